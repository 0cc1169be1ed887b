"""Whether a function is captured: decided from measured times.

In: times of calls without a graph, then of replays. Out: a decision with its reason, for `explain`.
A function is captured unless the host's share of a call is too small for a graph to gain anything. The
graph is kept if replays, with their copies, are faster than calls without it: in a loop that never waits for
the device, or one by one, and slower in neither. The more of the device's memory a graph keeps between calls, the
more it has to gain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from fulgurite.cudagraph.timing import CallTime, Stopwatch

CudaGraphMode = Literal["auto"] | bool
CUDAGRAPH_MODES: tuple[CudaGraphMode, ...] = ("auto", True, False)
TIMED_CALLS = 3  # of the host, and of the device; the fastest one counts: others only slow it down
# of the host's time to the device's. A graph also removes the gaps between kernels (1 to 2 µs each on an
# H200), and the host takes 5 to 8 µs to launch one: below this, there are at most 2% to gain.
MIN_HOST_SHARE = 0.1
MIN_GAIN = (
    1.02  # of a graph over calls without it; two readings of a device's time differ by less than 1%
)
# Gain per share of the device's memory: a graph that keeps a tenth of it must be 20% faster than one that keeps none.
# A larger batch gains about as much by the memory.
GAIN_PER_MEMORY = 2.0
MIN_OTHER_GAIN = 0.98  # in a loop, if single calls gain, and the other way round


@dataclass
class Measurement:
    """Measures a few calls: host and wall times, then the device time."""

    hosts: list[float] = field(default_factory=list)
    walls: list[float] = field(default_factory=list)
    devices: list[float] = field(default_factory=list)

    @property
    def result(self) -> CallTime | None:
        """The times, once all calls are measured."""
        if len(self.devices) < TIMED_CALLS:
            return None
        return CallTime(min(self.hosts), min(self.devices), min(self.walls))

    def run(self, call: Callable[[], Any], stopwatch: Stopwatch) -> Any:
        """Run and measure one call."""
        if len(self.hosts) < TIMED_CALLS:
            result, host, wall = stopwatch.time_call(call)
            self.hosts.append(host)
            self.walls.append(wall)
        else:
            result, seconds = stopwatch.time_device(call, min(self.hosts))
            self.devices.append(seconds)
        return result


@dataclass
class Decision:
    """What was measured for one set of sizes, and what it led to."""

    forced: bool  # cudagraph=True: nothing is measured
    plain: Measurement = field(default_factory=Measurement)
    replayed: Measurement = field(default_factory=Measurement)
    memory_share: float = 0.0  # of the device's memory, that the last capture keeps between calls
    reason_to_wait: str = ""  # why it is not captured yet
    reason_against: str = ""
    was_measured: bool = False  # the reason is a measurement, which may turn out otherwise

    @property
    def should_capture(self) -> bool | None:
        """None: more calls must be measured."""
        if self.reason_against:
            return False
        if self.forced:
            return True
        times = self.plain.result
        if times is None:
            return None
        if times.host < MIN_HOST_SHARE * times.device:
            self._decide_against(f"the device bounds a call ({times})")
        return not self.reason_against

    @property
    def is_confirmed(self) -> bool | None:
        """Whether replays are faster. None: more of them must be measured."""
        if self.forced:
            return True
        before, after = self.plain.result, self.replayed.result
        if before is None or after is None:
            return None
        gains = (before.bound / after.bound, before.wall / after.wall)
        if max(gains) < MIN_GAIN or min(gains) < MIN_OTHER_GAIN:
            self._decide_against(f"a replay is not faster ({after}) than a call ({before})")
        elif max(gains) < MIN_GAIN + GAIN_PER_MEMORY * self.memory_share:
            self._decide_against(
                f"a replay gains {max(gains) - 1:.0%} ({after}; without: {before}), too little for "
                f"{self.memory_share:.1%} of the device's memory"
            )
        return not self.reason_against

    def _decide_against(self, reason: str) -> None:
        self.reason_against, self.was_measured = reason, True

    def __str__(self) -> str:
        if self.reason_against:
            return f"not captured: {self.reason_against}"
        if self.reason_to_wait:
            return f"not captured so far: {self.reason_to_wait}"
        before, after = self.plain.result, self.replayed.result
        if before is None:
            return "captured as asked for" if self.forced else "being measured"
        if after is None:
            return f"captured, being measured (without: {before})"
        return f"captured: {after}; without: {before}"
