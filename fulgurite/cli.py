"""The `fulgurite` command line: `COMMANDS` maps a command to its help, its options and its function.

In: command-line arguments. Out: text on stdout, files where asked for, and an exit status. A command
imports what it needs, so that `fulgurite serve` starts its engines at once, and help needs no torch.
"""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, NoReturn

from fulgurite.config import ENV_VARS
from fulgurite.errors import FulguriteError
from fulgurite.process_exit import run_program
from fulgurite.version import VERSION

# A storage that is full or refuses to be written; other errors may come from inputs.
STORAGE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
AddOptions = Callable[[argparse.ArgumentParser], None]
Run = Callable[[argparse.Namespace], None]


class Command(NamedTuple):
    """One command. `load` imports its module and returns what adds its options, and what runs it."""

    help: str
    load: Callable[[], tuple[AddOptions, Run]]
    usage: str | None = None


# ---- the modules of commands ---------------------------------------------------------------------


def _load_generate() -> tuple[AddOptions, Run]:
    from fulgurite.serve import command

    return command.add_generate_options, command.generate


def _load_chat() -> tuple[AddOptions, Run]:
    from fulgurite.serve import command

    return command.add_chat_options, command.chat


def _load_serve() -> tuple[AddOptions, Run]:
    from fulgurite.serve import serve_command

    return serve_command.add_options, serve_command.serve


def _load_top() -> tuple[AddOptions, Run]:
    from fulgurite.serve import top

    return top.add_options, top.run_top


def _load_embed() -> tuple[AddOptions, Run]:
    from fulgurite.serve import embedding

    return embedding.add_options, embedding.run_embed


def _load_plan() -> tuple[AddOptions, Run]:
    from fulgurite.plan import command

    return command.add_options, command.plan


def _load_quantize() -> tuple[AddOptions, Run]:
    from fulgurite.compress import command

    return command.add_options, command.quantize


def _load_train() -> tuple[AddOptions, Run]:
    from fulgurite.train import command

    return command.add_train_options, command.run_train


def _load_verify() -> tuple[AddOptions, Run]:
    from fulgurite.train import command

    return command.add_verify_options, command.run_verify


def _load_explain() -> tuple[AddOptions, Run]:
    from fulgurite import explain_command

    return explain_command.add_options, explain_command.run_explain


def _load_bench() -> tuple[AddOptions, Run]:
    from fulgurite.bench import command

    return command.add_options, command.run_bench


def _load_env() -> tuple[AddOptions, Run]:
    from fulgurite import environment

    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="as JSON")

    def run(options: argparse.Namespace) -> None:
        print_facts(environment.describe(), options.json)

    return add_options, run


def print_facts(found: dict[str, str], as_json: bool) -> None:
    """Print what a bug report needs: versions, compiler, devices, settings."""
    if as_json:
        print(json.dumps(found, indent=2))
        return
    width = max(map(len, found))
    for label, text in found.items():
        print(f"{label:<{width}}   {text}")


COMMANDS: dict[str, Command] = {
    "generate": Command(
        "generate a reply to a prompt, streamed token by token",
        _load_generate,
        'fulgurite generate [options] ["prompt"]',
    ),
    "chat": Command("chat with a model", _load_chat, "fulgurite chat [options]"),
    "serve": Command(
        "serve a model over HTTP: OpenAI and Anthropic interfaces, a chat page",
        _load_serve,
        "fulgurite serve [--model NAME] [--port N] [options]",
    ),
    "top": Command(
        "watch a running server: requests, tokens/s, cache, latencies",
        _load_top,
        "fulgurite top [--url URL] [options]",
    ),
    "embed": Command(
        "print the embedding of each text, a JSON array a line",
        _load_embed,
        'fulgurite embed --model NAME [options] ["text" ...]',
    ),
    "plan": Command(
        "estimate memory and throughput on a cluster; needs no GPU",
        _load_plan,
        "fulgurite plan --model NAME [--gpus 8x2] [options]",
    ),
    "train": Command(
        "train a model on text, or fine-tune one; with nothing else, a small one in minutes",
        _load_train,
        "fulgurite train [CONFIG] [--size nano] [--ranks N] [--section.field VALUE ...]",
    ),
    "verify": Command(
        "replay random steps of a training run and compare them with its receipt",
        _load_verify,
        "fulgurite verify RUN [--steps 3]",
    ),
    "quantize": Command(
        "write a quantized checkpoint that other engines load, and its perplexity",
        _load_quantize,
        "fulgurite quantize MODEL --format NAME --output FOLDER [options]",
    ),
    "explain": Command(
        "compile with example inputs and print kernels, graph breaks, bytes and times",
        _load_explain,
    ),
    "bench": Command(
        "run a benchmark suite, with eager and torch.compile as baselines", _load_bench
    ),
    "env": Command(
        "print versions, compiler, devices and settings, to paste into a bug report", _load_env
    ),
}


def build_parser(with_options: Collection[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """The parser of all commands; `with_options`: those whose options are needed."""
    width = max(len(name) for name in ENV_VARS)
    variables = "\n".join(f"  {name:<{width}}  {text}" for name, text in ENV_VARS.items())
    top = argparse.ArgumentParser(
        prog="fulgurite",
        description="Compile PyTorch programs and see every step; generate text with the result.",
        epilog=f"environment variables:\n{variables}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"fulgurite {VERSION}")
    parsers = top.add_subparsers(dest="command", metavar="command")
    for name, command in COMMANDS.items():
        parser = parsers.add_parser(name, help=command.help, usage=command.usage)
        if name in with_options:
            add_options, _ = command.load()
            add_options(parser)
    return top


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
        from fulgurite.train.command import split_arguments

        known, overrides = split_arguments(words[1:])
        words = ["train", *known]
    options = build_parser(with_options=words[:1]).parse_args(words)
    options.overrides = overrides
    return options


# Iterations that an idle OpenMP thread spins: longer than the pauses inside a decode step, far
# shorter than GCC's default, which keeps cores from other programs for milliseconds.
OPENMP_SPIN_COUNT = "5000"


def _limit_openmp_spinning() -> None:
    """Set GOMP_SPINCOUNT, unless the user decides. OpenMP reads it when torch is imported."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPIN_COUNT)


def main(argv: Sequence[str] | None = None) -> int:
    _configure_streams()
    _limit_openmp_spinning()
    try:
        options = _parse(argv)
        if options.command is None:
            build_parser(with_options=()).print_help()
            return 2
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            _, run = COMMANDS[options.command].load()
            run(options)
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
        if problem.errno not in STORAGE_ERRORS:
            raise
        where = f" ({problem.filename})" if problem.filename else ""
        print(f"the output can't be written: {problem.strerror}{where}", file=sys.stderr)
        return 1
    return 0


def run() -> NoReturn:
    """The `fulgurite` command as a process."""
    run_program(main)


if __name__ == "__main__":
    run()
