"""Reductions that Triton before 3.7 compiles wrong.

In: the Triton GPU IR of a kernel, as text. Out: its reductions over elements that lie in lanes at distances
which are not consecutive powers of two, as after the reshape of a small block. Triton before 3.7 adds up
other lanes then (triton-lang/triton#9219), and the kernel's results are wrong without an error.

A layout says which element each bit of the lane's number moves to: with `lane = [[0, 1], [0, 2], [0, 0], [0, 4]]`,
the third bit moves nowhere. A sum along dimension 1 needs the lanes at distances 1, 2 and 8. Triton takes those at
1, 2 and 4.
"""

from __future__ import annotations

import json
import re

FIRST_RIGHT_VERSION = (3, 7)  # of Triton
LAYOUT = re.compile(r"^(#\w+) = #ttg\.linear<\{.*?lane = (\[.*?\]), warp", re.MULTILINE)
REDUCTION = re.compile(
    r'"tt\.reduce"\(.*?<\{axis = (\d+) : i32.*?\}\) : \(tensor<([\dx]+)x\w+, (.*?)>[,)]', re.DOTALL
)
SLICE = re.compile(r"#ttg\.slice<\{dim = (\d+), parent = (.*)\}>?$")


class WrongReductionError(Exception):
    """Triton compiles a reduction of the kernel wrong."""


def check_reductions(ir: str) -> None:
    """Raise an error if the kernel has a reduction that Triton before 3.7 compiles wrong."""
    lanes = {name: json.loads(bases) for name, bases in LAYOUT.findall(ir)}
    for axis, sizes, layout in REDUCTION.findall(ir):
        shape = [int(size) for size in sizes.split("x")]
        bases = _find_lanes(layout, lanes)
        if bases is not None and not _is_consecutive(bases, int(axis), shape[int(axis)]):
            raise WrongReductionError(
                f"Triton before 3.7 adds up wrong lanes of {layout} = {bases} along dimension {axis}"
            )


def _find_lanes(layout: str, lanes: dict[str, list[list[int]]]) -> list[list[int]] | None:
    """Where each bit of the lane's number moves to; None for layouts without gaps."""
    sliced = SLICE.match(layout)
    if sliced is None:
        return lanes.get(layout)
    bases = _find_lanes(sliced[2], lanes)
    dim = int(sliced[1])
    return bases and [base[:dim] + base[dim + 1 :] for base in bases]


def _is_consecutive(bases: list[list[int]], axis: int, size: int) -> bool:
    moves = [k for k, base in enumerate(bases) if 0 < base[axis] < size]
    return not moves or moves[-1] - moves[0] == len(moves) - 1
