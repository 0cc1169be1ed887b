"""The content-addressed store of built kernels and measured decisions.

In: a key (any text that determines the content) and a function that builds the content as a file.
Out: the path of a file that holds it. Entries are written under a temporary name and renamed, so
many processes may share a folder, and build an entry once; each carries a digest of its content, so a truncated or damaged
one is seen and built again. The folder is made with mode 0700. Where it can't be written (read-only,
full) the content is built into a private temporary folder for this process, with one warning.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fulgurite.config import settings
from fulgurite.errors import CacheError

DIGEST_SUFFIX = ".sha256"

_private_folder: Path | None = None


def digest(*parts: str | bytes) -> str:
    """A name for content that these parts determine."""
    sha = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        sha.update(len(data).to_bytes(8, "little"))
        sha.update(data)
    return sha.hexdigest()


def entry(kind: str, key: str, build: Callable[[Path], None], suffix: str = "") -> Path:
    """The file for `key`; `build` writes it to the path it gets where it isn't there whole."""
    name = f"{key}{suffix}"
    path = settings().cache_folder / kind / key[:2] / name
    if _whole(path):
        return path
    if _private_folder is not None:
        kept = _private_folder / kind / key[:2] / name
        if _whole(kept):
            return kept
    try:
        with _alone(path.parent):
            return path if _whole(path) else _write(path, build)
    except OSError as problem:
        if isinstance(problem, CacheError):
            raise
        return _write(_private(problem) / kind / key[:2] / name, build)


def read_text(kind: str, key: str) -> str | None:
    """A small text entry, or None where there is none that is whole."""
    data = _content(settings().cache_folder / kind / key[:2] / key)
    return None if data is None else data.decode()


def write_text(kind: str, key: str, text: str) -> None:
    """Keeps a small text entry, replacing what was there."""
    path = settings().cache_folder / kind / key[:2] / key
    try:
        _write(path, lambda place: _put(place, text))
    except OSError:
        return  # a decision that can't be kept is measured again next time


def clear(kind: str | None = None) -> None:
    """Removes every entry, or those of one kind."""
    folder = settings().cache_folder
    for name in [kind] if kind else ["cpp", "triton", "device", "decisions"]:
        shutil.rmtree(folder / name, ignore_errors=True)


def _put(path: Path, text: str) -> None:
    path.write_text(text)


def _whole(path: Path) -> bool:
    """Is the entry there, with the content it was written with?"""
    return _content(path) is not None


def _content(path: Path) -> bytes | None:
    """What an entry was written with, or None where it is missing or damaged."""
    try:
        want = path.with_name(path.name + DIGEST_SUFFIX).read_bytes()
        data = path.read_bytes()
    except OSError:
        return None
    return data if digest(data).encode() == want else None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Processes that want the same entry build it once: the others wait, and find it.

    One lock a folder, of which there are 256: two entries that share one are built in turn.
    """
    _make(folder)
    with open(folder / ".lock", "wb") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: each builds its own
            yield
            return
        try:
            yield
        finally:
            fcntl.flock(held, fcntl.LOCK_UN)  # a child forked meanwhile has the file open too


def _write(path: Path, build: Callable[[Path], None]) -> Path:
    folder = path.parent
    _make(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".building-") as place:
        built = Path(place) / path.name
        build(built)
        if not built.exists():
            raise CacheError(f"the build of {path.name} wrote no file", where=str(folder))
        mark = Path(place) / (path.name + DIGEST_SUFFIX)
        mark.write_text(digest(built.read_bytes()))
        # content first, then its digest: between the two a reader sees a damaged entry and builds
        os.replace(built, path)
        os.replace(mark, path.with_name(mark.name))
    return path


def _make(folder: Path) -> None:
    """The folder and what is missing above it, for this user only."""
    if not folder.parent.exists():
        _make(folder.parent)
    folder.mkdir(exist_ok=True, mode=0o700)


def _private(problem: OSError) -> Path:
    global _private_folder
    if _private_folder is None:
        _private_folder = Path(tempfile.mkdtemp(prefix="fulgurite-"))
        atexit.register(shutil.rmtree, _private_folder, ignore_errors=True)
        warnings.warn(
            f"the kernel cache {settings().cache_folder} can't be written ({problem.strerror}); "
            "kernels of this process are built in a temporary folder. Set FULGURITE_CACHE to a "
            "folder that can be written",
            stacklevel=3,
        )
    return _private_folder
