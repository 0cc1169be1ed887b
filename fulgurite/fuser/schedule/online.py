"""Maximum and sum of exponentials in one walk over a row: which sums are such, and when all is known then."""

from __future__ import annotations

from dataclasses import replace

from ..ir import Expression, Load, Operation
from ..nest import Nest, rewrite
from .base import Analysis


def online_sums(nest: Nest, facts: Analysis) -> dict[str, str]:
    """Sums of exp(e - m) where m is the maximum of e over the same row: both in one walk."""
    found: dict[str, str] = {}
    for x in nest.locals.values():
        if x.role != "rowsum" or x.reduction != "sum":
            continue
        e = resolved(nest, x.expression)
        if not (isinstance(e, Operation) and e.name == "exp"):
            continue
        inner = resolved(nest, e.arguments[0])
        if not (isinstance(inner, Operation) and inner.name == "sub"):
            continue
        value, best = inner.arguments
        best = resolved(nest, best)
        if not (isinstance(best, Load) and not best.index):
            continue
        m = nest.locals[best.name]
        if m.role == "rowsum" and m.reduction == "max" and m.dtype == x.dtype:
            if expanded(nest, m.expression) == expanded(nest, value):
                found[x.name] = m.name
    return found


def resolved(nest: Nest, expression: Expression) -> Expression:
    """Past locals that are no reductions, to what they are."""
    while isinstance(expression, Load) and not expression.index:
        local = nest.locals[expression.name]
        if local.reduction is not None:
            break
        expression = local.expression
    return expression


def expanded(nest: Nest, expression: Expression) -> Expression:
    """With all locals but reductions written out."""

    def out(part: Expression) -> Expression | None:
        if isinstance(part, Load) and not part.index:
            local = nest.locals[part.name]
            return None if local.reduction else expanded(nest, local.expression)
        return None

    return rewrite(expression, out, lambda index: index)


def replaced_waits(nest: Nest, facts: Analysis, online: dict[str, str]) -> Analysis:
    """When locals are known, where some sums are ready together with their maximum."""
    if not online:
        return facts
    again: dict[str, int] = {}
    found = replace(facts, waits=again)
    for local in nest.locals.values():
        if local.name in online:
            again[local.name] = again[online[local.name]]
            continue
        wait = found.expression_wait(local.expression)
        again[local.name] = wait + 1 if local.role == "rowsum" else wait
    return found
