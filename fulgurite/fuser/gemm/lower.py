"""A region with matrix products to one Triton kernel: tiles of the products, the rest of the region as their epilogue.

In: a region as an fx graph, and where its tensors are. Out: a `TritonRegion` with one kernel. Products stay with
the library unless someone asks for this: `executors/epilogue.py` does, where it measured or expects that it pays.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import fx

from fulgurite import device
from fulgurite.device import Device
from fulgurite.fuser import cost
from fulgurite.fuser.frontend.pointwise import Unsupported
from fulgurite.fuser.gemm import pattern
from fulgurite.fuser.gemm.autotune import searched_tile
from fulgurite.fuser.gemm.codegen import write_matmul
from fulgurite.fuser.gemm.pattern import Matmuls
from fulgurite.fuser.gemm.schedule import MatmulSchedule, Tile, over_tiles, tiled
from fulgurite.fuser.gemm.tiles import best_tile
from fulgurite.fuser.ir.split_axes import refine
from fulgurite.fuser.pipeline_triton import PRETENDED
from fulgurite.fuser.runtime.compile_triton import (
    Program,
    interpreting,
    make_program,
    may_specialize,
    measured,
)
from fulgurite.fuser.runtime.kernel import Kernel
from fulgurite.fuser.runtime.triton_region import TritonRegion, needs_wide
from fulgurite.fuser.schedule.gpu.choose import row_limit
from fulgurite.fuser.segment import Segment, segment
from fulgurite.fuser.segment.build_loop_nest import build


def lower_matmul(
    module: fx.GraphModule,
    place: torch.device,
    tune: bool = False,
    tile: Tile | None = None,
) -> TritonRegion:
    """The kernel of a region whose products are read by elementwise ops; `tune` searches its tiles."""
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    if tile is not None and tile.loop == "warp_specialize" and not may_specialize():
        raise Unsupported("a loop with warps apart, which Triton compiles right from 3.7 on")
    machine = device.cuda(place.index) if place.type == "cuda" else PRETENDED
    read = pattern.read(module)
    schedule, part = scheduled(read, machine, tile)
    name = kernel_name(part)
    wide = needs_wide(read.region)
    if tune and tile is None and not interpreting():
        schedule = searched_tile(name, schedule, machine, place, bool(wide))

    @functools.cache
    def write(with_wide: bool, aligned: bool) -> Program:
        chosen = schedule if aligned else replace(schedule, descriptors=False)
        return make_program([write_matmul(name, chosen, with_wide)])

    kernel = _kernel(read, write(bool(wide), True), part, schedule, machine, place)
    return TritonRegion(read.region, write, (kernel,), place, wide)


def scheduled(
    read: Matmuls, machine: Device, tile: Tile | None = None
) -> tuple[MatmulSchedule, Segment]:
    """The schedule with the tile that is asked for, or with the one that should be best."""
    refined = refine(read.epilogue)
    parts = segment(refined, row_limit(machine))
    if len(parts) != 1:
        raise Unsupported(f"an epilogue of {len(parts)} kernels")
    nest, accumulators = over_tiles(build(refined, parts[0]), read.products)
    chosen = tile or best_tile(nest, accumulators, machine)
    return tiled(nest, accumulators, chosen, machine), parts[0]


def kernel_name(part: Segment) -> str:
    """`mm_gelu`: the product, and what says most about its epilogue."""
    ops = dict.fromkeys(f.statement.origin.strip("_") for f in part.shape.facts.values())
    telling = [op for op in ops if op not in ("clone", "to_copy")] or list(ops)
    return "_".join(["mm", *telling[:3]])


def _kernel(
    read: Matmuls,
    program: Program,
    part: Segment,
    schedule: MatmulSchedule,
    machine: Device,
    place: torch.device,
) -> Kernel:
    (stage,) = program.stages
    moved = sum(map(cost.tensor_bytes, stage.tensors))
    rows = cost.number(schedule.rows.size)
    work = sum(2 * rows * p.width * p.depth for p in read.products)
    ops = ("mm",) * len(read.products) + tuple(
        f.statement.origin for f in part.shape.facts.values()
    )
    return Kernel(
        stage.name,
        stage.text,
        schedule,
        ops,
        moved,
        work,
        max(moved / machine.copy_bandwidth, work / tensor_rate(machine)) + cost.LAUNCH_SECONDS,
        part.reason,
        measured(program, [stage.name], place),
    )


def tensor_rate(machine: Device) -> float:
    """Operations a second of 16-bit products: on an H200 25 times those of a multiprocessor's plain lanes."""
    return 25 * machine.flops
