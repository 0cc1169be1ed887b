"""Memory that regions may store their results in: what a library call made, and nobody reads after the region.

In: the groups of a claimed trace in the order they run. Out: for each region the inputs that it may overwrite. Only results
of products and convolutions are lent: they are large, and known to lie in memory of their own. One that is returned, kept for
backward, seen through a view that is read later, or read by a collective, which may go on reading, is not.

    conv = convolution(x, w)
    out = relu(conv * scale + shift)   # in the place of conv: there is one such tensor at a time instead of two
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx

from fulgurite.executors.gather import Group
from fulgurite.trace.cost import is_view, value_bytes
from fulgurite.trace.writes import written
from fulgurite.transforms.purity import is_ordered

aten = torch.ops.aten
OWNERS = (
    aten.convolution.default,
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
)
LEAST = 1 << 20  # bytes; smaller ones are not what a peak is made of


def lend(groups: Sequence[Group]) -> dict[int, set[fx.Node]]:
    """By the index of a group, the inputs of it that it may overwrite."""
    position = {node: k for k, group in enumerate(groups) for node in group.nodes}
    found: dict[int, set[fx.Node]] = {}
    for node in position:
        if node.target in OWNERS and value_bytes(node.meta.get("val")) >= LEAST:
            if groups[position[node]].executor is None:
                taken = _last_reading(node, position)
                if taken is not None and groups[taken[0]].executor is not None:
                    found.setdefault(groups[taken[0]].index, set()).add(taken[1])
    return found


def _last_reading(owner: fx.Node, position: Mapping[fx.Node, int]) -> tuple[int, fx.Node] | None:
    """The place of the last group that reads a tensor, and what it sees of it; None where that is not all of it."""
    family = _family(owner)
    readers = {user for node in family for user in node.users} - family
    if not readers or any(r not in position or is_ordered(r) or written(r) for r in readers):
        return None
    last = max(position[reader] for reader in readers)
    given = {
        node
        for node in family
        if position[node] != last and any(position[user] == last for user in node.users)
    }
    if len(given) != 1:  # two would be seen as two tensors, of which one is overwritten
        return None
    (seen,) = given
    return (last, seen) if _is_all(owner, seen) else None


def _family(owner: fx.Node) -> set[fx.Node]:
    """A tensor and everything that lies in its memory."""
    found, stack = {owner}, [owner]
    while stack:
        for user in stack.pop().users:
            if is_view(user) and user not in found:
                found.add(user)
                stack.append(user)
    return found


def _is_all(owner: fx.Node, seen: fx.Node) -> bool:
    """Whether sizes are numbers, and a view shows as many elements as there are."""
    whole, part = owner.meta.get("val"), seen.meta.get("val")
    if not isinstance(whole, Tensor) or not isinstance(part, Tensor):
        return False
    if not all(isinstance(size, int) for size in (*whole.shape, *part.shape)):
        return False
    return whole.dtype == part.dtype and whole.numel() == part.numel()
