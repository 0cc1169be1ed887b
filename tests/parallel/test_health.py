"""Health of ranks: a killed, stopped, stuck or slow rank is named."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from fulgurite.errors import RankError
from fulgurite.parallel import RankPool, health
from fulgurite.parallel.health import (
    NOT_STARTED,
    HealthMonitor,
    Heartbeat,
    RankTime,
    compare_ranks,
    find_first_exits,
)
from fulgurite.parallel.processes.workers import (
    StartingProcess,
    WorkerProcesses,
    read_process_state,
)
from fulgurite.running_clock import RunningClock
from tests.parallel import health_cases as cases
from tests.waiting import wait_for

RUNNING = Heartbeat(4, 7, "tensor a|b", "running", True, 3, 0.25, 0.5)


# ---- heartbeats ------------------------------------------------------------------------------------


def test_position_of_a_rank_that_has_not_started():
    assert health.NOT_STARTED.position == "not started yet"


@pytest.mark.parametrize("one", [RUNNING, health.NOT_STARTED, replace(RUNNING, is_waiting=False)])
def test_heartbeat_text(one):
    assert Heartbeat.parse(one.text) == one


def test_position_says_whether_a_rank_waits_or_works():
    assert RUNNING.position == "at step 7, in 'tensor a|b'"
    assert replace(RUNNING, is_waiting=False).position == "at step 7, working after 'tensor a|b'"


def beats(work: list[float], steps: int) -> dict[int, Heartbeat]:
    """Heartbeats of ranks that have worked so many seconds a step."""
    return {
        rank: Heartbeat(1, steps, "x", "running", False, steps, seconds * steps, 0.1 * steps)
        for rank, seconds in enumerate(work)
    }


def test_slow_rank_is_compared_with_the_median_of_the_others():
    times = compare_ranks(beats([1, 1, 1, 1], 100), beats([0.51, 0.51, 0.51, 0.524], 200))
    assert [one.steps for one in times] == [100] * 4
    assert times[3].work_seconds == pytest.approx(0.048)
    assert times[3].slowdown == pytest.approx(2.4)
    assert [one.is_slow for one in times] == [False, False, False, True]
    text = str(times[3])
    assert text.startswith("rank 3 is 2.4x slower than the median of the others over 100 steps")


@pytest.mark.parametrize(
    ("steps", "work", "slowdown", "is_slow"),
    [
        (100, 0.02, 2.4, True),
        (99, 0.02, 2.4, False),  # too few
        (100, 0.02, 1.9, False),  # too little
        (100, 0.0002, 2.4, False),  # too short to matter
        (100, 0.0, 0.0, False),
    ],
)
def test_when_a_rank_is_slow(steps, work, slowdown, is_slow):
    assert RankTime(1, steps, work, 0.0, slowdown).is_slow == is_slow


def test_ranks_without_steps_are_not_compared():
    assert compare_ranks(beats([1, 1], 5), beats([1, 1], 5)) == ()
    assert compare_ranks(beats([0, 0], 0), beats([0, 0], 3))[1].slowdown == 1.0


def test_first_exits_are_those_that_had_not_failed_before():
    failed, left = replace(RUNNING, state="failed"), replace(RUNNING, state="left")
    killed, error = "was killed by SIGKILL", "ended with exit code 1 (RankError: rank 2 is gone)"
    assert find_first_exits({1: error, 2: killed}, {1: failed, 2: RUNNING}) == [2]
    assert find_first_exits({1: killed, 2: killed}, {1: RUNNING, 2: RUNNING}) == [1, 2]
    own = "ended with exit code 1 (CapacityError: no room)"
    assert find_first_exits({1: error, 2: own}, {1: left, 2: left}) == [2]
    assert find_first_exits({1: health.describe_exit(0)}, {1: left}) == []


# ---- two monitors in one process -------------------------------------------------------------------


@pytest.fixture
def monitors() -> Iterator[list[HealthMonitor]]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made = [HealthMonitor(0, "127.0.0.1", store.port, rank, 2, timeout=60.0) for rank in (0, 1)]
    yield made
    for one in made:
        one.close()


def test_rank_that_has_failed_and_left_ends_the_wait_of_others(monitors):
    """It raises an error of its own and closes its mesh, before others look at it."""
    waiting, failing = monitors
    failing.explain("start of the process group", RuntimeError("of the test"))
    failing.close()
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 failed before") as caught:
        waiting.wait_for_ranks("start of the process group")
    assert time.monotonic() - start < 20 and caught.value.ranks == (1,)
    assert "see the error of rank 1" in str(caught.value)


def test_a_rank_that_was_suspended_finds_the_others_alive(monitors):
    """The others were suspended as well, and have no new heartbeat yet."""
    seconds = 0.0
    monitor = monitors[0]
    monitor.close()  # its thread would look at the clock in between
    monitor.clock = RunningClock(lambda: seconds)
    heartbeats = {1: replace(NOT_STARTED, count=7)}
    assert monitor._measure_silence(heartbeats) == {1: 0.0}
    for _ in range(4):
        seconds += 2.0
        monitor.clock.now()
    assert monitor._measure_silence(heartbeats) == {1: 8.0}
    seconds += 3600.0
    assert monitor._measure_silence(heartbeats) == {1: 11.0}


def test_hosts_that_can_not_connect(monitors):
    """The name of a host leads to its loopback interface: the error says what to set."""
    text = "Gloo connectFullMesh failed with timed out connecting: SO_ERROR: Connection refused, "
    error = monitors[0].explain("start of the axis", RuntimeError(text + "remote=[127.0.1.1]:4"))
    assert "can't connect to another one" in str(error) and "GLOO_SOCKET_IFNAME" in str(error)


# ---- ranks -----------------------------------------------------------------------------------------


def ask_rank_0(function: Callable[..., Any], *arguments: Any, ends: bool) -> Any:
    """What rank 0 returns while rank 1 is lost; `ends`: its process ends, and the pool notices."""
    pool = RankPool(2)
    try:
        for pipe in pool.pipes:
            pipe.send_bytes(pickle.dumps((function, arguments)))
        if ends:
            pool._receive(1)
        assert pool.pipes[0].poll(40), "rank 0 did not answer"
        answer = pool._receive(0)
        assert isinstance(answer, tuple), answer
        return answer[0]
    finally:
        pool.kill()


def test_killed_rank_is_named_within_seconds():
    """The launcher sees the end of its process: nobody waits for heartbeats."""
    start = time.monotonic()
    with RankPool(2, failure_grace=8) as pool, pytest.raises(RankError) as caught:
        pool.run(cases.lose_rank, 1, "SIGKILL")
    assert caught.value.ranks == (1,)
    assert "killed by SIGKILL" in str(caught.value)
    assert time.monotonic() - start < 20  # processes, imports, and a second


@pytest.mark.parametrize(
    ("call", "number"), [("init_process_group", 1), ("new_group", 1), ("new_group", 2)]
)
def test_rank_that_is_killed_while_groups_are_made(call: str, number: int):
    """torch.distributed waits for it until the timeout."""
    with RankPool(2, failure_grace=40) as pool, pytest.raises(RankError) as caught:
        pool.run(cases.lose_rank_at_start, call, number)
    assert "ValueError: soon: True; rank 1 is gone: 'start of the" in str(caught.value)


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_lost_rank_in_a_collective(how):
    text, seconds = ask_rank_0(cases.lose_rank, 1, how, ends=how == "SIGKILL")
    verb = "gone" if how == "SIGKILL" else "stopped"
    assert text.startswith(f"rank 1 is {verb}: 'world second sum' can't finish: rank 1 "), text
    assert "at step" in text and "working after 'world all-reduce'" in text
    assert seconds < (5 if how == "SIGKILL" else 10), text


def test_stuck_rank_is_named_with_its_stack(ranks):
    (text, seconds), _ = ranks(2).run(cases.get_stuck, 1)
    assert text.startswith("rank 1 did not reach 'world second sum' in 2 s: rank 1 is at step"), (
        text
    )
    assert "working after 'world all-reduce'" in text and "in work_for_long" in text
    assert 1.5 < seconds < 6.0


def test_slow_rank_is_named_in_a_warning(ranks):
    times, warnings, before = ranks(2).run(cases.come_late, 1)[0]
    assert before == "()"
    assert [one.rank for one in times if one.is_slow] == [1]
    assert times[1].work_seconds > cases.SECONDS_LATE and times[0].wait_seconds > 0.005
    assert len(warnings) == 1, warnings
    assert warnings[0].startswith("rank 1 is ") and "slower than the median" in warnings[0]


def test_rank_that_ends_before_the_mesh_is_named_at_once():
    text, seconds = ask_rank_0(cases.exit_before_the_mesh, 1, ends=True)
    assert text.startswith("rank 1 is gone: 'start' can't finish: rank 1 ended with exit code 3")
    assert seconds < 15


PLAIN_RANK = "from tests.parallel import health_cases as c; print(c.lose_rank(1, 'SIGKILL')[0])"


@pytest.mark.slow  # two processes that import torch, and a heartbeat that does not come
def test_ranks_of_any_launcher():
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are enough (Ray, Slurm): rank 0 hosts the store."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    clean = {name: text for name, text in os.environ.items() if not name.startswith("TORCHELASTIC")}
    addresses = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PLAIN_RANK],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env=clean | addresses | {"RANK": str(rank)},
        )
        for rank in range(2)
    ]
    text = processes[0].communicate(timeout=120)[0]
    assert processes[1].wait(10) == -signal.SIGKILL
    assert text.startswith("rank 1 is gone: 'world second sum' can't finish: rank 1 has had no")


# ---- worker processes ------------------------------------------------------------------------------


def test_worker_that_ends_is_reported_with_its_error():
    before = dict(os.environ)
    workers = WorkerProcesses(2, "tests.parallel.health_cases", b"no more of this")
    try:
        deadline = time.monotonic() + 20
        while not workers.exits and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(RankError, match="rank 1 is gone: it ended with exit code 1") as caught:
            workers.check()
        assert "ValueError: no more of this" in str(caught.value) and caught.value.ranks == (1,)
    finally:
        workers.close(0.0)
    workers.check()  # nothing is expected of closed workers
    assert dict(os.environ) == before


def test_a_process_that_is_stopped_before_its_first_report() -> None:
    """It is named soon: nothing but a signal from outside lets it go on."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    seconds = 0.0
    try:
        starting = StartingProcess(process)
        starting.clock = RunningClock(lambda: seconds)
        starting.started = starting.advanced = 0.0

        def look(times: int) -> list[str | None]:
            nonlocal seconds
            found = []
            for _ in range(times):
                seconds += 1.0
                found.append(starting.find_failure(timeout=60.0))
            return found

        wait_for(lambda: look(1) == [None] and read_process_state(process.pid)[0] == "S", 20.0)
        assert look(20) == [None] * 20
        process.send_signal(signal.SIGSTOP)
        wait_for(lambda: read_process_state(process.pid)[0] == "T", 20.0)
        starting.advanced = seconds
        *before, last = look(11)
        assert before == [None] * 10
        assert last == "is stopped, and has not reported in 10 s"
    finally:
        process.kill()
        process.wait()


DRIVER = """
import time
from fulgurite.parallel.processes.workers import WorkerProcesses
workers = WorkerProcesses(2, "tests.parallel.health_cases", b"sleep")
print(workers.processes[0].pid, flush=True)
time.sleep(60)
"""


def test_workers_exit_with_rank_0():
    """Also if it is killed, and whatever they do."""
    root = Path(__file__).parents[2]
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True, cwd=root
    )
    assert driver.stdout is not None
    worker = int(driver.stdout.readline())
    assert is_alive(worker)
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    deadline = time.monotonic() + 10
    while is_alive(worker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(worker)


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
