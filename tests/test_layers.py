"""Imports go in one direction: a module imports only from its left in these orders, at its top.

Read with `ast`, so nothing is imported. Imports under `TYPE_CHECKING` don't count.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fulgurite"

# Packages and modules of the root. Entries of one set don't import each other.
ORDER: list[set[str]] = [
    {
        "version",
        "errors",
        "determinism",
        "files",
        "lazy",
        "lifeline",
        "units",
        "option_values",
        "process_exit",
        "running_clock",
    },
    {"config", "timing", "op"},
    {"logs"},
    {"cache"},
    {"native"},
    {"device", "replay"},
    {"environment", "host_api"},
    {"cudagraph"},
    {"quant"},
    {"kernels", "trace"},
    {"transforms", "fuser"},
    {"capture"},
    {"executors"},
    {"host"},
    {"options"},
    {"repro"},
    {"failures"},
    {"compiled_graph"},
    {"session"},
    {"explain"},
    {"compile"},
    {"fuse", "quantize"},
    {"parallel"},
    {"models"},
    {"plan"},
    {"explain_target", "serve", "compress"},
    {"report"},
    {"explain_command"},
    {"train"},
    {"bench"},
    {"__init__"},
    {"cli"},
    {"__main__"},
]
# The same inside packages that have sub-packages; `.` is the package's own files.
SUB_ORDER: dict[str, list[set[str]]] = {
    "fuser": [
        {"ir"},
        {"frontend"},
        {"segment"},
        {"schedule"},
        {"codegen"},
        {"runtime"},
        {"lowering"},
        {"gemm"},
        {"pipeline"},
        {"__init__"},
    ],
    "kernels": [
        {"registry", "integer_math"},
        {"tuning"},
        {"common"},
        {"elementwise", "sampling", "quantize"},
        {"attention", "conv", "gemm", "linear_attention"},
        {"recurrent"},
        {"cross_entropy", "optimizer"},
        {"mla"},
        {"grouped_gemm"},
        {"moe"},
        {"dispatch"},
        {"__init__"},
    ],
    "parallel": [
        {"topology", "emulation", "health", "device_collectives"},
        {"mesh"},
        {"processes", "collectives"},
        {"symmetric"},
        {"dispatch"},
        {"experts", "gradients", "layers"},
        {"sharding"},
        {"tensor", "pipeline", "context"},
        {"__init__"},
    ],
    "serve": [
        {"engine"},
        {"structured"},
        {"embedding", "expert_options", "expert_setup", "llm_config", "profile"},
        {"llm"},
        {"remote", "worker_main"},
        {"http"},
        {"command", "ray_serve", "scrape"},
        {"serve_command", "top"},
        {"__init__"},
    ],
    "train": [
        {"__init__"},
        {"config", "batch", "family_fields", "charts", "heartbeat", "profile", "remat", "stop"}
        | {"run_log", "user_code"},
        {"config_limits"},
        {"config_file", "layout", "sizes", "flops", "nvfp4", "nonfinite"},
        {
            "attention",
            "data",
            "optim",
            "checkpoint",
            "export_files",
            "precision",
            "published_layout",
        },
        {"balance", "build", "export", "metrics", "rank_group"},
        {"run_folder"},
        {"evaluate", "probes", "receipt", "supervisor", "view"},
        {"drill", "loss", "report", "verify"},
        {"accumulate"},
        {"step", "tune"},
        {"parallel"},
        {"checks"},
        {"setup"},
        {"finish"},
        {"trainer"},
        {"command"},
    ],
}
# The public API may be used by what stands on top of all of it.
API_USERS = {"bench", "cli", "report", "__main__"}
# Imports inside functions, each with its reason.
LAZY_IMPORTS = {
    ("serve/serve_command.py", "fulgurite.serve.http.engines"): "needs the extra `serve`",
    ("serve/serve_command.py", "fulgurite.serve.http.run"): "the same; while engines load",
    ("serve/serve_command.py", "fulgurite.serve.ray_serve"): "needs the extra `ray`",
    ("bench/generate/engines.py", "fulgurite.serve.llm"): "another interpreter runs this file",
    ("bench/generate/engines.py", "fulgurite.serve.engine.request"): "the same",
    (
        "models/transformers_backend/model.py",
        "fulgurite.compile",
    ): "other models are not compiled, and it takes seconds",
    (
        "serve/remote/engine_main.py",
        "fulgurite.serve.remote.served_engine",
    ): "the mock engine needs no torch",
    (
        "fuser/runtime/compile_worker.py",
        "fulgurite.fuser.codegen.triton.device_functions",
    ): "after the packages were entered without their __init__",
    **{
        ("cli.py", f"fulgurite.{module}"): "a command imports what it needs"
        for module in (
            "bench.command", "compress.command", "environment", "explain_command", "plan.command",
            "serve.command", "serve.embedding", "serve.serve_command", "serve.top", "train.command",
        )
    },
}  # fmt: skip

FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = {path: str(path.relative_to(PACKAGE)) for path in FILES}


def rank_of(order: list[set[str]]) -> dict[str, int]:
    return {name: rank for rank, names in enumerate(order) for name in names}


RANK = rank_of(ORDER)


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


class Import:
    """One imported module: `fulgurite.a.b`, its line, and whether it is inside a function."""

    def __init__(self, module: str, line: int, in_function: bool) -> None:
        self.module = module
        self.line = line
        self.in_function = in_function

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.module.split(".")[1:]) or ("__init__",)


def module_exists(module: str) -> bool:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    return path.is_dir() or path.with_suffix(".py").exists()


@cache
def imports_of(path: Path) -> list[Import]:
    here = ("fulgurite", *path.relative_to(PACKAGE).parts[:-1])
    return [
        Import(module, node.lineno, in_function)
        for node, in_function in import_statements(ast.parse(path.read_text()), False)
        for module in imported_modules(node, here)
        if module.split(".")[0] == "fulgurite"
    ]


def import_statements(
    block: ast.AST, in_function: bool
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Each import below a statement but those for type checkers, and whether it is in a function.

    Only statements are visited: expressions, which are most of a tree, hold no imports.
    """
    if isinstance(block, (ast.Import, ast.ImportFrom)):
        yield block, in_function
    if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test):
        return
    in_function |= isinstance(block, (ast.FunctionDef, ast.AsyncFunctionDef))
    for name in ("body", "orelse", "handlers", "finalbody", "cases"):
        for child in getattr(block, name, []):
            yield from import_statements(child, in_function)


