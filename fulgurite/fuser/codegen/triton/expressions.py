"""Expressions and indices of the IR as lines of Triton.

In: expressions over the loops of a nest. Out: text, and lines for what is loaded from memory.
`KernelBody` is the text below a kernel's `def`; `source_lines` decides where lines go, `operations`
prints what is computed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fulgurite.fuser.codegen.triton.operations import OperationPrinter
from fulgurite.fuser.codegen.triton.source_lines import AxisBinding
from fulgurite.fuser.codegen.triton.values import (
    fits_int32,
    is_single_atom,
    literal,
    triton_type,
    typed_literal,
)
from fulgurite.fuser.ir.expression import (
    NARROW_FLOATS,
    BoundsCheck,
    Constant,
    Expression,
    IndexValue,
    Load,
    Masked,
    opmath_dtype,
)
from fulgurite.fuser.ir.index import Atom, Axis, FloorDiv, Index, IndirectIndex, Mod, Symbol
from fulgurite.fuser.ir.loop_nest import LoopNest

WIDE_INTEGERS = (torch.int64, torch.uint64, torch.uint32)


class KernelBody(OperationPrinter):
    """The text below a kernel's `def`."""

    def __init__(
        self, nest: LoopNest, block_axes: tuple[Axis, ...], int64_index: bool, used_names: set[str]
    ) -> None:
        super().__init__(nest, used_names | {axis.name for axis in nest.axes})
        self.block_axes = block_axes  # the dimensions of a block, in order
        self.int64_index = int64_index
        self.bindings: dict[Axis, AxisBinding] = {}
        self.names: dict[str, str] = {}  # of tensors and locals
        self.depth_of: dict[str, int] = {}  # of locals: where each is known
        self.axes_of: dict[str, set[Axis]] = {}  # of locals
        self.mask_stack: list[tuple[str, set[Axis], int]] = []  # mask, its axes, its depth
        self.has_asserts = False
        self.resident: dict[Load, str] = {}  # blocks that an earlier pass has loaded
        self.index_texts: dict[Index | None, str] = {}  # indices that have a shorter text
        self.hides_ranges = False  # of numerators of integer values; see `hide_range`
        self.pass_number = 0  # over the body
        self.rematerializes = False  # loads stay narrow and are widened in every pass
        # inputs without elements, which may have no address
        accesses = nest.accesses()
        self.empty_inputs = {t.name for t, _, stores in accesses if t.is_empty and not stores}

    def print_broadcast(self, text: str, axis: Axis) -> str:
        """A vector along one axis, with the other dimensions of the block as ones."""
        if len(self.block_axes) < 2:
            return text
        dimensions = [":" if a == axis else "None" for a in self.block_axes]
        return f"{text}[{', '.join(dimensions)}]"

    # indices

    def print_index(self, index: Index, is_wide: bool = False) -> str:
        """An index; `is_wide` computes it in 64 bits where kernels use 32-bit indices."""
        if index in self.index_texts and not is_wide:
            return self.index_texts[index]
        parts: list[str] = []
        for monomial, coefficient in index.terms:
            factors = [self.print_atom(atom) for atom in monomial]
            if is_wide and monomial:
                factors[0] = self.print_wide(monomial[0], factors[0])
            if coefficient == -1:
                parts.append("-" + " * ".join(factors))
                continue
            if coefficient != 1:
                factors.append(str(coefficient))
            parts.append(" * ".join(factors))
        if index.constant or not parts:
            parts.append(str(index.constant))
        return " + ".join(parts).replace("+ -", "- ")

    def print_wide(self, atom: Atom, text: str) -> str:
        """An atom in 64 bits. A loop variable is a plain int in Triton's interpreter."""
        binding = self.bindings.get(atom) if isinstance(atom, Axis) else None
        if isinstance(atom, Symbol) or (binding is not None and binding.block):
            return f"{text}.to(tl.int64)"
        return f"({text} + tl.full([], 0, tl.int64))"

    def print_atom(self, atom: Axis | Symbol | FloorDiv | Mod | IndirectIndex) -> str:
        if isinstance(atom, Axis | Symbol):
            return atom.name
        if isinstance(atom, IndirectIndex):
            return self.print_indirect(atom)
        if atom.denominator == 0:
            return "0"  # of a loop without points
        top, bottom = self.print_index(atom.numerator), self.print_index(atom.denominator)
        top = top if is_single_atom(atom.numerator) else f"({top})"
        bottom = (
            bottom
            if atom.denominator.is_constant or atom.denominator.single_axis
            else f"({bottom})"
        )
        low, _ = atom.numerator.bounds()
        if low is not None and low >= 0:
            if self.hides_ranges and isinstance(atom, FloorDiv) and self._is_block(atom.numerator):
                self.functions.add("hide_range")
                top = f"hide_range({top})"
            return f"({top} {'//' if isinstance(atom, FloorDiv) else '%'} {bottom})"
        name = "int_floored_divide" if isinstance(atom, FloorDiv) else "int_floored_remainder"
        self.functions.add(name)
        return f"{name}({top}, {bottom})"

    def _is_block(self, index: Index) -> bool:
        axes = self.find_axes(IndexValue(index, torch.int64))
        return any(self.bindings[axis].block for axis in axes if axis in self.bindings)

    def print_indirect(self, atom: IndirectIndex) -> str:
        """An index that a tensor holds, checked against its range."""
        if isinstance(atom.value, Constant) and atom.size.is_constant:
            if 0 <= atom.value.value < atom.size.constant:
                return str(int(atom.value.value))
        mask = self.print_mask(self.find_axes(atom.value))
        # under another mask other indices were loaded
        key = f"{atom.value} of {atom.size} {atom.wraps_negative} {atom.is_checked} {mask}"
        depth = self.find_depth(atom.value)
        known = self.blocks[depth].conditions.get(key)
        if known is not None:
            return known
        value, size = self.print_typed(atom.value), self.print_index(atom.size)
        name = self.unique_name("index")
        if opmath_dtype(atom.value.dtype) != torch.int64 and self.int64_index:
            value = f"{value}.to(tl.int64)"
        self.emit(f"{name} = {value}", depth)
        if atom.wraps_negative:
            self.emit(f"{name} = tl.where({name} < 0, {name} + {size}, {name})", depth)
        if atom.is_checked:
            condition = f"(0 <= {name}) & ({name} < {size})"
            if mask:
                condition = f"({condition}) | ~({mask})"
            self.emit(f'tl.device_assert({condition}, "index out of range")', depth)
            self.has_asserts = True
        if not self.int64_index and opmath_dtype(atom.value.dtype) in WIDE_INTEGERS:
            self.emit(f"{name} = {name}.to(tl.int32)", depth)
        self.blocks[depth].conditions[key] = name
        return name

    # where an expression is known

    def find_axes(self, expression: Expression) -> set[Axis]:
        """The loops that an expression depends on, through locals too."""
        found = set(expression.axes())
        for local in self.nest.references(expression):
            found |= self.axes_of[local.name]
        return found

    def find_depth(self, expression: Expression) -> int:
        """The depth at which everything that an expression reads is known."""
        found = max((self.bindings[a].depth for a in expression.axes()), default=0)
        for local in self.nest.references(expression):
            found = max(found, self.depth_of[local.name])
        return max([found, *(depth for _, _, depth in self.mask_stack)])

    # masks

    def print_mask(self, axes: set[Axis]) -> str:
        """The conditions under which memory at these axes may be accessed."""
        masks: list[str] = []
        for axis in self.nest.axes:
            binding = self.bindings.get(axis)
            if axis in axes and binding is not None and binding.mask:
                masks.append(binding.mask)
        for mask, mask_axes, _ in self.mask_stack:
            if mask_axes & axes or not mask_axes:
                masks.append(mask)
        return " & ".join(masks)

    def outer_masks(self, axes: set[Axis]) -> list[str]:
        """The masks without the innermost conditions: a load under one of these covers this one."""
        stack, found = self.mask_stack, []
        for count in reversed(range(len(stack))):
            self.mask_stack = stack[:count]
            found.append(self.print_mask(axes))
        self.mask_stack = stack
        return found

    # values

    def print_expression(self, expression: Expression) -> str:
        if isinstance(expression, Constant):
            return literal(expression.value, expression.dtype)
        if isinstance(expression, IndexValue):
            is_wide = not self.int64_index and not fits_int32(expression.index)
            self.hides_ranges = not expression.dtype.is_floating_point
            text = self.print_index(expression.index, is_wide)
            self.hides_ranges = False
            if text.removeprefix("-").isdigit():
                return typed_literal(int(text), expression.dtype)
            is_plain = expression.index.single_axis is not None
            return f"{text if is_plain else f'({text})'}.to({triton_type(expression.dtype)})"
        if isinstance(expression, Load):
            return self.print_load(expression) if expression.index else self.names[expression.name]
        if isinstance(expression, Masked):
            return self.print_masked(expression)
        return self.print_operation(expression)

    def print_load(self, load: Load) -> str:
        """The name of a loaded block; emits the load where no earlier one has it."""
        index = load.index[0]
        axes = self.find_axes(load)
        broadcast = ""
        for _, mask_axes, _ in self.mask_stack:
            for axis in sorted(mask_axes - axes if mask_axes & axes else (), key=str):
                if self.bindings[axis].block:
                    broadcast += (
                        f" + 0 * {axis.name}"  # the mask has more dimensions than the index
                    )
                axes = axes | {axis}
        mask = self.print_mask(axes)
        depth = self.find_depth(load)
        key = (load, mask + broadcast)
        for known in (key, *((load, outer) for outer in self.outer_masks(axes))):
            for block in self.blocks[: depth + 1]:
                if known in block.loaded:
                    return block.loaded[known]
        letters = "".join(a.name for a in self.nest.axes if a in load.axes())
        if self.rematerializes and load not in self.resident and self.can_stay_narrow(load):
            self.resident[load] = self.unique_name(f"{self.names[load.name]}_regs")
            line = f"{self.resident[load]} = {self.print_load_call(load, mask)}"
            self.blocks[depth].loads.append(line)
        name = self.unique_name(f"{self.names[load.name]}_{letters or 'value'}")
        if load in self.resident:
            text, depth = self.print_resident(load, depth < self.depth), self.depth
        else:
            text = self.print_load_call(load, mask, broadcast)
        if load.dtype in NARROW_FLOATS:
            text += ".to(tl.float32)"
        is_plain = (
            not self.mask_stack and not index.indirect_indices() and load not in self.resident
        )
        lines = self.blocks[depth].loads if is_plain else self.blocks[depth].lines
        lines.append(f"{name} = {text}")
        self.blocks[depth].loaded[key] = name
        return name

    def print_load_call(self, load: Load, mask: str, broadcast: str = "") -> str:
        """The load of a block, in its storage dtype."""
        mask = "False" if load.name in self.empty_inputs else mask
        index = self.print_index(load.index[0]) + broadcast
        pointer = f"{self.names[load.name]} + {index}" if index != "0" else self.names[load.name]
        options = f", mask={mask}" if mask else ""
        if mask and not load.dtype.is_floating_point:
            options += ", other=0"  # it may be an index
        return f"tl.load({pointer}{options})"

    def print_resident(self, load: Load, is_outside: bool = False) -> str:
        """A register-resident block; behind a barrier, so that no float32 copy of it stays alive."""
        barrier = self.pass_number + is_outside
        if barrier == 0 or load.dtype.itemsize > 2:
            return self.resident[load]
        self.functions.add("optimization_barrier")
        return f"optimization_barrier({self.resident[load]}, {barrier})"

    def can_stay_narrow(self, load: Load) -> bool:
        """May a block stay in registers in its 16-bit storage dtype?"""
        is_block = any(a in self.bindings and self.bindings[a].block for a in load.axes())
        is_plain = not self.mask_stack and not load.index[0].indirect_indices()
        return is_block and load.dtype.itemsize == 2 and is_plain

    def print_masked(self, masked: Masked) -> str:
        checks = [self.print_bounds(bound) for bound in masked.bounds]
        text = " & ".join(f"({check})" for check in checks) if len(checks) > 1 else checks[0]
        axes: set[Axis] = set()
        depth = 0
        for bound in masked.bounds:
            for index in (bound.index, bound.size):
                value = IndexValue(index, torch.int64)
                axes |= self.find_axes(value)
                depth = max(depth, self.find_depth(value))
        conditions = self.blocks[depth].conditions
        if text not in conditions:
            conditions[text] = self.unique_name("in_bounds")
            self.emit(f"{conditions[text]} = {text}", depth)
        name = conditions[text]
        outside_loads = set(_iter_unconditional_loads(masked.outside))
        for load in _iter_unconditional_loads(masked.inside):
            if load in outside_loads:  # one load for both
                self.print_load(load)
        self.mask_stack.append((name, axes, depth))
        inside = self.print_expression(masked.inside)
        self.mask_stack[-1] = (f"~{name}", axes, depth)
        outside = self.print_expression(masked.outside)
        self.mask_stack.pop()
        if isinstance(masked.inside, Constant) and isinstance(masked.outside, Constant):
            inside = typed_literal(masked.inside.value, masked.dtype)
        return f"tl.where({name}, {inside}, {outside})"

    def print_bounds(self, bound: BoundsCheck) -> str:
        low, high = bound.index.bounds()
        text, size = self.print_index(bound.index), self.print_index(bound.size)
        checks = []
        if low is None or low < 0:
            checks.append(f"{text} >= 0")
        if high is None or not bound.size.is_constant or high >= bound.size.constant:
            checks.append(f"{text} < {size}")
        if len(checks) > 1:
            return " & ".join(f"({check})" for check in checks)
        return "".join(checks) or "True"


def _iter_unconditional_loads(expression: Expression) -> Iterator[Load]:
    """What an expression loads at every point, whatever its own masks are."""
    if isinstance(expression, Load):
        if expression.index:
            yield expression
    elif not isinstance(expression, Masked):
        for part in expression.children():
            yield from _iter_unconditional_loads(part)
