"""`CheckpointManager`: saves and loads the state of a run.

    manager = CheckpointManager(run / "checkpoints", config.checkpoint, layout)
    step = manager.load_latest(state)          # None: there is none
    for step in ...:
        manager.check()                        # an error of the writing thread
        manager.save(step, state)              # copies to host buffers; a thread writes them
    manager.close()                            # waits for the last save

A save in the training thread only copies tensors to host buffers. A thread writes them with
`torch.distributed.checkpoint`, syncs and hashes every file, writes a manifest, and renames the folder.
A second save waits for the first, so that all ranks save the same steps.

A save that the storage refuses (full disk) loses nothing: older checkpoints stay, the unfinished folder
is removed, and `check` warns. After `MAX_FAILURES` of them in a row `check` raises an error. Every other
failure is an error at once.
"""

from __future__ import annotations

import shutil
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.optim import Optimizer

from fulgurite.errors import ArgumentError
from fulgurite.train.checkpoint import folder as folders
from fulgurite.train.checkpoint.errors import (
    CheckpointError,
    CheckpointWarning,
    DamagedCheckpointError,
    describe_failure,
)
from fulgurite.train.checkpoint.folder import FileRecord, Manifest
from fulgurite.train.checkpoint.loading import load_into
from fulgurite.train.checkpoint.ranks import SaveRanks
from fulgurite.train.checkpoint.staging import HostBuffers, StagedPlanner, StagedState
from fulgurite.train.checkpoint.state import flatten
from fulgurite.train.config import CheckpointSection
from fulgurite.units import format_bytes

MAX_FAILURES = 3  # saves in a row that the storage may refuse
LONG_WAIT = 5.0  # seconds for an earlier save, above which a warning says so

# DCP warns about a process without a group, which is our normal case.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


