"""The `fulgurite` command line: `COMMANDS` maps a command to its function.

In: command-line arguments. Out: text on stdout, files where asked for, and an exit status.
"""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import fulgurite
from fulgurite import environment
from fulgurite.bench.generate.model import add_options as add_generate_options
from fulgurite.bench.readme import write_readme
from fulgurite.bench.serve.suite import add_options as add_serve_options
from fulgurite.bench.suites import SUITES
from fulgurite.bench.zoo.suite import add_options as add_zoo_options
from fulgurite.compress import command as compression
from fulgurite.config import ENV_VARS
from fulgurite.device import resolve_device
from fulgurite.errors import ArgumentError, FulguriteError
from fulgurite.explain import Explanation
from fulgurite.explain_target import load_example, run_script
from fulgurite.models import tiny
from fulgurite.plan import command
from fulgurite.report.html import write_html
from fulgurite.serve import command as terminal
from fulgurite.serve import embedding, serve_command
from fulgurite.serve import top as live_view
from fulgurite.train import command as training


def explain(options: argparse.Namespace) -> None:
    """Compile a function with example inputs and print what was compiled."""
    if options.target and ":" not in options.target and options.target.endswith(".py"):
        for number, compiled in enumerate(run_script(options.target)):
            _print_explanation(compiled.explain(), options, compiled, number)
        return
    function, inputs = load_example(options.target) if options.target else tiny.build_example()
    choices: dict[str, Any] = {"granularity": options.granularity, "remat": options.remat}
    if options.executors:
        choices["executors"] = options.executors.split(",")
    compiled = fulgurite.compile(function, **choices)
    result = compiled(*inputs)
    if isinstance(result, torch.Tensor) and result.requires_grad:
        result.sum().backward()
    _print_explanation(compiled.explain(*inputs), options, compiled)


def _print_explanation(
    explanation: Explanation, options: argparse.Namespace, compiled: Any, number: int = 0
) -> None:
    if options.measure:
        explanation = explanation.with_measured_kernels()
    if not options.no_trace and explanation.graphs:
        print(compiled.last_trace(graph=0))
    print(explanation)
    if options.html:
        page = Path(options.html)
        page = page.with_stem(f"{page.stem}-{number}") if number else page  # a page a function
        try:
            print(f"written to {write_html(explanation, page)}")
        except OSError as problem:
            raise ArgumentError(
                f"{page} can't be written: {problem.strerror}",
                next="give --html a file in a folder that can be written",
            ) from problem


def bench(options: argparse.Namespace) -> None:
    """Run a suite and save its results; `report` renders the saved results as Markdown."""
    if options.suite == REPORT:
        print(f"written to {write_readme(Path(options.output or 'benchmarks'))}")
        return
    if not options.merge:  # rows of another machine
        resolve_device(options.device)
    SUITES[options.suite].run(options)


def env(options: argparse.Namespace) -> None:
    """Print what a bug report needs: versions, compiler, devices, settings."""
    found = environment.describe()
    if options.json:
        print(json.dumps(found, indent=2))
        return
    width = max(map(len, found))
    for label, text in found.items():
        print(f"{label:<{width}}   {text}")


REPORT = "report"  # `fulgurite bench report`: the saved results as benchmarks/README.md
COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "generate": terminal.generate,
    "chat": terminal.chat,
    "serve": serve_command.serve,
    "top": live_view.run_top,
    "embed": embedding.run_embed,
    "plan": command.plan,
    "quantize": compression.quantize,
    "train": training.run_train,
    "verify": training.run_verify,
    "explain": explain,
    "bench": bench,
    "env": env,
}


