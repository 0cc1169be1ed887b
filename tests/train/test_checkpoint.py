"""A checkpoint is whole or not there, holds every bit, and loads on any number of ranks."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from fulgurite.errors import ArgumentError, RankError
from fulgurite.parallel.processes.launch import PRELOADED_MODULES, RankPool, launch
from fulgurite.train.checkpoint import (
    CheckpointError,
    CheckpointManager,
    CheckpointWarning,
    DamagedCheckpointError,
    hash_checkpoint,
    hash_state,
    list_checkpoints,
    read_checkpoint,
    training_state,
    verify_checkpoint,
)
from fulgurite.train.checkpoint import folder as folders
from fulgurite.train.checkpoint.state import flatten
from fulgurite.train.config import CheckpointSection
from tests.train import fault_worker as worker

WORKER = "tests.train.fault_worker"
SAVE_PHASES = [
    ("save:staged", 3),
    ("save:folder", 3),
    ("save:write", 1),
    ("save:write", 7),  # in the middle of the third save
    ("save:written", 3),
    ("save:synced", 3),
    ("save:manifest", 3),
    ("save:published", 3),
    ("save:prune", 1),
    ("save:pruned", 3),
    ("save:replace", 1),
]
LOAD_PHASES = [("load:verify", 1), ("load:verified", 1), ("load:read", 1), ("load:loaded", 1)]


@pytest.fixture(scope="module", autouse=True)
def preload() -> None:
    """Rank processes start from a server that has imported the worker."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED_MODULES, WORKER])


def run_process(function: Callable[..., Any], *arguments: Any) -> int | None:
    """Run a function in a process of its own; returns its exit code."""
    process = multiprocessing.get_context("forkserver").Process(target=function, args=arguments)
    process.start()
    process.join(60)
    assert process.exitcode is not None, "the process hangs"
    return process.exitcode


