"""Runs a region in plain torch, statement by statement.

In: a `Region` and its arguments. Out: the tuple that the generated code returns. This is the
reference for every schedule and code generator. It is slow and simple on purpose: each statement is
evaluated at all points of its axes at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fulgurite.fuser.ir.expression import (
    NARROW_FLOATS,
    PACKED_DTYPES,
    BoundsCheck,
    Constant,
    Expression,
    IndexValue,
    Load,
    Masked,
    Operation,
    opmath_dtype,
)
from fulgurite.fuser.ir.host_symbols import evaluate_symbol, solve_for_symbol
from fulgurite.fuser.ir.index import Atom, Axis, FloorDiv, Index, IndirectIndex, Mod, Symbol
from fulgurite.fuser.ir.primitives import PRIMITIVES
from fulgurite.fuser.ir.random_seed import SEED, draw_seed
from fulgurite.fuser.ir.statement import Output, Region, Scatter, Statement, Tensor


def bind_symbols(region: Region, arguments: Sequence[Any]) -> dict[str, int]:
    """Finds the value of every symbol: an argument, or a size or stride of an argument."""
    draws = any(SEED in e.symbols() for s in region.statements for e in s.expressions)
    found = {SEED.name: draw_seed()} if draws else {}
    for declared, given in zip(region.arguments, arguments, strict=True):
        if isinstance(declared, Index):
            pairs = [(declared, given)]
        else:
            pairs = list(zip(declared.sizes, given.shape, strict=True))
            pairs += zip(declared.strides, given.stride(), strict=True)
        for index, value in pairs:
            solved = solve_for_symbol(index)
            if solved is not None:
                symbol, _ = solved
                coefficient = index.terms[0][1]
                found.setdefault(symbol.name, (value - index.constant) // coefficient)
    return found


class StatementEvaluator:
    """Evaluates expressions at all points of the axes.

    `memory` holds inputs and earlier results.
    """

    def __init__(
        self, axes: Sequence[Axis], memory: Mapping[str, torch.Tensor], symbols: Mapping[str, int]
    ) -> None:
        self.memory = memory
        self.symbols = symbols
        self.shape = [self.evaluate_size(axis.size) for axis in axes]
        self.axis_values: dict[Axis, torch.Tensor] = {}
        for k, axis in enumerate(axes):
            view = [1] * len(axes)
            view[k] = -1
            self.axis_values[axis] = torch.arange(self.shape[k]).reshape(view)

    def evaluate_size(self, size: Index) -> int:
        def symbol(atom: Atom) -> int:
            assert isinstance(atom, Symbol), f"the size {size} depends on an axis"
            return evaluate_symbol(atom, self.symbols)

        return size.evaluate(symbol)

    def evaluate_index(self, index: Index) -> torch.Tensor:
        total = torch.full([1] * len(self.shape), index.constant)
        for monomial, coefficient in index.terms:
            product = torch.full([1] * len(self.shape), coefficient)
            for atom in monomial:
                product = product * self.evaluate_atom(atom)
            total = total + product
        return total

    def evaluate_atom(self, atom: Atom) -> torch.Tensor:
        if isinstance(atom, Axis):
            return self.axis_values[atom]
        if isinstance(atom, Symbol):
            return torch.tensor(evaluate_symbol(atom, self.symbols))
        if isinstance(atom, FloorDiv):
            down = self.evaluate_index(atom.denominator)
            return torch.div(self.evaluate_index(atom.numerator), down, rounding_mode="floor")
        if isinstance(atom, Mod):
            return torch.remainder(
                self.evaluate_index(atom.numerator), self.evaluate_index(atom.denominator)
            )
        assert isinstance(atom, IndirectIndex)
        value = self.evaluate(atom.value).to(torch.int64)
        return torch.where(value < 0, value + self.evaluate_size(atom.size), value)

    def evaluate_bounds_check(self, bound: BoundsCheck) -> torch.Tensor:
        index = self.evaluate_index(bound.index)
        return (index >= 0) & (index < self.evaluate_index(bound.size))

    def evaluate(self, expression: Expression) -> torch.Tensor:
        if isinstance(expression, Constant):
            shape = [1] * len(self.shape)
            return torch.full(shape, expression.value, dtype=opmath_dtype(expression.dtype))
        if isinstance(expression, IndexValue):
            return self.evaluate_index(expression.index).to(opmath_dtype(expression.dtype))
        if isinstance(expression, Load):
            return self.load(expression)
        if isinstance(expression, Masked):
            inside = torch.ones([1] * len(self.shape), dtype=torch.bool)
            for bound in expression.bounds:
                inside = inside & self.evaluate_bounds_check(bound)
            return torch.where(
                inside, self.evaluate(expression.inside), self.evaluate(expression.outside)
            )
        values = [self.evaluate(argument) for argument in expression.arguments]
        if expression.name == "cast":
            return values[0].to(expression.dtype).to(opmath_dtype(expression.dtype))
        if expression.name == "bitcast":
            stored = self.to_storage(expression.arguments[0], values[0])
            return stored.view(_storage_dtype(expression.dtype)).to(opmath_dtype(expression.dtype))
        return PRIMITIVES[expression.name].torch(*values).to(opmath_dtype(expression.dtype))

    def to_storage(self, argument: Expression, value: torch.Tensor) -> torch.Tensor:
        """Converts a value to its storage dtype. A load of a narrow float keeps its exact bits."""
        if argument.dtype in NARROW_FLOATS and isinstance(argument, Operation):
            inner = argument.arguments[0]
            if isinstance(inner, Load) and inner.dtype == argument.dtype:
                return self.load_stored(inner)
        return value.to(_storage_dtype(argument.dtype))

    def load(self, load: Load) -> torch.Tensor:
        return self.load_stored(load).to(opmath_dtype(load.dtype))

    def load_stored(self, load: Load) -> torch.Tensor:
        memory = self.memory[load.name]
        if not load.index:
            value = memory.reshape([1] * len(self.shape))
        elif memory.numel() == 0:
            # Only a masked load, whose mask is never true, can read an empty tensor.
            value = torch.zeros([1] * len(self.shape), dtype=memory.dtype)
        else:
            at = [
                self.evaluate_index(position).clamp(0, size - 1)
                for position, size in zip(load.index, memory.shape, strict=True)
            ]
            value = memory[tuple(torch.broadcast_tensors(*at))]
        return value


def interpret_statement(
    s: Statement, memory: Mapping[str, torch.Tensor], symbols: Mapping[str, int]
) -> torch.Tensor:
    """Computes the statement's values, in its storage dtype."""
    if s.scatter is not None:
        return _interpret_scatter(s, s.scatter, memory, symbols)
    evaluator = StatementEvaluator(s.all_axes, memory, symbols)
    if s.reduction is not None and s.reduction.rank is not None:
        return _select_rank(s, s.reduction.rank, evaluator)
    value = evaluator.evaluate(s.expression).broadcast_to(evaluator.shape)
    if s.reduction is not None:
        dims = list(range(len(s.axes), len(s.all_axes)))
        value = _reduce(s.reduction.kind, value, dims)
    if s.scan is not None:
        value = _scan(s.scan.kind, value, s.axes.index(s.scan.axis))
    return value.to(_storage_dtype(s.tensor.dtype))


