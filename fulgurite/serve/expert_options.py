"""Command-line options about experts: arguments in, fields of `LLMConfig` out. Imports no torch."""

from __future__ import annotations

import argparse
from typing import Any

from fulgurite.option_values import AUTO, MICRO_BATCHES, TRANSPORT_NAMES, WIRES

EXPERT_FIELDS = (
    "transport", "wire", "expert_capacity", "micro_batches", "placement", "record_load",
    "record_load_interval", "nodes",
)  # fmt: skip


def add_expert_arguments(group: argparse._ArgumentGroup) -> None:
    """The options of `LLMConfig` about experts as command-line options."""
    group.add_argument(
        "--transport",
        choices=(AUTO, *TRANSPORT_NAMES),
        help="how tokens go to experts of other ranks (default auto: by device and topology)",
    )
    group.add_argument(
        "--wire",
        choices=WIRES,
        help="wire format of these tokens (default auto: the model's dtype)",
    )
    group.add_argument(
        "--expert-capacity",
        type=int,
        metavar="N",
        help="most tokens from one rank to another in a step; bounds the memory of a rank",
    )
    group.add_argument(
        "--micro-batches",
        type=int,
        choices=MICRO_BATCHES,
        help="2: large steps in two halves, one sent while the other is computed",
    )
    group.add_argument(
        "--placement", metavar="FILE", help="expert slots, of fulgurite plan --placement"
    )
    group.add_argument(
        "--record-load",
        metavar="FILE",
        help="save the tokens of each expert at the end, for fulgurite plan --expert-load",
    )
    group.add_argument(
        "--record-load-interval",
        type=float,
        metavar="SECONDS",
        help="save it again after so many seconds (default: only at the end)",
    )
    group.add_argument(
        "--nodes",
        type=int,
        metavar="N",
        help="divide the ranks into so many emulated nodes (default: by host name)",
    )


def given_expert_options(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of `LLMConfig` that were given as options."""
    return {name: value for name in EXPERT_FIELDS if (value := getattr(options, name)) is not None}
