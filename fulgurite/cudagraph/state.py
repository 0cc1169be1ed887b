"""What is known of the calls of a function with one set of sizes.

In: the addresses of inputs, call by call. Out: its captures, and which inputs the next capture copies.

Several layers of a model may call one function, each with parameters of its own. So calls are grouped by
the addresses of their parameters, and of other inputs that stay where they are: those that captures of the
same program made. Only the other inputs may be copied.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fulgurite.cudagraph.decision import Decision
from fulgurite.cudagraph.memory import CapturePool, StaticAddresses
from fulgurite.cudagraph.replay import ReplayableCall

WARMUPS = 2  # calls before the first capture
REPEATS = 3  # calls with the same addresses after which all inputs count as static
MAX_ADDRESS_SETS = 4  # captures without copies; past that, inputs that moved are copied
MAX_CALLS = 6  # captures of one layer that are kept
# Outputs that captures of one layer keep, up to which there is one for every set of addresses: each has outputs of
# its own. Above, one capture serves all, and copies the inputs that move.
MAX_DUPLICATED_BYTES = 16 << 20
MAX_LAYERS = 256
MAX_MISSES = 400  # calls in a row without a capture for their addresses
CALLS_UNTIL_MEASURED_AGAIN = 200  # of a function that was not worth a graph
MAX_MEASURED_AGAIN = 2


@dataclass
class LayerState:
    """The calls with the same parameters."""

    storages: set[int]  # addresses of the memory that stays where it is: parameters, say
    calls: list[ReplayableCall] = field(default_factory=list)  # the last used one first
    captures: int = 0
    held: int = 0  # calls since the last capture that found outputs still held
    addresses: deque[tuple[int, ...]] = field(default_factory=lambda: deque(maxlen=REPEATS))
    seen: Counter[tuple[int, ...]] = field(default_factory=Counter)

    def observe(self, inputs: Sequence[Any]) -> None:
        """Record the addresses of a call without a capture."""
        addresses = tuple(x.data_ptr() if isinstance(x, Tensor) else 0 for x in inputs)
        self.addresses.append(addresses)
        if len(self.seen) > 4 * MAX_CALLS:
            self.seen.clear()
        self.seen[addresses] += 1

    @property
    def is_warm(self) -> bool:
        return len(self.addresses) > WARMUPS

    def may_add_capture(self) -> bool:
        """Whether another capture may be kept beside those that there are."""
        kept = sum(call.kept_bytes for call in self.calls)
        return kept <= MAX_DUPLICATED_BYTES and len(self.calls) < MAX_ADDRESS_SETS

    def repeats_addresses(self) -> bool:
        """Whether the addresses of this call were seen before, and another capture for them may be made."""
        return self.seen[self.addresses[-1]] >= REPEATS and len(self.calls) < MAX_ADDRESS_SETS

    def moving_inputs(self) -> set[int]:
        """Positions of inputs to copy: none if these addresses repeat, else those that changed."""
        now = self.addresses[-1]
        if self.repeats_addresses() and self.may_add_capture():
            return set()
        before = [*self.addresses, *(call.addresses for call in self.calls)]
        return {k for k, a in enumerate(now) if any(other[k] != a for other in before)}


@dataclass
class ShapeState:
    """The calls with one set of sizes."""

    decision: Decision
    layers: dict[tuple[int, ...], LayerState] = field(default_factory=dict)
    observed: int = 0
    misses: int = 0  # calls since the last replay
    disabled: bool = False
    pools: set[CapturePool] = field(default_factory=set)  # that it has captured into
    reserved_bytes: int = 0  # that they have grown for it
    plain_calls: int = 0  # since it is disabled
    measured_again: int = 0

    def calls(self) -> Iterator[ReplayableCall]:
        for layer in self.layers.values():
            yield from layer.calls

    def keep(self, is_kept: Callable[[ReplayableCall], bool]) -> None:
        """Free the other captures."""
        for layer in self.layers.values():
            layer.calls = [call for call in layer.calls if is_kept(call)]

    def drop(self, call: ReplayableCall) -> None:
        self.keep(lambda one: one is not call)

    def drop_unused(self, oldest: int) -> None:
        """Free captures whose last replay was before this one: of parameters that moved, say."""
        self.keep(lambda call: call.last_used > oldest)

    def drop_moved_layers(self, known: StaticAddresses) -> None:
        """Free the captures of layers whose memory has moved or is gone."""
        still = known.find()
        self.layers = {key: layer for key, layer in self.layers.items() if layer.storages <= still}

    @property
    def captures(self) -> int:
        return sum(layer.captures for layer in self.layers.values())

    @property
    def is_warm(self) -> bool:
        return self.observed > WARMUPS

    def observe(self, inputs: Sequence[Any], known: StaticAddresses) -> LayerState:
        """Record a call without a capture; returns the layer that it belongs to."""
        self.observed += 1
        self.misses += 1
        key, storages = known.identify(inputs)
        layer = self.layers.pop(key, None)
        if layer is None:
            self.drop_moved_layers(known)
            layer = LayerState(storages)
        self.layers[key] = layer  # the last used one at the end
        if len(self.layers) > MAX_LAYERS:
            del self.layers[next(iter(self.layers))]
        layer.observe(inputs)
        return layer

    def disable(self) -> None:
        self.disabled = True
        for layer in self.layers.values():
            layer.calls.clear()

    def count_plain_call(self) -> None:
        """Measure again after a while: the machine may have been busy when it was measured."""
        self.plain_calls += 1
        if self.plain_calls != CALLS_UNTIL_MEASURED_AGAIN or not self.decision.was_measured:
            return
        if self.measured_again < MAX_MEASURED_AGAIN:
            self.measured_again += 1
            self.decision, self.disabled, self.plain_calls = Decision(False), False, 0
