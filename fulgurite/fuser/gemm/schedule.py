"""A matrix product with its epilogue: tiles of the product, and the epilogue's loops over them.

In: the refined epilogue of `matmul.Matmuls`, cut into its one segment. Out: a `MatmulSchedule`: the epilogue's nest
over rows `i` and columns `j` of a tile, where reads of a product became accumulators. Where the columns are reduced in
blocks (the largest value of every 128, to quantize by), a tile has the columns of one block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from fulgurite.device import Device
from fulgurite.fuser.cost import number
from fulgurite.fuser.frontend.pointwise import Unsupported
from fulgurite.fuser.gemm.fast_math import lean
from fulgurite.fuser.gemm.pattern import Product
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import Constant, Expression, Load
from fulgurite.fuser.ir.index import Axis, Index
from fulgurite.fuser.ir.loop_nest import Local, Nest, named, rewrite
from fulgurite.fuser.schedule.gpu.base import GpuSchedule, joined, power_above

MOST_COLUMNS = 256  # of a tile
SHARED_BYTES = 227 << 10  # of a program, of Hopper and later
ALIGNMENT = 16  # bytes, of every row a descriptor reads


@dataclass(frozen=True)
class Accumulator:
    """The part of a product that a tile sums up: its own columns, from `offset` on."""

    name: str  # of the local that it is in the epilogue
    product: Product
    offset: int


@dataclass(frozen=True)
class Tile:
    """What a program computes at once, and how."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    descriptors: bool = True  # tiles are copied by the tensor memory accelerator
    walking: bool = True  # a program a multiprocessor, which walks over tiles
    rows_together: int = 8  # rows of tiles that programs side by side work on
    loop: str = "flatten"  # over tiles: as one with the inner one, "plain", or "warp_specialize"
    stores: bool = False  # results go through descriptors as well


@dataclass(frozen=True)
class MatmulSchedule(GpuSchedule):
    """The epilogue's nest over the tiles of its products."""

    accumulators: tuple[Accumulator, ...] = ()
    depth: int = 64
    descriptors: bool = False
    rows_together: int = 8
    loop: str = "flatten"
    stores_tiles: bool = False

    @property
    def rows(self) -> Axis:
        return self.nest.grid[0]

    @property
    def tile_columns(self) -> int:
        return self.sizes[self.blocks[-1]]

    def __str__(self) -> str:
        inner = self.accumulators[0].product.depth
        text = f"matmul: {' '.join(f'{a.name}<{a.size}' for a in self.nest.axes)} x {inner}"
        text += f", tiles of {self.sizes[self.rows]} x {self.tile_columns} x {self.depth}"
        count = len(self.accumulators)
        text += f" of {count} products" if count > 1 else ""
        text += f", {self.warps} warps, {self.stages} blocks ahead"
        text += ", by descriptors" if self.descriptors else ""
        text += ", results too" if self.descriptors and self.stores_tiles else ""
        if not self.programs:
            return text
        text += f", {self.programs} programs walk the tiles"
        return (
            text
            + {"flatten": " in one loop", "plain": "", "warp_specialize": ", warps apart"}[
                self.loop
            ]
        )


