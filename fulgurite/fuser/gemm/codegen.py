"""The Triton text of a matrix product with its epilogue.

In: a `MatmulSchedule`. Out: one `Stage`. A program finds its tile, sums up the accumulators over the inner
dimension, and then writes the epilogue with the same writer as every other kernel: an accumulator is one more value
that it knows. Matrices are read by descriptors (the tensor memory accelerator) or by addresses.
"""

from __future__ import annotations

from fulgurite.fuser.codegen.triton.kernel import Stage, finished, held
from fulgurite.fuser.codegen.triton.source_lines import Loop
from fulgurite.fuser.codegen.triton.writer import Writer
from fulgurite.fuser.gemm.schedule import Accumulator, MatmulSchedule, columns_of
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.index import Index
from fulgurite.fuser.ir.loop_nest import Store
from fulgurite.fuser.ir.statement import Tensor


def write_matmul(name: str, schedule: MatmulSchedule, wide: bool) -> Stage:
    """The kernel of one schedule."""
    w = MatmulWriter(name, schedule, wide)
    b = w.body
    b.head("program = tl.program_id(0)")
    w.open_matrices()
    w.open_results()
    if schedule.programs:
        steps = f"program, {w.tiles()}, {schedule.programs}"
        tile = b.fresh("tile")
        way = "" if schedule.loop == "plain" else f", {schedule.loop}=True"
        with b.loop(f"for {tile} in tl.range({steps}{way}):"):
            w.one_tile(tile)
            w.forget(b.depth)
    else:
        w.one_tile("program")
    return finished(w)


