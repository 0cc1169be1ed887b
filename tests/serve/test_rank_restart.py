"""Lost ranks: all ranks are restarted, waiting requests run, running ones are retried or failed.

The tests of one process share an `LLM` over two ranks, since each of them starts and loads ranks anew.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fulgurite.parallel import health
from fulgurite.parallel.processes.workers import is_single_process
from fulgurite.serve.engine.engine import Engine
from fulgurite.serve.engine.rank_restart import RestartPolicy
from fulgurite.serve.engine.request import Update
from fulgurite.serve.llm import LLM
from tests.parallel.engine_cases import PLAIN
from tests.serve.rank_cases import GREEDY, Run, asked, kill, run_undisturbed, save_model
from tests.waiting import wait_for

RETRY = RestartPolicy("retry", max_restarts=100, delays=(0.0,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def wanted(folder) -> list[list[int]]:
    return run_undisturbed(folder)


@pytest.fixture(scope="module")
def shared(folder) -> Iterator[LLM]:
    with LLM(folder, tensor=2, timeout=120.0, on_rank_failure="retry", **PLAIN) as llm:
        yield llm
    assert is_single_process()


@pytest.fixture
def llm(shared) -> LLM:
    restarter = shared.engine.restarter
    assert restarter is not None
    restarter.policy = RETRY
    return shared


def count_restarts(llm: LLM) -> int:
    return llm.engine.stats().restarts


# ---- one rank is lost ------------------------------------------------------------------------------


def test_running_requests_are_retried_with_the_same_tokens(llm, wanted):
    before = count_restarts(llm)
    run = Run(llm, 25, lambda: kill(llm, 1))
    results = run.run()
    assert [one.token_ids for one in results] == wanted
    assert count_restarts(llm) == before + 1
    assert {one.restarts for one in results} == {0, 1}  # some ran, one waited
    assert "restarts" in str(llm.stats())


def test_running_requests_fail_and_waiting_ones_run(llm, wanted):
    assert llm.engine.restarter is not None
    llm.engine.restarter.policy = RestartPolicy("fail", delays=(0.0,), max_restarts=100)
    results = Run(llm, 10, lambda: kill(llm, 1)).run()
    failed = [one for one in results if one.finish_reason == "error"]
    assert len(failed) == PLAIN["max_sequences"]
    for number, one in enumerate(results):
        if one in failed:
            assert one.error is not None and "rank 1 is gone" in one.error, one.error
            assert "killed by SIGKILL" in one.error
            assert one.token_ids == wanted[number][: len(one.token_ids)]
        else:
            assert one.token_ids == wanted[number] and one.restarts == 0


def test_rank_that_is_lost_while_nothing_runs(llm, wanted):
    """The next request waits for the restart, and does not count as running: it can't fail."""
    assert llm.engine.restarter is not None and llm.workers is not None
    llm.engine.restarter.policy = RestartPolicy("fail", delays=(0.0,), max_restarts=100)
    kill(llm, 1)
    llm.workers.processes[0].wait()
    wait_for(lambda: llm.workers.exits)
    assert [one.token_ids for one in llm.generate(*asked())] == wanted


