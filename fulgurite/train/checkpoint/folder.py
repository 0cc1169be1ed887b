"""The folder of a run's checkpoints: a checkpoint is whole, or it is not there.

    checkpoints/
      step-000100/                    whole: renamed after every byte and the manifest were synced
        manifest.json                 step, ranks, and size and SHA-256 of every file
        .metadata, __0_0.distcp, …    torch.distributed.checkpoint
      step-000200.tmp-host-4711/      being written, or the leftover of a process that was killed
      step-000100.old-host-4711/      being replaced or deleted
      step-000150.damaged-1/          found damaged, and passed over

In: a folder of files. Out: the manifest, a renamed folder, the problems found.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fulgurite.train.checkpoint.errors import CheckpointError, DamagedCheckpointError
from fulgurite.version import VERSION

MANIFEST = "manifest.json"
FORMAT = 1
WHOLE_NAME = re.compile(r"step-(\d+)$")
UNFINISHED_NAME = re.compile(r"step-(\d+)\.(tmp|old)-(.+)-(\d+)$")


@dataclass(frozen=True)
class FileRecord:
    """A file of a checkpoint."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of."""

    step: int
    ranks: int
    files: tuple[FileRecord, ...]
    torch: str = torch.__version__
    fulgurite: str = VERSION
    format: int = FORMAT


def step_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def unfinished_path(path: Path, kind: str) -> Path:
    """A name for a folder that is being written (`tmp`) or given up (`old`) by this process."""
    return path.with_name(f"{path.name}.{kind}-{socket.gethostname()}-{os.getpid()}")


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Step and path of all complete checkpoints, in order. Their files are not looked at."""
    if not folder.is_dir():
        return []
    found = ((WHOLE_NAME.match(path.name), path) for path in folder.iterdir() if path.is_dir())
    return sorted((int(match[1]), path) for match, path in found if match)


def sync_and_hash(path: Path) -> FileRecord:
    """Force a file to the disk, then read it back."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = os.fstat(file.fileno()).st_size
    return FileRecord(path.name, size, digest)


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write the manifest into a checkpoint that is not published yet."""
    with (path / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(asdict(manifest), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path)


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint; DamagedCheckpointError if it is missing or unreadable."""
    try:
        fields = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files = tuple(FileRecord(**record) for record in fields.pop("files"))
        manifest = Manifest(files=files, **fields)
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{path} has no {MANIFEST}") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        # All that a manifest with changed bytes can raise.
        raise DamagedCheckpointError(f"{path / MANIFEST} can't be read: {error}") from error
    if manifest.format != FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest.format}; this version reads format {FORMAT}",
            next=f"load it with Fulgurite {manifest.fulgurite}",
        )
    match = WHOLE_NAME.match(path.name)
    if match and int(match[1]) != manifest.step:
        raise DamagedCheckpointError(f"{path} says that it is of step {manifest.step}")
    return manifest


def find_damage(path: Path, records: Iterable[FileRecord]) -> list[str]:
    """What is wrong with the files of a checkpoint; an empty list if nothing is."""
    return [problem for record in records if (problem := _find_file_damage(path, record))]


def _find_file_damage(path: Path, record: FileRecord) -> str | None:
    file = path / record.name
    try:
        size = file.stat().st_size
        if size != record.size:
            return f"{file} has {size} bytes instead of {record.size}"
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except FileNotFoundError:
        return f"{file} is missing"
    except OSError as error:
        return f"{file} can't be read: {error.strerror}"
    return None if digest == record.sha256 else f"{file} has other bytes than were written"


def verify_checkpoint(path: Path) -> Manifest:
    """Read every byte of a checkpoint; DamagedCheckpointError names what is wrong."""
    manifest = read_manifest(path)
    problems = find_damage(path, manifest.files)
    if problems:
        raise DamagedCheckpointError(problems[0], others="\n".join(problems[1:]) or None)
    return manifest


def hash_checkpoint(path: Path) -> str:
    """SHA-256 of the manifest, and so of all files that it lists."""
    return hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()


def publish(unfinished: Path, path: Path, on_phase: Callable[[str], None]) -> None:
    """Give a finished folder its name. An earlier checkpoint of that step is replaced."""
    replaced: Path | None = None
    if path.exists():
        replaced = unfinished_path(path, "old")
        path.rename(replaced)
        on_phase("save:replace")
    unfinished.rename(path)
    sync_folder(path.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def prune(folder: Path, keep: int, on_phase: Callable[[str], None]) -> None:
    """Delete all but the `keep` newest checkpoints. Each loses its name first, then its files."""
    checkpoints = list_checkpoints(folder)
    for _step, path in checkpoints[: max(0, len(checkpoints) - keep)]:
        given_up = unfinished_path(path, "old")
        path.rename(given_up)
        on_phase("save:prune")
        shutil.rmtree(given_up, ignore_errors=True)


def remove_leftovers(folder: Path) -> list[Path]:
    """Delete what killed processes left; a whole checkpoint that was being replaced comes back."""
    removed = []
    for path in sorted(folder.iterdir()):
        match = UNFINISHED_NAME.match(path.name)
        if not match or _is_in_use(match[3], int(match[4])):
            continue
        whole = step_path(folder, int(match[1]))
        if match[2] == "old" and not whole.exists() and _is_newest(folder, path):
            path.rename(whole)
            continue
        shutil.rmtree(path, ignore_errors=True)
        removed.append(path)
    return removed


def _is_newest(folder: Path, given_up: Path) -> bool:
    """Whether a folder that lost its name is whole and newer than every checkpoint with a name.

    Then it was being replaced: what `prune` gives up is older than what it keeps.
    """
    match = UNFINISHED_NAME.match(given_up.name)
    assert match, "the caller has matched the name"
    if any(step > int(match[1]) for step, _path in list_checkpoints(folder)):
        return False
    try:
        fields: dict[str, Any] = json.loads((given_up / MANIFEST).read_text(encoding="utf-8"))
        return not find_damage(given_up, (FileRecord(**record) for record in fields["files"]))
    except (OSError, ValueError, TypeError, KeyError):  # all that a damaged manifest can raise
        return False


def _is_in_use(host: str, process: int) -> bool:
    """Whether a name belongs to another live process of this machine."""
    if host != socket.gethostname() or process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def list_set_aside(folder: Path) -> list[str]:
    """The damaged checkpoints that `set_aside` has renamed, as text."""
    paths = sorted(folder.glob("step-*.damaged-*")) if folder.is_dir() else []
    return [f"{path} was found damaged" for path in paths]


def set_aside(path: Path) -> None:
    """Take the name of a damaged checkpoint away, so that nothing loads it; its files stay."""
    number = 1
    while (target := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    path.rename(target)