class RankNumbers(Protocol):
    """What the manager needs of a `Layout`."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...


def _ignore_phase(name: str) -> None:
    """Phases matter to tests of faults only."""


def _ignore_save(step: int, path: Path) -> None:
    """Nobody wants to know."""


class CheckpointManager:
    """The checkpoints of one run. All ranks construct it, and call its methods in the same order.

    `on_saved` is called on rank 0, by the writing thread, with the step and path of each whole checkpoint.
    """

    def __init__(
        self,
        folder: Path | str,
        section: CheckpointSection | None = None,
        layout: RankNumbers | None = None,
        *,
        on_saved: Callable[[int, Path], None] = _ignore_save,
        on_phase: Callable[[str], None] = _ignore_phase,
    ) -> None:
        self.folder, self.section = Path(folder), section or CheckpointSection()
        if self.section.keep < 1:
            raise ArgumentError(f"checkpoint.keep is {self.section.keep}", next="keep at least 1")
        self.ranks = SaveRanks(layout.rank, layout.world_size) if layout else SaveRanks(0, 1)
        self.on_saved, self.on_phase = on_saved, on_phase
        self.last_stall = 0.0  # seconds that the last save kept the training thread
        self._buffers = HostBuffers()
        self._staged: StagedState | None = None  # until an update waits for its copies
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self._failures = 0
        self._verified: set[Path] = set()
        self.ranks.run_on_first(self._open_folder)

    def _open_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            folders.remove_leftovers(self.folder)
        except OSError as error:
            raise CheckpointError(
                f"the folder of checkpoints can't be written: {error}",
                is_storage=True,
                next="make it writable, or give another one: --output FOLDER",
            ) from error

    # --- saving, in the training thread

    def prepare(self, state: dict[str, Any]) -> None:
        """Allocate host buffers for a state, so that the first save is as quick as all others."""
        self._buffers.allocate(flatten(state))

    def overlap_copies(self, optimizer: Optimizer) -> None:
        """Copy from a GPU beside the next forward and backward; `optimizer.step` waits for it.

        Nothing else may change the saved tensors before that step.
        """
        self._buffers.overlaps = True
        optimizer.register_step_pre_hook(lambda *_: self._order_update())

    def _order_update(self) -> None:
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.order_update()

    def save(self, step: int, state: dict[str, Any], *, wait: bool = False) -> None:
        """Save a state, in the background if the section says so and `wait` is False."""
        self.check()
        started = time.perf_counter()
        self._join(step)
        self.check()
        self._order_update()  # the buffers of a save that no update followed
        staged = self._staged = self._buffers.stage(flatten(state))
        self.on_phase("save:staged")
        self._thread = threading.Thread(
            target=self._write, args=(step, staged), name=f"fulgurite-checkpoint-{step}"
        )
        self._thread.start()
        if wait or not self.section.is_async:
            self.wait()
        self.last_stall = time.perf_counter() - started

    def check(self) -> None:
        """Report a save that failed: a warning if the run can go on, an error if not."""
        error, self._error = self._error, None
        if error is None:
            return
        if error.is_storage and self._failures < MAX_FAILURES:
            warnings.warn(f"{error}\n  the run goes on", CheckpointWarning, stacklevel=2)
            return
        raise error

    def wait(self) -> None:
        """Wait until the last save is on the disk; an error if it failed."""
        self._join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _join(self, step: int | None = None) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        started = time.perf_counter()
        thread.join()
        seconds = time.perf_counter() - started
        if step is not None and seconds > LONG_WAIT and self.section.is_async:
            warnings.warn(
                f"the save of step {step} waited {seconds:.0f} s for the one before; save less often: "
                "checkpoint.every",
                CheckpointWarning,
                stacklevel=3,
            )

    def close(self) -> None:
        """Wait for the last save, and leave the group of ranks."""
        try:
            self.wait()
        finally:
            self.ranks.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:  # the error of the block matters more
            self._join()
            self.ranks.close()

    # --- writing, in a thread of its own

    def _write(self, step: int, staged: StagedState) -> None:
        path = folders.step_path(self.folder, step)
        unfinished = None
        try:
            unfinished = self.ranks.run_on_first(lambda: self._start_folder(path, staged))
            self._write_files(step, staged, unfinished)
            self.ranks.run_on_first(lambda: self._publish(step, unfinished, path))
            self._failures = 0
        except (Exception, CheckpointException) as error:  # reaches the trainer by `check`
            self._failures += 1
            if unfinished is not None and self.ranks.is_first:
                shutil.rmtree(unfinished, ignore_errors=True)
            self._error = self._make_save_error(step, error)

    def _start_folder(self, path: Path, staged: StagedState) -> Path:
        free = shutil.disk_usage(self.folder).free
        if free < staged.num_bytes:
            raise CheckpointError(
                f"{self.folder} has {format_bytes(free)} left, and a checkpoint needs "
                f"{format_bytes(staged.num_bytes)}",
                is_storage=True,
            )
        unfinished = folders.unfinished_path(path, "tmp")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        self._verified.discard(path)
        self.on_phase("save:folder")
        return unfinished

    def _write_files(self, step: int, staged: StagedState, unfinished: Path) -> None:
        staged.wait_for_copies()
        planner = StagedPlanner(staged, self.ranks.world_size, lambda: self.on_phase("save:write"))
        dcp.save(
            staged.values,
            storage_writer=FileSystemWriter(unfinished, sync_files=False, per_thread_copy_ahead=0),
            planner=planner,
            process_group=self.ranks.group,
            no_dist=self.ranks.group is None,
        )
        self.on_phase("save:written")
        records = self.ranks.run_on_all(lambda: self._sync_own_files(unfinished))
        files = tuple(sorted((r for rank in records for r in rank), key=lambda r: r.name))
        self.on_phase("save:synced")
        manifest = Manifest(step, self.ranks.world_size, files)
        self.ranks.run_on_first(lambda: folders.write_manifest(unfinished, manifest))
        self.on_phase("save:manifest")

    def _sync_own_files(self, unfinished: Path) -> list[FileRecord]:
        """Sync and hash what this rank has written; rank 0 also has DCP's metadata."""
        patterns = [f"__{self.ranks.rank}_*"] + ([".metadata"] if self.ranks.is_first else [])
        paths = [path for pattern in patterns for path in unfinished.glob(pattern)]
        return [folders.sync_and_hash(path) for path in paths]

    def _publish(self, step: int, unfinished: Path, path: Path) -> None:
        folders.publish(unfinished, path, self.on_phase)
        self.on_phase("save:published")
        self.on_saved(step, path)
        folders.prune(self.folder, self.section.keep, self.on_phase)
        self.on_phase("save:pruned")

    def _make_save_error(self, step: int, error: BaseException) -> CheckpointError:
        text, is_storage = describe_failure(error, self.ranks.rank)
        return CheckpointError(
            f"the checkpoint of step {step} was not saved: {text}",
            is_storage=is_storage,
            where=str(self.folder),
            next="make room or give another folder; checkpoints before it are whole"
            if is_storage
            else "checkpoints before it are whole",
        )

    # --- loading

    def latest(self) -> Path | None:
        """The newest whole checkpoint, every byte of it checked. None: there is none.

        Damaged ones are set aside with a warning. If all are damaged, that is an error, now and at the
        next start.
        """
        self._join()
        problems: list[str] = []
        paths = self.ranks.run_on_first(lambda: folders.list_checkpoints(self.folder))
        for _step, path in reversed(paths):
            try:
                self._verify(path)
            except DamagedCheckpointError as error:
                problems.append(error.one_line())
                self._set_aside(path, error)
            else:
                return path
        problems += self.ranks.run_on_first(lambda: folders.list_set_aside(self.folder))
        if problems:  # a start from nothing would replace what is left of the run
            raise CheckpointError(
                f"no checkpoint in {self.folder} is whole",
                others="\n".join(problems),
                next="restore one from a backup, or start again in another folder",
            )
        return None

    def load(self, path: Path | str, state: dict[str, Any]) -> int:
        """Load a checkpoint into a state, in place, on any number of ranks; returns its step."""
        self._join()
        path = Path(path)
        if not path.is_dir():
            raise CheckpointError(f"there is no checkpoint {path}", next="give its folder")
        if path not in self._verified:
            self._verify(path)
        self.on_phase("load:verified")
        load_into(path, state, self.ranks, lambda: self.on_phase("load:read"))
        self.on_phase("load:loaded")
        return folders.read_manifest(path).step

    def load_latest(self, state: dict[str, Any]) -> int | None:
        """Load the newest whole checkpoint; returns its step, None if there is none."""
        path = self.latest()
        return None if path is None else self.load(path, state)

    def _verify(self, path: Path) -> None:
        """Check all files of a checkpoint; each rank reads a share of them."""
        rank, count = self.ranks.rank, self.ranks.world_size
        self.on_phase("load:verify")

        def find_own_damage() -> list[str]:
            return folders.find_damage(path, folders.read_manifest(path).files[rank::count])

        problems = [p for found in self.ranks.run_on_all(find_own_damage) for p in found]
        if problems:
            raise DamagedCheckpointError("; ".join(problems))
        self._verified.add(path)

    def _set_aside(self, path: Path, error: DamagedCheckpointError) -> None:
        if not self.ranks.is_first:
            return
        warnings.warn(
            f"{path.name} is damaged and passed over: {error.one_line()}",
            CheckpointWarning,
            stacklevel=4,
        )
        try:
            folders.set_aside(path)
        except OSError as problem:  # a folder that can only be read
            warnings.warn(f"{path} keeps its name: {problem}", CheckpointWarning, stacklevel=4)
