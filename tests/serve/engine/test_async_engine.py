"""The engine from asyncio."""

from __future__ import annotations

import asyncio

import pytest

from fulgurite.errors import ArgumentError
from fulgurite.serve.engine.async_engine import AsyncEngine
from fulgurite.serve.engine.request import Result, SamplingParams
from tests.serve.engines import check_idle, make_engine, tiny_model

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPTS = [[number, number + 1, number + 2] for number in range(6)]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def test_many_at_once_equal_one_at_a_time(model) -> None:
    wanted = make_engine(model).generate(PROMPTS, PARAMS)
    engine = make_engine(model)

    async def main() -> list:
        async with AsyncEngine(engine) as running:
            return await asyncio.gather(*(running.generate(ids, PARAMS) for ids in PROMPTS))

    got = asyncio.run(main())
    assert [one.token_ids for one in got] == [one.token_ids for one in wanted]
    check_idle(engine)


def test_abandoned_stream_is_cancelled(model) -> None:
    engine = make_engine(model)

    async def leave(running: AsyncEngine) -> int:
        stream = running.stream([1, 2], SamplingParams(max_tokens=100, ignore_eos=True))
        count = 0
        async for update in stream:
            count += len(update.token_ids)
            if count >= 3:
                break
        await stream.aclose()  # type: ignore[attr-defined]
        return count

    async def main() -> None:
        async with AsyncEngine(engine) as running:
            good = asyncio.create_task(running.generate([3, 4], PARAMS))
            stopped = asyncio.create_task(running.generate([5], SamplingParams(max_tokens=120)))
            with pytest.raises(ArgumentError, match="empty"):
                await running.generate([])
            assert await leave(running) == 3
            stopped.cancel()
            assert len((await good).token_ids) == 12
            with pytest.raises(asyncio.CancelledError):
                await stopped
            assert len((await running.generate([3, 4], PARAMS)).token_ids) == 12

    asyncio.run(main())
    check_idle(engine)


def test_failed_engine_ends_all_streams(model) -> None:
    engine = make_engine(model)

    def broken(*arguments):
        raise ZeroDivisionError("the model broke")

    engine.runner.execute = broken  # type: ignore[method-assign]

    async def main() -> None:
        running = AsyncEngine(engine)
        running.thread.join(0)
        with pytest.raises(ZeroDivisionError, match="the model broke"):
            await running.generate([1], PARAMS)
        running.thread.join(5)
        with pytest.raises(RuntimeError, match="has stopped"):
            await running.generate([1], PARAMS)

    asyncio.run(main())


def test_closed_engine_ends_all_streams(model) -> None:
    async def main() -> None:
        engine = AsyncEngine(make_engine(model))
        engine.commands.put(None)  # what close() does first, while requests still come
        with pytest.raises(RuntimeError, match="has stopped"):
            await asyncio.wait_for(engine.generate([1, 2]), timeout=60)
        engine.close()
        with pytest.raises(RuntimeError, match="has stopped"):
            await engine.generate([1, 2])
        assert not engine.failure_callbacks

    asyncio.run(main())


def test_failing_prompt_affects_only_its_caller(model) -> None:
    class Odd(list):
        def __iter__(self):
            raise OSError("odd")

    async def main() -> None:
        async with AsyncEngine(make_engine(model)) as engine:
            with pytest.raises(OSError, match="odd"):
                await engine.generate(Odd([1]))
            assert (await engine.generate([1, 2])).token_ids

    asyncio.run(main())


def test_closed_event_loop_does_not_stop_the_engine(model) -> None:
    made = make_engine(model)
    engine = AsyncEngine(made)

    async def leave() -> None:
        async for _ in engine.stream([1, 2], SamplingParams(max_tokens=100, ignore_eos=True)):
            break

    async def ask() -> Result:
        return await engine.generate([1, 2], SamplingParams(max_tokens=3, ignore_eos=True))

    asyncio.run(leave())
    assert len(asyncio.run(ask()).token_ids) == 3
    engine.close()
    check_idle(made)