def make_state(seed: int = 0) -> dict[str, Any]:
    """Every dtype and shape that a run may have."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (24,), generator=generator, dtype=torch.uint8)
    return {
        "model": {
            "w.weight": torch.randn(5, 3, generator=generator),
            "transposed": torch.randn(4, 6, generator=generator).t(),
            "view": torch.randn(10, generator=generator)[2:7],
            "half": torch.randn(7, generator=generator).bfloat16(),
            "fp8": bits.view(torch.float8_e4m3fn),
            "codes": bits.clone(),
            "empty": torch.zeros(0, 3),
            "flag": torch.tensor([True, False]),
            "nan": torch.tensor([float("nan"), float("-inf"), -0.0]),
        },
        "optimizer": {0: {"step": torch.tensor(3.0)}, 1: [torch.ones(2), 7]},
        "step": 11,
        "names": ["a", ("b", 2)],
        "nothing": {},
        "none": None,
    }


def zeros_like(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: zeros_like(value) for key, value in state.items()}
    if isinstance(state, list) and any(isinstance(value, torch.Tensor) for value in state):
        return [zeros_like(value) for value in state]
    if isinstance(state, torch.Tensor):
        return torch.zeros(state.shape, dtype=torch.uint8).to(state.dtype)
    return state if state == {} else "unset"


def test_every_bit_of_every_dtype_comes_back(tmp_path: Path) -> None:
    state = make_state()
    with CheckpointManager(tmp_path) as manager:
        manager.save(11, state)
    loaded = zeros_like(state)
    with CheckpointManager(tmp_path) as manager:
        assert manager.load_latest(loaded) == 11
    assert hash_state(loaded) == hash_state(state)
    values = {k: v for k, v in flatten(loaded).items() if not isinstance(v, torch.Tensor)}
    expected = {k: v for k, v in flatten(state).items() if not isinstance(v, torch.Tensor)}
    assert values == expected
    assert hash_state(read_checkpoint(tmp_path / "step-000011")) == hash_state(state)


def test_read_checkpoint_of_a_prefix(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, make_state())
    read = read_checkpoint(tmp_path / "step-000001", prefix="optimizer.")
    assert sorted(read) == ["optimizer.0.step", "optimizer.1.0", "optimizer.1.1"]
    assert read["optimizer.1.1"] == 7


def test_training_resumes_with_the_same_bits(tmp_path: Path) -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            worker.train_step(model, optimizer, step)

    whole = worker.build(sharded=False)
    run(*whole, range(6))
    first = worker.build(sharded=False)
    run(*first, range(3))
    with CheckpointManager(tmp_path) as manager:
        manager.save(3, training_state(*first))
        run(*first, range(3, 5))  # while the thread writes: the checkpoint is of step 3
    resumed = worker.build(sharded=False)
    with CheckpointManager(tmp_path) as manager:
        assert manager.load_latest(training_state(*resumed)) == 3
    run(*resumed, range(3, 6))
    assert hash_state(training_state(*resumed)) == hash_state(training_state(*whole))


def test_a_save_holds_the_values_of_its_moment(tmp_path: Path) -> None:
    """The thread writes only after the live tensor has changed."""
    changed = threading.Event()

    def hold(phase: str) -> None:
        if phase == "save:folder":
            assert changed.wait(30)

    state = {"weight": torch.ones(4), "log": [1]}
    with CheckpointManager(tmp_path, on_phase=hold) as manager:
        manager.save(1, state)
        state["weight"].zero_()
        state["log"].append(2)
        changed.set()
    read = read_checkpoint(tmp_path / "step-000001")
    assert read["weight"].tolist() == [1, 1, 1, 1] and read["log"] == [1]


def test_host_buffers_are_reused_and_follow_shapes(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.prepare({"a": torch.zeros(3)})
        prepared = manager._buffers._buffers["a"]
        manager.save(1, {"a": torch.ones(3)}, wait=True)
        assert manager._buffers._buffers["a"] is prepared
        manager.save(2, {"a": torch.ones(5), "b": torch.ones(1)}, wait=True)
        manager.save(3, {"b": torch.ones(1)}, wait=True)
        assert list(manager._buffers._buffers) == ["b"]
    assert read_checkpoint(tmp_path / "step-000002")["a"].tolist() == [1] * 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copies_from_a_gpu_precede_the_next_update(tmp_path: Path) -> None:
    weights = {f"w{i}": torch.ones(1 << 20, device="cuda") for i in range(32)}
    with CheckpointManager(tmp_path) as manager:
        manager.prepare(weights)
        assert all(buffer.is_pinned() for buffer in manager._buffers._buffers.values())
        for _ in range(3):
            manager.save(1, weights)
            for weight in weights.values():
                weight.add_(1)
        manager.wait()
    read = read_checkpoint(tmp_path / "step-000001")
    assert all(torch.equal(value, torch.full((1 << 20,), 3.0)) for value in read.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_update_waits_for_copies_that_overlap(tmp_path: Path) -> None:
    """Copies have a stream of their own: the step of the optimizer waits for it, forward does not."""
    weights = [torch.nn.Parameter(torch.ones(1 << 22, device="cuda")) for _ in range(32)]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    state = {f"w{i}": weight.detach() for i, weight in enumerate(weights)}
    with CheckpointManager(tmp_path) as manager:
        manager.overlap_copies(optimizer)
        manager.prepare(state)
        for _ in range(3):
            manager.save(1, state)
            for weight in weights:
                weight.grad = -torch.ones_like(weight)
            optimizer.step()
        manager.wait()
    read = read_checkpoint(tmp_path / "step-000001")
    assert all(bool((value == 3.0).all()) for value in read.values())


def test_the_optimizer_orders_its_update_behind_a_save(tmp_path: Path) -> None:
    """Once for each save, before the weights change."""
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer, seen = torch.optim.SGD([weight], lr=1.0), []
    with CheckpointManager(tmp_path) as manager:
        manager.overlap_copies(optimizer)
        manager.save(1, {"w": weight.detach()})
        staged = manager._staged
        assert staged is not None
        with mock.patch.object(
            type(staged), "order_update", lambda _: seen.append(weight.tolist())
        ):
            optimizer.step()
            optimizer.step()
    assert seen == [[1.0, 1.0, 1.0]] and manager._staged is None


def test_the_newest_are_kept(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, CheckpointSection(keep=3)) as manager:
        for step in (1, 5, 20, 1_000_000, 7):
            manager.save(step, {"step": step})
    assert [step for step, _ in list_checkpoints(tmp_path)] == [7, 20, 1_000_000]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_step_is_replaced(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"a": torch.zeros(2)})
        manager.save(1, {"a": torch.ones(2)})
    assert read_checkpoint(tmp_path / "step-000001")["a"].tolist() == [1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_an_empty_folder_has_no_checkpoint(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "new" / "deep") as manager:
        assert manager.latest() is None
        assert manager.load_latest({"a": torch.ones(1)}) is None
        with pytest.raises(CheckpointError, match="no checkpoint"):
            manager.load(tmp_path / "step-000001", {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["model"].pop("half"), "also has model.half"),
        (lambda s: s["model"].update(extra=torch.ones(1)), "lacks model.extra"),
        (lambda s: s["model"].update(half=torch.ones(7)), "model.half is torch.bfloat16"),
        (
            lambda s: s["model"].update(codes=torch.ones(3, dtype=torch.uint8)),
            "codes is torch.uint8",
        ),
        (lambda s: s.update(step=torch.tensor(3)), "step is no tensor"),
        (lambda s: s["model"].update(codes=3), "the run has no tensor"),
    ],
)
def test_a_state_that_differs_is_refused(
    tmp_path: Path, change: Callable[[Any], Any], message: str
) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, make_state())
        state = make_state()
        change(state)
        with pytest.raises(CheckpointError, match=message):
            manager.load_latest(state)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"b.c": 1}, "a.b": {"c": 2}}, "two values of the state have the name a.b.c"),
        ({"a": torch.empty(2, device="meta")}, "on the meta device"),
        ({"a": torch.eye(2).to_sparse()}, "layout torch.sparse_coo"),
        ({"a": (torch.ones(1),)}, "tuple with tensors"),
    ],
)
def test_values_that_can_not_be_saved(tmp_path: Path, state: Any, message: str) -> None:
    with CheckpointManager(tmp_path) as manager, pytest.raises(CheckpointError, match=message):
        manager.save(1, state)


def test_an_unpicklable_value_is_an_error_at_the_next_step(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"a": 1}, wait=True)
        manager.save(2, {"a": os.getpid, "b": lambda: 1})
        manager._join()
        with pytest.raises(CheckpointError, match=r"step 2 was not saved.*pickle"):
            manager.check()
        manager.check()  # an error is told once
        assert manager.latest() == tmp_path / "step-000001"
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_an_optimizer_of_another_model_is_refused() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 3).parameters())
    with pytest.raises(ArgumentError, match=r"shape \(3, 2\) that is not one of the model"):
        training_state(nn.Linear(2, 3), optimizer)


def test_keep_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="keep"):
        CheckpointManager(tmp_path, CheckpointSection(keep=0))


# --- damage


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


FILES = ["__0_0.distcp", ".metadata", "manifest.json"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", [flip_bit, truncate, Path.unlink])
def test_a_damaged_newest_is_passed_over(
    tmp_path: Path, damage: Callable[[Path], None], file: str
) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {"weight": torch.full((4,), float(step))})
    damage(tmp_path / "step-000002" / file)
    with pytest.raises(DamagedCheckpointError):
        verify_checkpoint(tmp_path / "step-000002")
    state = {"weight": torch.zeros(4)}
    with CheckpointManager(tmp_path) as manager:
        with pytest.warns(CheckpointWarning, match="step-000002 is damaged"):
            assert manager.load_latest(state) == 1
        assert state["weight"].tolist() == [1] * 4
        manager.save(2, state)  # the run goes on over the same step
    assert [step for step, _ in list_checkpoints(tmp_path)] == [1, 2]
    assert (tmp_path / "step-000002.damaged-1").is_dir()


def test_a_damaged_checkpoint_is_not_loaded_by_name(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"weight": torch.ones(4)}, wait=True)
        flip_bit(tmp_path / "step-000001" / "__0_0.distcp")
        with pytest.raises(DamagedCheckpointError, match="other bytes"):
            manager.load(tmp_path / "step-000001", {"weight": torch.zeros(4)})


def test_all_damaged_is_an_error(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {"weight": torch.ones(4)})
        manager.wait()
        for step in (1, 2):
            (tmp_path / f"step-00000{step}" / "manifest.json").write_text("{}")
        with (
            pytest.warns(CheckpointWarning),
            pytest.raises(CheckpointError, match="no checkpoint in .* is whole") as caught,
        ):
            manager.latest()
    assert "step-000001" in str(caught.value) and "step-000002" in str(caught.value)
    with (  # nor does the next start begin again from nothing
        CheckpointManager(tmp_path) as manager,
        pytest.raises(CheckpointError, match="no checkpoint in .* is whole"),
    ):
        manager.latest()


def test_a_checkpoint_of_another_step_under_a_name(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"weight": torch.ones(4)})
    shutil.copytree(tmp_path / "step-000001", tmp_path / "step-000009")
    with CheckpointManager(tmp_path) as manager, pytest.warns(CheckpointWarning, match="step 1"):
        assert manager.latest() == tmp_path / "step-000001"


def test_the_hash_of_a_checkpoint_names_its_bytes(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"weight": torch.ones(4)})
        manager.save(2, {"weight": torch.zeros(4)})
    first, second = (hash_checkpoint(path) for _, path in list_checkpoints(tmp_path))
    assert first != second


# --- storage


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("no permission to mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_keeps_the_checkpoint_before(small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(bytes(720_000))  # room for one checkpoint of 160 kB
    reports = worker.fill_small_disk(str(small_disk), steps=4, free_after=4)
    assert reports[0] == "saved" and reports[3] == "saved"
    assert "step 2 was not saved" in reports[1] and "step 3 was not saved" in reports[2]
    assert [path.name for path in (small_disk / "checkpoints").iterdir()] == ["step-000004"]


def test_a_disk_that_is_full_in_the_middle_of_a_file(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the check of free space before the save."""
    usage = shutil.disk_usage(small_disk)._replace(free=1 << 40)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    (small_disk / "filler").write_bytes(bytes(720_000))
    reports = worker.fill_small_disk(str(small_disk), steps=3, free_after=3)
    assert reports[0] == "saved" and reports[2] == "saved"
    assert "step 2 was not saved" in reports[1] and "make room" in reports[1], reports[1]