def test_ctrl_c_waits_for_the_end_of_the_step(llm, wanted, monkeypatch):
    """The other ranks are in it, too: no rank is lost, and none is out of step."""
    before, handler = count_restarts(llm), signal.signal(signal.SIGINT, signal.default_int_handler)
    execute, num_steps = Engine.execute, 0

    def interrupt(self: Engine, *arguments: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 5:
            signal.raise_signal(signal.SIGINT)
        return execute(self, *arguments)

    monkeypatch.setattr(Engine, "execute", interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(*asked())
    finally:
        signal.signal(signal.SIGINT, handler)
    assert num_steps == 5
    assert [one.token_ids for one in llm.generate(*asked())] == wanted
    assert count_restarts(llm) == before


def test_step_that_rank_0_leaves_ends_with_new_ranks(llm, wanted, monkeypatch):
    """The other ranks wait in it: their next collective would be another one than rank 0's."""
    before, reasons, num_steps = count_restarts(llm), [], 0
    execute = Engine.execute

    def leave(self: Engine, *arguments: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 5:
            raise ValueError("of the test")
        return execute(self, *arguments)

    monkeypatch.setattr(Engine, "execute", leave)
    assert llm.engine.restarter is not None
    llm.engine.restarter.listeners.append(reasons.append)
    with pytest.raises(ValueError, match="of the test"):
        llm.generate(*asked())
    assert [one.token_ids for one in llm.generate(*asked())] == wanted
    llm.engine.restarter.listeners.clear()
    assert count_restarts(llm) == before + 1
    assert "rank 0 has left a step" in reasons[0] and "ValueError: of the test" in reasons[0]


@pytest.mark.slow  # five more restarts: other moments
@pytest.mark.parametrize("seed", range(5))
def test_kill_at_a_random_moment(llm, wanted, seed):
    chance = random.Random(seed)
    timer = threading.Timer(chance.uniform(0.0, 0.5), lambda: kill(llm, 1))
    run = Run(llm, 1, timer.start)
    assert [one.token_ids for one in run.run()] == wanted
    timer.join()
    llm.engine.step()  # if it was killed after the last token


@pytest.mark.slow  # waits for a heartbeat that does not come
def test_stopped_rank(llm, wanted, monkeypatch):
    monkeypatch.setattr(health, "HEARTBEAT_TIMEOUT", 4.0)
    reasons: list[str] = []
    assert llm.engine.restarter is not None
    llm.engine.restarter.listeners.append(reasons.append)
    run = Run(llm, 25, lambda: kill(llm, 1, how=signal.SIGSTOP))
    results = run.run()
    llm.engine.restarter.listeners.clear()
    assert [one.token_ids for one in results] == wanted
    assert reasons[0].startswith("rank 1 is stopped") and reasons[1:] == [""], reasons


@pytest.mark.slow  # two restarts: the second while the first one loads
@pytest.mark.parametrize("delay", [0.0, 1.0, 3.0])
def test_kill_during_the_restart(llm, wanted, delay):
    """The new worker is killed as well: while it starts, or while it loads."""
    old, before = llm.workers, count_restarts(llm)

    def kill_the_next() -> None:
        wait_for(lambda: llm.workers is not old and llm.workers is not None)
        time.sleep(delay)
        kill(llm, 1)

    thread = threading.Thread(target=kill_the_next)

    def fault() -> None:
        thread.start()
        kill(llm, 1)

    assert [one.token_ids for one in Run(llm, 25, fault).run()] == wanted
    thread.join()
    assert count_restarts(llm) >= before + 1


@pytest.mark.slow  # two more restarts
def test_request_that_kills_ranks_twice_fails(llm, wanted, monkeypatch):
    """The others get all of their tokens."""
    execute = Engine.execute

    def kill_by_poison(self: Engine, chunks: Any, *arguments: Any) -> Any:
        if any(chunk.request.id == "poison" for chunk in chunks) and llm.workers is not None:
            kill(llm, 1)
            llm.workers.processes[0].wait()
        return execute(self, chunks, *arguments)

    monkeypatch.setattr(Engine, "execute", kill_by_poison)
    before, results = count_restarts(llm), {}

    def listen(update: Update) -> None:
        if update.result is not None:
            results[update.id] = update.result

    llm.engine.add_request([1, 2, 3], GREEDY, id="poison", listener=listen)
    while "poison" not in results:
        llm.engine.step()
    assert results["poison"].finish_reason == "error"
    assert "twice at this token" in str(results["poison"].error)
    assert count_restarts(llm) == before + 2
    assert [one.token_ids for one in llm.generate(*asked())] == wanted
