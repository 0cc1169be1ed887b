"""Two reductions in one walk over a row, although the second is made of the first: which, and when all is known.

The sum of exponentials below a maximum; squared distances from the mean of a sum. And which quotients are by such sums.
"""

from __future__ import annotations

from dataclasses import replace

from fulgurite.fuser.ir.expression import Expression, Load, Operation
from fulgurite.fuser.ir.loop_nest import Nest, rewrite
from fulgurite.fuser.schedule.cpu.base import Analysis


def online_sums(nest: Nest) -> dict[str, str]:
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


def with_shares(nest: Nest) -> Nest:
    """The nest whose quotients of an exponential by the sum of its row are called so: they divide once a row."""
    online = online_sums(nest)

    def share(part: Expression) -> Expression | None:
        if not isinstance(part, Operation) or part.name != "div":
            return None
        one, whole = part.arguments
        if not isinstance(whole, Load) or whole.index or whole.name not in online:
            return None
        same = expanded(nest, one) == expanded(nest, nest.locals[whole.name].expression)
        return replace(part, name="share") if same else None

    def shared(expression: Expression) -> Expression:
        return rewrite(expression, share, lambda index: index)

    found = {n: replace(x, expression=shared(x.expression)) for n, x in nest.locals.items()}
    stores = tuple(replace(s, value=shared(s.value)) for s in nest.stores)
    return replace(nest, locals=found, stores=stores) if online else nest


def squares_about(nest: Nest) -> dict[str, str]:
    """Sums of squared distances from a mean, each with the sum that the mean is of."""
    sums = {x.name: x for x in nest.locals.values() if x.role == "rowsum"}
    return {name: x.about for name, x in sums.items() if x.about is not None and x.about in sums}


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
    """When locals are known, where some sums are ready together with what they are made of."""
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
