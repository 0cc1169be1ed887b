"""Names of regions and kernels, derived from the ops they compute.

In: op names. Out: an identifier such as `layer_norm_gelu`. Ops that say little about a kernel are left
out where others say more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import fx

from fulgurite.trace.node_meta import composite_of

GENERIC_OPS = frozenset(
    ("add", "mul", "sub", "div", "to_copy", "clone", "scalar_tensor", "full", "where")
)


def name_from_ops(
    ops: Iterable[str],
    *,
    first: Iterable[str] = (),
    generic: Collection[str] = GENERIC_OPS,
    max_ops: int = 3,
) -> str:
    """Join the first distinct op names; generic ones count only if there are no others.

    first   names that come before those of `ops` and are never generic
    """
    names = dict.fromkeys(op.strip("_") for op in ops)
    specific = [name for name in names if name not in generic]
    chosen = list(dict.fromkeys([*first, *specific])) or list(names) or ["region"]
    return "_".join(chosen[:max_ops])


def name_of_op(node: fx.Node) -> str:
    """`layer_norm` for aten.native_layer_norm, and for every op that it was decomposed into."""
    composite = composite_of(node)
    return name_of_target(node.target if composite is None else composite.target)


def name_of_target(target: Any) -> str:
    schema = getattr(target, "_schema", None)
    full = schema.name.split("::")[1] if schema else getattr(target, "__name__", "region")
    name = full.strip("_").removeprefix("native_")
    return name if name.isidentifier() else "region"
