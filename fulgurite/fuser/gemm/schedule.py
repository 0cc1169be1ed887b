"""Schedule GEMMs with their epilogue: the epilogue's loops run over the tiles of a GEMM's output.

In: a `GemmRegion`. Out: a `ScheduledGemm`. Its `GemmSchedule` is the epilogue's loop nest over rows `i` and
columns `j` of a tile, where loads of a GEMM output became accumulators. If the epilogue reduces blocks of
columns (the absolute maximum of every 128, to quantize), a tile has the columns of one block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from fulgurite.device import DeviceInfo
from fulgurite.fuser.gemm.fast_math import use_fast_math
from fulgurite.fuser.gemm.frontend import Gemm, GemmRegion
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.cost import size_hint
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.ir.expression import Constant, Expression, Load
from fulgurite.fuser.ir.expression_rewrites import rewrite_expression
from fulgurite.fuser.ir.index import Axis, Index
from fulgurite.fuser.ir.loop_nest import Local, LoopNest, rename_loops
from fulgurite.fuser.ir.split_axes import split_axes
from fulgurite.fuser.schedule.gpu.base import GpuSchedule, flatten_loops, next_power_of_two
from fulgurite.fuser.schedule.gpu.choose import make_row_limit
from fulgurite.fuser.segment import Segment, segment_region
from fulgurite.fuser.segment.build_loop_nest import build_loop_nest
from fulgurite.kernels.tuning.gemm_epilogue import (
    GemmEpilogueConfig,
    GemmEpilogueHeuristics,
    GemmEpilogueProblem,
)
from fulgurite.trace.op_names import name_from_ops

MAX_BLOCK_N = 256
TMA_ALIGNMENT = 16  # bytes; of every row that a tensor descriptor reads or writes
LOOP_NAMES = {"flatten": "flattened", "plain": "plain", "warp_specialize": "warp-specialized"}


@dataclass(frozen=True)
class Accumulator:
    """The accumulator of one GEMM in a tile: the GEMM's columns from `offset` on."""

    name: str  # of its local in the epilogue
    gemm: Gemm
    offset: int


@dataclass(frozen=True)
class GemmSchedule(GpuSchedule):
    """The epilogue's loop nest over the output tiles of its GEMMs."""

    accumulators: tuple[Accumulator, ...] = ()
    block_k: int = 64
    use_tma: bool = False
    group_m: int = 8
    tile_loop: str = "flatten"
    tma_store: bool = False

    @property
    def row_axis(self) -> Axis:
        return self.nest.grid[0]

    @property
    def block_m(self) -> int:
        return self.block_sizes[self.row_axis]

    @property
    def block_n(self) -> int:
        return self.block_sizes[self.block_axes[-1]]

    def __str__(self) -> str:
        inner = self.accumulators[0].gemm.k
        text = f"gemm: {' '.join(f'{a.name}<{a.size}' for a in self.nest.axes)} x {inner}"
        text += f", tiles of {self.block_m} x {self.block_n} x {self.block_k}"
        count = len(self.accumulators)
        text += f" of {count} GEMMs" if count > 1 else ""
        text += f", {self.num_warps} warps, {self.num_stages} stages"
        text += ", TMA loads" if self.use_tma else ""
        text += " and stores" if self.use_tma and self.tma_store else ""
        if not self.num_programs:
            return text
        loop = LOOP_NAMES[self.tile_loop]
        return f"{text}, persistent: {self.num_programs} programs, {loop} tile loop"


@dataclass(frozen=True, eq=False)
class ScheduledGemm:
    """A GEMM region with its schedule; `segment` holds the statements of the epilogue."""

    region: GemmRegion
    schedule: GemmSchedule
    segment: Segment

    @property
    def kernel_name(self) -> str:
        """`mm_gelu`: the GEMM and its epilogue."""
        ops = [s.statement.origin for s in self.segment.structure.statements.values()]
        gemm = self.region.gemms[0].origin
        return f"{gemm}_{name_from_ops(ops, generic=('clone', 'to_copy'))}"

    @property
    def gemm_flops(self) -> int:
        m = size_hint(self.schedule.row_axis.size)
        return sum(2 * m * gemm.n * gemm.k for gemm in self.region.gemms)

    @property
    def epilogue_flops(self) -> int:
        return sum(s.flops * s.elements for s in self.segment.structure.statements.values())


