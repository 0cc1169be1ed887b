"""The engine for asyncio: `async for update in engine.stream(prompt)`.

One thread runs the engine's steps; it sleeps while there is nothing to do. Coroutines hand it
requests through a queue and hear of their updates on their own event loop, so a step never stops
the loop, and nothing of the engine is touched by two threads.
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
    """Close it (or use `async with`) to stop its thread; requests on their way are cancelled."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self.failure: BaseException | None = None
        self.stopped = False
        self.waiting: dict[int, Callable[[BaseException], None]] = {}
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
        """Updates as they come; leaving the loop early, or being cancelled, cancels the request."""
        loop, updates = asyncio.get_running_loop(), asyncio.Queue[Update | BaseException]()
        ids: list[str] = []

        def deliver(item: Update | BaseException) -> None:
            with suppress(RuntimeError):  # a loop that is closed by now, with all who wait in it
                loop.call_soon_threadsafe(updates.put_nowait, item)

        def submit() -> None:
            try:
                request = self.engine.add(prompt, params, listener=deliver, constraint=constraint)
            except Exception as error:  # whatever it was, it is one caller's and not the engine's
                deliver(error)
            else:
                ids.append(request.id)

        def withdraw() -> None:
            for one in ids:
                self.engine.cancel(one)

        self.waiting[id(updates)] = deliver
        try:
            self._put(submit)
            while True:
                item = await updates.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                if item.result is not None:
                    return
        finally:
            del self.waiting[id(updates)]
            self.commands.put(withdraw)

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> Result:
        async for update in self.stream(prompt, params):
            if update.result is not None:
                return update.result
        raise AssertionError("a stream ends with a result")

    def _put(self, command: Command) -> None:
        if self.stopped:
            raise RuntimeError("the engine has stopped") from self.failure
        self.commands.put(command)

    def _run(self) -> None:
        """The thread: commands as they come, a step whenever there is a request."""
        try:
            while self._obey():
                self.engine.step()
            for name in list(self.engine.requests):
                self.engine.cancel(name)
        except BaseException as error:  # whatever it was, nobody may wait for it forever
            self.failure = error
        self.stopped = True  # and only then look who waits: who comes later sees it
        for fail in list(self.waiting.values()):
            fail(self.failure or RuntimeError("the engine has stopped"))

    def _obey(self) -> bool:
        """All commands there are, waiting for one while there is nothing to run; False: stop."""
        while not self.engine.busy or not self.commands.empty():
            command = self.commands.get()
            if command is None:
                return False
            command()
        return True
