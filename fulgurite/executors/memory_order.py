"""Memory-aware order of groups: a large output that nothing else reads is delayed if that saves memory.

In: groups in an order in which they can run. Out: the same groups in an order with a lower peak, or
unchanged if the gain is small. A weight's gradient is often larger than the two activations it is the
product of. Computed in program order, all such gradients are live while the last layers' activations
still are. Computed last, they never are.

    grad_in  = mm(grad, weight)            grad_in = mm(grad, weight)
    grad_w   = mm(grad.t(), x)        →    …                                # earlier layers
    …                                      grad_w  = mm(grad.t(), x)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from fulgurite.executors.grouping import Group
from fulgurite.trace.cost import is_view, value_bytes, view_base
from fulgurite.trace.mutations import mutated_inputs
from fulgurite.trace.node_meta import fake_value, is_saved_for_backward
from fulgurite.trace.purity import is_ordered

MAX_PEAK_RATIO = 0.97  # new peak over old; above, the program keeps its own order


@dataclass
class Buffer:
    """A tensor's memory, shared by all of its views."""

    bytes: int
    producer: int | None = None  # a group's index; None: live from the beginning
    readers: set[int] = field(default_factory=set)
    is_output: bool = False


class LiveMemory:
    """The live buffers while groups run one after another."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.buffers = collect_buffers(groups)
        self.produced: dict[int, list[Buffer]] = {}
        self.read: dict[int, list[Buffer]] = {}
        for buffer in self.buffers:
            if buffer.producer is not None:
                self.produced.setdefault(buffer.producer, []).append(buffer)
            for reader in buffer.readers:
                self.read.setdefault(reader, []).append(buffer)
        self.pending_readers = {id(buffer): set(buffer.readers) for buffer in self.buffers}
        self.live_bytes = sum(buffer.bytes for buffer in self.buffers if buffer.producer is None)
        self.peak_bytes = self.live_bytes

    def growth(self, group: Group) -> int:
        """Live bytes after the group minus live bytes before it."""
        produced = self.produced.get(group.index, ())
        kept = sum(b.bytes for b in produced if b.readers or b.is_output)
        return kept - sum(b.bytes for b in self._freed_by(group))

    def run(self, group: Group) -> None:
        growth = self.growth(group)
        produced = sum(buffer.bytes for buffer in self.produced.get(group.index, ()))
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + produced)
        self.live_bytes += growth
        for buffer in self.read.get(group.index, ()):
            self.pending_readers[id(buffer)].discard(group.index)

    def _freed_by(self, group: Group) -> list[Buffer]:
        read = self.read.get(group.index, ())
        return [b for b in read if not b.is_output and self.pending_readers[id(b)] == {group.index}]


def reorder_for_memory(groups: list[Group]) -> list[Group]:
    """Return the groups in an order with a lower peak, if there is one."""
    delayed = _delay_terminal_groups(groups)
    return delayed if peak_bytes(delayed) < MAX_PEAK_RATIO * peak_bytes(groups) else groups


def peak_bytes(groups: Sequence[Group]) -> int:
    """The most bytes live at once, without inputs that the program doesn't own."""
    memory = LiveMemory(groups)
    for group in groups:
        memory.run(group)
    return memory.peak_bytes


def _delay_terminal_groups(groups: list[Group]) -> list[Group]:
    """Run a terminal group once it frees as much as it allocates; other groups keep their order."""
    memory = LiveMemory(groups)
    terminal = _find_terminal_groups(groups)
    ordered: dict[int, Group] = {}
    delayed: dict[int, Group] = {}

    def run(group: Group) -> None:
        memory.run(group)
        ordered[group.index] = group
        delayed.pop(group.index, None)
        buffers = memory.read.get(group.index, ())
        affected = {k for b in buffers for k in memory.pending_readers[id(b)]}
        affected |= {other.index for other in delayed.values() if group.index in other.needs}
        for index in sorted(affected & delayed.keys()):
            if index in delayed and can_run_without_growth(delayed[index]):
                run(delayed[index])

    def can_run_without_growth(group: Group) -> bool:
        return group.needs <= ordered.keys() and memory.growth(group) <= 0

    for group in groups:
        if group.index in terminal and not can_run_without_growth(group):
            delayed[group.index] = group
        else:
            run(group)
    while delayed:
        ready = [group for group in delayed.values() if group.needs <= ordered.keys()]
        run(min(ready, key=memory.growth))
    return list(ordered.values())


def _find_terminal_groups(groups: Sequence[Group]) -> set[int]:
    """Groups that only views of their own outputs need, and those views."""
    users: dict[int, list[Group]] = {}
    for group in groups:
        for index in group.needs:
            users.setdefault(index, []).append(group)
    found: set[int] = set()
    for group in reversed(groups):
        after = users.get(group.index, ())
        if _can_delay(group) and all(
            g.index in found and all(map(is_view, g.nodes)) for g in after
        ):
            found.add(group.index)
    return found


def _can_delay(group: Group) -> bool:
    return not any(
        is_ordered(node) or any(True for _ in mutated_inputs(node)) for node in group.nodes
    )


def collect_buffers(groups: Sequence[Group]) -> list[Buffer]:
    """The buffers that groups allocate and read; of inputs only those saved for this program alone."""
    buffers: dict[fx.Node, Buffer] = {}
    group_of = {node: group.index for group in groups for node in group.nodes}
    for group in groups:
        for node in group.nodes:
            for source in node.all_input_nodes:
                owner = view_base(source)
                if owner not in buffers and is_saved_for_backward(owner):
                    buffers[owner] = Buffer(value_bytes(fake_value(owner)))
            if view_base(node) is node and not isinstance(fake_value(node), tuple | list):
                buffers[node] = Buffer(value_bytes(fake_value(node)), group.index)
    for node, buffer in buffers.items():
        for view in _collect_views(node):
            for user in view.users:
                if user.op == "output":
                    buffer.is_output = True
                elif group_of.get(user) not in (None, buffer.producer):
                    buffer.readers.add(group_of[user])
    return list(buffers.values())


def _collect_views(owner: fx.Node) -> list[fx.Node]:
    """A tensor and its views."""
    found = [owner]
    for node in found:
        found += [u for u in node.users if u.op == "call_function" and view_base(u) is owner]
    return found