def schedule_gemms(
    region: GemmRegion,
    device_info: DeviceInfo,
    heuristics: GemmEpilogueHeuristics,
    config: GemmEpilogueConfig | None = None,
) -> ScheduledGemm:
    """Schedule a region with the given config, or with the one that should be fastest."""
    epilogue = split_axes(region.epilogue)
    segments = segment_region(epilogue, make_row_limit(device_info))
    if len(segments) != 1:
        raise Unsupported(f"an epilogue of {len(segments)} kernels")
    nest, accumulators = tile_epilogue(build_loop_nest(epilogue, segments[0]), region.gemms)
    if config is None:
        problem = make_problem(nest, accumulators, device_info)
        config = heuristics.rank_gemm_epilogue_configs(problem)[0]
    schedule = apply_config(nest, accumulators, config, device_info)
    return ScheduledGemm(region, schedule, segments[0])


def make_problem(
    nest: LoopNest, accumulators: tuple[Accumulator, ...], device_info: DeviceInfo
) -> GemmEpilogueProblem:
    """The sizes by which heuristics choose a config."""
    return GemmEpilogueProblem(
        m=size_hint(nest.grid[0].size),
        n=epilogue_columns(nest),
        num_gemms=len(accumulators),
        block_columns=size_hint(nest.axes[-1].size) if nest.body else 0,
        num_sms=device_info.num_cores,
    )


