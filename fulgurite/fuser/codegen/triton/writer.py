"""What all ways through a kernel's body share: names, values, masks, reductions, stores.

In: a `GpuSchedule`. Out: a `KernelWriter`, whose `body` collects lines. `kernel.py` drives it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fulgurite.fuser.codegen.store_casts import drop_store_casts
from fulgurite.fuser.codegen.triton.expressions import KernelBody
from fulgurite.fuser.codegen.triton.source_lines import AxisBinding
from fulgurite.fuser.codegen.triton.values import (
    TO_FLOAT8,
    literal,
    strip_parentheses,
    triton_type,
    typed_literal,
)
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import (
    Constant,
    Expression,
    Load,
    opmath_dtype,
    walk,
)
from fulgurite.fuser.ir.index import Axis, Index, Symbol
from fulgurite.fuser.ir.loop_nest import Local, Store
from fulgurite.fuser.ir.random_seed import SEED, SEED_ADDRESS
from fulgurite.fuser.ir.statement import Tensor
from fulgurite.fuser.schedule.analysis import analyze_nest, is_body_store
from fulgurite.fuser.schedule.gpu.base import GpuSchedule
from fulgurite.fuser.schedule.online_reduction import merge_online_passes

# DeviceInfo functions that combine two values of a reduction.
COMBINE_FUNCTIONS = {
    "sum": "sum_combine",
    "prod": "prod_combine",
    "max": "nan_max",
    "min": "nan_min",
    "logsumexp": "logaddexp",
}
# What a split stores for Welford, besides its sum of squares.
WELFORD_PARTIALS = ("base", "center", "count")


@dataclass(frozen=True)
class PeeledRow:
    """Names of a peeled row's parts."""

    index: Index  # of a point of the row in memory
    peeled: str  # elements before the first aligned one
    start: str  # index of the first aligned element
    length: str  # aligned elements


