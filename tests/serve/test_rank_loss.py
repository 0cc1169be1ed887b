"""Lost ranks of engines of their own: four ranks, too many restarts, a server, torchrun.

A process can have the ranks of one `LLM` at a time, so these are not in test_rank_restart.py.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from fulgurite.errors import ArgumentError, RankError
from fulgurite.parallel.experts.placement import read_expert_load
from fulgurite.parallel.processes.workers import is_single_process
from fulgurite.serve.engine import rank_restart
from fulgurite.serve.engine.rank_restart import RestartPolicy
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.llm import LLM
from tests.parallel.engine_cases import PLAIN
from tests.serve.http.serving import MODEL
from tests.serve.http.tiny_server import serve_tiny
from tests.serve.rank_cases import PARAMS, Run, asked, kill, run_undisturbed, save_model
from tests.waiting import wait_for


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def wanted(folder) -> list[list[int]]:
    return run_undisturbed(folder)


@pytest.mark.slow  # four ranks
def test_two_of_four_ranks_at_once(folder, wanted):
    """With a data axis: requests of the other replica are retried as well."""
    options: dict[str, Any] = {"timeout": 120.0, "on_rank_failure": "retry", **PLAIN}
    with LLM(folder, tensor=2, data=2, **options) as llm:
        results = Run(llm, 25, lambda: kill(llm, 1, 3)).run()
        assert [one.token_ids for one in results] == wanted
        for rank in (1, 2, 3):
            results = Run(llm, 25, lambda rank=rank: kill(llm, rank)).run()
            assert [one.token_ids for one in results] == wanted
            llm.engine.restarter.recent.clear()
    assert is_single_process()


def test_load_counts_go_on_after_a_restart(tmp_path):
    """What was saved before a rank was lost is in the file that is saved later."""
    path, file = save_model(tmp_path, "qwen3_moe"), tmp_path / "load.json"
    with LLM(path, record_load=file, **PLAIN) as one:
        one.generate(*asked())
    once = read_expert_load(file)
    axes = {"data": 2, "expert": 2, "timeout": 120.0}
    with LLM(path, record_load=file, on_rank_failure="retry", **axes, **PLAIN) as llm:
        llm.generate(*asked())
        llm.save_load()
        assert torch.equal(read_expert_load(file), once)
        kill(llm, 1)
        wait_for(lambda: llm.workers.exits)
        llm.generate(*asked())
    assert torch.equal(read_expert_load(file), 2 * once)


@pytest.mark.parametrize("axes", [{"tensor": 2}, pytest.param({"data": 2}, marks=pytest.mark.slow)])
def test_a_rank_is_lost_with_steps_in_flight(folder, wanted, axes):
    """Tokens that were not read are sampled again; none is reported twice."""
    options: dict[str, Any] = {"timeout": 120.0, "on_rank_failure": "retry", **PLAIN}
    with LLM(folder, **axes, async_scheduling=True, **options) as llm:
        in_flight: list[int] = []

        def lose() -> None:
            in_flight.append(len(llm.engine.in_flight))
            kill(llm, 1)

        results = Run(llm, 25, lose).run()
        assert [one.token_ids for one in results] == wanted and in_flight == [1]
        assert max(one.restarts for one in results) == 1 and llm.engine.max_in_flight == 2
    assert is_single_process()


# ---- the end ---------------------------------------------------------------------------------------


def lose_ranks_for_good(folder: Path) -> None:
    """The first lost rank is one too many: requests are told, and later calls as well."""
    llm = LLM(folder, tensor=2, timeout=120.0, max_restarts=0, **PLAIN)
    assert llm.workers is not None
    processes = llm.workers.processes
    run = Run(llm, 10, lambda: kill(llm, 1))
    with pytest.raises(RankError, match="rank 1 is gone.*gave up after 0 restarts") as caught:
        run.run()
    assert caught.value.ranks == (1,)
    assert len(run.results) == len(PARAMS)
    for one in run.results.values():
        assert one.finish_reason == "error" and "rank 1 is gone" in str(one.error)
    for call in (lambda: llm.generate([[1, 2]]), llm.engine.step, llm.stats):
        with pytest.raises(RankError, match="gave up"):
            call()
    llm.close()
    assert all(process.poll() is not None for process in processes)


def test_too_many_restarts_end_every_request(folder):
    """Nothing is left behind: no process, port or thread."""
    LLM(folder, **PLAIN).generate([[1]])  # what the first engine of a process starts for good
    environment = dict(os.environ)
    sockets, threads = count_sockets(), threading.active_count()
    lose_ranks_for_good(folder)
    assert is_single_process() and dict(os.environ) == environment
    deadline = time.monotonic() + 10
    while count_sockets() > sockets and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    assert count_sockets() <= sockets and threading.active_count() <= threads


def count_sockets() -> int:
    """Open sockets of this process: ports and connections."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one of this listing
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum(link.startswith("socket:") for link in links)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"on_rank_failure": "ignore"}, "on_rank_failure='ignore'"),
        ({"max_restarts": -1}, "max_restarts=-1"),
    ],
)
def test_bad_policy(folder, options, text):
    with pytest.raises(ArgumentError, match=text):
        LLM(folder, tensor=2, **options, **PLAIN)


