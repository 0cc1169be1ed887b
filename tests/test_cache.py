"""The kernel cache: shared, atomic, and mended where an entry is damaged."""

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
    place = tmp_path / "cache"
    monkeypatch.setenv("FULGURITE_CACHE", str(place))
    monkeypatch.setattr(cache, "_private_folder", None)
    return place


class Build:
    """Writes a text and counts how often."""

    def __init__(self, text: str = "content") -> None:
        self.text, self.calls = text, 0

    def __call__(self, path: Path) -> None:
        self.calls += 1
        path.write_text(self.text)


def test_built_once(folder: Path) -> None:
    build, key = Build(), cache.digest("a")
    first = cache.entry("cpp", key, build, ".so")
    assert cache.entry("cpp", key, build, ".so") == first
    assert (build.calls, first.read_text()) == (1, "content")
    assert first.is_relative_to(folder)


def test_folders_are_private(folder: Path) -> None:
    cache.entry("cpp", cache.digest("a"), Build())
    assert stat.S_IMODE((folder / "cpp").stat().st_mode) == 0o700


def test_digest_keeps_parts_apart() -> None:
    assert cache.digest("ab", "c") != cache.digest("a", "bc")


@pytest.mark.parametrize("damage", ["truncate", "change", "no digest", "no content"])
def test_a_damaged_entry_is_built_again(damage: str) -> None:
    build, key = Build(), cache.digest("a")
    path = cache.entry("cpp", key, build)
    if damage == "truncate":
        path.write_bytes(path.read_bytes()[:3])
    elif damage == "change":
        path.write_text("contenT")
    elif damage == "no digest":
        path.with_name(path.name + cache.DIGEST_SUFFIX).unlink()
    else:
        path.unlink()
    assert cache.entry("cpp", key, build).read_text() == "content"
    assert build.calls == 2


def test_a_failed_build_leaves_nothing(folder: Path) -> None:
    def fail(path: Path) -> None:
        path.write_text("half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        cache.entry("cpp", cache.digest("a"), fail)
    assert not [p for p in folder.rglob("*") if p.is_file() and p.name != ".lock"]
    with pytest.raises(CacheError):
        cache.entry("cpp", cache.digest("b"), lambda path: None)


@pytest.mark.parametrize(
    "problem", [OSError(28, "No space left on device"), PermissionError(13, "Permission denied")]
)
def test_a_folder_that_can_not_be_written(
    problem: OSError, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, a read-only folder: one warning, and the build goes to a private folder."""
    real = cache._write

    def write(path: Path, build) -> Path:
        if path.is_relative_to(folder):
            raise problem
        return real(path, build)

    monkeypatch.setattr(cache, "_write", write)
    build = Build()
    with pytest.warns(UserWarning, match="can't be written"):
        path = cache.entry("cpp", cache.digest("a"), build)
    assert path.read_text() == "content"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.entry("cpp", cache.digest("a"), build) == path
        cache.entry("cpp", cache.digest("b"), build)
    assert build.calls == 2


def test_a_cache_path_that_is_a_file(folder: Path) -> None:
    folder.write_text("in the way")
    with pytest.warns(UserWarning, match="can't be written"):
        assert cache.entry("cpp", cache.digest("a"), Build()).read_text() == "content"


def _one_of_many(folder: str, results: multiprocessing.Queue) -> None:
    os.environ["FULGURITE_CACHE"] = folder

    def build(place: Path, k: int) -> None:
        with open(f"{folder}-built", "a") as log:
            log.write(f"{k}\n")
        place.write_text(f"entry {k}")

    for k in range(20):
        path = cache.entry("cpp", cache.digest(str(k)), lambda place, k=k: build(place, k))
        if path.read_text() != f"entry {k}":
            results.put(k)
    results.put("done")


def test_many_processes_at_once(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    workers = [context.Process(target=_one_of_many, args=(str(folder), results)) for _ in range(6)]
    for worker in workers:
        worker.start()
    said = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert said == ["done"] * 6
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
