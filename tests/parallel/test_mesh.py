"""The mesh: who is where, what does not add up, and ranks that start and end together."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fulgurite.errors import ArgumentError, RankError
from fulgurite.parallel import Mesh, MeshShape, RankPool, launch
from fulgurite.parallel.collectives import shard_range
from tests.parallel import mesh_cases as cases


def test_axes_of_a_shape():
    shape = MeshShape(data=2, tensor=3, expert=2)
    assert shape.groups("tensor") == [[0, 1, 2], [3, 4, 5]]
    assert shape.groups("data") == [[0, 3], [1, 4], [2, 5]]
    assert shape.groups("expert") == [[0, 1], [2, 3], [4, 5]]
    assert shape.groups("expert_data") == [[0, 2, 4], [1, 3, 5]]
    for axis in ("world", "data", "tensor", "expert", "expert_data"):
        assert sorted(r for group in shape.groups(axis) for r in group) == list(range(6))


def test_tokens_of_a_rank():
    """Of a step of 33 tokens a replica: shared over the context axis, and with experts over both."""
    assert MeshShape(data=2, expert=2).count_rank_tokens(33) == 33
    assert MeshShape(context=4, tensor=2).count_rank_tokens(33) == 9
    assert MeshShape(context=4, tensor=2, expert=2).count_rank_tokens(33) == 5
    assert MeshShape(context=2, expert=2, pipeline=3).count_rank_tokens(33, micro_batches=3) == 6


@pytest.mark.parametrize(
    "world, data, tensor, expert, message",
    [
        (6, 2, 2, 1, "data 2 x tensor 2 = 4 ranks, but 6 were started"),
        (1, 1, 2, 1, "data 1 x tensor 2 = 2 ranks, but 1 was started"),
        (8, None, 3, 1, "data 2 x tensor 3 = 6 ranks, but 8 were started"),
        (8, 4, 2, 3, "expert 3 must divide data 4 x tensor 2 = 8 ranks"),
        (4, 4, 1, 8, "expert 8 must divide data 4 x tensor 1 = 4 ranks"),
        (4, 0, 4, 1, "data=0"),
    ],
)
def test_impossible_meshes_raise(world, data, tensor, expert, message):
    with pytest.raises(ArgumentError, match=message) as caught:
        MeshShape.for_world(world, data, tensor, expert)
    assert "next" in caught.value.details


def test_data_axis_defaults_to_world_over_tensor():
    assert MeshShape.for_world(8, None, 2, 4) == MeshShape(4, 2, 4)


def test_one_process_is_a_mesh_of_one():
    with Mesh() as mesh:
        assert [a.size for a in (mesh.data, mesh.tensor, mesh.expert, mesh.world)] == [1] * 4
        assert mesh.tensor.group is None and "rank 0" in repr(mesh)


def test_a_started_rank_without_an_address(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ArgumentError, match="MASTER_ADDR"):
        Mesh()


@pytest.mark.parametrize(
    "variables, message",
    [
        ({"WORLD_SIZE": "four"}, "WORLD_SIZE is 'four' and not a number"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is '' and not a number"),
        ({"RANK": "1"}, "RANK 1 is not in 0 to WORLD_SIZE 1 - 1 = 0"),
        ({"WORLD_SIZE": "0"}, "RANK 0 is not in 0 to WORLD_SIZE 0 - 1 = -1"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK -1 is not in 0 to WORLD_SIZE 2 - 1 = 1"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
    ],
)
def test_invalid_launcher_variables_raise(monkeypatch, variables, message):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentError, match=re.escape(message)):
        Mesh(timeout=1)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf")])
def test_a_timeout_is_a_time(timeout):
    with pytest.raises(ArgumentError, match="timeout="):
        Mesh(timeout=timeout)


@pytest.mark.parametrize("total", [0, 1, 5, 8, 97])
@pytest.mark.parametrize("step", [1, 3])
def test_shard_ranges_cover_everything_once(total, step):
    ranges = [shard_range(total, index, 4, step) for index in range(4)]
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(total))
    assert all(start % step == 0 or start == total for start, _ in ranges)


def test_ranks_and_meshes_one_after_another(ranks):
    for _ in range(2):  # a second mesh in the same processes
        found = ranks(4).run(cases.places)
        assert [rank for rank, *_ in found] == [0, 1, 2, 3]
        assert [data for _, data, *_ in found] == [(0, 2), (1, 3), (0, 2), (1, 3)]
        assert [tensor for _, _, tensor, _ in found] == [0, 1, 0, 1]


def test_wrong_world_size_raises_on_all_ranks(ranks):
    for text in ranks(4).run(cases.too_many):
        assert "data 3 x tensor 1 = 3 ranks, but 4 were started" in text


def test_failing_function_kills_all_ranks():
    started = time.monotonic()
    pool = RankPool(3, failure_grace=0.5)
    with pytest.raises(
        RankError, match="rank 1 of 3 failed: ValueError: no more of rank 1"
    ) as error:
        pool.run(cases.one_fails, 1)
    assert time.monotonic() - started < 30
    assert "rank 0: still running; killed" in str(error.value)
    assert not pool.is_alive
    with pytest.raises(RankError, match="have ended"):
        pool.run(cases.one_fails, 1)


def test_launch_gives_results_by_rank():
    results = launch(cases.doubled, 2, torch.arange(3))
    assert [r.tolist() for r in results] == [[0, 2, 4], [0, 3, 6]]
    with pytest.raises(ArgumentError, match="0 ranks"):
        launch(cases.doubled, 0)


def test_unpicklable_function_or_result_raises(ranks):
    with pytest.raises(ArgumentError, match="lambda> can't be sent to ranks"):
        ranks(2).run(lambda: 1)
    with pytest.raises(RankError, match="rank . of 2 failed: ValueError: invalid literal"):
        ranks(2).run(cases.unreadable)


def test_ranks_end_with_their_parent(tmp_path):
    """However it ends, and whatever they are doing."""
    names = "from fulgurite.parallel import launch; from tests.parallel.mesh_cases import stay"
    code = f"{names}; launch(stay, 2, {str(tmp_path)!r})"
    folder = Path(__file__).parents[2]
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=folder, stderr=subprocess.DEVNULL)
    try:
        _wait_until(lambda: len([*tmp_path.iterdir()]) == 2, 120)
    finally:
        parent.kill()
        parent.wait()
    pids = [int(file.name) for file in tmp_path.iterdir()]
    _wait_until(lambda: not any(map(_runs, pids)), 20)


def _wait_until(happens: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline, f"not in {seconds} s"
        time.sleep(0.1)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def test_messages_of_rank_0(ranks):
    texts = [b"", b"one", b"\0" * 100_000, b"two", b"three"]
    heard = ranks(4).run(cases.messages, texts, 1.3)
    assert heard == [[], texts, texts, texts]


def test_rank_0_leaves_without_stopping_workers(ranks):
    first, *others = ranks(4).run(cases.left_alone)
    assert first == ""
    for text in others:
        assert re.search(r"ranks? 0\b.* left while others waited in 'message of rank 0'", text)
