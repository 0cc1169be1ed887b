"""`fulgurite plan --load`: a recorded load of experts in, how evenly ranks share it out.

Three placements are compared by their busiest rank: experts in order, rebalanced, and rebalanced with
redundant places for the busiest experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.parallel.placement import (
    Placement,
    contiguous,
    moved,
    read_load,
    save_placement,
    simulate,
)
from fulgurite.parallel.rebalance import rebalance
from fulgurite.plan.cluster import Question, Split
from fulgurite.plan.memory import size


@dataclass(frozen=True)
class Places:
    """One placement, and what it is called."""

    name: str
    placement: Placement


def load_text(question: Question, split: Split, path: Path, write_to: str | None) -> str:
    """The comparison as a table; the best placement goes to a file where one is named."""
    load = read_load(path)
    _check(question, split, load)
    places = _places(question, split, load)
    layers, experts = load.shape
    lines = [
        f"load of {path.name} · {layers} layers of {experts} experts on {split.shape.expert} ranks"
    ]
    first = places[0].placement
    rows = [("", "busiest rank", "worst layer", "places a rank", "experts that move", "")]
    for one in places:
        balance = simulate(load, one.placement)
        worst = int(balance.ratio_L.argmax())
        count = moved(first, one.placement)
        rows.append(
            (
                one.name,
                f"{balance.ratio:.2f} × mean",
                f"{float(balance.ratio_L[worst]):.2f} (layer {worst})",
                str(one.placement.slots_per_rank),
                f"{count:,}",
                f"{size(count * _expert_bytes(question, split))} in all" if count else "",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  " + "   ".join(cells).rstrip())
    if write_to is not None:
        lines.append(f"written to {save_placement(places[-1].placement, Path(write_to))}")
    return "\n".join(lines)


def _check(question: Question, split: Split, load: Tensor) -> None:
    experts = question.config.experts
    assert experts is not None, "a load was asked for of a model with experts"
    sparse = sum(layer.experts for layer in question.config.layers)
    if tuple(load.shape) != (sparse, experts.count):
        raise ArgumentError(
            f"a load of {list(load.shape)} is not of {question.name}",
            next=f"it has {sparse} layers with {experts.count} experts each",
        )
    if split.shape.expert == 1:
        raise ArgumentError(
            "this split keeps all experts on every rank, so there is nothing to place",
            next="--expert spreads them",
        )


def _places(question: Question, split: Split, load: Tensor) -> list[Places]:
    experts, ranks = question.config.experts, split.shape.expert
    assert experts is not None, "a load was asked for of a model with experts"
    nodes, groups = -(-ranks // question.cluster.per_node), experts.groups
    if ranks % nodes or groups % nodes:
        nodes = groups = 1  # groups can't stay together then
    layers = load.shape[0]
    plain = contiguous(layers, experts.count, ranks)
    slots = plain.slots_LS.shape[1]
    extra = max(split.cut.slots, slots + ranks)
    found = [
        Places("experts in order", plain),
        Places("rebalanced", rebalance(load, ranks, slots=slots, nodes=nodes, groups=groups)),
    ]
    if extra <= experts.count * ranks:
        name = f"with {extra - experts.count} redundant"
        spread = rebalance(load, ranks, slots=extra, nodes=nodes, groups=groups)
        found.append(Places(name, spread))
    return found


def _expert_bytes(question: Question, split: Split) -> int:
    sparse = sum(layer.experts for layer in question.config.layers)
    return split.weights["experts"] // (sparse * split.cut.slots // split.shape.expert)
