"""Names of kernels, from the ops they compute."""

from __future__ import annotations

from fulgurite.fuser.segment import Segment

DULL = ("add", "mul", "sub", "div", "_to_copy", "clone", "scalar_tensor", "full", "where")


def kernel_name(part: Segment, number: int) -> str:
    """A name from the ops of the segment, those that say most about it."""
    ops = list(dict.fromkeys(f.statement.origin for f in part.shape.facts.values()))
    telling = [op for op in ops if op not in DULL] or ops
    return "_".join(op.strip("_") for op in telling[:3]) + f"_{number}"
