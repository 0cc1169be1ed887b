"""Triton of row programs: one step of a few rows after the other, all values in registers.

In: a row-program schedule. Out: the kernel. A step is computed over its frame (`row_frames.py`). It
reads another step's value where it is, at other points it recomputes a cheap value from memory, and
selects any other from registers.

    key = …                                       elementwise
    topk = smallest_keys(key, …) & 0xFFFFFFFF     sorts; the position is in a key's lower bits
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fulgurite.fuser.codegen.triton.row_frames import (
    Frame,
    make_frames,
    order_loops,
    step_loops,
    value_loops,
)
from fulgurite.fuser.codegen.triton.values import strip_parentheses
from fulgurite.fuser.codegen.triton.writer import KernelWriter
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import Constant, Expression, Load, Masked, walk
from fulgurite.fuser.ir.expression_rewrites import rewrite_expression
from fulgurite.fuser.ir.index import Axis, Index
from fulgurite.fuser.ir.index_rewrites import map_indirect
from fulgurite.fuser.ir.loop_nest import Local, Store
from fulgurite.fuser.schedule.gpu.base import GpuSchedule, next_power_of_two
from fulgurite.kernels.tuning import fuser_gpu as tuning

MAX_INLINED_DEPTH = 6  # steps that are recomputed inside one another


class RowProgramWriter(KernelWriter):
    """Writes the text of a row program."""

    def __init__(self, name: str, schedule: GpuSchedule, int64_index: bool) -> None:
        nest = schedule.nest
        self.steps = dict(nest.locals)
        (self.row,) = nest.grid
        self.row_nest = nest
        self.frames = make_frames(nest, schedule.block_sizes)
        # blocks of several loops are reshaped to rows, and Triton 3.6 may reduce these wrong
        merges_loops = any(sum(b > 1 for b in f.blocks[1:]) > 1 for f in self.frames.values())
        self.by_pairs = str(merges_loops)
        axes = tuple(axis for frame in self.frames.values() for axis in frame.axes)
        # The nest of the text: its axes are those of the frames, its locals are views of values.
        written = replace(nest, grid=(), body=axes, locals=dict(nest.locals))
        super().__init__(name, replace(schedule, nest=written), int64_index)
        self.schedule = schedule
        self.values: dict[str, str] = {}  # of steps, in the frame of their own loops
        self.views: dict[tuple[Load, tuple[Axis, ...]], Load] = {}  # reads of steps in a frame

    def grid_size(self) -> tuple[Index, Index]:
        block = self.schedule.block_sizes[self.row]
        return indices.floordiv(self.row.size + (block - 1), Index(block)), indices.ONE

    def frame(self, loops: set[Axis]) -> Frame:
        return self.frames[order_loops(self.row_nest, loops)]

    def write(self) -> None:
        for frame in self.frames.values():
            self.bind_frame(frame)
        for step in self.steps.values():
            if step.rank is not None:
                self.emit_argsort(step, step.rank)
            elif step.reduction is not None:
                self.emit_row_reduction(step)
            else:
                self.emit_elementwise(step)
        for store in self.row_nest.stores:
            self.emit_row_store(store)

    def bind_frame(self, frame: Frame) -> None:
        """Emits the positions of a frame's loops."""
        self.body.block_axes = frame.axes
        rows, int64 = frame.blocks[0], self.print_int64()
        positions = f"tl.program_id(0){int64} * {rows} + tl.arange(0, {rows})"
        self.bind_block_axis(frame.axes[0], positions, rows)
        for axis, block in zip(frame.axes[1:], frame.blocks[1:], strict=True):
            self.bind_block_axis(axis, f"tl.arange(0, {block}){int64}", block)

    # steps

    def emit_value(self, step: Local, text: str) -> None:
        name = self.body.unique_name(step.name)
        self.body.emit(f"{name} = {text}")
        self.values[step.name] = name

    def emit_elementwise(self, step: Local) -> None:
        frame = self.enter(step_loops(step))
        text = self.body.print_typed(self.localize(step.expression, frame))
        self.emit_value(step, f"tl.broadcast_to({strip_parentheses(text)}, {frame.shape})")

    def emit_row_reduction(self, step: Local) -> None:
        frame = self.enter(step_loops(step))
        reduced = [
            axis
            for loop, axis in zip(frame.loops, frame.axes[1:], strict=True)
            if loop in step.reduced_axes
        ]
        local = replace(step, expression=self.localize(step.expression, frame))
        text = self.print_reduction_input(local, tuple(reduced))
        text = f"tl.broadcast_to({strip_parentheses(text)}, {frame.shape})"
        for axis in reduced:
            name = self.body.unique_name(f"{step.name}_partial")
            result = self.print_reduction(local, text, axis)
            self.body.emit(f"{name} = {result}")
            text = f"{name}.to(tl.int32)" if local.dtype == torch.bool else name
        text = f"{text} != 0" if local.dtype == torch.bool else text
        shape = self.frame(value_loops(step)).shape
        self.emit_value(step, f"tl.reshape({text}, {shape})")

    def emit_argsort(self, step: Local, rank: Index) -> None:
        """Packs keys and positions, sorts as far as the ranks need, and keeps the positions."""
        b, (sorted_loop,) = self.body, step.reduced_axes
        frame = self.enter(step_loops(step))
        sorted_axis = frame.axes[1 + frame.loops.index(sorted_loop)]
        bits = 16 if step.expression.dtype == torch.int16 else 32
        largest, packed = (1 << (2 * bits - 1)) - 1, f"tl.int{2 * bits}"
        key = b.print_typed(self.localize(step.expression, frame))
        text = f"({key}.to({packed}) << {bits}) | {sorted_axis.name}.to({packed})"
        text = self.mask_value(text, str(largest), (sorted_axis,))
        keys = b.unique_name(f"{step.name}_keys")
        b.emit(f"{keys} = tl.broadcast_to({strip_parentheses(text)}, {frame.shape})")
        outer = tuple(loop for loop in frame.loops if loop != sorted_loop)
        if frame.loops[-1:] != (sorted_loop,):
            order = [
                0,
                *(1 + frame.loops.index(loop) for loop in outer),
                1 + frame.loops.index(sorted_loop),
            ]
            b.emit(f"{keys} = tl.permute({keys}, {order})")
        length = self.schedule.block_sizes[sorted_loop]
        rows = frame.blocks[0] * frame.row_points // length
        b.emit(f"{keys} = tl.reshape({keys}, [{rows}, {length}])")
        _, high = rank.bounds()
        assert high is not None, f"the ranks of {step.name} have a static size"
        if high < tuning.MAX_EXTRACTED_RANKS:
            b.functions.add("smallest_keys")
            length = next_power_of_two(high + 1)
            b.emit(
                f"{keys} = smallest_keys({keys}, {high + 1}, {length}, {largest}, {self.by_pairs})"
            )
        else:
            b.emit(f"{keys} = tl.sort({keys})")
        b.emit(f"{keys} = ({keys} & {(1 << bits) - 1}).to(tl.int32)")
        self.emit_ranks(step, rank, keys, (rows, length), outer)

    def emit_ranks(
        self, step: Local, rank: Index, keys: str, shape: tuple[int, int], outer: tuple[Axis, ...]
    ) -> None:
        """Selects the ranks of sorted positions, which are in a block of `shape`."""
        ranked = order_loops(self.row_nest, rank.axes())
        frame = self.enter(set(step.axes))
        blocks = dict(zip(frame.loops, frame.blocks[1:], strict=True))
        count = 1
        for loop in ranked:
            count *= blocks[loop]
        if rank.single_axis is None or blocks[ranked[0]] != shape[1]:
            axes = frame.rename(self.row)
            index = self.body.print_index(rank.substitute(axes))
            full = [str(blocks[loop]) if loop in ranked else "1" for loop in frame.loops]
            at = self.body.unique_name("rank")
            ones = ", ".join(["1", *full])
            self.body.emit(f"{at} = {print_positions(index, f'[{ones}]')}")
            self.body.emit(
                f"{at} = tl.broadcast_to(tl.reshape({at}, [1, {count}]), [{shape[0]}, {count}])"
            )
            keys = self.print_selected(keys, at, shape[1], count)
        split = [str(frame.blocks[0]), *(str(blocks[loop]) for loop in (*outer, *ranked))]
        text = f"tl.reshape({keys}, [{', '.join(split)}])"
        if (*outer, *ranked) != frame.loops:
            order = [0, *(1 + (*outer, *ranked).index(loop) for loop in frame.loops)]
            text = f"tl.permute({text}, {order})"
        self.emit_value(step, f"{text}.to(tl.int64)")

    def print_selected(self, source: str, index: str, length: int, count: int) -> str:
        """The elements of a block [rows, length] at the positions of a block [rows, count]."""
        self.body.functions.add("select_along_rows")
        return f"select_along_rows({source}, {index}, {length}, {count}, {self.by_pairs})"

    def emit_row_store(self, store: Store) -> None:
        assert isinstance(store.value, Load), f"{store} stores no step"
        b, step = self.body, self.steps[store.value.name]
        frame = self.enter(value_loops(step))
        value = replace(store, value=self.localize(store.value, frame))
        index = b.print_index(store.index.substitute(frame.rename(self.row)))
        pointer = f"{self.outputs[store.tensor.name]} + {print_positions(index, frame.shape)}"
        mask = b.print_mask(set(frame.axes))
        options = f", mask={mask}" if mask else ""
        b.emit(f"tl.store({pointer}, {self.print_stored(value)}{options})")

    # reads of other steps

    def enter(self, loops: set[Axis]) -> Frame:
        """Makes a frame the block that is written."""
        frame = self.frame(loops)
        self.body.block_axes = frame.axes
        return frame

    def localize(
        self, expression: Expression, frame: Frame, depth: int = 0, is_masked: bool = False
    ) -> Expression:
        """Replaces loads of steps by values in this frame, and axes by those of the frame.

        What is recomputed on a side of a `Masked` stays there, since it may read memory that only
        the mask allows.
        """
        renamed = frame.rename(self.row)

        def change(part: Expression) -> Expression | None:
            if isinstance(part, Masked) and not is_masked:
                return self.localize(part, frame, depth, is_masked=True)
            if isinstance(part, Load) and self.row_nest.is_local(part):
                return self.read_step(part, frame, depth, is_masked)
            if isinstance(part, Load):
                at = (map_indirect(i, inner).substitute(renamed) for i in part.index)
                return replace(part, index=tuple(at))
            return None

        def inner(part: Expression) -> Expression:
            return rewrite_expression(part, change, lambda index: index)

        return inner(expression).substitute(renamed)

    def read_step(self, load: Load, frame: Frame, depth: int, is_masked: bool) -> Expression:
        """A step's value at an index: its own block, or recomputed, or selected from the block."""
        key = (load, frame.loops)
        if key in self.views:
            return self.views[key]
        step = self.steps[load.name]
        text = self.print_aligned(step, load, frame)
        if text is not None:
            loops = {axis for position in load.index for axis in position.axes()}
            self.views[key] = self.make_view(load, text, frame, loops)
        elif step.reduction is None and depth < MAX_INLINED_DEPTH and self.is_cheap(step):
            mapping = dict(zip(step.axes, load.index, strict=True))
            value = step.expression.substitute(mapping)
            recomputed = self.localize(value, frame, depth + 1, is_masked)
            if is_masked:
                return recomputed
            name = self.body.unique_name(f"{step.name}_at")
            self.body.emit(f"{name} = {strip_parentheses(self.body.print_typed(recomputed))}")
            self.views[key] = self.make_view(load, name, frame, set(frame.loops))
        else:
            self.views[key] = self.select(step, load, frame, depth)
        return self.views[key]

    def is_cheap(self, step: Local) -> bool:
        loads = sum(isinstance(part, Load) for part in walk(step.expression))
        return step.flops <= tuning.MAX_RECOMPUTED_FLOPS and loads <= 4

    def print_aligned(self, step: Local, load: Load, frame: Frame) -> str | None:
        """A value at its own points, with the dimensions of the frame; None if there is no such."""
        targets = dict(zip(step.axes, (i.single_axis for i in load.index), strict=True))
        own = order_loops(self.row_nest, set(step.axes))
        positions = []
        for loop in own:
            axis = targets[loop]
            if axis not in frame.loops or axis.size != loop.size:
                return None
            positions.append(frame.loops.index(axis))
        if positions != sorted(set(positions)):
            return None
        dims = [":", *(":" if k in positions else "None" for k in range(len(frame.loops)))]
        name = self.values[step.name]
        return f"{name}[{', '.join(dims)}]" if "None" in dims else name

    def make_view(self, load: Load, text: str, frame: Frame, loops: set[Axis]) -> Load:
        """A local of the written nest for a value in this frame."""
        name = f"{load.name}@{len(self.views)}"
        constant = Constant(0, load.dtype)
        local = Local(name, constant, load.dtype, "view", "row")
        self.nest.locals[name] = local
        axes = {frame.axes[0]} | {
            frame.axes[1 + frame.loops.index(loop)] for loop in loops & set(frame.loops)
        }
        self.define_local(local, text, 0, axes)
        return Load(name, (), load.dtype)

    def select(self, step: Local, load: Load, frame: Frame, depth: int) -> Load:
        """A value at other points of its row: selected from the registers that hold it."""
        b = self.body
        source = self.frame(value_loops(step))
        sizes = dict(zip(source.loops, source.blocks[1:], strict=True))
        targets = dict(zip(step.axes, load.index, strict=True))
        flat = indices.ZERO
        for loop in source.loops:
            flat = flat * sizes[loop] + targets[loop]
        position = map_indirect(flat, lambda part: self.localize(part, frame, depth))
        text = b.print_index(position.substitute(frame.rename(self.row)))
        rows, length, count = frame.blocks[0], source.row_points, frame.row_points
        index = b.unique_name("at")
        positions = print_positions(text, frame.shape)
        b.emit(f"{index} = tl.reshape({positions}, [{rows}, {count}])")
        value = f"tl.reshape({self.values[step.name]}, [{rows}, {length}])"
        name = b.unique_name(f"{step.name}_at")
        selected = self.print_selected(value, index, length, count)
        b.emit(f"{name} = tl.reshape({selected}, {frame.shape})")
        return self.make_view(load, name, frame, set(frame.loops))


def print_positions(index: str, shape: str) -> str:
    """An index as a block of this shape. Its text may be a number."""
    return f"({index} + tl.zeros({shape}, tl.int32))"