def tiled(
    nest: Nest, accumulators: tuple[Accumulator, ...], tile: Tile, device: Device
) -> MatmulSchedule:
    """The schedule with these tiles."""
    rows, last = nest.grid[0], nest.axes[-1]
    block = number(last.size) if nest.body else tile.columns
    sizes = {rows: tile.rows, last: block}
    programs = 0
    if tile.walking:
        count = -(-number(rows.size) // tile.rows) * -(-columns_of(nest) // block)
        programs = min(device.threads, count) if rows.size.is_constant else device.threads
    return MatmulSchedule(
        "matmul",
        nest,
        (rows, last),
        sizes,
        programs=programs,
        warps=tile.warps,
        stages=tile.stages,
        accumulators=accumulators,
        depth=tile.depth,
        descriptors=tile.descriptors and all(map(describable, accumulators)),
        rows_together=tile.rows_together,
        loop=tile.loop,
        stores_tiles=tile.stores,
    )


def describable(accumulator: Accumulator) -> bool:
    """May descriptors read both matrices? Their rows must begin at multiples of 16 bytes."""
    product = accumulator.product
    for matrix in (product.left, product.right):
        step = max(stride.constant for stride in matrix.strides)
        if (step * matrix.itemsize) % ALIGNMENT:
            return False
    return True


def columns_of(nest: Nest) -> int:
    """Columns of the epilogue: of a product, or of a part of it."""
    return number(indices.product([axis.size for axis in nest.axes[1:]]))


def fits(tile: Tile, products: int) -> bool:
    """Does the memory of a multiprocessor hold what is under way?"""
    block = (tile.rows + products * tile.columns) * tile.depth * 2
    return block * tile.stages <= SHARED_BYTES


# ---- the epilogue over rows and columns ----------------------------------------------------------


def over_tiles(nest: Nest, products: tuple[Product, ...]) -> tuple[Nest, tuple[Accumulator, ...]]:
    """The epilogue's nest over (rows, columns), with accumulators in the place of the products' elements."""
    if len({product.left.name for product in products}) > 1:
        raise Unsupported("products of different left matrices in one kernel")
    by_name = {product.name: product for product in products}
    roles = {local.role for local in nest.locals.values() if local.reduction}
    if roles - {"rowsum"}:
        raise Unsupported("a sum over rows or a scan after a product")
    nest = _grouped(nest, by_name)
    found: dict[tuple[str, int], Accumulator] = {}

    def replaced(part: Expression) -> Expression | None:
        if not isinstance(part, Load) or part.name not in by_name:
            return None
        product = by_name[part.name]
        offset = _offset(nest, product, part.index[0])
        key = (product.name, offset)
        name = f"{product.name}_at{offset}" if offset else product.name
        found.setdefault(key, Accumulator(name, product, offset))
        return Load(name, (), torch.float32)

    def changed(expression: Expression) -> Expression:
        return lean(rewrite(expression, replaced, lambda index: index))

    locals_ = {n: replace(x, expression=changed(x.expression)) for n, x in nest.locals.items()}
    stores = tuple(replace(s, value=changed(s.value)) for s in nest.stores)
    sums = {a.name: _local(a) for a in found.values()}
    memory = {n: t for n, t in nest.memory.items() if n not in by_name}
    for product in products:
        memory |= {t.name: t for t in (product.left, product.right)}
    formulas = (*map(_formula, products), *nest.formulas)
    nest = replace(
        nest, locals={**sums, **locals_}, stores=stores, memory=memory, formulas=formulas
    )
    return nest, tuple(found.values())


def _formula(product: Product) -> str:
    return f"{product.name}[i,j] = sum_k {product.left.name}[i,k] * {product.right.name}[k,j]"


def _local(accumulator: Accumulator) -> Local:
    """Where an accumulator stands in the epilogue; what it is, the code generator writes."""
    return Local(accumulator.name, Constant(0.0, torch.float32), torch.float32)


def _places(nest: Nest, products: dict[str, Product]) -> Iterator[tuple[Product, Index]]:
    for tensor, index, stores in nest.accesses():
        if tensor.name in products and not stores:
            yield products[tensor.name], index


def _grouped(nest: Nest, products: dict[str, Product]) -> Nest:
    """The nest with one loop over rows and one over columns; a second one where blocks of them are reduced."""
    steps: dict[Axis, Index] = {}
    rows: list[Axis] = []
    for axis in nest.axes:
        along = {_step(index, axis, product) for product, index in _places(nest, products)}
        if len(along) != 1:
            raise Unsupported("an epilogue that walks its products in different ways")
        is_row, steps[axis] = along.pop()
        rows += [axis] if is_row else []
    columns = [a for a in nest.grid if a not in rows]
    if not rows or set(rows) & set(nest.body) or len(nest.body) > 1:
        raise Unsupported("an epilogue that is not over rows and columns of a product")
    for group in (rows, columns):
        group.sort(key=lambda axis: -number(steps[axis]))
    nest = replace(nest, grid=(*rows, *columns))
    nest = joined(joined(nest, tuple(rows)), tuple(columns))
    if any(not axis.size.is_constant for axis in nest.axes[1:]):
        raise Unsupported("a product with a dynamic number of columns")
    for axis in nest.body:
        size = number(axis.size)
        if steps[axis] != 1 or size != power_above(size) or not 16 <= size <= MOST_COLUMNS:
            raise Unsupported(f"a reduction of {size} columns of a product")
    return named(nest)


def _step(index: Index, axis: Axis, product: Product) -> tuple[bool, Index]:
    """Whether the loop walks along rows of the product, and how many rows or columns a step is."""
    step = index.coefficient(axis)
    if step is None or step == 0:
        raise Unsupported("an epilogue that reads its product by other loops than its own")
    rows = indices.divide_exactly(step, Index(product.width))
    if rows is not None:
        return True, rows
    if not axis.size.is_constant or number(step) * axis.size.constant > product.width:
        raise Unsupported("an epilogue that reads its product across rows")
    return False, step


def _offset(nest: Nest, product: Product, index: Index) -> int:
    """The column of the product that the first column of the epilogue is."""
    place = indices.of_atom(nest.axes[0]) * product.width
    width = indices.ONE
    for axis in reversed(nest.axes[1:]):
        place = place + indices.of_atom(axis) * width
        width = width * axis.size
    rest = index - place
    if not rest.is_constant or not 0 <= rest.constant <= product.width - number(width):
        raise Unsupported("an epilogue that reads its product out of order")
    return rest.constant
