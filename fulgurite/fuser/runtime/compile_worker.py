"""A process that compiles Triton kernels for another: what `compile_processes` starts.

    python -P compile_worker.py SOCKET COUNT

In: recipes, one a message of the socket. Out: a message for each when Triton's cache has its kernel, with what went
wrong otherwise. It forks into COUNT processes that share the socket when the first recipe comes: whoever is free
takes the next. They end when the other side closes it. Importing torch takes seconds and nothing here needs it, so
this file imports only what it must, and packages of ours are entered without running their `__init__`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

MESSAGE = 1 << 16  # bytes at most; a recipe has some hundreds
READY = -1  # the number of the message that says that recipes are welcome
EVEN = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Recipe:
    """All that compiling one kernel takes, as plain values."""

    path: str  # of the module the kernel is in
    name: str
    types: tuple[str, ...]  # of its arguments
    even: tuple[int, ...]  # arguments that are multiples of 16
    options: dict[str, Any]
    target: tuple[str, int, int]  # backend, architecture, threads of a warp
    folder: str  # Triton's cache

    def message(self, number: int) -> bytes:
        return json.dumps([number, asdict(self)]).encode()


def load(path: str) -> ModuleType:
    """The module of a file: its name is part of what Triton knows a kernel by."""
    spec = importlib.util.spec_from_file_location(f"fulgurite_kernels_{Path(path).stem[:16]}", path)
    assert spec is not None and spec.loader is not None, f"no module at {path}"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_triton() -> None:
    """Triton knows a kernel by all of its own files, half a gigabyte: read once, not by each thread and fork."""
    from triton.runtime.cache import triton_key

    with _reading:
        triton_key()  # which remembers


_reading = threading.Lock()


def build(function: Any, recipe: Recipe) -> Any:
    """The compiled kernel, from Triton's cache where it is there."""
    import triton
    from triton.backends.compiler import GPUTarget

    read_triton()
    source = triton.compiler.ASTSource(
        fn=function,
        signature=dict(zip(function.arg_names, recipe.types, strict=True)),
        constexprs={},
        attrs={(position,): EVEN for position in recipe.even},
    )
    return triton.compile(source, target=GPUTarget(*recipe.target), options=recipe.options)


def answer(message: bytes, modules: dict[str, ModuleType]) -> bytes:
    """Compiles what a message asks for."""
    import triton

    number, fields = json.loads(message)
    recipe = Recipe(**fields)
    triton.knobs.cache.dir = recipe.folder
    try:
        if recipe.path not in modules:
            modules[recipe.path] = load(recipe.path)
        build(getattr(modules[recipe.path], recipe.name), recipe)
    except Exception as problem:  # whoever asked compiles it again and raises it there
        return json.dumps([number, f"{type(problem).__name__}: {problem}"[:1000]]).encode()
    return json.dumps([number, None]).encode()


def serve(channel: socket.socket) -> None:
    modules: dict[str, ModuleType] = {}
    while message := channel.recv(MESSAGE):
        channel.send(answer(message, modules))


def fork(channel: socket.socket, count: int) -> None:
    """Processes that serve, until all have ended; where one dies, all do, and the other side sees the end."""
    children: set[int] = set()
    for _ in range(count):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                serve(channel)
                status = 0
            finally:  # nothing of what the first process would do next
                os._exit(status)
        children.add(child)
    channel.close()
    while children:
        child, status = os.wait()
        children.discard(child)
        if status != 0:
            for other in children:
                os.kill(other, signal.SIGKILL)


def enter_packages() -> None:
    """Our packages without what their `__init__` imports."""
    folder = Path(__file__).parents[3]
    for name in (
        "fulgurite",
        "fulgurite.fuser",
        "fulgurite.fuser.codegen",
        "fulgurite.fuser.codegen.triton",
    ):
        package = ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")))]
        sys.modules[name] = package


def main() -> None:
    channel, count = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    enter_packages()
    import fulgurite.fuser.codegen.triton.device_functions  # noqa: F401  (so that forks have it)

    read_triton()
    channel.send(json.dumps([READY, None]).encode())
    if channel.recv(1, socket.MSG_PEEK):
        fork(channel, count)


if __name__ == "__main__":
    main()
