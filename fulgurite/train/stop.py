"""`StopRequest`: SIGINT and SIGTERM ask a run to save and to end, at the same step on every rank.

    with StopRequest(rank, world_size) as stop:
        for step in ...:
            ...
            if stop.poll():                # all ranks get the same answer at the same step
                break

A signal reaches ranks at different moments. So every poll starts a reduction of their flags on a group
of its own and reads the result of the poll before: nobody waits for it. One rank stops at once; several
stop one step later. A second signal ends the process as it would have without this class.

One request may arrive twice: ctrl-C and `scancel` reach a whole process group, and the supervisor or
torchrun in it passes the signal on. So signals within `REPEAT_SECONDS` count as one.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGINT, signal.SIGTERM)
REPEAT_SECONDS = 2.0  # the supervisor looks for signals every 0.2 s


class StopRequest:
    """Whether a signal asked this run to end."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self.received: signal.Signals | None = None
        self._group = dist.new_group(backend="gloo") if world_size > 1 else None
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._pending: Any = None
        self._handlers: dict[signal.Signals, Any] = {}
        self._first_signal: float | None = None  # when

    def request(self) -> None:
        """Ask to stop, as a signal would."""
        self.received = self.received or signal.SIGTERM

    def poll(self) -> bool:
        """Whether the run should save and end. All ranks call it once a step."""
        if self._group is None:
            return self.received is not None
        if self._pending is not None:
            self._pending.wait()
            if self._flag.item():
                self._pending = None
                return True
        self._flag = torch.tensor([int(self.received is not None)], dtype=torch.int32)
        self._pending = dist.all_reduce(
            self._flag, dist.ReduceOp.MAX, group=self._group, async_op=True
        )
        return False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first_signal is None:
            self.received, self._first_signal = signal.Signals(number), now
        elif now - self._first_signal > REPEAT_SECONDS:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python's rule for handlers
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # a supervisor's rank ignores it
                    self._handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()
        if self._pending is not None and error is None:
            self._pending.wait()  # every rank has started it
        self._pending = None
