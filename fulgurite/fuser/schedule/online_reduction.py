"""Online reductions: two dependent reductions over a row in one pass.

In: a loop nest. Out: which reductions can share a pass, and an `Analysis` where they do.

    online softmax   max(x), then sum(exp(x - max(x)))   rescales the sum as the maximum grows
    Welford          sum(x), then sum((x - mean(x))^2)   corrects the mean at every element
"""

from __future__ import annotations

from dataclasses import replace

from fulgurite.fuser.ir.expression import Expression, Load, Operation
from fulgurite.fuser.ir.expression_rewrites import rewrite_expression
from fulgurite.fuser.ir.loop_nest import LoopNest
from fulgurite.fuser.schedule.analysis import Analysis


def find_online_softmax(nest: LoopNest) -> dict[str, str]:
    """Sums of exp(x - m) where m is the maximum of x over the same row: sum → maximum."""
    found: dict[str, str] = {}
    for total in nest.locals.values():
        if total.role != "row_reduction" or total.reduction != "sum":
            continue
        power = resolve_local(nest, total.expression)
        if not (isinstance(power, Operation) and power.name == "exp"):
            continue
        shifted = resolve_local(nest, power.arguments[0])
        if not (isinstance(shifted, Operation) and shifted.name == "sub"):
            continue
        value, reference = shifted.arguments
        reference = resolve_local(nest, reference)
        if not (isinstance(reference, Load) and not reference.index):
            continue
        maximum = nest.locals[reference.name]
        if maximum.role != "row_reduction" or maximum.reduction != "max":
            continue
        same = inline_locals(nest, maximum.expression) == inline_locals(nest, value)
        if maximum.dtype == total.dtype and same:
            found[total.name] = maximum.name
    return found


def mark_softmax_divisions(nest: LoopNest) -> LoopNest:
    """Turns exp(x - max) / sum into `softmax_div`, which divides once a row, not at every element."""
    sums = find_online_softmax(nest)
    if not sums:
        return nest

    def mark(part: Expression) -> Expression | None:
        if not isinstance(part, Operation) or part.name != "div":
            return None
        numerator, total = part.arguments
        if not isinstance(total, Load) or total.index or total.name not in sums:
            return None
        summand = nest.locals[total.name].expression
        is_summand = inline_locals(nest, numerator) == inline_locals(nest, summand)
        return replace(part, name="softmax_div") if is_summand else None

    def mark_all(expression: Expression) -> Expression:
        return rewrite_expression(expression, mark, lambda index: index)

    changed = {n: replace(x, expression=mark_all(x.expression)) for n, x in nest.locals.items()}
    stores = tuple(replace(s, value=mark_all(s.value)) for s in nest.stores)
    return replace(nest, locals=changed, stores=stores)


def find_welford(nest: LoopNest) -> dict[str, str]:
    """Sums of squared distances from a mean: sum of squares → sum behind the mean."""
    sums = {x.name: x for x in nest.locals.values() if x.role == "row_reduction"}
    pairs = {name: x.welford_sum for name, x in sums.items()}
    return {name: total for name, total in pairs.items() if total is not None and total in sums}


def resolve_local(nest: LoopNest, expression: Expression) -> Expression:
    """The expression behind a chain of locals that are no reductions."""
    while isinstance(expression, Load) and not expression.index:
        local = nest.locals[expression.name]
        if local.reduction is not None:
            break
        expression = local.expression
    return expression


def inline_locals(nest: LoopNest, expression: Expression) -> Expression:
    """The expression with all locals but reductions replaced by their own expressions."""

    def inline(part: Expression) -> Expression | None:
        if isinstance(part, Load) and not part.index:
            local = nest.locals[part.name]
            return None if local.reduction else inline_locals(nest, local.expression)
        return None

    return rewrite_expression(expression, inline, lambda index: index)


def merge_online_passes(nest: LoopNest, analysis: Analysis, pairs: dict[str, str]) -> Analysis:
    """The analysis where each key of `pairs` is ready in the same pass as its value."""
    if not pairs:
        return analysis
    ready_pass: dict[str, int] = {}
    merged = replace(analysis, ready_pass=ready_pass)
    for local in nest.locals.values():
        if local.name in pairs:
            ready_pass[local.name] = ready_pass[pairs[local.name]]
            continue
        ready = merged.expression_ready_pass(local.expression)
        ready_pass[local.name] = ready + 1 if local.role == "row_reduction" else ready
    return merged