class MatmulWriter(Writer):
    """A `Writer` that also knows the matrices and the tile."""

    def __init__(self, name: str, schedule: MatmulSchedule, wide: bool) -> None:
        super().__init__(name, schedule, wide)
        self.plan = schedule
        products = [a.product for a in schedule.accumulators]
        matrices = [products[0].left, *(product.right for product in products)]
        self.reads = list(dict.fromkeys([*(m.name for m in matrices), *self.reads]))
        for matrix in matrices:
            if matrix.name not in self.body.names:
                self.body.names[matrix.name] = self.body.fresh(matrix.name)
        self.left, self.rights = matrices[0], list(dict.fromkeys(matrices[1:]))
        self.left_tiles = ""
        self.described: dict[str, str] = {}  # right matrices and results
        self.at = ("", "")  # the tile's row and column, as text

    # where a program is

    def tiles(self) -> str:
        rows, columns = self.row_tiles(), self.column_tiles()
        if rows.isdigit():
            return str(int(rows) * columns)
        return rows if columns == 1 else f"{rows} * {columns}"

    def row_tiles(self) -> str:
        size, block = self.plan.rows.size, self.plan.sizes[self.plan.rows]
        if size.is_constant:
            return str(-(-size.constant // block))
        return f"tl.cdiv({self.body.index(size)}, {block})"

    def column_tiles(self) -> int:
        return -(-columns_of(self.nest) // self.plan.tile_columns)

    def place(self, tile: str) -> tuple[str, str]:
        """The tile's row and column: tiles of some rows go first through all their columns."""
        b, columns, together = self.body, self.column_tiles(), self.plan.rows_together
        if columns == 1:
            return tile, "0"
        rows, band = self.row_tiles(), together * columns
        first, row, column = (b.fresh(name) for name in ("first_row", "row", "column"))
        count = str(together)
        b.head(f"{first} = {tile} // {band} * {together}")
        if not rows.isdigit() or int(rows) % together:
            count = b.fresh("rows_here")
            b.head(f"{count} = tl.minimum({rows} - {first}, {together})")
        b.head(f"{row} = {first} + {tile} % {band} % {count}")
        b.head(f"{column} = {tile} % {band} // {count}")
        return row, column

    # matrices

    def open_matrices(self) -> None:
        """Descriptors of the matrices, made once a program."""
        if not self.plan.descriptors:
            return
        depth = self.plan.depth
        self.left_tiles = self.opened(self.left, [self.plan.sizes[self.plan.rows], depth])
        for matrix in self.rights:
            self.described[matrix.name] = self.opened(matrix, [depth, self.plan.tile_columns])

    def opened(self, matrix: Tensor, block: list[int]) -> str:
        """A descriptor of a matrix, whose contiguous dimension comes last."""
        b = self.body
        sizes, strides = list(map(b.index, matrix.sizes)), list(matrix.strides)
        if _is_turned(matrix):
            sizes, strides, block = sizes[::-1], strides[::-1], block[::-1]
        name = b.fresh(f"{b.names[matrix.name]}_tiles")
        shape = f"[{', '.join(sizes)}], [{b.index(strides[0])}, 1], {block}"
        b.head(f"{name} = tl.make_tensor_descriptor({b.names[matrix.name]}, {shape})")
        return name

    def open_results(self) -> None:
        """Descriptors of the results that are written a tile at a time."""
        rows, columns = self.plan.sizes[self.plan.rows], self.plan.tile_columns
        for store in self.main_stores() if self.plan.descriptors and self.plan.stores_tiles else ():
            stride = self.tile_stride(store)
            if stride is None or store.tensor.name in self.described:
                continue
            pointer = self.outputs[store.tensor.name]
            name = self.body.fresh(f"{pointer}_tiles")
            sizes = f"[{self.body.index(self.plan.rows.size)}, {columns_of(self.nest)}]"
            shape = f"{sizes}, [{stride}, 1], {[rows, columns]}"
            self.body.head(f"{name} = tl.make_tensor_descriptor({pointer}, {shape})")
            self.described[store.tensor.name] = name

    def tile_stride(self, store: Store) -> int | None:
        """From row to row, of a result that a descriptor can write: contiguous, rows at 16 bytes."""
        step = store.index.coefficient(self.plan.rows)
        if step is None or not step.is_constant or (step.constant * store.tensor.itemsize) % 16:
            return None
        place = indices.of_atom(self.plan.rows) * step
        width = indices.ONE
        for axis in reversed(self.nest.axes[1:]):
            place = place + indices.of_atom(axis) * width
            width = width * axis.size
        return step.constant if store.index == place else None

    def store(self, store: Store) -> None:
        name = self.described.get(store.tensor.name)
        axes = self.body.axes(store.value)
        if name is None or not {*self.plan.blocks} <= axes:
            super().store(store)
            return
        b, target = self.body, store.tensor.dtype
        text = b.expression(store.value)
        value = b.narrowed(text, store.value, target)
        rows = f"{self.at[0]} * {self.plan.sizes[self.plan.rows]}"
        columns = "0" if self.at[1] == "0" else f"{self.at[1]} * {self.plan.tile_columns}"
        b.line(f"{name}.store([{rows}, {columns}], {value})")

    def one_tile(self, tile: str) -> None:
        """The accumulators of one tile, and the epilogue."""
        row, column = self.at = self.place(tile)
        self.sum_up(row, column)
        self.open_axes(row, column)
        held(self)

    def open_axes(self, row: str, column: str) -> None:
        """The epilogue's loops: rows and columns of this tile."""
        b, plan = self.body, self.plan
        wide = ".to(tl.int64)" if self.wide else ""
        block = plan.sizes[plan.rows]
        self.block_axis(plan.rows, f"{row} * {block} + tl.arange(0, {block}){wide}", block)
        block = plan.tile_columns
        here = f"tl.arange(0, {block}){wide}"
        if not self.nest.body:
            text = here if column == "0" else f"{column} * {block} + {here}"
            self.block_axis(plan.blocks[-1], text, block)
            return
        for axis in self.nest.grid[1:]:  # one: which block of columns this is
            b.head(f"{axis.name} = {column}")
            b.loops[axis] = Loop(axis, 0, b.depth)
        self.block_axis(plan.blocks[-1], here, block)

    def sum_up(self, row: str, column: str) -> None:
        """The loop over the inner dimension; every line of it goes before what the epilogue reads."""
        b, plan = self.body, self.plan
        shape = f"[{plan.sizes[plan.rows]}, {plan.tile_columns}]"
        sums = [b.fresh(f"{a.name}_sum") for a in plan.accumulators]
        for name in sums:
            b.head(f"{name} = tl.zeros({shape}, tl.float32)")
        step = b.fresh("k0")
        reads = self.by_descriptors if plan.descriptors else self.by_addresses
        left, rights = reads(row, column, step)
        b.head(f"for {step} in range(0, {self.left.sizes[1]}, {plan.depth}):")
        tile = b.fresh(f"{b.names[self.left.name]}_tile")
        b.head(f"    {tile} = {left}")
        for name, right in zip(sums, rights, strict=True):
            b.head(f"    {name} = tl.dot({tile}, {right}, {name})")
        for accumulator, name in zip(plan.accumulators, sums, strict=True):
            local = self.nest.locals[accumulator.name]
            self.known(local, name, b.depth, set(self.nest.axes))

    def by_descriptors(self, row: str, column: str, step: str) -> tuple[str, list[str]]:
        """What the loop reads, as text: past the end of a matrix are zeros."""
        rows = f"{row} * {self.plan.sizes[self.plan.rows]}"
        rights = []
        for a in self.plan.accumulators:
            columns = _column(column, self.plan.tile_columns, a)
            name = self.described[a.product.right.name]
            rights.append(_described_load(name, a.product.right, step, columns))
        return _described_load(self.left_tiles, self.left, rows, step), rights

    def by_addresses(self, row: str, column: str, step: str) -> tuple[str, list[str]]:
        """The same with an address for every element; where the inner dimension ends, a mask."""
        b, plan = self.body, self.plan
        inner = b.fresh("inner")
        b.head(f"{inner} = tl.arange(0, {plan.depth})")
        block = plan.sizes[plan.rows]
        rows = self.lines_of(f"{row} * {block}", block, self.left, 0)
        left = self.addressed(self.left, rows, inner, step, 0)
        rights = []
        for a in plan.accumulators:
            start = _column(column, plan.tile_columns, a)
            columns = self.lines_of(start, plan.tile_columns, a.product.right, 1)
            rights.append(self.addressed(a.product.right, columns, inner, step, 1))
        return left, rights

    def lines_of(self, start: str, block: int, matrix: Tensor, dim: int) -> tuple[str, str]:
        """Positions along the outer dimension of a matrix, and the mask they need.

        Past its end they begin again, as nothing there is stored; but not along contiguous memory, where that
        would take addresses apart.
        """
        b, size = self.body, matrix.sizes[dim]
        name = b.fresh(f"{b.names[matrix.name]}_{'rows' if dim == 0 else 'columns'}")
        wide = ".to(tl.int64)" if self.wide else ""
        text = f"{start} + tl.arange(0, {block})" if start != "0" else f"tl.arange(0, {block})"
        text = f"({text}){wide}" if wide else text
        whole = size.is_constant and size.constant % block == 0 and columns_fit(start)
        contiguous = matrix.strides[dim] == 1
        if whole or contiguous:
            b.head(f"{name} = {text}")
        else:
            b.head(f"{name} = ({text}) % {_factor(b.index(size))}")
        mask = "" if whole or not contiguous else f"{name} < {b.index(size)}"
        return name, mask

    def addressed(
        self, matrix: Tensor, lines: tuple[str, str], inner: str, step: str, dim: int
    ) -> str:
        """A load of one block of a matrix, whose outer dimension is `dim`."""
        b, depth = self.body, self.plan.depth
        name, mask = lines
        sides = ("[:, None]", "[None, :]") if dim == 0 else ("[None, :]", "[:, None]")
        outer, along = matrix.strides[dim], matrix.strides[1 - dim]
        pointer = b.fresh(f"{b.names[matrix.name]}_at")
        first = f"{name}{sides[0]}{_times(outer)} + {inner}{sides[1]}{_times(along)}"
        b.head(f"{pointer} = {b.names[matrix.name]} + {first}")
        tests = [f"({mask}){sides[0]}"] if mask else []
        length = matrix.sizes[1 - dim].constant
        if length % depth:
            tests.append(f"({inner} < {length} - {step}){sides[1]}")
        options = f", mask={' & '.join(tests)}, other=0.0" if tests else ""
        return f"tl.load({pointer} + {step}{_times(along)}{options})"


def columns_fit(start: str) -> bool:
    """Do blocks begin at multiples of their size? Not those from a column in the middle on."""
    return "+" not in start


def _column(column: str, block: int, accumulator: Accumulator) -> str:
    """The first column of a tile in the matrix itself."""
    start = "" if column == "0" else f"{column} * {block}"
    if not accumulator.offset:
        return start or "0"
    return f"{start} + {accumulator.offset}" if start else str(accumulator.offset)


def _described_load(name: str, matrix: Tensor, first: str, second: str) -> str:
    if _is_turned(matrix):
        return f"{name}.load([{second}, {first}]).T"
    return f"{name}.load([{first}, {second}])"


def _is_turned(matrix: Tensor) -> bool:
    """Is the first dimension the contiguous one?"""
    return matrix.strides[1] != 1


def _times(stride: Index) -> str:
    return "" if stride == 1 else f" * {stride}"


def _factor(text: str) -> str:
    return text if text.isalnum() else f"({text})"
