"""Runs a region in plain torch, statement by statement: the oracle of every schedule and generator.

In: an `ir.Region` and the region's arguments. Out: the same tuple that the generated code returns.
It is slow and simple on purpose: each statement is evaluated at every point of its axes at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fulgurite.fuser.frontend.random import SEED, draw_seed
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import (
    NARROW_FLOATS,
    PACKED,
    Bound,
    Constant,
    Expression,
    Guard,
    Load,
    Operation,
    Position,
    value_type,
)
from fulgurite.fuser.ir.index import Atom, Axis, Index, Loaded, Quotient, Remainder, Symbol
from fulgurite.fuser.ir.primitives import PRIMITIVES
from fulgurite.fuser.ir.statement import Region, Statement, Tensor


def symbol_values(region: Region, arguments: Sequence[Any]) -> dict[str, int]:
    """The value of every symbol, from arguments that are one or have it as a size or stride."""
    drawing = any(SEED in s.expression.symbols() for s in region.statements)
    found = {SEED.name: draw_seed()} if drawing else {}
    for declared, given in zip(region.arguments, arguments, strict=True):
        if isinstance(declared, Index):
            pairs = [(declared, int(given))]
        else:
            pairs = list(zip(declared.sizes, given.shape, strict=True))
            pairs += zip(declared.strides, given.stride(), strict=True)
        for what, number in pairs:
            atoms = what.atoms()
            if (
                len(atoms) == 1
                and isinstance(atoms[0], Symbol)
                and what == indices.of_atom(atoms[0])
            ):
                found.setdefault(atoms[0].name, number)
    return found


class Evaluation:
    """One statement at all points of its axes; `memory` holds inputs and earlier statements."""

    def __init__(
        self, axes: Sequence[Axis], memory: Mapping[str, torch.Tensor], symbols: Mapping[str, int]
    ) -> None:
        self.memory = memory
        self.symbols = symbols
        self.shape = [self.size(axis.size) for axis in axes]
        self.grid: dict[Axis, torch.Tensor] = {}
        for k, axis in enumerate(axes):
            view = [1] * len(axes)
            view[k] = -1
            self.grid[axis] = torch.arange(self.shape[k]).reshape(view)

    def size(self, size: Index) -> int:
        def symbol(atom: Atom) -> int:
            assert isinstance(atom, Symbol), f"the size {size} has an axis in it"
            return self.symbols[atom.name]

        return size.evaluate(symbol)

    def index(self, index: Index) -> torch.Tensor:
        total = torch.full([1] * len(self.shape), index.constant)
        for monomial, coefficient in index.terms:
            product = torch.full([1] * len(self.shape), coefficient)
            for atom in monomial:
                product = product * self.atom(atom)
            total = total + product
        return total

    def atom(self, atom: Atom) -> torch.Tensor:
        if isinstance(atom, Axis):
            return self.grid[atom]
        if isinstance(atom, Symbol):
            return torch.tensor(self.symbols[atom.name])
        if isinstance(atom, Quotient):
            down = self.index(atom.denominator)
            return torch.div(self.index(atom.numerator), down, rounding_mode="floor")
        if isinstance(atom, Remainder):
            return torch.remainder(self.index(atom.numerator), self.index(atom.denominator))
        assert isinstance(atom, Loaded)
        value = self.expression(atom.value).to(torch.int64)
        return torch.where(value < 0, value + self.size(atom.size), value)

    def bound(self, bound: Bound) -> torch.Tensor:
        index = self.index(bound.index)
        return (index >= 0) & (index < self.index(bound.size))

    def expression(self, expression: Expression) -> torch.Tensor:
        if isinstance(expression, Constant):
            shape = [1] * len(self.shape)
            return torch.full(shape, expression.value, dtype=value_type(expression.dtype))
        if isinstance(expression, Position):
            return self.index(expression.index).to(value_type(expression.dtype))
        if isinstance(expression, Load):
            return self.load(expression)
        if isinstance(expression, Guard):
            inside = torch.ones([1] * len(self.shape), dtype=torch.bool)
            for bound in expression.bounds:
                inside = inside & self.bound(bound)
            return torch.where(
                inside, self.expression(expression.inside), self.expression(expression.outside)
            )
        values = [self.expression(argument) for argument in expression.arguments]
        if expression.name == "cast":
            return values[0].to(expression.dtype).to(value_type(expression.dtype))
        if expression.name == "bitcast":
            stored = self.stored(expression.arguments[0], values[0])
            return stored.view(_seen(expression.dtype)).to(value_type(expression.dtype))
        return PRIMITIVES[expression.name].torch(*values).to(value_type(expression.dtype))

    def stored(self, argument: Expression, value: torch.Tensor) -> torch.Tensor:
        """A value in its storage dtype; what a narrow format holds in memory exactly as it is there."""
        if argument.dtype in NARROW_FLOATS and isinstance(argument, Operation):
            inner = argument.arguments[0]
            if isinstance(inner, Load) and inner.dtype == argument.dtype:
                return self.element(inner)
        return value.to(_seen(argument.dtype))

    def load(self, load: Load) -> torch.Tensor:
        return self.element(load).to(value_type(load.dtype))

    def element(self, load: Load) -> torch.Tensor:
        memory = self.memory[load.name]
        if not load.index:
            value = memory.reshape([1] * len(self.shape))
        elif memory.numel() == 0:
            # only a guard that never lets it through can read from an empty tensor
            value = torch.zeros([1] * len(self.shape), dtype=memory.dtype)
        else:
            at = [
                self.index(position).clamp(0, size - 1)
                for position, size in zip(load.index, memory.shape, strict=True)
            ]
            value = memory[tuple(torch.broadcast_tensors(*at))]
        return value


def run_statement(
    s: Statement, memory: Mapping[str, torch.Tensor], symbols: Mapping[str, int]
) -> torch.Tensor:
    """The statement's values, in its storage dtype."""
    evaluation = Evaluation(s.all_axes, memory, symbols)
    value = evaluation.expression(s.expression).broadcast_to(evaluation.shape)
    if s.reduction is not None:
        dims = list(range(len(s.axes), len(s.all_axes)))
        value = _reduce(s.reduction.kind, value, dims)
    if s.scan is not None:
        value = _scan(s.scan.kind, value, s.axes.index(s.scan.axis))
    return value.to(_seen(s.tensor.dtype))


