"""A dead or stalled rank is named, and all start again from the last checkpoint; signals drain."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fulgurite.errors import ArgumentError, RankError
from fulgurite.running_clock import RunningClock
from fulgurite.train.checkpoint import hash_state, list_checkpoints, read_checkpoint
from fulgurite.train.config import CheckpointSection, ModelSection, ParallelSection, TrainConfig
from fulgurite.train.heartbeat import Beat, Heartbeat, read_beat
from fulgurite.train.rank_group import RankExit, RankGroup, choose_threads
from fulgurite.train.stop import StopRequest
from fulgurite.train.supervisor import Watch, choose_failure, supervise, was_stopped_early
from tests.train import tiny_run
from tests.waiting import wait_for


def make_config(
    folder: Path, *, restarts: int = 3, timeout: float = 60.0, **faults: Any
) -> TrainConfig:
    return TrainConfig(
        output=str(folder),
        steps=6,
        deterministic=True,
        model=ModelSection(fields=faults),
        checkpoint=CheckpointSection(every=2, max_restarts=restarts),
        parallel=ParallelSection(timeout=timeout),
    )


def final_hash(folder: Path) -> tuple[int, str]:
    step, path = list_checkpoints(folder / "checkpoints")[-1]
    return step, hash_state(read_checkpoint(path))


def read_events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "supervisor.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[int, str]]:
    found = {}
    for ranks in (1, 2):
        folder = tmp_path_factory.mktemp("undisturbed")
        assert supervise(make_config(folder), ranks, tiny_run.train) == 0
        found[ranks] = final_hash(folder)
    return found


SLOW = pytest.mark.slow  # variants of the others


@pytest.mark.parametrize(
    ("ranks", "rank", "kind"),
    [
        (2, 0, "kill"),
        (2, 1, "error"),
        pytest.param(1, 0, "kill", marks=SLOW),
        pytest.param(1, 0, "error", marks=SLOW),
        pytest.param(2, 1, "kill", marks=SLOW),
        pytest.param(2, 0, "error", marks=SLOW),
    ],
)
def test_a_dead_rank_is_named_and_all_start_again(
    tmp_path: Path,
    undisturbed: dict[int, tuple[int, str]],
    capfd: pytest.CaptureFixture[str],
    kind: str,
    ranks: int,
    rank: int,
) -> None:
    config = make_config(tmp_path, kind=kind, rank=rank, at=5, once=True)
    assert supervise(config, ranks, tiny_run.train) == 0
    assert final_hash(tmp_path) == undisturbed[ranks]
    restart = next(event for event in read_events(tmp_path) if event["event"] == "restart")
    assert restart["rank"] == rank and restart["from_step"] in (2, 4)
    word = "killed by SIGKILL" if kind == "kill" else "a number nobody likes"
    assert word in restart["what"] and "after step 5" in restart["what"]
    assert word in capfd.readouterr().err


def test_a_stalled_rank_is_found(tmp_path: Path, undisturbed: dict[int, tuple[int, str]]) -> None:
    config = make_config(tmp_path, timeout=5.0, kind="stop", rank=1, at=3, once=True)
    assert supervise(config, 2, tiny_run.train) == 0
    assert final_hash(tmp_path) == undisturbed[2]
    restart = next(event for event in read_events(tmp_path) if event["event"] == "restart")
    assert "no rank made progress" in restart["what"]


def test_restarts_are_limited(tmp_path: Path) -> None:
    config = make_config(tmp_path, restarts=2, kind="error", at=3)
    with pytest.raises(RankError, match=r"rank 0 failed after step 3: ArithmeticError") as caught:
        supervise(config, 1, tiny_run.train)
    assert caught.value.ranks == (0,)
    text = str(caught.value)
    assert "2 restarts did not help" in text and "step 2 is saved" in text and "--resume" in text
    assert "fail_at_step" in text  # its traceback
    assert [e["event"] for e in read_events(tmp_path)].count("start") == 3


def test_an_error_before_the_first_step_is_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(
        RankError, match="rank 1 failed before its first step: ValueError: the data"
    ):
        supervise(make_config(tmp_path, start_error=True, rank=1), 2, tiny_run.train)
    assert [e["event"] for e in read_events(tmp_path)].count("start") == 1


def test_new_checkpoints_renew_the_limit(tmp_path: Path) -> None:
    """Two kills, a limit of one restart, and a checkpoint between them."""
    killed: list[int] = []

    def kill_after(group: RankGroup) -> None:
        def work() -> None:
            goal = {0: 3, 1: 5}.get(len(killed))
            if goal:
                wait_for(lambda: (group.beats()[0] or Beat(0, 0)).step >= goal)
                killed.append(goal)
                os.kill(group.pids[0], signal.SIGKILL)

        threading.Thread(target=work, daemon=True).start()

    config = make_config(tmp_path, restarts=1, sleep=0.1)
    assert supervise(config, 1, tiny_run.train, kill_after) == 0
    assert killed == [3, 5]


@pytest.mark.parametrize(
    ("ranks", "number"),
    [
        (1, signal.SIGTERM),
        (2, signal.SIGINT),
        pytest.param(2, signal.SIGTERM, marks=SLOW),
        pytest.param(1, signal.SIGINT, marks=SLOW),
    ],
)
def test_a_signal_saves_and_ends(
    tmp_path: Path,
    undisturbed: dict[int, tuple[int, str]],
    ranks: int,
    number: signal.Signals,
) -> None:
    config = replace(make_config(tmp_path, sleep=0.05), steps=10_000)

    def interrupt(group: RankGroup) -> None:
        def work() -> None:
            wait_for(lambda: (group.beats()[0] or Beat(0, 0)).step >= 3)
            os.kill(os.getpid(), number)

        threading.Thread(target=work, daemon=True).start()

    assert supervise(config, ranks, tiny_run.train, interrupt) == 128 + number
    step, _ = final_hash(tmp_path)
    assert 3 <= step < 1000
    receipt = json.loads((tmp_path / "receipt.json").read_text())
    assert receipt["is_finished"] and max(map(int, receipt["losses"])) == step
    if step < 6:  # the run goes on where it was stopped
        assert supervise(replace(config, steps=6), ranks, tiny_run.train) == 0
        assert final_hash(tmp_path) == undisturbed[ranks]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.mark.slow
def test_ranks_end_with_a_killed_supervisor(tmp_path: Path) -> None:
    config = replace(make_config(tmp_path, sleep=0.05), steps=10_000)
    context = multiprocessing.get_context("forkserver")
    supervisor = context.Process(target=supervise, args=(config, 2, tiny_run.train))
    supervisor.start()
    while (read_beat(tmp_path, 1) or Beat(0, 0)).step < 2:
        assert supervisor.is_alive()
        time.sleep(0.01)
    pids = read_events(tmp_path)[0]["pids"]
    assert len(pids) == 2 and all(is_alive(pid) for pid in pids)
    supervisor.kill()
    supervisor.join()
    deadline = time.monotonic() + 30
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(is_alive(pid) for pid in pids)


def test_numbers_that_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="0 ranks"):
        supervise(make_config(tmp_path), 0, tiny_run.train)
    with pytest.raises(ArgumentError, match="no folder"):
        supervise(TrainConfig(), 1, tiny_run.train)


def test_the_rank_at_fault_is_chosen_among_all_errors() -> None:
    lost = RankExit(0, 1, "RuntimeError: gloo connection closed by peer", "t", 4)
    killed = RankExit(1, -9, None, None, 4)
    raised = RankExit(2, 1, "ValueError: bad", "t", 4)
    running = RankExit(3, None, None, None, 4)
    assert choose_failure([lost, killed, raised, running]).rank == 1
    failure = choose_failure([lost, raised, running])
    assert failure.rank == 2 and "rank 0 failed" in (failure.others or "")
    assert choose_failure([lost, running]).rank == 0
    assert choose_failure([running, RankExit(1, 7, None, None, None)]).what.endswith(
        "ended with exit code 7 before its first step"
    )


def test_ranks_that_a_stop_ends_before_their_first_step_did_not_fail() -> None:
    def exits(*codes: int | None, last_step: int | None = None) -> list[RankExit]:
        return [RankExit(r, code, None, None, last_step) for r, code in enumerate(codes)]

    assert was_stopped_early(exits(-signal.SIGTERM, None))
    assert was_stopped_early(exits(-signal.SIGTERM, 0, -signal.SIGTERM))
    assert not was_stopped_early(exits(-signal.SIGTERM, -signal.SIGKILL))
    assert not was_stopped_early(exits(-signal.SIGTERM, 1))
    assert not was_stopped_early(exits(-signal.SIGTERM, last_step=3))  # it should have saved


def test_threads_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert choose_threads(TrainConfig(), 2) == 5
    assert choose_threads(TrainConfig(deterministic=True), 2) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert choose_threads(TrainConfig(), 3) == 2


def test_a_suspended_run_does_not_stall() -> None:
    """Ctrl-Z stops the supervisor and all ranks, for longer than ranks may take for a step."""
    seconds, beats = 0.0, [Beat(3, 3), Beat(3, 3)]
    group: Any = SimpleNamespace(beats=lambda: beats)
    watch = Watch(group, timeout=10.0, clock=RunningClock(lambda: seconds))

    def wait(looks: int) -> str | None:
        nonlocal seconds
        found = None
        for _ in range(looks):
            seconds += 1.0
            found = watch.find_stall()
        return found

    assert wait(5) is None
    seconds += 3600.0
    assert wait(2) is None
    assert "rank 0 is behind, with step 3 done" in (wait(12) or "")


def test_heartbeats(tmp_path: Path) -> None:
    assert read_beat(tmp_path, 0) is None
    heartbeat = Heartbeat(tmp_path, 0)
    assert read_beat(tmp_path, 0) is None
    for step in (123456789, 2, 2):
        heartbeat.beat(step)
    assert read_beat(tmp_path, 0) == Beat(2, 3)
    heartbeat.close()


def test_a_stop_request_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    try:
        with StopRequest() as stop:
            assert not stop.poll()
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.poll() and stop.received is signal.SIGTERM
            os.kill(os.getpid(), signal.SIGINT)  # the same request, passed on by a launcher
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.received is signal.SIGTERM and not ended
            monkeypatch.setattr("fulgurite.train.stop.REPEAT_SECONDS", 0.0)
            os.kill(os.getpid(), signal.SIGTERM)
            assert ended == [signal.SIGTERM]  # a second request ends the process
    finally:
        signal.signal(signal.SIGTERM, before)
    with StopRequest() as stop:
        stop.request()
        assert stop.poll()