@pytest.mark.parametrize("limit", [0, 1, 100, 20_000, 100_000])
def test_files_that_may_not_grow(tmp_path: Path, limit: int) -> None:
    """The system refuses a write at byte `limit` of any file."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"weight": torch.ones(40_000)}, wait=True)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            manager.save(2, {"weight": torch.zeros(40_000)})
            manager._join()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        with pytest.warns(CheckpointWarning, match=r"step 2 was not saved(.|\n)*the run goes on"):
            manager.check()
        assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
        manager.save(3, {"weight": torch.zeros(40_000)})
    assert [step for step, _ in list_checkpoints(tmp_path)] == [1, 3]


def test_the_run_stops_after_several_refused_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(tmp_path)
    usage = shutil.disk_usage(tmp_path)._replace(free=3)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    warned = 0
    with (
        pytest.raises(CheckpointError, match="has 3 B left, and a checkpoint needs 16 B"),
        warnings.catch_warnings(record=True) as w,
    ):
        warnings.simplefilter("always")
        for step in range(10):
            manager.save(step, {"weight": torch.ones(4)})
            warned = len(w)
    assert warned == 2
    monkeypatch.undo()
    manager.save(9, {"weight": torch.ones(4)}, wait=True)
    manager.close()


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match="can't be written"):
        CheckpointManager(tmp_path / "checkpoints")


def test_a_read_only_file_system(small_disk: Path) -> None:
    with CheckpointManager(small_disk / "checkpoints") as manager:
        manager.save(1, {"weight": torch.ones(4)}, wait=True)
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        manager.save(2, {"weight": torch.ones(4)})
        manager._join()
        with pytest.warns(CheckpointWarning, match="Read-only file system"):
            manager.check()
    with pytest.raises(CheckpointError, match="Read-only"):
        CheckpointManager(small_disk / "new")
    with CheckpointManager(small_disk / "checkpoints") as manager:  # loads, for example to verify
        assert manager.load_latest({"weight": torch.zeros(4)}) == 1


# --- kill -9


@pytest.mark.parametrize(("phase", "occurrence"), SAVE_PHASES)
def test_kill_in_a_save(tmp_path: Path, phase: str, occurrence: int) -> None:
    assert run_process(worker.run_loop, str(tmp_path), 5, phase, occurrence) == -9
    published = [step for step, _ in list_checkpoints(tmp_path)]
    assert len(published) <= 3
    assert run_process(worker.run_loop, str(tmp_path), 5) == 0  # checks the weight it resumes from
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-000004", "step-000005"]
    assert torch.equal(read_checkpoint(tmp_path / "step-000005")["weight"], worker.weight_at(5))


@pytest.mark.parametrize(("phase", "occurrence"), LOAD_PHASES)
def test_kill_in_a_load(tmp_path: Path, phase: str, occurrence: int) -> None:
    worker.run_loop(str(tmp_path), 2)
    before = {path: hash_checkpoint(path) for _, path in list_checkpoints(tmp_path)}
    assert run_process(worker.run_loop, str(tmp_path), 5, phase, occurrence) == -9
    assert {path: hash_checkpoint(path) for _, path in list_checkpoints(tmp_path)} == before
    assert worker.run_loop(str(tmp_path), 3) == 2


def test_kill_between_the_renames_of_a_replacement(tmp_path: Path) -> None:
    """The only checkpoint has lost its name, and comes back."""
    assert run_process(worker.run_loop, str(tmp_path), 1, "save:replace", 1) == -9
    assert list_checkpoints(tmp_path) == []
    assert worker.run_loop(str(tmp_path), 1) == 1


def test_leftovers_of_a_live_process_stay(tmp_path: Path) -> None:
    host = folders.socket.gethostname()
    alive = tmp_path / f"step-000003.tmp-{host}-{os.getppid()}"
    alive.mkdir()
    (tmp_path / f"step-000003.tmp-{host}-{2**22 + 1}").mkdir()
    (tmp_path / "step-000003.tmp-elsewhere-1").mkdir()
    (tmp_path / "notes").mkdir()
    CheckpointManager(tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", alive.name]


# --- ranks


def test_resume_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    """4 -> 2 -> 3 -> 1, FSDP2 and AdamW, shapes that do not divide."""
    digest, start = launch(worker.run_sharded, 4, str(tmp_path), 3, None)[0]
    assert start == 0
    for ranks, expected_start in ((2, 3), (3, 5)):
        results = launch(worker.run_sharded, ranks, str(tmp_path), 2, digest)
        assert [s for _, s in results] == [expected_start] * ranks
        assert len({d for d, _ in results}) == 1
        digest = results[0][0]
    model, optimizer = worker.build(sharded=False)
    state = {**training_state(model, optimizer), "step": 0}
    with CheckpointManager(tmp_path) as manager:
        assert manager.load_latest(state) == 7
    assert state["step"] == 7
    assert hash_state(training_state(model, optimizer)) == digest


def test_replicas_that_differ_are_named(tmp_path: Path) -> None:
    errors = launch(worker.save_unequal_replicas, 2, str(tmp_path))
    assert all("experts differs between rank 0 and rank 1" in error for error in errors)
    assert list(tmp_path.iterdir()) == []


def test_damage_is_seen_by_all_ranks(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {"weight": torch.full((4,), float(step)), "step": step})
    flip_bit(tmp_path / "step-000002" / "__0_0.distcp")
    assert launch(worker.load_damaged_on_ranks, 3, str(tmp_path)) == [(1, [1.0] * 4)] * 3


@pytest.mark.parametrize(
    ("rank", "phase", "occurrence"),
    [
        (1, "save:write", 2),
        (0, "save:manifest", 2),
        (1, "save:synced", 2),
        (0, "save:published", 2),
    ],
)
def test_kill_of_one_rank_in_a_save(tmp_path: Path, rank: int, phase: str, occurrence: int) -> None:
    with RankPool(2, failure_grace=20) as pool, pytest.raises(RankError) as caught:
        pool.run(worker.run_killed_rank, str(tmp_path), rank, phase, occurrence)
    assert rank in caught.value.ranks
    expected = 2 if phase == "save:published" else 1
    state = {"weight": torch.zeros(8, 5), "step": 0}
    with CheckpointManager(tmp_path) as manager:
        assert manager.load_latest(state) == expected
    assert torch.equal(state["weight"], worker.weight_at(expected))