def _seen(dtype: torch.dtype) -> torch.dtype:
    """What a dtype is computed with as: packed numbers as bytes."""
    return PACKED.get(dtype, dtype)


def _reduce(kind: str, value: torch.Tensor, dims: list[int]) -> torch.Tensor:
    if kind == "sum":
        return value.sum(dims, dtype=value.dtype)
    if kind == "prod":
        for dim in reversed(dims):
            value = value.prod(dim, dtype=value.dtype)
        return value
    if value.dtype == torch.bool:
        for dim in reversed(dims):
            value = value.any(dim) if kind == "max" else value.all(dim)
        return value
    if value.dtype in (torch.uint16, torch.uint32, torch.uint64):
        wide = value.to(torch.int64)
        return (wide.amax(dims) if kind == "max" else wide.amin(dims)).to(value.dtype)
    return value.amax(dims) if kind == "max" else value.amin(dims)


def _scan(kind: str, value: torch.Tensor, dim: int) -> torch.Tensor:
    wide = value.double() if value.is_floating_point() else value
    if kind == "sum":
        return torch.cumsum(wide, dim, dtype=wide.dtype).to(value.dtype)
    if kind == "prod":
        return torch.cumprod(wide, dim, dtype=wide.dtype).to(value.dtype)
    if kind == "logsumexp":
        return torch.logcumsumexp(wide, dim).to(value.dtype)
    return (torch.cummax if kind == "max" else torch.cummin)(value, dim).values


def run(region: Region, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """The region's results."""
    arguments = [
        torch.view_as_real(given) if isinstance(declared, Tensor) and declared.pairs else given
        for declared, given in zip(region.arguments, arguments, strict=True)
    ]
    symbols = symbol_values(region, arguments)
    memory: dict[str, torch.Tensor] = {}
    for declared, given in zip(region.arguments, arguments, strict=True):
        if not isinstance(declared, Index):
            memory[declared.name] = given.view(_seen(given.dtype))
    size = Evaluation((), memory, symbols).size
    for tensor in region.layouts.values():
        given = memory[tensor.name]
        memory[tensor.name] = torch.as_strided(
            given,
            [size(n) for n in tensor.sizes],
            [size(n) for n in tensor.strides],
            given.storage_offset(),
        )
    for s in region.statements:
        computed = run_statement(s, memory, symbols)
        strided = torch.empty_strided(
            [size(n) for n in s.tensor.sizes],
            [size(n) for n in s.tensor.strides],
            dtype=_seen(s.tensor.dtype),
        )
        memory[s.name] = strided.copy_(computed)
    results = tuple(_result(region, output, memory, symbols) for output in region.outputs)
    for name, target in region.writes:
        memory[target].copy_(memory[name].reshape(memory[target].shape))
    return results


def _result(
    region: Region, output: Any, memory: Mapping[str, torch.Tensor], symbols: Mapping[str, int]
) -> Any:
    size = Evaluation((), memory, symbols).size
    if output.size is not None:
        return size(output.size)
    if output.name is None:
        return None
    base = memory[output.name]
    base = base.view(region.tensors[output.name].dtype)
    seen = torch.as_strided(
        base,
        [size(n) for n in output.sizes],
        [size(n) for n in output.strides],
        base.storage_offset() + size(output.offset),
    )
    return torch.view_as_complex(seen) if output.pairs else seen
