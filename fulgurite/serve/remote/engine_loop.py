"""The loop of an engine: commands in, steps, reports out.

    receive commands ─▶ step ─▶ flush: one `Report` with the updates of all requests

The loop owns its engine: nothing else calls it. A command that fails is answered with `Rejected`. A
step that fails ends the requests in it, and the loop goes on; it gives up after several in a row, since
the device may be broken, and whoever started it starts it again. An engine over ranks restarts a rank
that was lost (rank_restart.py): a report says so before, and commands wait until it is done.

With many running requests reports are sent less often: a reader that wakes up once for many tokens
spends its time on tokens instead of on waking up.
"""

from __future__ import annotations

import os
import time
from typing import Any

from msgspec.structs import replace as structs_replace

from fulgurite.errors import FulguriteError
from fulgurite.logs import LOG
from fulgurite.option_values import HEARTBEAT_SECONDS
from fulgurite.serve.remote.channel import Channel
from fulgurite.serve.remote.engine_interface import ServedEngine
from fulgurite.serve.remote.messages import (
    Audit,
    Cancel,
    Done,
    Embed,
    Embeddings,
    Exported,
    ExportPrefix,
    Generate,
    ImportPrefix,
    InjectFault,
    Progress,
    Rejected,
    Report,
    ResetPrefixCache,
    Shutdown,
    TokenUpdate,
)

FLUSH_SECONDS_PER_REQUEST = 1.25e-4  # between reports: 1 ms with 8 running requests, 32 with 256
MAX_FLUSH_SECONDS = 0.05
MAX_FAILED_STEPS = 3  # in a row


class InjectedFault(RuntimeError):
    """A failure that a test asked for."""


class EngineLoop:
    """Runs an engine until its channel closes or it is told to shut down."""

    def __init__(self, engine: ServedEngine, channel: Channel, *, faults: bool = False) -> None:
        self.engine, self.channel = engine, channel
        self.accepts_faults = faults
        self.fault: InjectFault | None = None
        self.updates: dict[int, TokenUpdate] = {}  # since the last report, merged by request
        self.last_flush = 0.0
        self.failed_steps = self.failures_in_a_row = 0
        self.audit: dict[str, int] = {}
        self.is_stopping = False
        self.progress = Progress()  # of the last report
        engine.watch_ranks(self.report_restart)

    def run(self) -> None:
        try:
            while not self.is_stopping and not self.channel.is_closed:
                was_busy = self.engine.has_unfinished_requests
                is_preparing = not was_busy and self.engine.prepare_step()
                timeout = 0.0 if was_busy or is_preparing else HEARTBEAT_SECONDS
                for command in self.channel.receive(timeout):
                    self.run_command(command)
                if self.engine.has_unfinished_requests:
                    self.step()
                else:
                    self.engine.check_ranks()
                if was_busy and not self.engine.has_unfinished_requests:
                    self.audit = self.engine.audit()
                self.flush_if_due()
        finally:
            self.engine.close()

    # ---- commands ----------------------------------------------------------------------------------

    def run_command(self, command: Any) -> None:
        try:
            self.dispatch(command)
        except FulguriteError as error:
            self.channel.send(Rejected(command.id, error.one_line()))

    def dispatch(self, command: Any) -> None:
        engine = self.engine
        match command:
            case Generate():
                engine.add(command, self.listen)
            case Cancel(ids=ids):
                for id in ids:
                    engine.cancel(id)
            case Embed(id=id, prompts=prompts):
                self.channel.send(Embeddings(id, engine.embed(prompts)))
            case ExportPrefix(id=id):
                self.channel.send(Exported(id, engine.export_prefix(command)))
            case ImportPrefix(id=id, blocks=blocks):
                self.channel.send(Done(id, {"blocks": engine.import_prefix(blocks)}))
            case Audit(id=id):
                self.audit = engine.audit()
                self.channel.send(Done(id, self.audit))
            case ResetPrefixCache():
                engine.reset_prefix_cache()
            case InjectFault() if self.accepts_faults:
                self.fault = command
                if command.kind == "exit":
                    os._exit(9)
            case Shutdown():
                self.is_stopping = True

    def listen(self, update: TokenUpdate) -> None:
        """Merge an update into those of its request that were not reported yet."""
        before = self.updates.get(update.id)
        if before is not None:
            logprobs = before.logprobs
            if update.logprobs is not None:
                logprobs = [*(logprobs or ()), *update.logprobs]
            tokens = [*before.token_ids, *update.token_ids]
            prompt_logprobs = before.prompt_logprobs or update.prompt_logprobs
            update = TokenUpdate(update.id, tokens, logprobs, update.finish, prompt_logprobs)
        self.updates[update.id] = update

    # ---- steps and reports -------------------------------------------------------------------------

    def step(self) -> None:
        try:
            self.raise_fault()
            self.engine.step()
        except Exception as error:  # whatever it is, it must not end the requests of later steps
            self.failed_steps += 1
            self.failures_in_a_row += 1
            LOG.exception("a step failed: %s", error)
            if not self.engine.can_continue or self.failures_in_a_row >= MAX_FAILED_STEPS:
                self.send_last_progress()  # the last updates name the cause
                raise
            self.engine.fail_step(f"the step failed: {type(error).__name__}")
        else:
            self.failures_in_a_row = 0

    def raise_fault(self) -> None:
        fault, self.fault = self.fault, None
        if fault is None:
            return
        if fault.kind == "hang":
            time.sleep(fault.seconds)
        elif fault.kind == "oom":
            raise MemoryError("injected")
        else:
            raise InjectedFault("injected")

    def report_restart(self, reason: str) -> None:
        """Tell the other side that ranks are being restarted, or that they are there again."""
        self.progress = structs_replace(self.progress, restarting=reason)
        if reason:  # the engine has nothing to read while its ranks start
            self.send_last_progress()
        else:
            self.flush(time.perf_counter())

    def send_last_progress(self) -> None:
        """Send all updates, with the counters of the last report."""
        lists: dict[str, Any] = {"step_seconds": [], "step_tokens": [], "mask_seconds": []}
        self.channel.send(Report([*self.updates.values()], structs_replace(self.progress, **lists)))
        self.updates = {}

    def flush_if_due(self) -> None:
        """Send a report, if the last one is long enough ago for the number of requests."""
        now = time.perf_counter()
        interval = HEARTBEAT_SECONDS
        if self.updates:
            interval = min(FLUSH_SECONDS_PER_REQUEST * len(self.updates), MAX_FLUSH_SECONDS)
        is_idle = not self.engine.has_unfinished_requests
        if now - self.last_flush >= interval or (self.updates and is_idle):
            self.flush(now)

    def flush(self, now: float) -> None:
        progress = self.engine.read_progress()
        progress = structs_replace(progress, failed_steps=self.failed_steps, audit=self.audit)
        self.progress = progress
        self.channel.send(Report([*self.updates.values()], progress))
        self.updates = {}
        self.last_flush = now
