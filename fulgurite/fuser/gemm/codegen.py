"""Triton code of GEMMs with their epilogue.

In: a `GemmSchedule`. Out: one `TritonKernelSource`. A program locates its tile, accumulates over K, and then
runs the epilogue, which the same writer as for every other kernel writes: an accumulator is one more known
value. Matrices are read by tensor descriptors (TMA) or by pointers.
"""

from __future__ import annotations

from fulgurite.fuser.codegen.triton.kernel import (
    TritonKernelSource,
    build_source,
    emit_single_block,
)
from fulgurite.fuser.codegen.triton.source_lines import AxisBinding
from fulgurite.fuser.codegen.triton.writer import KernelWriter
from fulgurite.fuser.gemm.calls import FLOAT8
from fulgurite.fuser.gemm.schedule import (
    TMA_ALIGNMENT,
    Accumulator,
    GemmSchedule,
    epilogue_columns,
)
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.index import Index
from fulgurite.fuser.ir.loop_nest import Store
from fulgurite.fuser.ir.statement import Tensor

# Elements of K. Hopper's float8 instructions sum in 14 bits of mantissa; so do the hand-written kernels.
PROMOTION_INTERVAL = 128


def write_gemm(name: str, schedule: GemmSchedule, int64_index: bool) -> TritonKernelSource:
    """Write the kernel of one schedule."""
    w = GemmWriter(name, schedule, int64_index)
    b = w.body
    b.emit_header("program = tl.program_id(0)")
    w.make_operand_descriptors()
    w.make_output_descriptors()
    if schedule.num_programs:
        steps = f"program, {w.tile_count()}, {schedule.num_programs}"
        tile = b.unique_name("tile")
        option = "" if schedule.tile_loop == "plain" else f", {schedule.tile_loop}=True"
        with b.indented(f"for {tile} in tl.range({steps}{option}):"):
            w.write_tile(tile)
            w.forget_values(b.depth)
    else:
        w.write_tile("program")
    return build_source(w)


