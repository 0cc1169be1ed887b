"""A module imports only from its left in this order, at its top, and there are no cycles by delay."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fulgurite"
ORDER: list[set[str]] = [
    {"version", "errors"},
    {"config", "timing", "op"},
    {"cache"},
    {"native"},
    {"device", "replay", "cudagraph"},
    {"quant"},
    {"kernels", "trace"},
    {"transforms", "fuser"},
    {"capture"},
    {"executors"},
    {"options"},
    {"repro"},
    {"session"},
    {"explain"},
    {"compile"},
    {"fuse", "quantize"},
    {"parallel"},
    {"models"},
    {"plan"},
    {"target", "train", "serve"},
    {"bench", "report"},
    {"__init__"},
    {"cli"},
    {"__main__"},
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
# The public API may be used by what stands on top of all of it.
FACADE_USERS = {"bench", "cli", "report", "__main__"}


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> list[tuple[str, int]]:
    """The parts of fulgurite a file imports, with line numbers; imports for type checkers don't count."""
    tree = ast.parse(path.read_text())
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    here = ("fulgurite", *path.relative_to(PACKAGE).parts[:-1])
    found = []
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(here[: len(here) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (base, node.module) if part)
            names = [f"{base}.{a.name}" if base == "fulgurite" else base for a in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "fulgurite":
                known = len(parts) > 1 and (
                    (PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").exists()
                )
                found.append((parts[1] if known else "__init__", node.lineno))
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


def test_every_file_has_a_place():
    assert {layer_of(path) for path in FILES} <= set(RANK)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_left(path):
    layer = layer_of(path)
    for name, line in imports_of(path):
        if name == "__init__" and layer in FACADE_USERS:
            continue
        same = name == layer
        assert same or RANK[name] < RANK[layer], f"{path.name}:{line}: {layer} imports {name}"


def test_the_reader_of_imports_sees_all_kinds(tmp_path, monkeypatch):
    file = PACKAGE / "trace" / "example.py"
    source = "import fulgurite.compile\nfrom fulgurite import errors\ndef f():\n    from ..quant import x\n"
    monkeypatch.setattr(Path, "read_text", lambda self: source)
    assert [name for name, _ in imports_of(file)] == ["compile", "errors", "quant"]
