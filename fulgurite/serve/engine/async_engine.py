"""The engine for asyncio: `async for update in engine.stream(prompt)`.

One thread runs the engine's steps and sleeps while there are no requests. Coroutines send it
commands through a queue and receive updates on their own event loop. So a step never blocks the
loop, and only one thread uses the engine.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from fulgurite.serve.engine.engine import Engine, Prompt
from fulgurite.serve.engine.request import Constraint, Result, SamplingParams, Update

Command = Callable[[], None]


class AsyncEngine:
    """Close it (or use `async with`) to stop its thread; unfinished requests are cancelled."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self.failure: BaseException | None = None
        self.stopped = False
        self.failure_callbacks: dict[int, Callable[[BaseException], None]] = {}
        self.thread = threading.Thread(target=self._run, name="fulgurite-engine", daemon=True)
        self.thread.start()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        self.commands.put(None)
        self.thread.join()

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        constraint: Constraint | None = None,
    ) -> AsyncIterator[Update]:
        """The updates as they come. Leaving the loop early cancels the request."""
        loop, updates = asyncio.get_running_loop(), asyncio.Queue[Update | BaseException]()
        ids: list[str] = []

        def deliver(item: Update | BaseException) -> None:
            with suppress(RuntimeError):  # the event loop may be closed by now
                loop.call_soon_threadsafe(updates.put_nowait, item)

        def submit() -> None:
            try:
                request = self.engine.add_request(
                    prompt, params, listener=deliver, constraint=constraint
                )
            except Exception as error:  # any error of a request goes to its caller
                deliver(error)
            else:
                ids.append(request.id)

        def cancel() -> None:
            for request_id in ids:
                self.engine.cancel(request_id)

        self.failure_callbacks[id(updates)] = deliver
        try:
            self._submit(submit)
            while True:
                item = await updates.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                if item.result is not None:
                    return
        finally:
            del self.failure_callbacks[id(updates)]
            self.commands.put(cancel)

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> Result:
        async for update in self.stream(prompt, params):
            if update.result is not None:
                return update.result
        raise AssertionError("a stream ends with a result")

    def _submit(self, command: Command) -> None:
        if self.stopped:
            raise RuntimeError("the engine has stopped") from self.failure
        self.commands.put(command)

    def _run(self) -> None:
        """The thread: run commands as they come, and a step while there are requests."""
        try:
            while self._run_commands():
                self.engine.step()
            for request_id in list(self.engine.requests):
                self.engine.cancel(request_id)
        except BaseException as error:  # any error must reach the streams that wait
            self.failure = error
        self.stopped = True  # before the loop: streams that start later see it
        for fail in list(self.failure_callbacks.values()):
            fail(self.failure or RuntimeError("the engine has stopped"))

    def _run_commands(self) -> bool:
        """Run all queued commands; wait for one if there are no requests. False: stop."""
        while not self.engine.has_unfinished_requests or not self.commands.empty():
            command = self.commands.get()
            if command is None:
                return False
            command()
        return True
