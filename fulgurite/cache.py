"""Content-addressed cache on disk for compiled kernels and autotuning results.

In: a key (a digest of everything the content depends on) and a function that builds the content as a
file. Out: the path of that file.

Entries are written under a temporary name and renamed, so many processes can share a folder. A lock
makes them build an entry once. Each entry has a digest of its content: a truncated or damaged entry is
rebuilt. The folder has mode 0700. If it can't be written (read-only, full), this process warns once and
builds into a private temporary folder.
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
from fulgurite.logs import LOG

DIGEST_SUFFIX = ".sha256"

_private_folder: Path | None = None


def digest(*parts: str | bytes) -> str:
    """A SHA-256 key from all parts. Part boundaries count: ("ab", "c") is not ("a", "bc")."""
    sha = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        sha.update(len(data).to_bytes(8, "little"))
        sha.update(data)
    return sha.hexdigest()


def get_or_build(kind: str, key: str, build: Callable[[Path], None], suffix: str = "") -> Path:
    """The file for `key`. If it is missing or damaged, `build(path)` writes it."""
    name = f"{key}{suffix}"
    path = settings().cache_dir / kind / key[:2] / name
    if _is_intact(path):
        LOG.debug("cache hit: %s %s", kind, key[:12])
        return path
    LOG.debug("cache miss: %s %s", kind, key[:12])
    if _private_folder is not None:
        private = _private_folder / kind / key[:2] / name
        if _is_intact(private):
            return private
    try:
        with _lock_folder(path.parent):
            return path if _is_intact(path) else _write_entry(path, build)
    except OSError as problem:
        if isinstance(problem, CacheError):
            raise
        return _write_entry(_get_private_folder(problem) / kind / key[:2] / name, build)


def read_text(kind: str, key: str) -> str | None:
    """A small text entry; None if it is missing or damaged."""
    data = _read_intact(settings().cache_dir / kind / key[:2] / key)
    return None if data is None else data.decode()


def write_text(kind: str, key: str, text: str) -> None:
    """Store a small text entry, replacing the previous one."""
    path = settings().cache_dir / kind / key[:2] / key
    try:
        _write_entry(path, lambda target: _write_file(target, text))
    except OSError:
        return  # an autotuning result that can't be stored is measured again next time


def clear(kind: str | None = None) -> None:
    """Remove all entries, or those of one kind."""
    folder = settings().cache_dir
    for name in [kind] if kind else ["cpp", "triton", "device", "decisions"]:
        shutil.rmtree(folder / name, ignore_errors=True)


def _write_file(path: Path, text: str) -> None:
    path.write_text(text)


def _is_intact(path: Path) -> bool:
    """Whether the entry exists and matches its digest."""
    return _read_intact(path) is not None


def _read_intact(path: Path) -> bytes | None:
    """The content of an entry; None if it is missing or does not match its digest."""
    try:
        expected = path.with_name(path.name + DIGEST_SUFFIX).read_bytes()
        data = path.read_bytes()
    except OSError:
        return None
    return data if digest(data).encode() == expected else None


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder, so that processes that need the same entry build it once.

    There are 256 folders per kind, each with one lock. Entries of one folder are built in turn.
    """
    _make_folder(folder)
    with open(folder / ".lock", "wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: each process builds its own entry
            yield
            return
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough: a forked child holds it too


def _write_entry(path: Path, build: Callable[[Path], None]) -> Path:
    folder = path.parent
    _make_folder(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".building-") as temporary:
        built = Path(temporary) / path.name
        build(built)
        if not built.exists():
            raise CacheError(f"the build of {path.name} wrote no file", where=str(folder))
        checksum = Path(temporary) / (path.name + DIGEST_SUFFIX)
        checksum.write_text(digest(built.read_bytes()))
        # content first, then its digest: between the two a reader sees a damaged entry and rebuilds
        os.replace(built, path)
        os.replace(checksum, path.with_name(checksum.name))
    return path


def _make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, accessible to this user only."""
    if not folder.parent.exists():
        _make_folder(folder.parent)
    folder.mkdir(exist_ok=True, mode=0o700)


def _get_private_folder(problem: OSError) -> Path:
    global _private_folder
    if _private_folder is None:
        _private_folder = Path(tempfile.mkdtemp(prefix="fulgurite-"))
        atexit.register(shutil.rmtree, _private_folder, ignore_errors=True)
        warnings.warn(
            f"the kernel cache {settings().cache_dir} can't be written ({problem.strerror}); "
            "this process compiles its kernels in a temporary folder. Set FULGURITE_CACHE_DIR to a "
            "writable folder",
            stacklevel=3,
        )
    return _private_folder
