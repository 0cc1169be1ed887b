"""The `fulgurite` command: a dict from command to function.

In: the words of the command line. Out: text for people, files where asked for, and an exit status.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import fulgurite
from fulgurite.bench.suites import SUITES
from fulgurite.config import ENVIRONMENT
from fulgurite.errors import ArgumentError, FulguriteError
from fulgurite.explain import Explanation
from fulgurite.models import tiny
from fulgurite.plan import command
from fulgurite.report.html import write_html
from fulgurite.serve import terminal
from fulgurite.serve.engine.engine import choose_device
from fulgurite.target import load_example, run_script


def explain(options: argparse.Namespace) -> None:
    """Compile something with example inputs and show what became of it."""
    if options.target and ":" not in options.target and options.target.endswith(".py"):
        for number, made in enumerate(run_script(options.target)):
            _show(made.explain(), options, made, number)
        return
    function, inputs = load_example(options.target) if options.target else tiny.example()
    choices: dict[str, Any] = {"regions": options.regions, "remat": options.remat}
    if options.executors:
        choices["executors"] = options.executors.split(",")
    compiled: Any = fulgurite.compile(function, **choices)
    result = compiled(*inputs)
    if isinstance(result, torch.Tensor) and result.requires_grad:
        result.sum().backward()
    _show(compiled.explain(*inputs), options, compiled)


def _show(
    explanation: Explanation, options: argparse.Namespace, compiled: Any, number: int = 0
) -> None:
    if options.measure:
        explanation = explanation.measured()
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
    """Run a suite and write its figures to a file."""
    choose_device(options.device)
    SUITES[options.suite](options)


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "generate": terminal.generate,
    "chat": terminal.chat,
    "plan": command.plan,
    "explain": explain,
    "bench": bench,
}


def parser() -> argparse.ArgumentParser:
    width = max(len(name) for name in ENVIRONMENT)
    variables = "\n".join(f"  {name:<{width}}  {text}" for name, text in ENVIRONMENT.items())
    top = argparse.ArgumentParser(
        prog="fulgurite",
        description="Compile PyTorch programs and see every step; generate text with the result.",
        epilog=f"environment variables:\n{variables}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"fulgurite {fulgurite.__version__}")
    commands = top.add_subparsers(dest="command", metavar="command")
    _text_commands(commands)
    one = commands.add_parser(
        "explain", help="compile with example inputs and show what became of it"
    )
    one.add_argument(
        "target", nargs="?", help="module:name, file.py:name or script.py (default: built in)"
    )
    one.add_argument("--html", metavar="FILE", help="write the same as one self-contained page")
    one.add_argument("--executors", help="names in order, separated by commas")
    one.add_argument("--regions", default="auto", choices=["auto", "blocks", "whole"])
    one.add_argument("--remat", default="mincut", choices=["none", "mincut", "full"])
    one.add_argument("--measure", action="store_true", help="time each generated kernel by itself")
    one.add_argument("--no-trace", action="store_true", help="only the table")
    two = commands.add_parser(
        "bench", help="measure, beside eager and torch.compile in the same run"
    )
    two.add_argument("suite", choices=sorted(SUITES))
    two.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    two.add_argument("--output", metavar="FILE", help="where the figures go (default: benchmarks/)")
    two.add_argument("--quick", action="store_true", help="fewer repeats")
    return top


def _text_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    reply = commands.add_parser(
        "generate",
        help="write a reply to a prompt, token by token",
        usage='fulgurite generate [options] ["prompt"]',
    )
    reply.add_argument("prompt", nargs="?", help="the prompt (default: read from stdin)")
    reply.add_argument("--raw", action="store_true", help="the prompt as it is, without a template")
    terminal.add_options(reply, max_tokens=256)
    talk = commands.add_parser(
        "chat", help="a conversation with a model", usage="fulgurite chat [options]"
    )
    terminal.add_options(talk, max_tokens=1024)
    command.add_options(
        commands.add_parser(
            "plan",
            help="what fits on how many GPUs, without having one",
            usage="fulgurite plan --model NAME [--gpus 8x2] [options]",
        )
    )


def _warn(message: Warning | str, *place: Any, **more: Any) -> None:
    """In words: which line of ours a warning comes from helps nobody at a terminal."""
    print(f"warning: {message}", file=sys.stderr)


def _open_streams() -> None:
    """Text that a stream's encoding lacks is shown as `?`; a closed stream takes all, says nothing."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  # as long as we live
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream, errors in (
        (sys.stdout, "replace"),
        (sys.stderr, "replace"),
        (sys.stdin, "surrogateescape"),
    ):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def main(words: Sequence[str] | None = None) -> int:
    _open_streams()
    options = parser().parse_args(words)
    if options.command is None:
        parser().print_help()
        return 2
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            COMMANDS[options.command](options)
    except FulguriteError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130  # as a shell says it
    except BrokenPipeError:
        sys.stderr.close()  # the reader went away (`| head`): nothing more to say
        return 1
    except OSError as problem:
        if problem.errno != errno.ENOSPC:
            raise
        print(f"the output can't be written: {problem.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