def apply_config(
    nest: LoopNest,
    accumulators: tuple[Accumulator, ...],
    config: GemmEpilogueConfig,
    device_info: DeviceInfo,
) -> GemmSchedule:
    """The schedule with this config."""
    rows, last = nest.grid[0], nest.axes[-1]
    block_n = size_hint(last.size) if nest.body else config.block_n
    num_programs = 0
    if config.persistent:
        num_programs = device_info.num_cores
        if rows.size.is_constant:
            row_tiles = -(-size_hint(rows.size) // config.block_m)
            tiles = row_tiles * -(-epilogue_columns(nest) // block_n)
            num_programs = min(num_programs, tiles)
    return GemmSchedule(
        "gemm",
        nest,
        (rows, last),
        {rows: config.block_m, last: block_n},
        num_programs=num_programs,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        accumulators=accumulators,
        block_k=choose_block_k(config, accumulators[0].gemm),
        use_tma=config.use_tma and all(can_use_tma(a.gemm) for a in accumulators),
        group_m=config.group_m,
        tile_loop=config.tile_loop,
        tma_store=config.tma_store,
    )


def choose_block_k(config: GemmEpilogueConfig, gemm: Gemm) -> int:
    """The config's block of 16-bit operands; of float8 twice as many fill the same shared memory."""
    block_k = config.block_k * 2 // gemm.lhs.itemsize
    return block_k if gemm.scales is None else min(block_k, gemm.scales.block_k)


def can_use_tma(gemm: Gemm) -> bool:
    """Whether tensor descriptors can read both matrices: rows must start at multiples of 16 bytes."""
    for matrix in (gemm.lhs, gemm.rhs):
        row_stride = max(stride.constant for stride in matrix.strides)
        if (row_stride * matrix.itemsize) % TMA_ALIGNMENT:
            return False
    return True


def epilogue_columns(nest: LoopNest) -> int:
    """Columns of the epilogue: all columns of a GEMM, or a part of them."""
    return size_hint(indices.product([axis.size for axis in nest.axes[1:]]))


# ---- the epilogue over rows and columns ----------------------------------------------------------


def tile_epilogue(
    nest: LoopNest, gemms: tuple[Gemm, ...]
) -> tuple[LoopNest, tuple[Accumulator, ...]]:
    """The epilogue's loop nest over (rows, columns); loads of GEMM outputs become accumulators."""
    if len({gemm.operands[::2] for gemm in gemms}) > 1:  # left matrix, its scales
        raise Unsupported("GEMMs of different left matrices in one kernel")
    by_name = {gemm.name: gemm for gemm in gemms}
    roles = {local.role for local in nest.locals.values() if local.reduction}
    if roles - {"row_reduction"}:
        raise Unsupported("a sum over rows or a scan after a GEMM")
    nest = _collapse_to_rows_and_columns(nest, by_name)
    accumulators: dict[tuple[str, int], Accumulator] = {}

    def replace_load(part: Expression) -> Expression | None:
        if not isinstance(part, Load) or part.name not in by_name:
            return None
        gemm = by_name[part.name]
        offset = _column_offset(nest, gemm, part.index[0])
        name = f"{gemm.name}_at{offset}" if offset else gemm.name
        accumulators.setdefault((gemm.name, offset), Accumulator(name, gemm, offset))
        return Load(name, (), torch.float32)

    def transform(expression: Expression) -> Expression:
        return use_fast_math(rewrite_expression(expression, replace_load, lambda index: index))

    locals_ = {n: replace(x, expression=transform(x.expression)) for n, x in nest.locals.items()}
    stores = tuple(replace(s, value=transform(s.value)) for s in nest.stores)
    sums = {a.name: _accumulator_local(a) for a in accumulators.values()}
    memory = {n: t for n, t in nest.memory.items() if n not in by_name}
    for gemm in gemms:
        memory |= {t.name: t for t in gemm.operands}
    formulas = (*map(_formula, gemms), *nest.formulas)
    nest = replace(
        nest, locals={**sums, **locals_}, stores=stores, memory=memory, formulas=formulas
    )
    return nest, tuple(accumulators.values())


def _formula(gemm: Gemm) -> str:
    text = f"{gemm.name}[i,j] = sum_k {gemm.lhs.name}[i,k] * {gemm.rhs.name}[k,j]"
    scales = gemm.scales
    if scales is None:
        return text
    column = "j" if scales.rhs_block == 1 else f"j//{scales.rhs_block}"
    block = f"k//{scales.block_k}"
    return f"{text} * {scales.lhs.name}[i,{block}] * {scales.rhs.name}[{column},{block}]"


def _accumulator_local(accumulator: Accumulator) -> Local:
    """The local of an accumulator in the epilogue. Codegen writes its value, not this constant."""
    return Local(accumulator.name, Constant(0.0, torch.float32), torch.float32)


def _gemm_loads(nest: LoopNest, gemms: dict[str, Gemm]) -> Iterator[tuple[Gemm, Index]]:
    for tensor, index, is_store in nest.accesses():
        if tensor.name in gemms and not is_store:
            yield gemms[tensor.name], index


def _collapse_to_rows_and_columns(nest: LoopNest, gemms: dict[str, Gemm]) -> LoopNest:
    """One loop over rows and one over columns; a third if blocks of columns are reduced."""
    steps: dict[Axis, Index] = {}
    rows: list[Axis] = []
    for axis in nest.axes:
        axis_steps = {_axis_step(index, axis, gemm) for gemm, index in _gemm_loads(nest, gemms)}
        if len(axis_steps) != 1:
            raise Unsupported("an epilogue that loops over its GEMMs in different ways")
        is_row, steps[axis] = axis_steps.pop()
        rows += [axis] if is_row else []
    columns = [a for a in nest.grid if a not in rows]
    if not rows or set(rows) & set(nest.body) or len(nest.body) > 1:
        raise Unsupported("an epilogue that is not over rows and columns of a GEMM")
    for group in (rows, columns):
        group.sort(key=lambda axis: -size_hint(steps[axis]))
    nest = replace(nest, grid=(*rows, *columns))
    nest = flatten_loops(flatten_loops(nest, tuple(rows)), tuple(columns))
    if any(not axis.size.is_constant for axis in nest.axes[1:]):
        raise Unsupported("a GEMM with a dynamic N")
    for axis in nest.body:
        size = size_hint(axis.size)
        if steps[axis] != 1 or size != next_power_of_two(size) or not 16 <= size <= MAX_BLOCK_N:
            raise Unsupported(f"a reduction of {size} columns of a GEMM")
    return rename_loops(nest)


def _axis_step(index: Index, axis: Axis, gemm: Gemm) -> tuple[bool, Index]:
    """Whether the loop goes along rows of the GEMM, and how many rows or columns a step is."""
    step = index.coefficient(axis)
    if step is None or step == 0:
        raise Unsupported("an epilogue that reads its GEMM by other loops than its own")
    rows = indices.divide_exactly(step, Index(gemm.n))
    if rows is not None:
        return True, rows
    if not axis.size.is_constant or size_hint(step) * axis.size.constant > gemm.n:
        raise Unsupported("an epilogue that reads its GEMM across rows")
    return False, step


def _column_offset(nest: LoopNest, gemm: Gemm, index: Index) -> int:
    """The column of the GEMM that is the first column of the epilogue."""
    start = indices.from_atom(nest.axes[0]) * gemm.n
    width = indices.ONE
    for axis in reversed(nest.axes[1:]):
        start = start + indices.from_atom(axis) * width
        width = width * axis.size
    offset = index - start
    if not offset.is_constant or not 0 <= offset.constant <= gemm.n - size_hint(width):
        raise Unsupported("an epilogue that reads its GEMM out of order")
    return offset.constant
