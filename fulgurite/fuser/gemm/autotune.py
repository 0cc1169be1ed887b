"""A search over the tiles of a product with an epilogue: `tune=True`.

In: a schedule. Out: the fastest of the likely tiles, compiled side by side and timed on the device; what was found
is kept in the cache for this device, this Triton and this kernel's text.
"""

from __future__ import annotations

import json
from dataclasses import asdict

import torch

from fulgurite import cache
from fulgurite.device import Device
from fulgurite.fuser.frontend.pointwise import Unsupported
from fulgurite.fuser.gemm.codegen import write_matmul
from fulgurite.fuser.gemm.schedule import MatmulSchedule, Tile, tiled
from fulgurite.fuser.gemm.tiles import neighbours
from fulgurite.fuser.runtime.compile_triton import (
    ALIGNED,
    WIDE,
    Program,
    make_program,
    may_specialize,
    measured,
)


def searched_tile(
    name: str, schedule: MatmulSchedule, machine: Device, place: torch.device, wide: bool
) -> MatmulSchedule:
    """The schedule with the fastest tile, or with what an earlier search found."""
    import triton

    nest, accumulators = schedule.nest, schedule.accumulators
    base = make_program([write_matmul(name, schedule, wide)])
    key = cache.digest("matmul tile", machine.name, triton.__version__, base.text)
    kept = cache.read_text("decisions", key)
    if kept is not None:
        return tiled(nest, accumulators, Tile(**json.loads(kept)), machine)
    variant = ALIGNED | (WIDE if wide else 0)
    tried = []
    for tile in neighbours(nest, accumulators, machine, may_specialize()):
        near = tiled(nest, accumulators, tile, machine)
        program = make_program([write_matmul(name, near, wide)])
        program.begin(variant)  # all of them at once; what is measured finds them in the cache
        tried.append((tile, program))
    seconds = {tile: _seconds(program, name, place) for tile, program in tried}
    best = min(seconds, key=lambda tile: seconds[tile])
    if seconds[best] == float("inf"):
        raise Unsupported("tiles that the device has no memory for")
    cache.write_text("decisions", key, json.dumps(asdict(best)))
    return tiled(nest, accumulators, best, machine)


def _seconds(program: Program, name: str, place: torch.device) -> float:
    """Of one run; endless where the device has not the memory a tile asks for."""
    from triton.runtime.errors import OutOfResources

    try:
        return measured(program, [name], place)()
    except OutOfResources:
        return float("inf")