def build_parser() -> argparse.ArgumentParser:
    width = max(len(name) for name in ENV_VARS)
    variables = "\n".join(f"  {name:<{width}}  {text}" for name, text in ENV_VARS.items())
    top = argparse.ArgumentParser(
        prog="fulgurite",
        description="Compile PyTorch programs and see every step; generate text with the result.",
        epilog=f"environment variables:\n{variables}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"fulgurite {fulgurite.__version__}")
    commands = top.add_subparsers(dest="command", metavar="command")
    _add_text_commands(commands)
    explain_parser = commands.add_parser(
        "explain",
        help="compile with example inputs and print kernels, graph breaks, bytes and times",
    )
    explain_parser.add_argument(
        "target", nargs="?", help="module:name, file.py:name or script.py (default: built in)"
    )
    explain_parser.add_argument(
        "--html", metavar="FILE", help="write the same as one self-contained page"
    )
    explain_parser.add_argument("--executors", help="names in order, separated by commas")
    explain_parser.add_argument(
        "--granularity", default="auto", choices=["auto", "blocks", "model"]
    )
    explain_parser.add_argument("--remat", default="mincut", choices=["none", "mincut", "full"])
    explain_parser.add_argument(
        "--measure", action="store_true", help="time each generated kernel by itself"
    )
    explain_parser.add_argument("--no-trace", action="store_true", help="only the table")
    bench_parser = commands.add_parser(
        "bench", help="run a benchmark suite, with eager and torch.compile as baselines"
    )
    bench_parser.add_argument(
        "suite",
        choices=[*sorted(SUITES), REPORT],
        help="what to measure; report: write benchmarks/README.md from the saved results",
    )
    bench_parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu or cuda (default: cuda if there is a GPU)",
    )
    bench_parser.add_argument(
        "--output", metavar="FILE", help="JSON file for the results (default: in benchmarks/)"
    )
    bench_parser.add_argument("--quick", action="store_true", help="run fewer cases and repeats")
    add_zoo_options(bench_parser)
    add_generate_options(bench_parser)
    add_serve_options(bench_parser)
    env_parser = commands.add_parser(
        "env", help="print versions, compiler, devices and settings, to paste into a bug report"
    )
    env_parser.add_argument("--json", action="store_true", help="as JSON")
    return top


def _add_text_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    reply = commands.add_parser(
        "generate",
        help="generate a reply to a prompt, streamed token by token",
        usage='fulgurite generate [options] ["prompt"]',
    )
    reply.add_argument("prompt", nargs="?", help="the prompt (default: read from stdin)")
    reply.add_argument(
        "--raw", action="store_true", help="use the prompt as it is, without the chat template"
    )
    terminal.add_options(reply, max_tokens=256)
    talk = commands.add_parser("chat", help="chat with a model", usage="fulgurite chat [options]")
    terminal.add_options(talk, max_tokens=1024)
    serve_command.add_options(
        commands.add_parser(
            "serve",
            help="serve a model over HTTP: OpenAI and Anthropic interfaces, a chat page",
            usage="fulgurite serve [--model NAME] [--port N] [options]",
        )
    )
    live_view.add_options(
        commands.add_parser(
            "top",
            help="watch a running server: requests, tokens/s, cache, latencies",
            usage="fulgurite top [--url URL] [options]",
        )
    )
    embedding.add_options(
        commands.add_parser(
            "embed",
            help="print the embedding of each text, a JSON array a line",
            usage='fulgurite embed --model NAME [options] ["text" ...]',
        )
    )
    command.add_options(
        commands.add_parser(
            "plan",
            help="estimate memory and throughput on a cluster; needs no GPU",
            usage="fulgurite plan --model NAME [--gpus 8x2] [options]",
        )
    )
    _add_train_commands(commands)
    compression.add_options(
        commands.add_parser(
            "quantize",
            help="write a quantized checkpoint that other engines load, and its perplexity",
            usage="fulgurite quantize MODEL --format NAME --output FOLDER [options]",
        )
    )


def _add_train_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    training.add_train_options(
        commands.add_parser(
            "train",
            help="train a model on text, or fine-tune one; with nothing else, a small one in minutes",
            usage="fulgurite train [CONFIG] [--size nano] [--ranks N] [--section.field VALUE ...]",
        )
    )
    training.add_verify_options(
        commands.add_parser(
            "verify",
            help="replay random steps of a training run and compare them with its receipt",
            usage="fulgurite verify RUN [--steps 3]",
        )
    )


def _show_warning(message: Warning | str, *location: Any, **more: Any) -> None:
    """Print the message only: the source line of a warning does not help at a terminal."""
    print(f"warning: {message}", file=sys.stderr)


def _configure_streams() -> None:
    """Replace characters that a stream's encoding lacks with `?`; write to /dev/null if it is closed."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  # open until the process ends
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream, errors in (
        (sys.stdout, "replace"),
        (sys.stderr, "replace"),
        (sys.stdin, "surrogateescape"),
    ):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; of `train`, fields of its config are in `overrides`."""
    words = list(sys.argv[1:] if argv is None else argv)
    overrides: list[tuple[str, str]] = []
    if words[:1] == ["train"]:
        known, overrides = training.split_arguments(words[1:])
        words = ["train", *known]
    options = build_parser().parse_args(words)
    options.overrides = overrides
    return options


def main(argv: Sequence[str] | None = None) -> int:
    _configure_streams()
    try:
        options = _parse(argv)
        if options.command is None:
            build_parser().print_help()
            return 2
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            COMMANDS[options.command](options)
    except FulguriteError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130  # 128 + SIGINT, as shells report it
    except BrokenPipeError:
        sys.stderr.close()  # the reader closed the pipe (`| head`)
        return 1
    except OSError as problem:
        if problem.errno != errno.ENOSPC:
            raise
        print(f"the output can't be written: {problem.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