class KernelWriter:
    """Writes the text of one kernel."""

    def __init__(self, name: str, schedule: GpuSchedule, int64_index: bool) -> None:
        self.name = name
        self.schedule = schedule
        self.nest = drop_store_casts(schedule.nest)
        self.int64_index = int64_index
        pairs = schedule.online_softmax | schedule.welford
        self.analysis = merge_online_passes(self.nest, analyze_nest(self.nest), pairs)
        locals_ = self.nest.locals.values()
        self.row_reductions = [x for x in locals_ if x.role == "row_reduction"]
        self.partial_locals: list[Local] = []  # reductions whose partials this kernel stores
        if schedule.num_splits:
            self.partial_locals = self.row_reductions
        elif schedule.num_programs:
            roles = ("column_reduction", "full_reduction")
            self.partial_locals = [x for x in locals_ if x.role in roles]
        self.writes = list(dict.fromkeys(s.tensor.name for s in self.main_stores()))
        self.reads = list(dict.fromkeys(self.find_reads()))
        symbols = {s.name for s in self.find_symbols()}
        self.body = KernelBody(self.nest, schedule.block_axes, int64_index, symbols)
        for tensor in self.reads:
            self.body.names[tensor] = self.body.unique_name(tensor)
        self.updates = [t for t in self.writes if t in self.reads]
        self.outputs = {
            t: self.body.names[t] if t in self.updates else self.body.unique_name(f"{t}_out")
            for t in self.writes
        }
        self.partials = {x.name: self.make_partial(x) for x in self.partial_locals}
        for x in self.partial_locals if schedule.num_splits else ():
            for what in WELFORD_PARTIALS if x.name in schedule.welford else ():
                partial = replace(self.partials[x.name], name=f"{x.name}_{what}_partials")
                self.partials[f"{x.name}_{what}"] = partial
        self.partial_names = {n: self.body.unique_name(t.name) for n, t in self.partials.items()}
        self.scan_carries: dict[str, str] = {}  # from block to block
        self.accumulators: dict[str, str] = {}  # of reductions over the grid
        self.is_first_row = ""  # the condition, as text
        self.resident: dict[Load, str] = {}  # register-resident loads: tuples of their blocks
        self.resident_edges: dict[Load, str] = {}  # the same of a peeled row's edges
        self.peeled_row: PeeledRow | None = None
        self.split_start, self.split_end = (
            "0",
            "",
        )  # the part of the body that this program iterates

    def main_stores(self) -> list[Store]:
        """Stores of this kernel, not of the combine kernel."""
        return [s for s in self.nest.stores if not self.is_combine_store(s)]

    def combine_stores(self) -> list[Store]:
        return [s for s in self.nest.stores if self.is_combine_store(s)]

    def is_combine_store(self, store: Store) -> bool:
        """Does the kernel that combines partials store it?"""
        if self.schedule.num_splits:
            return not is_body_store(self.nest, store)
        return self.analysis.is_after_grid(store.value)

    def find_roots(self) -> list[Expression]:
        """The expressions that this kernel computes."""
        roots = [expression for s in self.main_stores() for expression in s.expressions]
        welford = self.schedule.welford  # computed along with another sum
        return roots + [x.expression for x in self.partial_locals if x.name not in welford]

    def find_used_locals(self, roots: list[Expression]) -> set[str]:
        """Locals that are used, also those that reductions read."""
        found: set[str] = set()
        stack = list(roots)
        while stack:
            for local in self.nest.references(stack.pop()):
                if local.name not in found:
                    found.add(local.name)
                    stack.append(local.expression)
        return found

    def find_reads(self) -> list[str]:
        """Tensors that this kernel loads, in order."""
        used = self.find_used_locals(self.find_roots())
        expressions = [self.nest.locals[n].expression for n in self.nest.locals if n in used]
        parts = (part for e in [*expressions, *self.find_roots()] for part in walk(e))
        loads = [p for p in parts if isinstance(p, Load) and not self.nest.is_local(p)]
        return [self.nest.memory[load.name].name for load in loads]

    def find_symbols(self) -> list[Symbol]:
        found = self.nest.symbols()
        if SEED in found:
            found.add(SEED_ADDRESS)
        return sorted(found, key=lambda s: s.name)

    def make_partial(self, x: Local) -> Tensor:
        """Memory for the partials of a reduction: one row for each program or split."""
        rows = Index(self.schedule.num_programs or self.schedule.num_splits)
        if self.schedule.num_splits:
            columns = indices.product([a.size for a in self.nest.grid])
        else:
            is_column = x.role == "column_reduction"
            columns = self.nest.body[0].size if is_column else indices.ONE
        strides = (columns, indices.ONE)
        return Tensor(f"{x.name}_partials", opmath_dtype(x.dtype), (rows, columns), strides)

    def count_programs(self, axis: Axis) -> Index:
        """Programs along a loop of the grid."""
        block = self.schedule.block_sizes.get(axis)
        if axis not in self.schedule.block_axes or block is None:
            return axis.size
        return indices.floordiv(axis.size + (block - 1), Index(block))

    def grid_size(self) -> tuple[Index, Index]:
        if self.schedule.num_programs:
            return Index(self.schedule.num_programs), indices.ONE
        total = indices.product([self.count_programs(axis) for axis in self.nest.grid])
        return total, Index(self.schedule.num_splits or 1)

    # loops and values

    def bind_block_axis(
        self, axis: Axis, text: str, block: int, is_full: bool | None = None
    ) -> None:
        """A loop as a dimension of the block, masked unless blocks are full (None: by the size)."""
        b = self.body
        if len(b.block_axes) > 1:
            text = b.print_broadcast(f"({text})" if "+" in text else text, axis)
        b.emit_header(f"{axis.name} = {text}")
        binding = AxisBinding(axis, block, b.depth)
        if is_full is None:
            size = axis.size.constant if axis.size.is_constant else 0
            is_full = size > 0 and size % block == 0
        if not is_full:
            binding.mask = f"{axis.name}_mask"
            b.emit_header(f"{binding.mask} = {axis.name} < {b.print_index(axis.size)}")
        b.bindings[axis] = binding

    def declare_local(self, local: Local) -> None:
        b = self.body
        depth, axes = b.find_depth(local.expression), b.find_axes(local.expression)
        text = strip_parentheses(b.print_typed(local.expression))
        name = text
        if not text.isidentifier():
            name = b.unique_name(local.name)
            b.emit(f"{name} = {text}", depth)
        self.define_local(local, name, depth, axes)

    def define_local(self, local: Local, name: str, depth: int, axes: set[Axis]) -> None:
        """Records what a local is called, where it is known, and on which loops it depends."""
        self.body.names[local.name] = name
        self.body.depth_of[local.name] = depth
        self.body.axes_of[local.name] = axes

    def forget_body_values(self) -> None:
        """Forgets values at points of the body; loads of other axes stay."""
        b, body = self.body, set(self.nest.body)
        for name in [n for n, axes in b.axes_of.items() if axes & body]:
            del b.names[name], b.depth_of[name], b.axes_of[name]
        for block in b.blocks:
            block.loaded = {k: n for k, n in block.loaded.items() if not k[0].axes() & body}

    def forget_values(self, depth: int) -> None:
        """Forgets the values of a loop that ends."""
        b = self.body
        for name in [n for n, value_depth in b.depth_of.items() if value_depth >= depth]:
            del b.names[name], b.depth_of[name], b.axes_of[name]

    # reductions

    def mask_value(self, text: str, neutral: str, axes: tuple[Axis, ...]) -> str:
        """The value where every loop is inside its size, elsewhere a neutral one."""
        bindings = [self.body.bindings[a] for a in axes if a in self.body.bindings]
        masks = " & ".join(binding.mask for binding in bindings if binding.mask)
        return f"tl.where({masks}, {strip_parentheses(text)}, {neutral})" if masks else text

    def print_reduction_input(self, x: Local, axes: tuple[Axis, ...]) -> str:
        """The block that a reduction reduces."""
        text = self.body.print_typed(x.expression)
        if opmath_dtype(x.dtype) == torch.bool:
            text = f"{text}.to(tl.int32)"
        return self.mask_value(text, initial_value(x), axes)

    def print_reduction(self, x: Local, text: str, axis: Axis) -> str:
        """The reduction of a block along one of its dimensions."""
        b = self.body
        dimension = b.block_axes.index(axis)
        keep = ", keep_dims=True" if len(b.block_axes) > 1 else ""
        dtype = opmath_dtype(x.dtype)
        text = strip_parentheses(text)
        if x.reduction == "sum":
            return f"tl.sum({text}, {dimension}{keep})"
        if x.reduction == "prod" or dtype.is_floating_point:
            return f"tl.reduce({text}, {dimension}, {self.combine_function(x)}{keep})"
        result = f"tl.{x.reduction}({text}, {dimension}{keep})"
        if dtype == torch.bool:
            return f"{result} != 0"
        return result if dtype.itemsize >= 4 else f"{result}.to({triton_type(dtype)})"

    def print_scan(self, x: Local, text: str, axis: Axis) -> str:
        """The scan of a block along one of its dimensions."""
        dimension = self.body.block_axes.index(axis)
        if x.reduction == "sum":
            return f"tl.cumsum({strip_parentheses(text)}, {dimension})"
        function = self.combine_function(x)
        return f"tl.associative_scan({strip_parentheses(text)}, {dimension}, {function})"

    def combine_function(self, x: Local) -> str:
        """The device function that combines two values of a reduction."""
        assert x.reduction is not None, f"{x.name} is no reduction"
        name = COMBINE_FUNCTIONS[x.reduction]
        self.body.functions.add(name)
        return name

    # text

    def print_range(self, start: str, end: str, step: int, num_stages: int = 1) -> str:
        """The iterations of a loop, pipelined where it has several stages."""
        if self.int64_index and end.isdigit():  # beyond 2**31 it would be a negative number
            end = f"tl.full([], {end}, tl.int64)"
        steps = f"{start}, {end}, {step}"
        if num_stages > 1:
            return f"tl.range({steps}, num_stages={num_stages})"
        return f"range({steps})"

    def print_block_shape(self) -> str:
        sizes = (str(self.schedule.block_sizes[a]) for a in self.body.block_axes)
        return f"[{', '.join(sizes)}]"

    def print_int64(self) -> str:
        """The cast of an index, where indices need 64 bits."""
        return ".to(tl.int64)" if self.int64_index else ""

    def emit_store(self, store: Store) -> None:
        b = self.body
        axes = set(store.index.axes()) | set(self.nest.grid)
        value = self.print_stored(store)
        index = b.print_index(store.index)
        pointer = self.outputs[store.tensor.name]
        pointer = pointer if index == "0" else f"{pointer} + {index}"
        mask = b.print_mask(axes)
        options = f", mask={mask}" if mask else ""
        b.emit(f"tl.store({pointer}, {value}{options})")

    def print_stored(self, store: Store) -> str:
        """The value of a store, in the dtype that it is stored in where Triton can't convert it."""
        value = self.body.print_expression(store.value)
        is_converted = store.tensor.dtype in TO_FLOAT8
        if isinstance(store.value, Constant) and (
            is_converted or store.value.dtype == torch.float64
        ):
            # to a store, an untyped literal is a float32
            value = typed_literal(store.value.value, store.value.dtype)
        if is_converted:
            value = self.body.print_narrowed(value, store.value, store.tensor.dtype)
        return strip_parentheses(value)


