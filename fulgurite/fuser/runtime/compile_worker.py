"""A worker process that compiles Triton kernels; `compile_pool` starts it.

    python -P compile_worker.py SOCKET COUNT

In: `CompileJob`s, one per message of the socket. Out: a message for each when Triton's cache has its kernel, or
with the error. When the first job comes, the process forks into COUNT workers that share the socket; an idle one
takes the next job. They exit when the other side closes the socket. Importing torch takes seconds and nothing here
needs it. So this file imports only what it must, and registers our packages without running their `__init__`.
"""

from __future__ import annotations

import importlib
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

MAX_MESSAGE_BYTES = 1 << 16  # a job has some hundreds
READY_ID = -1  # the job id of the message that the workers are ready
DIVISIBLE_BY_16 = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class CompileJob:
    """What compiling one kernel takes, as plain values."""

    path: str  # of the module that defines the kernel
    name: str
    argument_types: tuple[str, ...]
    divisible_arguments: tuple[int, ...]  # positions of arguments that are multiples of 16
    options: dict[str, Any]
    target: tuple[str, int, int]  # backend, architecture, warp size
    cache_dir: str  # Triton's cache

    def to_message(self, job_id: int) -> bytes:
        return json.dumps([job_id, asdict(self)]).encode()


def load_module(path: str) -> ModuleType:
    """Import a file; the module's name is part of Triton's cache key."""
    spec = importlib.util.spec_from_file_location(f"fulgurite_kernels_{Path(path).stem[:16]}", path)
    assert spec is not None and spec.loader is not None, f"no module at {path}"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cache_triton_key() -> None:
    """Compute Triton's own cache key once: it hashes half a gigabyte of Triton's files."""
    from triton.runtime.cache import triton_key

    with _triton_key_lock:
        triton_key()  # caches its result


_triton_key_lock = threading.Lock()


def compile_kernel(function: Any, job: CompileJob) -> Any:
    """Compile a kernel, or load it from Triton's cache."""
    import triton
    from triton.backends.compiler import GPUTarget

    cache_triton_key()
    source = triton.compiler.ASTSource(
        fn=function,
        signature=dict(zip(function.arg_names, job.argument_types, strict=True)),
        constexprs={},
        attrs={(position,): DIVISIBLE_BY_16 for position in job.divisible_arguments},
    )
    return triton.compile(source, target=GPUTarget(*job.target), options=job.options)


def handle_message(message: bytes, modules: dict[str, ModuleType]) -> bytes:
    """Compile the kernel of a message; return the answer."""
    import triton

    job_id, fields = json.loads(message)
    job = CompileJob(**fields)
    triton.knobs.cache.dir = job.cache_dir
    try:
        if job.path not in modules:
            modules[job.path] = load_module(job.path)
        compile_kernel(getattr(modules[job.path], job.name), job)
    except Exception as error:  # the other side compiles it again, and raises there
        return json.dumps([job_id, f"{type(error).__name__}: {error}"[:1000]]).encode()
    return json.dumps([job_id, None]).encode()


def serve_jobs(channel: socket.socket) -> None:
    modules: dict[str, ModuleType] = {}
    while message := channel.recv(MAX_MESSAGE_BYTES):
        channel.send(handle_message(message, modules))


def fork_workers(channel: socket.socket, count: int) -> None:
    """Fork workers and wait for them. If one dies, all are killed, and the other side notices."""
    children: set[int] = set()
    for _ in range(count):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                serve_jobs(channel)
                status = 0
            finally:  # never return into the first process's code
                os._exit(status)
        children.add(child)
    channel.close()
    while children:
        child, status = os.wait()
        children.discard(child)
        if status != 0:
            for other in children:
                os.kill(other, signal.SIGKILL)


def register_bare_packages() -> None:
    """Register our packages without running what their `__init__` imports."""
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
    register_bare_packages()
    importlib.import_module("fulgurite.fuser.codegen.triton.device_functions")  # for all forks
    cache_triton_key()
    channel.send(json.dumps([READY_ID, None]).encode())
    if channel.recv(1, socket.MSG_PEEK):
        fork_workers(channel, count)


if __name__ == "__main__":
    main()