def imported_modules(node: ast.Import | ast.ImportFrom, here: tuple[str, ...]) -> list[str]:
    """Full names of what a statement imports, in a file of the package `here`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = ".".join(here[: len(here) - node.level + 1]) if node.level else ""
    base = ".".join(part for part in (base, node.module) if part)
    names = [f"{base}.{alias.name}" for alias in node.names]
    return [n if base.startswith("fulgurite") and module_exists(n) else base for n in names]


def test_every_file_has_a_place():
    assert {layer_of(path) for path in FILES} <= set(RANK)
    for package, order in SUB_ORDER.items():
        here = {
            path.relative_to(PACKAGE / package).parts[0]
            for path in FILES
            if layer_of(path) == package
        }
        assert {name.removesuffix(".py") for name in here} == set(rank_of(order)), package


def test_the_orders_name_only_what_exists():
    for name in RANK:
        assert module_exists(f"fulgurite.{name}"), name


def imports_of_layer(layer: str) -> Iterator[tuple[Path, Import]]:
    return ((file, one) for file in FILES if layer_of(file) == layer for one in imports_of(file))


@pytest.mark.parametrize("layer", sorted({layer_of(path) for path in FILES}))
def test_imports_point_left(layer):
    for path, found in imports_of_layer(layer):
        name = found.parts[0]
        if name == "__init__" and layer in API_USERS:
            continue
        where = f"{NAMES[path]}:{found.line}"
        assert name == layer or RANK[name] < RANK[layer], f"{where}: {layer} imports {name}"
        if name == layer and layer in SUB_ORDER:
            rank = rank_of(SUB_ORDER[layer])
            own = path.relative_to(PACKAGE / layer).parts[0].removesuffix(".py")
            other = found.parts[1] if len(found.parts) > 1 else "__init__"
            assert own == other or rank[other] < rank[own], f"{where}: {own} imports {other}"


def test_imports_are_at_the_top():
    for path, found in ((file, one) for file in FILES for one in imports_of(file)):
        if found.in_function:
            key = (NAMES[path], found.module)
            assert key in LAZY_IMPORTS, f"{NAMES[path]}:{found.line}: {found.module} in a function"


def test_no_import_cycles():
    """Modules import each other in no circle. A package stands for its `__init__.py`."""

    def file_of(module: str) -> Path:
        path = PACKAGE.joinpath(*module.split(".")[1:])
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    edges = {path: {file_of(found.module) for found in imports_of(path)} for path in FILES}
    state: dict[Path, str] = {}
    cycles: list[str] = []

    def visit(path: Path, above: list[Path]) -> None:
        state[path] = "open"
        for other in sorted(edges[path]):
            if state.get(other) == "open":
                circle = [*above[above.index(other) :], other] if other in above else [path, other]
                cycles.append(" → ".join(NAMES[one] for one in circle))
            elif other not in state:
                visit(other, [*above, other])
        state[path] = "done"

    for path in FILES:
        if path not in state:
            visit(path, [path])
    assert not cycles, "\n".join(cycles)


def test_registries_hold_functions():
    """No `"fulgurite.module:function"` strings: go-to-definition works on real objects."""
    pattern = re.compile(r"""["']fulgurite(\.\w+)+:\w+["']""")
    for path in FILES:
        assert not pattern.search(path.read_text()), NAMES[path]


def test_the_reader_of_imports_sees_all_kinds(tmp_path, monkeypatch):
    path = PACKAGE / "trace" / "example.py"
    source = "import fulgurite.compile\nfrom fulgurite import errors\ndef f():\n    from ..quant import x\n"
    monkeypatch.setattr(Path, "read_text", lambda self: source)
    found = imports_of.__wrapped__(path)
    assert [one.parts[0] for one in found] == ["compile", "errors", "quant"]
    assert [one.in_function for one in found] == [False, False, True]