class GemmWriter(KernelWriter):
    """A `KernelWriter` that also knows the matrices and the position of the tile."""

    def __init__(self, name: str, schedule: GemmSchedule, int64_index: bool) -> None:
        super().__init__(name, schedule, int64_index)
        self.gemm = schedule
        gemms = [a.gemm for a in schedule.accumulators]
        matrices = [gemms[0].lhs, *(gemm.rhs for gemm in gemms)]
        scales = [scale for gemm in gemms for scale in gemm.operands[2:]]
        self.reads = list(dict.fromkeys([*(m.name for m in (*matrices, *scales)), *self.reads]))
        for matrix in (*matrices, *scales):
            if matrix.name not in self.body.names:
                self.body.names[matrix.name] = self.body.unique_name(matrix.name)
        self.lhs, self.rhs_matrices = matrices[0], list(dict.fromkeys(matrices[1:]))
        self.lhs_descriptor = ""
        self.descriptors: dict[str, str] = {}  # by name, of right matrices and outputs
        self.tile_position = ("", "")  # names of the tile's row and column

    # ---- tiles

    def tile_count(self) -> str:
        rows, columns = self.row_tile_count(), self.column_tile_count()
        if rows.isdigit():
            return str(int(rows) * columns)
        return rows if columns == 1 else f"{rows} * {columns}"

    def row_tile_count(self) -> str:
        size, block = self.gemm.row_axis.size, self.gemm.block_m
        if size.is_constant:
            return str(-(-size.constant // block))
        return f"tl.cdiv({self.body.print_index(size)}, {block})"

    def column_tile_count(self) -> int:
        return -(-epilogue_columns(self.nest) // self.gemm.block_n)

    def locate_tile(self, tile: str) -> tuple[str, str]:
        """The tile's row and column, swizzled: groups of group_m rows of tiles share operands in L2."""
        b, columns, group_m = self.body, self.column_tile_count(), self.gemm.group_m
        if columns == 1:
            return tile, "0"
        rows, group = self.row_tile_count(), group_m * columns
        first, row, column = (b.unique_name(name) for name in ("first_pid_m", "pid_m", "pid_n"))
        group_size = str(group_m)
        b.emit_header(f"{first} = {tile} // {group} * {group_m}")
        if not rows.isdigit() or int(rows) % group_m:
            group_size = b.unique_name("group_size_m")
            b.emit_header(f"{group_size} = tl.minimum({rows} - {first}, {group_m})")
        b.emit_header(f"{row} = {first} + {tile} % {group} % {group_size}")
        b.emit_header(f"{column} = {tile} % {group} // {group_size}")
        return row, column

    # ---- tensor descriptors

    def make_operand_descriptors(self) -> None:
        """Make the descriptors of the matrices, once per program."""
        if not self.gemm.use_tma:
            return
        block_m, block_n, block_k = self.gemm.block_m, self.gemm.block_n, self.gemm.block_k
        self.lhs_descriptor = self.make_descriptor(self.lhs, [block_m, block_k])
        for matrix in self.rhs_matrices:
            self.descriptors[matrix.name] = self.make_descriptor(matrix, [block_k, block_n])

    def make_descriptor(self, matrix: Tensor, block: list[int]) -> str:
        """Make the descriptor of a matrix; its contiguous dimension comes last."""
        b = self.body
        sizes, strides = list(map(b.print_index, matrix.sizes)), list(matrix.strides)
        if _is_transposed(matrix):
            sizes, strides, block = sizes[::-1], strides[::-1], block[::-1]
        name = b.unique_name(f"{b.names[matrix.name]}_desc")
        shape = f"[{', '.join(sizes)}], [{b.print_index(strides[0])}, 1], {block}"
        b.emit_header(f"{name} = tl.make_tensor_descriptor({b.names[matrix.name]}, {shape})")
        return name

    def make_output_descriptors(self) -> None:
        """Make the descriptors of the outputs that are stored a tile at a time."""
        schedule = self.gemm
        for store in self.main_stores() if schedule.use_tma and schedule.tma_store else ():
            stride = self.output_row_stride(store)
            if stride is None or store.tensor.name in self.descriptors:
                continue
            pointer = self.outputs[store.tensor.name]
            name = self.body.unique_name(f"{pointer}_desc")
            rows = self.body.print_index(schedule.row_axis.size)
            block = [schedule.block_m, schedule.block_n]
            shape = f"[{rows}, {epilogue_columns(self.nest)}], [{stride}, 1], {block}"
            self.body.emit_header(f"{name} = tl.make_tensor_descriptor({pointer}, {shape})")
            self.descriptors[store.tensor.name] = name

    def output_row_stride(self, store: Store) -> int | None:
        """The row stride of an output that a descriptor can store; None if none can.

        Rows must be contiguous and start at multiples of 16 bytes.
        """
        step = store.index.coefficient(self.gemm.row_axis)
        if step is None or not step.is_constant:
            return None
        if (step.constant * store.tensor.itemsize) % TMA_ALIGNMENT:
            return None
        expected = indices.from_atom(self.gemm.row_axis) * step
        width = indices.ONE
        for axis in reversed(self.nest.axes[1:]):
            expected = expected + indices.from_atom(axis) * width
            width = width * axis.size
        return step.constant if store.index == expected else None

    def emit_store(self, store: Store) -> None:
        name = self.descriptors.get(store.tensor.name)
        axes = self.body.find_axes(store.value)
        if name is None or not {*self.gemm.block_axes} <= axes:
            super().emit_store(store)
            return
        b, target = self.body, store.tensor.dtype
        text = b.print_expression(store.value)
        value = b.print_narrowed(text, store.value, target)
        row, column = self.tile_position
        rows = f"{row} * {self.gemm.block_m}"
        columns = "0" if column == "0" else f"{column} * {self.gemm.block_n}"
        b.emit(f"{name}.store([{rows}, {columns}], {value})")

    # ---- one tile

    def write_tile(self, tile: str) -> None:
        """Write the main loop of one tile and its epilogue."""
        row, column = self.tile_position = self.locate_tile(tile)
        self.write_mainloop(row, column)
        self.bind_tile_axes(row, column)
        emit_single_block(self)

    def bind_tile_axes(self, row: str, column: str) -> None:
        """Bind the epilogue's loops to the rows and columns of this tile."""
        b, schedule = self.body, self.gemm
        cast = ".to(tl.int64)" if self.int64_index else ""
        block = schedule.block_m
        self.bind_block_axis(
            schedule.row_axis, f"{row} * {block} + tl.arange(0, {block}){cast}", block
        )
        block = schedule.block_n
        offsets = f"tl.arange(0, {block}){cast}"
        if not self.nest.body:
            text = offsets if column == "0" else f"{column} * {block} + {offsets}"
            self.bind_block_axis(schedule.block_axes[-1], text, block)
            return
        for axis in self.nest.grid[1:]:  # one axis: the block of columns
            b.emit_header(f"{axis.name} = {column}")
            b.bindings[axis] = AxisBinding(axis, 0, b.depth)
        self.bind_block_axis(schedule.block_axes[-1], offsets, block)

    def write_mainloop(self, row: str, column: str) -> None:
        """Write the loop over K; all of its lines come before the loads of the epilogue."""
        b, schedule = self.body, self.gemm
        shape = f"[{schedule.block_m}, {schedule.block_n}]"
        accumulators = [b.unique_name(f"{a.name}_acc") for a in schedule.accumulators]
        for name in accumulators:
            b.emit_header(f"{name} = tl.zeros({shape}, tl.float32)")
        step = b.unique_name("k0")
        print_loads = self.tma_loads if schedule.use_tma else self.pointer_loads
        lhs_load, rhs_loads = print_loads(row, column, step)
        scale_loads = [self.scale_loads(a, row, column, step) for a in schedule.accumulators]
        b.emit_header(f"for {step} in range(0, {self.lhs.sizes[1]}, {schedule.block_k}):")
        tile = b.unique_name(f"{b.names[self.lhs.name]}_tile")
        b.emit_header(f"    {tile} = {lhs_load}")
        for name, rhs_load, scales in zip(accumulators, rhs_loads, scale_loads, strict=True):
            if scales:
                dot = f"tl.dot({tile}, {rhs_load}{self.accumulation_option()})"
                b.emit_header(f"    {name} += {dot} * {scales[0]} * {scales[1]}")
            else:
                option = self.accumulation_option()
                b.emit_header(f"    {name} = tl.dot({tile}, {rhs_load}, {name}{option})")
        for accumulator, name in zip(schedule.accumulators, accumulators, strict=True):
            local = self.nest.locals[accumulator.name]
            self.define_local(local, name, b.depth, set(self.nest.axes))

    def accumulation_option(self) -> str:
        """Float8 tensor cores of Hopper sum in fewer bits than float32; how often to add to float32."""
        gemm = self.gemm.accumulators[0].gemm
        is_exact = gemm.lhs.dtype not in FLOAT8 or gemm.is_fast_accum
        interval = min(PROMOTION_INTERVAL, self.gemm.block_k)
        return "" if is_exact else f", max_num_imprecise_acc={interval}"

    def scale_loads(
        self, accumulator: Accumulator, row: str, column: str, step: str
    ) -> tuple[str, ...]:
        """The scales of one block of K, of rows and columns of the tile; empty without such scales."""
        gemm, schedule = accumulator.gemm, self.gemm
        if gemm.scales is None:
            return ()
        block = f"{step} // {gemm.scales.block_k}"
        columns = _first_column(column, schedule.block_n, accumulator)
        return (
            self.scale_load(gemm.scales.lhs, f"{row} * {schedule.block_m}", gemm.lhs.sizes[0],
                            schedule.block_m, 1, block) + "[:, None]",
            self.scale_load(gemm.scales.rhs, columns, gemm.rhs.sizes[1],
                            schedule.block_n, gemm.scales.rhs_block, block) + "[None, :]",
        )  # fmt: skip

    def scale_load(
        self, scale: Tensor, start: str, size: Index, width: int, group: int, block: str
    ) -> str:
        """The load of scales [lines / group, blocks of K]; past the end lines wrap around."""
        b = self.body
        name = b.unique_name(f"{b.names[scale.name]}_lines")
        cast = ".to(tl.int64)" if self.int64_index else ""
        lines = f"(({start} + tl.arange(0, {width})) % {_parenthesize(b.print_index(size))}){cast}"
        lines = lines if group == 1 else f"{lines} // {group}"
        b.emit_header(f"{name} = {lines}")
        outer, inner = (b.print_index(stride) for stride in scale.strides)
        offset = f"{name} * {_parenthesize(outer)} + {block} * {_parenthesize(inner)}"
        return f"tl.load({b.names[scale.name]} + {offset})"

    def tma_loads(self, row: str, column: str, step: str) -> tuple[str, list[str]]:
        """The loads of the main loop by TMA, which reads zeros past the end of a matrix."""
        rows = f"{row} * {self.gemm.block_m}"
        rhs_loads = []
        for a in self.gemm.accumulators:
            columns = _first_column(column, self.gemm.block_n, a)
            name = self.descriptors[a.gemm.rhs.name]
            rhs_loads.append(_tma_load(name, a.gemm.rhs, step, columns))
        return _tma_load(self.lhs_descriptor, self.lhs, rows, step), rhs_loads

    def pointer_loads(self, row: str, column: str, step: str) -> tuple[str, list[str]]:
        """The loads of the main loop by pointers, with a mask at the end of K."""
        b, schedule = self.body, self.gemm
        inner = b.unique_name("offs_k")
        b.emit_header(f"{inner} = tl.arange(0, {schedule.block_k})")
        block = schedule.block_m
        rows = self.line_offsets(f"{row} * {block}", block, self.lhs, 0)
        lhs_load = self.pointer_load(self.lhs, rows, inner, step, 0)
        rhs_loads = []
        for a in schedule.accumulators:
            start = _first_column(column, schedule.block_n, a)
            columns = self.line_offsets(start, schedule.block_n, a.gemm.rhs, 1)
            rhs_loads.append(self.pointer_load(a.gemm.rhs, columns, inner, step, 1))
        return lhs_load, rhs_loads

    def line_offsets(self, start: str, block: int, matrix: Tensor, dim: int) -> tuple[str, str]:
        """Offsets along the outer dimension of a matrix, and the mask that they need.

        Past the end they wrap around, since nothing there is stored. Along contiguous memory they are
        masked instead: wrapping would break up vector loads.
        """
        b, size = self.body, matrix.sizes[dim]
        name = b.unique_name(f"{b.names[matrix.name]}_{'rows' if dim == 0 else 'columns'}")
        cast = ".to(tl.int64)" if self.int64_index else ""
        text = f"{start} + tl.arange(0, {block})" if start != "0" else f"tl.arange(0, {block})"
        text = f"({text}){cast}" if cast else text
        is_full = size.is_constant and size.constant % block == 0 and is_block_aligned(start)
        is_contiguous = matrix.strides[dim] == 1
        if is_full or is_contiguous:
            b.emit_header(f"{name} = {text}")
        else:
            b.emit_header(f"{name} = ({text}) % {_parenthesize(b.print_index(size))}")
        mask = "" if is_full or not is_contiguous else f"{name} < {b.print_index(size)}"
        return name, mask

    def pointer_load(
        self, matrix: Tensor, lines: tuple[str, str], inner: str, step: str, dim: int
    ) -> str:
        """The load of one block of a matrix; its outer dimension is `dim`."""
        b, block_k = self.body, self.gemm.block_k
        name, mask = lines
        shapes = ("[:, None]", "[None, :]") if dim == 0 else ("[None, :]", "[:, None]")
        outer, along = matrix.strides[dim], matrix.strides[1 - dim]
        pointer = b.unique_name(f"{b.names[matrix.name]}_ptrs")
        first = (
            f"{name}{shapes[0]}{_times_stride(outer)} + {inner}{shapes[1]}{_times_stride(along)}"
        )
        b.emit_header(f"{pointer} = {b.names[matrix.name]} + {first}")
        conditions = [f"({mask}){shapes[0]}"] if mask else []
        length = matrix.sizes[1 - dim].constant
        if length % block_k:
            conditions.append(f"({inner} < {length} - {step}){shapes[1]}")
        options = f", mask={' & '.join(conditions)}, other=0.0" if conditions else ""
        return f"tl.load({pointer} + {step}{_times_stride(along)}{options})"


def is_block_aligned(start: str) -> bool:
    """Whether blocks start at multiples of their size; not so with a column offset."""
    return "+" not in start


def _first_column(column: str, block: int, accumulator: Accumulator) -> str:
    """The first column of a tile in the right matrix."""
    start = "" if column == "0" else f"{column} * {block}"
    if not accumulator.offset:
        return start or "0"
    return f"{start} + {accumulator.offset}" if start else str(accumulator.offset)


def _tma_load(name: str, matrix: Tensor, first: str, second: str) -> str:
    if _is_transposed(matrix):
        return f"{name}.load([{second}, {first}]).T"
    return f"{name}.load([{first}, {second}])"


def _is_transposed(matrix: Tensor) -> bool:
    """Whether the first dimension is the contiguous one."""
    return matrix.strides[1] != 1


def _times_stride(stride: Index) -> str:
    return "" if stride == 1 else f" * {stride}"


def _parenthesize(text: str) -> str:
    return text if text.isalnum() else f"({text})"