def initial_value(x: Local) -> str:
    """The neutral element of a reduction."""
    dtype = opmath_dtype(x.dtype)
    if x.reduction == "sum":
        return "0" if not dtype.is_floating_point else "0.0"
    if x.reduction == "prod":
        return "1" if not dtype.is_floating_point else "1.0"
    if dtype == torch.bool:
        return "0" if x.reduction == "max" else "1"
    if dtype.is_floating_point:
        return 'float("inf")' if x.reduction == "min" else 'float("-inf")'
    info = torch.iinfo(dtype)
    return literal(info.min if x.reduction == "max" else info.max, dtype)


def accumulator_type(x: Local) -> str:
    return "tl.int32" if opmath_dtype(x.dtype) == torch.bool else triton_type(x.dtype)


def print_accumulate(b: KernelBody, x: Local, name: str, value: str) -> str:
    """The line that adds a value to an accumulator."""
    dtype, value = opmath_dtype(x.dtype), strip_parentheses(value)
    if x.reduction == "sum":
        return f"{name} += {value}"
    if x.reduction == "prod":
        return f"{name} *= {value}"
    if dtype.is_floating_point:
        b.functions.add(f"nan_{x.reduction}")
        return f"{name} = nan_{x.reduction}({name}, {value})"
    function = "tl.maximum" if x.reduction == "max" else "tl.minimum"
    return f"{name} = {function}({name}, {value})"