def test_restarts_outside_of_the_window_do_not_count(monkeypatch):
    now = 0.0
    monkeypatch.setattr(rank_restart.time, "monotonic", lambda: now)
    nothing = rank_restart.RankProcesses(lambda: None, lambda: None, lambda: pytest.fail())
    restarter = rank_restart.RankRestarter(RestartPolicy(max_restarts=2, delays=(0, 3)), nothing)
    error = RankError("rank 1 is gone", ranks=(1,))
    assert [restarter._count_restart(error) for _ in range(2)] == [0, 3]
    with pytest.raises(RankError, match="rank 1 is gone; the engine gave up after 2 restarts"):
        restarter._count_restart(error)
    now = rank_restart.RESTART_WINDOW + 1
    assert restarter._count_restart(error) == 0 and restarter.num_restarts == 3


# ---- the server ------------------------------------------------------------------------------------


@pytest.mark.slow  # a server over two ranks, and two restarts
@pytest.mark.parametrize("mode", ["retry", "fail"])
def test_server_goes_on_after_a_lost_rank(tmp_path, mode):
    """/health says restarting; a stream goes on or ends with an error; new requests wait."""
    engine = {"tensor": 2, "on_rank_failure": mode, "max_restarts": 5, "timeout": 120.0}
    body: dict[str, Any] = {"model": MODEL, "prompt": "abc", "max_tokens": 400, "ignore_eos": True}
    body["temperature"] = 0
    with serve_tiny(tmp_path, engine, engine_in="process") as server:
        undisturbed = server.post("/v1/completions", body, timeout=120.0).json()
        (client,) = server.app.server.clients
        (worker,) = find_children(client.process.pid)
        with ThreadPoolExecutor(2) as pool:
            running = pool.submit(server.post, "/v1/completions", body, timeout=120.0)
            wait_for(lambda: client.progress.running)
            os.kill(worker, signal.SIGKILL)
            wait_for(lambda: server.get("/health").json()["status"] == "restarting")
            answer = server.get("/health")
            assert answer.status_code == 503
            assert "rank 1 is gone" in answer.json()["engines"][0]["restarting"]
            waiting = pool.submit(server.post, "/v1/completions", body, timeout=120.0)
        texts = [undisturbed["choices"][0]["text"]]
        texts.append(waiting.result().json()["choices"][0]["text"])
        if mode == "retry":
            texts.append(running.result().json()["choices"][0]["text"])
        else:
            assert running.result().status_code == 503 and "rank 1 is gone" in running.result().text
        assert len({*texts}) == 1
        health_now = server.get("/health")
        assert health_now.status_code == 200 and health_now.json()["engines"][0]["restarts"] == 1
        (worker,) = find_children(client.process.pid)  # while nothing runs
        os.kill(worker, signal.SIGKILL)
        wait_for(lambda: server.get("/health").json()["engines"][0]["restarts"] == 2)
        assert (
            server.post("/v1/completions", body, timeout=120.0).json()["choices"][0]["text"]
            == texts[0]
        )


def find_children(pid: int) -> list[int]:
    """The worker processes of an engine."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == pid and b"worker_main" in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
    return found


# ---- torchrun --------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys
from fulgurite.serve.llm import LLM
from fulgurite.serve.engine.request import SamplingParams
llm = LLM(sys.argv[1], tensor=2, timeout=20.0, context=64, max_sequences=4, cache_tokens=160)
if os.environ["RANK"] == "1" and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
    os.kill(os.getpid(), signal.SIGKILL)
if llm.is_driver:
    results = []
    llm.engine.add_request([1, 2], listener=lambda update: results.append(update.result))
    try:
        print(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids)
    finally:
        print("told:", [one.error for one in results if one is not None], file=sys.stderr)
llm.close()
"""


@pytest.mark.slow  # torchrun starts two ranks, twice
@pytest.mark.parametrize("restarts", [0, 1])
def test_torchrun_restarts_the_ranks(folder, tmp_path, restarts):
    """The driver can't: its requests fail with the rank's name, and its process ends."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(restarts), str(script), str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert (done.returncode == 0) == bool(restarts), done.stderr[-3000:]
    expected = LLM(folder, **PLAIN).generate(
        [[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True)
    )
    assert done.stdout.strip() == (str(expected[0].token_ids) if restarts else "")
