"""`fulgurite bench`: the name of a suite in, its table and a file of results out."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from fulgurite.bench.generate.model import add_options as add_generate_options
from fulgurite.bench.readme import write_readme
from fulgurite.bench.serve.suite import add_options as add_serve_options
from fulgurite.bench.suites import SUITES
from fulgurite.bench.train.suite import add_options as add_train_options
from fulgurite.bench.zoo.suite import add_options as add_zoo_options
from fulgurite.device import resolve_device

REPORT = "report"  # `fulgurite bench report`: the saved results as benchmarks/README.md


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "suite",
        choices=[*sorted(SUITES), REPORT],
        help="what to measure; report: write benchmarks/README.md from the saved results",
    )
    command.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu or cuda (default: cuda if there is a GPU)",
    )
    command.add_argument(
        "--output", metavar="FILE", help="JSON file for the results (default: in benchmarks/)"
    )
    command.add_argument("--quick", action="store_true", help="run fewer cases and repeats")
    add_zoo_options(command)
    add_generate_options(command)
    add_serve_options(command)
    add_train_options(command)


def run_bench(options: argparse.Namespace) -> None:
    """Run a suite and save its results; `report` renders the saved results as Markdown."""
    if options.suite == REPORT:
        print(f"written to {write_readme(Path(options.output or 'benchmarks'))}")
        return
    if not options.merge:  # rows of another machine
        resolve_device(options.device)
    SUITES[options.suite].run(options)
