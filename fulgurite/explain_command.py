"""`fulgurite explain`: a function with example inputs in, what was compiled out as text or HTML."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fulgurite.compile import compile
from fulgurite.errors import ArgumentError
from fulgurite.explain import Explanation
from fulgurite.explain_target import Example, load_example, run_script
from fulgurite.models import tiny
from fulgurite.report.html import write_html


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "target", nargs="?", help="module:name, file.py:name or script.py (default: built in)"
    )
    command.add_argument("--html", metavar="FILE", help="write the same as one self-contained page")
    command.add_argument("--executors", help="names in order, separated by commas")
    command.add_argument("--granularity", default="auto", choices=["auto", "blocks", "model"])
    command.add_argument("--remat", default="mincut", choices=["none", "mincut", "full"])
    command.add_argument(
        "--measure", action="store_true", help="time each generated kernel by itself"
    )
    command.add_argument("--no-trace", action="store_true", help="only the table")


def run_explain(options: argparse.Namespace) -> None:
    """Compile a function with example inputs and print what was compiled."""
    if options.target and ":" not in options.target and options.target.endswith(".py"):
        for number, compiled in enumerate(run_script(options.target)):
            _print_explanation(compiled.explain(), options, compiled, number)
        return
    example = load_example(options.target) if options.target else Example(*tiny.build_example())
    choices: dict[str, Any] = {"granularity": options.granularity, "remat": options.remat}
    if options.executors:
        choices["executors"] = options.executors.split(",")
    compiled = compile(example.function, **choices)
    _run_backward(compiled(*example.args, **example.kwargs))
    _print_explanation(compiled.explain(*example.args, **example.kwargs), options, compiled)


def _run_backward(result: Any) -> None:
    """Compile the backward graph: of the first result that requires a gradient, such as a loss."""
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            return leaf.sum().backward()


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
