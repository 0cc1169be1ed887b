"""`fulgurite bench`: the name of a suite in, its table and a file of results out."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from fulgurite.bench.readme import write_readme
from fulgurite.bench.suites import SUITES
from fulgurite.device import resolve_device

REPORT = "report"  # `fulgurite bench report`: the saved results as benchmarks/README.md


def add_options(command: argparse.ArgumentParser) -> None:
    """A sub-command for each suite, with the suite's own options."""
    suites = command.add_subparsers(dest="suite", required=True, metavar="suite", title="suites")
    for name, suite in SUITES.items():
        parser = suites.add_parser(name, help=suite.help, description=f"Measure {suite.help}.")
        add_common_options(parser)
        suite.add_options(parser)
    report = suites.add_parser(REPORT, help="write README.md of the saved results")
    report.add_argument("--output", metavar="FOLDER", help="of the results (default: benchmarks)")


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """The options of every suite."""
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu or cuda (default: cuda if there is a GPU)",
    )
    parser.add_argument(
        "--output", metavar="FILE", help="JSON file for the results (default: in benchmarks/)"
    )
    parser.add_argument("--quick", action="store_true", help="run fewer cases and repeats")


def run_bench(options: argparse.Namespace) -> None:
    """Run a suite and save its results; `report` renders the saved results as Markdown."""
    if options.suite == REPORT:
        print(f"written to {write_readme(Path(options.output or 'benchmarks'))}")
        return
    if not getattr(options, "merge", None):  # rows of another machine
        resolve_device(options.device)
    SUITES[options.suite].run(options)
