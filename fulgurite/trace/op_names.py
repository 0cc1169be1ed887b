"""Names of regions and kernels, derived from the ops they compute.

In: op names. Out: an identifier such as `layer_norm_gelu`. Ops that say little about a kernel are left
out where others say more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

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
