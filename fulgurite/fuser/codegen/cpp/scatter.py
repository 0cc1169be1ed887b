"""C++ of indexed stores: `out[index[i], j] += value[i, j]`.

for each point of the loops that threads split, or each block of the SIMD loop
  the other loops in program order; an index is looked up as soon as its loops are known
    one SIMD loop over neighbouring elements, or one element
"""

from __future__ import annotations

import torch

from fulgurite.fuser.codegen.cpp.expressions import ExpressionPrinter, identifier, value_ctype
from fulgurite.fuser.codegen.cpp.kernel import KernelWriter
from fulgurite.fuser.ir.expression import Expression, IndexValue, Load
from fulgurite.fuser.ir.index import IndirectIndex
from fulgurite.fuser.ir.loop_nest import Store
from fulgurite.fuser.schedule.analysis import iter_unmasked

# What is stored, of the element in memory and the new value.
COMBINED = {
    "sum": "{0} + {1}",
    "prod": "{0} * {1}",
    "max": "nan_max{3}<{2}>({0}, {1})",
    "min": "nan_min{3}<{2}>({0}, {1})",
}
COMBINED_BOOLS = {"sum": "{0} | {1}", "max": "{0} | {1}", "prod": "{0} & {1}", "min": "{0} & {1}"}


def write_scatter(kernel: KernelWriter) -> None:
    kernel.open_function()
    ScatterWriter(kernel).write()
    kernel.close_function()


class ScatterWriter:
    """Writes the loops of one indexed store."""

    def __init__(self, kernel: KernelWriter) -> None:
        self.kernel = kernel
        self.nest = kernel.nest
        self.emit = kernel.emit
        (self.store,) = self.nest.stores
        self.printer = ExpressionPrinter(identifier)
        self.depths: dict[str, int] = {}  # of locals: the loops around them
        self.locals = kernel.find_required_locals(list(self.store.expressions))
        for local in self.locals:
            self.depths[local.name] = self.find_depth(local.expression)

    def find_depth(self, expression: Expression) -> int:
        """How many loops must be open for an expression. Loops that threads split open at once."""
        axes = [self.nest.axes.index(axis) + 1 for axis in expression.axes()]
        used = [self.depths[local.name] for local in self.nest.references(expression)]
        depth = max([0, *axes, *used])
        return max(depth, len(self.nest.grid)) if depth else 0

    def write(self) -> None:
        k, block = self.kernel, self.kernel.schedule.block
        num_threads = k.print_num_threads()
        self.values(0)
        if num_threads and (self.nest.grid or block):
            k.open_parallel_for(num_threads, len(self.nest.grid) + bool(block))
        if block:
            size = k.print_size(self.nest.body[-1])
            self.emit(f"for (int64_t block = 0; block < {size}; block += {block}) {{")
        for axis in self.nest.grid:
            k.open_loop(axis)
        if self.nest.grid:
            self.values(len(self.nest.grid))
        self.body_loops()
        for _ in range(len(self.nest.axes) + bool(block)):
            self.emit("}")

    def body_loops(self) -> None:
        k, body = self.kernel, self.nest.body
        for number, axis in enumerate(body):
            is_simd = axis == k.schedule.simd_axis
            if is_simd:
                k.emit_pragma("omp simd")
            if is_simd and k.schedule.block:
                end = f"min_i64({k.print_size(axis)}, block + {k.schedule.block})"
                k.open_loop(axis, "", "block", end)
            else:
                k.open_loop(axis)
            self.values(len(self.nest.grid) + number + 1)
        self.combine(self.store)

    def values(self, depth: int) -> None:
        """The locals and index lookups that are known inside this many loops.

        Lookups of locals in inner loops, too: SIMD loops don't move them out.
        """
        for local in self.locals:
            if self.depths[local.name] < depth:
                continue
            self.declare_lookups(local.expression, depth)
            if self.depths[local.name] == depth:
                self.kernel.declare_local(local, self.printer)
        for expression in self.store.expressions:
            self.declare_lookups(expression, depth)

    def declare_lookups(self, expression: Expression, depth: int) -> None:
        """Declares the lookups of an expression whose loops are open: outside of inner loops."""
        for part in iter_unmasked(expression):
            indices = part.index if isinstance(part, Load) else ()
            if isinstance(part, IndexValue):
                indices = (part.index,)
            for atom in (atom for index in indices for atom in index.indirect_indices()):
                self.declare_lookup(atom, depth)

    def declare_lookup(self, atom: IndirectIndex, depth: int) -> None:
        if atom in self.printer.lookups or self.find_depth(atom.value) != depth:
            return
        name = f"index{len(self.printer.lookups) + 1}_"
        self.emit(f"const int64_t {name} = {self.printer.print_lookup(atom)};")
        self.printer.lookups[atom] = name

    def combine(self, store: Store) -> None:
        """Stores the new value, or what it and the element in memory come to."""
        if store.combine in (None, "set"):
            self.kernel.emit_store(store, self.printer)
            return
        tensor = store.tensor
        index = self.printer.print_index(store.index)
        old = self.printer.print_widened(
            Load(tensor.name, (store.index,), tensor.dtype),
            f"{self.kernel.output_name(tensor.name)}[{index}]",
        )
        table = COMBINED_BOOLS if tensor.dtype == torch.bool else COMBINED
        new = self.printer.print_expression(store.value)
        suffix = "" if self.kernel.schedule.simd_axis is not None else "_scalar"
        text = table[store.combine].format(old, new, value_ctype(tensor.dtype), suffix)
        self.kernel.emit_store_text(store, text, self.printer)
