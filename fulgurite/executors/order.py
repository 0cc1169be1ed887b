"""The order in which groups run: a large result that nothing here reads waits while that saves memory.

In: groups in an order in which they can run. Out: the same groups in another one, or in that order where it gains little.
A weight's gradient is often larger than the two activations that it is a product of. Computed at once, as backward comes
by, all such gradients are there while the last layers' activations still are; computed last, they never meet.

    grad_in  = mm(grad, weight)            grad_in = mm(grad, weight)
    grad_w   = mm(grad.t(), x)        →    …                                # the layers before this one
    …                                      grad_w  = mm(grad.t(), x)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from fulgurite.executors.gather import Group
from fulgurite.trace.cost import is_view, memory_of, value_bytes
from fulgurite.trace.writes import written
from fulgurite.transforms.purity import is_ordered

MOST = 0.97  # of the peak that the given order has: for less a program keeps its own order


@dataclass
class Value:
    """A tensor's memory, with everything that looks into it."""

    bytes: int
    maker: int | None = None  # a group's index; None where it is there from the beginning
    readers: set[int] = field(default_factory=set)
    stays: bool = False  # returned, or held by others


class Memory:
    """What is alive while groups run one after another."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.values = values_of(groups)
        self.made: dict[int, list[Value]] = {}
        self.read: dict[int, list[Value]] = {}
        for value in self.values:
            if value.maker is not None:
                self.made.setdefault(value.maker, []).append(value)
            for reader in value.readers:
                self.read.setdefault(reader, []).append(value)
        self.waiting = {id(value): set(value.readers) for value in self.values}
        self.alive = sum(value.bytes for value in self.values if value.maker is None)
        self.peak = self.alive

    def growth(self, group: Group) -> int:
        """How much more is alive after the group than before it."""
        made = sum(v.bytes for v in self.made.get(group.index, ()) if v.readers or v.stays)
        return made - sum(v.bytes for v in self._freed_by(group))

    def run(self, group: Group) -> None:
        freed = sum(value.bytes for value in self._freed_by(group))
        made = self.made.get(group.index, ())
        self.peak = max(self.peak, self.alive + sum(value.bytes for value in made))
        self.alive += sum(value.bytes for value in made if value.readers or value.stays) - freed
        for value in self.read.get(group.index, ()):
            self.waiting[id(value)].discard(group.index)

    def _freed_by(self, group: Group) -> list[Value]:
        read = self.read.get(group.index, ())
        return [v for v in read if not v.stays and self.waiting[id(v)] == {group.index}]


def for_memory(groups: list[Group]) -> list[Group]:
    """The groups such that less memory is needed at once."""
    later = _with_ends_later(groups)
    return later if peak(later) < MOST * peak(groups) else groups


def peak(groups: Sequence[Group]) -> int:
    """The most bytes that are alive at once, without inputs that are not the program's to drop."""
    memory = Memory(groups)
    for group in groups:
        memory.run(group)
    return memory.peak


def _with_ends_later(groups: list[Group]) -> list[Group]:
    """What nothing waits for runs once it drops more than it makes, everything else as before."""
    memory = Memory(groups)
    ends = _ends(groups)
    ordered: dict[int, Group] = {}
    waiting: dict[int, Group] = {}

    def run(group: Group) -> None:
        memory.run(group)
        ordered[group.index] = group
        waiting.pop(group.index, None)
        touched = {k for v in memory.read.get(group.index, ()) for k in memory.waiting[id(v)]}
        touched |= {one.index for one in waiting.values() if group.index in one.needs}
        for index in sorted(touched & waiting.keys()):
            if index in waiting and grows_not(waiting[index]):
                run(waiting[index])

    def grows_not(group: Group) -> bool:
        return group.needs <= ordered.keys() and memory.growth(group) <= 0

    for group in groups:
        if group.index in ends and not grows_not(group):
            waiting[group.index] = group
        else:
            run(group)
    while waiting:
        ready = [group for group in waiting.values() if group.needs <= ordered.keys()]
        run(min(ready, key=memory.growth))
    return list(ordered.values())


def _ends(groups: Sequence[Group]) -> set[int]:
    """Groups that no other one needs, but for views of what they make; those, too."""
    needed_by: dict[int, list[Group]] = {}
    for group in groups:
        for index in group.needs:
            needed_by.setdefault(index, []).append(group)
    found: set[int] = set()
    for group in reversed(groups):
        after = needed_by.get(group.index, ())
        if _may_wait(group) and all(g.index in found and all(map(is_view, g.nodes)) for g in after):
            found.add(group.index)
    return found


def _may_wait(group: Group) -> bool:
    return not any(is_ordered(node) or any(True for _ in written(node)) for node in group.nodes)


def values_of(groups: Sequence[Group]) -> list[Value]:
    """The memory that groups make, read and drop; of inputs only what was saved for this program alone."""
    values: dict[fx.Node, Value] = {}
    home = {node: group.index for group in groups for node in group.nodes}
    for group in groups:
        for node in group.nodes:
            for source in node.all_input_nodes:
                owner = memory_of(source)
                if owner not in values and owner.meta.get("saved"):
                    values[owner] = Value(value_bytes(owner.meta.get("val")))
            if memory_of(node) is node and not isinstance(node.meta.get("val"), tuple | list):
                values[node] = Value(value_bytes(node.meta.get("val")), group.index)
    for node, value in values.items():
        for seen in _family(node):
            for user in seen.users:
                if user.op == "output":
                    value.stays = True
                elif home.get(user) not in (None, value.maker):
                    value.readers.add(home[user])
    return list(values.values())


def _family(owner: fx.Node) -> list[fx.Node]:
    """A tensor and its views."""
    found = [owner]
    for node in found:
        found += [u for u in node.users if u.op == "call_function" and memory_of(u) is owner]
    return found
