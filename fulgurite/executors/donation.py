"""Buffer donation: which inputs a region may overwrite with its results.

In: the groups of a claimed trace in the order they run. Out: for each region, the inputs that it may
overwrite. Only outputs of matmuls and convolutions are donated: they are large and known to own their
memory. An output is not donated if it is returned, saved for backward, read later through a view, or read
by a collective, which may go on reading.

    conv = convolution(x, w)
    out = relu(conv * scale + shift)   # stored in conv's buffer: one such tensor at a time, not two
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx

from fulgurite.executors.grouping import Group
from fulgurite.trace.cost import is_view, value_bytes
from fulgurite.trace.mutations import mutated_inputs
from fulgurite.trace.node_meta import fake_value
from fulgurite.trace.purity import is_ordered

aten = torch.ops.aten
DONATABLE_OPS = (
    aten.convolution.default,
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
)
MIN_DONATED_BYTES = 1 << 20  # smaller buffers hardly change the peak


def find_donations(groups: Sequence[Group]) -> dict[int, set[fx.Node]]:
    """By group index, the inputs that the group may overwrite."""
    position = {node: k for k, group in enumerate(groups) for node in group.nodes}
    donations: dict[int, set[fx.Node]] = {}
    for node in position:
        if node.target in DONATABLE_OPS and value_bytes(fake_value(node)) >= MIN_DONATED_BYTES:
            if groups[position[node]].executor is None:
                last = _find_last_reader(node, position)
                if last is not None and groups[last[0]].executor is not None:
                    donations.setdefault(groups[last[0]].index, set()).add(last[1])
    return donations


def _find_last_reader(
    owner: fx.Node, position: Mapping[fx.Node, int]
) -> tuple[int, fx.Node] | None:
    """The position of the last group that reads a tensor, and the view that it reads.

    None if the buffer can't be donated: the group must read one view, and the view all elements.
    """
    views = _collect_views(owner)
    readers = {user for node in views for user in node.users} - views
    if not readers or any(r not in position or is_ordered(r) or mutated_inputs(r) for r in readers):
        return None
    last = max(position[reader] for reader in readers)
    read_last = {
        node
        for node in views
        if position[node] != last and any(position[user] == last for user in node.users)
    }
    if len(read_last) != 1:  # the region would see two tensors, and overwrite one of them
        return None
    (view,) = read_last
    return (last, view) if _covers_whole_buffer(owner, view) else None


def _collect_views(owner: fx.Node) -> set[fx.Node]:
    """A tensor and all views of its memory."""
    found, stack = {owner}, [owner]
    while stack:
        for user in stack.pop().users:
            if is_view(user) and user not in found:
                found.add(user)
                stack.append(user)
    return found


def _covers_whole_buffer(owner: fx.Node, view: fx.Node) -> bool:
    """Whether sizes are static and the view has as many elements as the buffer."""
    buffer, part = fake_value(owner), fake_value(view)
    if not isinstance(buffer, Tensor) or not isinstance(part, Tensor):
        return False
    if not all(isinstance(size, int) for size in (*buffer.shape, *part.shape)):
        return False
    return buffer.dtype == part.dtype and buffer.numel() == part.numel()