def _interpret_scatter(
    s: Statement,
    scatter: Scatter,
    memory: Mapping[str, torch.Tensor],
    symbols: Mapping[str, int],
) -> torch.Tensor:
    """Stores the values one after the other on top of the initial ones."""
    over_result = StatementEvaluator(s.axes, memory, symbols)
    initial = over_result.evaluate(s.expression).broadcast_to(over_result.shape)
    result = initial.to(_storage_dtype(s.tensor.dtype)).clone()
    points = StatementEvaluator(scatter.axes, memory, symbols)
    values = points.evaluate(scatter.value).broadcast_to(points.shape).reshape(-1)
    values = values.to(_storage_dtype(s.tensor.dtype))
    flat = torch.zeros(points.shape, dtype=torch.int64)
    for index, size in zip(scatter.index, result.shape, strict=True):
        flat = flat * size + points.evaluate_index(index)
    view = result.view(-1)
    for position, value in zip(flat.reshape(-1).tolist(), values, strict=True):
        view[position] = _combine(scatter.kind, view[position], value)
    return result


def _combine(kind: str, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    if kind == "set":
        return new
    if old.dtype == torch.bool:
        return old & new if kind in ("prod", "min") else old | new
    combine = {"sum": torch.add, "prod": torch.mul, "max": torch.maximum, "min": torch.minimum}
    return combine[kind](old, new)


def _select_rank(s: Statement, rank: Index, evaluator: StatementEvaluator) -> torch.Tensor:
    """Sorts the keys once for all ranks, and looks up the position at each rank."""
    keys = evaluator.evaluate(s.expression)
    rank_axes = rank.axes()
    shape = [
        1 if axis in rank_axes else size
        for axis, size in zip(s.all_axes, evaluator.shape, strict=True)
    ]
    keys = keys.broadcast_to(shape).reshape(*shape[: len(s.axes)], -1)
    order = keys.argsort(dim=-1, stable=True)
    sizes = evaluator.shape[: len(s.axes)]
    ranks = evaluator.evaluate_index(rank)
    ranks = ranks.reshape(*ranks.shape[: len(sizes)], 1).expand(*sizes, 1)
    return order.expand(*sizes, -1).gather(-1, ranks)[..., 0]


def _storage_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype that torch can index: packed formats are bytes."""
    return PACKED_DTYPES.get(dtype, dtype)


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


def interpret_region(region: Region, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Runs the region and returns its results. Mutated inputs are overwritten."""
    arguments = [
        _resolve_bits(declared, given) if isinstance(declared, Tensor) else given
        for declared, given in zip(region.arguments, arguments, strict=True)
    ]
    symbols = bind_symbols(region, arguments)
    memory: dict[str, torch.Tensor] = {}
    for declared, given in zip(region.arguments, arguments, strict=True):
        if not isinstance(declared, Index):
            memory[declared.name] = given.view(_storage_dtype(given.dtype))
    size = StatementEvaluator((), memory, symbols).evaluate_size
    for tensor in region.input_layouts.values():
        given = memory[tensor.name]
        memory[tensor.name] = torch.as_strided(
            given,
            [size(n) for n in tensor.sizes],
            [size(n) for n in tensor.strides],
            given.storage_offset(),
        )
    for s in region.statements:
        computed = interpret_statement(s, memory, symbols)
        strided = torch.empty_strided(
            [size(n) for n in s.tensor.sizes],
            [size(n) for n in s.tensor.strides],
            dtype=_storage_dtype(s.tensor.dtype),
        )
        memory[s.name] = strided.copy_(computed)
    for buffer in region.buffers:
        memory[buffer.name] = torch.empty_strided(
            [size(n) for n in buffer.sizes],
            [size(n) for n in buffer.strides],
            dtype=_storage_dtype(buffer.dtype),
        )
    for name, part in region.slices.items():
        piece, buffer_memory = memory[name], memory[part.buffer]
        start = buffer_memory.storage_offset() + size(part.offset)
        torch.as_strided(buffer_memory, piece.shape, piece.stride(), start).copy_(piece)
    results = tuple(_make_output(region, output, memory, symbols) for output in region.outputs)
    for name, target in region.writes:
        memory[target].copy_(memory[name].reshape(memory[target].shape))
    return results


def _resolve_bits(declared: Tensor, given: torch.Tensor) -> torch.Tensor:
    """Returns an argument as the region reads it: real, without conjugate and negative bit."""
    given = given.resolve_neg()
    return torch.view_as_real(given.resolve_conj()) if declared.is_view_as_real else given


def _make_output(
    region: Region, output: Output, memory: Mapping[str, torch.Tensor], symbols: Mapping[str, int]
) -> Any:
    size = StatementEvaluator((), memory, symbols).evaluate_size
    if output.size is not None:
        return size(output.size)
    if output.name is None:
        return None
    base = memory[output.name]
    base = base.view(region.tensors[output.name].dtype)
    view = torch.as_strided(
        base,
        [size(n) for n in output.sizes],
        [size(n) for n in output.strides],
        base.storage_offset() + size(output.offset),
    )
    view = torch.view_as_complex(view) if output.is_view_as_real else view
    view = view.conj() if output.is_conj else view
    return torch._neg_view(view) if output.is_neg else view
