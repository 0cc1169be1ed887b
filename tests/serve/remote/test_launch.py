"""The process of an engine that is launched before its client."""

from __future__ import annotations

import asyncio
import time

from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.remote.client import EngineClient
from fulgurite.serve.remote.launch import launch_engine, read_process_age
from fulgurite.serve.remote.messages import LoadModel
from tests.waiting import wait_until

LOAD = LoadModel("none", mock={"tokens_per_step": 4}, faults=True)


def test_a_client_takes_over_a_launched_engine_and_restarts_it() -> None:
    async def run() -> None:
        launched = launch_engine(LOAD, {})
        client = EngineClient(LOAD, launched=launched)
        try:
            info = await client.start()
            assert info.model_type == "mock" and client.process is launched.process
            stream = client.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
            assert len((await stream.next()).token_ids) == 4
            client.kill()
            await wait_until(lambda: client.restarts and client.is_ready)
            assert client.process is not launched.process  # a new one
            assert launched.process.returncode is not None
        finally:
            await client.close()
            launched.kill()  # nothing is left to do

    asyncio.run(run())


def test_an_engine_ends_if_its_server_does_before_it_connects() -> None:
    launched = launch_engine(LOAD, {})
    launched.socket.close()
    assert launched.process.wait(60) == 0


def test_the_age_of_a_process_grows_with_time() -> None:
    first = read_process_age()
    time.sleep(0.05)
    assert first > 0 and 0.03 <= read_process_age() - first < 10
