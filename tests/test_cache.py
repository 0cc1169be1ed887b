"""The kernel cache: shared between processes, atomic, rebuilds damaged entries."""

from __future__ import annotations

import multiprocessing
import os
import stat
import warnings
from pathlib import Path

import pytest

from fulgurite import cache
from fulgurite.errors import CacheError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv("FULGURITE_CACHE_DIR", str(path))
    monkeypatch.setattr(cache, "_private_folder", None)
    return path


class Build:
    """A build function that writes a text and counts its calls."""

    def __init__(self, text: str = "content") -> None:
        self.text, self.calls = text, 0

    def __call__(self, path: Path) -> None:
        self.calls += 1
        path.write_text(self.text)


def test_entry_is_built_once(folder: Path) -> None:
    build, key = Build(), cache.digest("a")
    first = cache.get_or_build("cpp", key, build, ".so")
    assert cache.get_or_build("cpp", key, build, ".so") == first
    assert (build.calls, first.read_text()) == (1, "content")
    assert first.is_relative_to(folder)


def test_folders_are_private(folder: Path) -> None:
    cache.get_or_build("cpp", cache.digest("a"), Build())
    assert stat.S_IMODE((folder / "cpp").stat().st_mode) == 0o700


def test_digest_depends_on_part_boundaries() -> None:
    assert cache.digest("ab", "c") != cache.digest("a", "bc")


@pytest.mark.parametrize("damage", ["truncate", "change", "no digest", "no content"])
def test_damaged_entry_is_rebuilt(damage: str) -> None:
    build, key = Build(), cache.digest("a")
    path = cache.get_or_build("cpp", key, build)
    if damage == "truncate":
        path.write_bytes(path.read_bytes()[:3])
    elif damage == "change":
        path.write_text("contenT")
    elif damage == "no digest":
        path.with_name(path.name + cache.DIGEST_SUFFIX).unlink()
    else:
        path.unlink()
    assert cache.get_or_build("cpp", key, build).read_text() == "content"
    assert build.calls == 2


def test_failed_build_leaves_no_files(folder: Path) -> None:
    def fail(path: Path) -> None:
        path.write_text("half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        cache.get_or_build("cpp", cache.digest("a"), fail)
    assert not [p for p in folder.rglob("*") if p.is_file() and p.name != ".lock"]
    with pytest.raises(CacheError):
        cache.get_or_build("cpp", cache.digest("b"), lambda path: None)


@pytest.mark.parametrize(
    "problem", [OSError(28, "No space left on device"), PermissionError(13, "Permission denied")]
)
def test_unwritable_folder_falls_back_to_a_private_one(
    problem: OSError, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk or a read-only folder: one warning, and entries go to a private folder."""
    real = cache._write_entry

    def write(path: Path, build) -> Path:
        if path.is_relative_to(folder):
            raise problem
        return real(path, build)

    monkeypatch.setattr(cache, "_write_entry", write)
    build = Build()
    with pytest.warns(UserWarning, match="can't be written"):
        path = cache.get_or_build("cpp", cache.digest("a"), build)
    assert path.read_text() == "content"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get_or_build("cpp", cache.digest("a"), build) == path
        cache.get_or_build("cpp", cache.digest("b"), build)
    assert build.calls == 2


def test_cache_path_that_is_a_file(folder: Path) -> None:
    folder.write_text("in the way")
    with pytest.warns(UserWarning, match="can't be written"):
        assert cache.get_or_build("cpp", cache.digest("a"), Build()).read_text() == "content"


def _build_entries(folder: str, results: multiprocessing.Queue) -> None:
    os.environ["FULGURITE_CACHE_DIR"] = folder

    def build(place: Path, k: int) -> None:
        with open(f"{folder}-built", "a") as log:
            log.write(f"{k}\n")
        place.write_text(f"entry {k}")

    for k in range(20):
        path = cache.get_or_build("cpp", cache.digest(str(k)), lambda place, k=k: build(place, k))
        if path.read_text() != f"entry {k}":
            results.put(k)
    results.put("done")


def test_concurrent_processes(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    workers = [
        context.Process(target=_build_entries, args=(str(folder), results)) for _ in range(6)
    ]
    for worker in workers:
        worker.start()
    messages = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert messages == ["done"] * 6
    assert not list(folder.rglob(".building-*"))
    built = Path(f"{folder}-built").read_text().split()
    assert sorted(map(int, built)) == list(range(20)), "an entry was built more than once"


def test_text_entries() -> None:
    key = cache.digest("x")
    assert cache.read_text("decisions", key) is None
    cache.write_text("decisions", key, "one")
    cache.write_text("decisions", key, "two")
    assert cache.read_text("decisions", key) == "two"
    cache.clear("decisions")
    assert cache.read_text("decisions", key) is None
