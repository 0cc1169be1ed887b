"""When each local of a loop nest is available, and what each pass over the body computes.

In: a `LoopNest`. Out: an `Analysis`, and the locals, loads and roots that a pass needs. A row
reduction is available one pass after its inputs, so that softmax takes three passes: maximum, sum,
division.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fulgurite.fuser.ir.expression import Expression, Load, Masked, walk
from fulgurite.fuser.ir.loop_nest import Local, LoopNest, Store


@dataclass(frozen=True)
class Analysis:
    """When each local of a nest is available, and on which loops it depends."""

    nest: LoopNest
    ready_pass: dict[str, int]  # passes over the body that must finish first
    in_body: dict[str, bool]  # depends on a body loop
    after_grid: dict[str, bool]  # available only when all grid points are done

    def expression_ready_pass(self, expression: Expression) -> int:
        return max((self.ready_pass[x.name] for x in self.nest.references(expression)), default=0)

    def is_in_body(self, expression: Expression) -> bool:
        body = set(self.nest.body)
        if expression.axes() & body:
            return True
        return any(self.in_body[x.name] for x in self.nest.references(expression))

    def is_after_grid(self, expression: Expression) -> bool:
        return any(self.after_grid[x.name] for x in self.nest.references(expression))


def analyze_nest(nest: LoopNest) -> Analysis:
    analysis = Analysis(nest, {}, {}, {})
    for local in nest.locals.values():
        ready = analysis.expression_ready_pass(local.expression)
        in_body, after_grid = False, analysis.is_after_grid(local.expression)
        if local.role == "row_reduction":
            ready, after_grid = ready + 1, False
        elif local.role == "scan":
            in_body = True
        elif local.role == "column_reduction":
            in_body, after_grid = True, True
        elif local.role == "full_reduction":
            after_grid = True
        else:
            in_body = analysis.is_in_body(local.expression)
        analysis.ready_pass[local.name] = ready
        analysis.in_body[local.name] = in_body
        analysis.after_grid[local.name] = after_grid
    return analysis


def count_passes(nest: LoopNest, analysis: Analysis) -> int:
    """Passes over the body: one more than the last pass that a body value must wait for."""
    passes = 1
    for local in nest.locals.values():
        if local.role == "row_reduction":
            passes = max(passes, analysis.ready_pass[local.name])
        elif local.role == "column_reduction" or (
            local.role == "full_reduction" and local.over_body
        ):
            passes = max(passes, analysis.ready_pass[local.name] + 1)
    for store in nest.stores:
        if is_body_store(nest, store) and not analysis.is_after_grid(store.value):
            passes = max(passes, analysis.expression_ready_pass(store.value) + 1)
    return passes


def find_pass_roots(nest: LoopNest, analysis: Analysis, step: int) -> list[Expression]:
    """The expressions that one pass over the body computes: inputs of reductions, stored values."""
    roots: list[Expression] = []
    for local in nest.locals.values():
        if local.role == "row_reduction" and analysis.ready_pass[local.name] == step + 1:
            roots.append(local.expression)
        elif local.role in ("column_reduction", "full_reduction"):
            over_body = local.over_body or local.role == "column_reduction"
            if analysis.ready_pass[local.name] == step and over_body:
                roots.append(local.expression)
    for store in nest.stores:
        if is_body_store(nest, store) and not analysis.is_after_grid(store.value):
            if analysis.expression_ready_pass(store.value) == step:
                roots += store.expressions
    return roots


def is_body_store(nest: LoopNest, store: Store) -> bool:
    """Does the store happen at every body point?"""
    return bool(store.index.axes() & set(nest.body))


def has_scan(nest: LoopNest) -> bool:
    """Must the body be iterated in order?"""
    return any(local.role == "scan" for local in nest.locals.values())


def find_required_locals(nest: LoopNest, roots: list[Expression]) -> list[Local]:
    """The locals that expressions use, directly or not, in an order they can be computed in.

    Reductions count as available: their inputs are not searched.
    """
    required: set[str] = set()
    stack = list(roots)
    while stack:
        for part in walk(stack.pop()):
            if isinstance(part, Load) and not part.index and part.name not in required:
                required.add(part.name)
                local = nest.locals[part.name]
                if local.reduction is None:
                    stack.append(local.expression)
    return [local for name, local in nest.locals.items() if name in required]


def iter_expressions(nest: LoopNest) -> Iterator[Expression]:
    """The expressions of all locals, then of all stores."""
    yield from (local.expression for local in nest.locals.values())
    yield from (expression for store in nest.stores for expression in store.expressions)


def iter_unmasked(expression: Expression) -> Iterator[Expression]:
    """The parts of an expression that are evaluated at every point."""
    yield expression
    if not isinstance(expression, Masked):
        for part in expression.children():
            yield from iter_unmasked(part)


def collect_memory_loads(expressions: list[Expression]) -> set[Load]:
    """Loads from memory."""
    return {p for e in expressions for p in walk(e) if isinstance(p, Load) and p.index}
