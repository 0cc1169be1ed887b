"""Compiles Triton kernels for a GPU without having one: launches become compilations.

In: a module of kernels. Out: the same module, whose launches compile their kernel for sm_90 (or
TEST_ARCH) with the types, sizes and divisibility of the arguments, and record the result.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

# TEST_ARCH=100 compiles for sm_100; test_compile_sm100.py does
TARGET = GPUTarget("cuda", int(os.environ.get("TEST_ARCH", "90")), 32)
IS_HOPPER = TARGET.arch == 90  # what the PTX must contain is known for Hopper only
SHARED_BYTES = 227 << 10  # per program on an H200 and on a B200
TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "i8",
    torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv", torch.float64: "fp64",
}  # fmt: skip
DIVISIBLE_BY_16 = [["tt.divisibility", 16]]


@dataclass
class Compiled:
    """Replaces a kernel; `kernels` are the compiled kernels of its launches."""

    function: Any
    kernels: list[Any] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(0 < size < 2**31 for size in grid), f"{self.function.__name__}{grid}"
        return self._compile

    def _compile(self, *args: Any, **named: Any) -> None:
        options = {
            key: named.pop(key) for key in ("num_warps", "num_stages", "maxnreg") if key in named
        }
        arguments = dict(zip(self.function.arg_names, args, strict=False)) | named
        types: dict[str, str] = {}
        constants: dict[tuple[int], Any] = {}
        attributes: dict[tuple[int], Any] = {}
        for position, parameter in enumerate(self.function.params):
            value, key = arguments[parameter.name], (position,)
            is_one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
            if parameter.is_constexpr or is_one or value is None:
                types[parameter.name], constants[key] = "constexpr", value
                continue
            types[parameter.name] = triton_type(value)
            is_divisible = isinstance(value, torch.Tensor) or (
                isinstance(value, int) and value % 16 == 0
            )
            if is_divisible and not parameter.do_not_specialize:
                attributes[key] = DIVISIBLE_BY_16
        source = ASTSource(self.function, types, constants, attributes)
        compiled = triton.compile(source, target=TARGET, options=options)
        assert compiled.asm["cubin"], "no machine code"
        assert compiled.metadata.shared <= SHARED_BYTES, (
            f"{compiled.metadata.shared} bytes of shared memory"
        )
        self.kernels.append(compiled)


def stack_bytes(compiled: Any, folder: Path) -> int:
    """Bytes that a thread of a compiled kernel spills to the stack."""
    return read_resource(compiled, folder, "STACK")


def register_count(compiled: Any, folder: Path) -> int:
    """Registers of a thread of a compiled kernel."""
    return read_resource(compiled, folder, "REG")


def read_resource(compiled: Any, folder: Path, name: str) -> int:
    """What `cuobjdump -res-usage` says of a compiled kernel."""
    path = folder / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(rf"{name}:(\d+)", result.stdout + result.stderr)
    assert found, result.stdout
    return int(found.group(1))


def triton_type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
    if isinstance(value, float):
        return "fp32"
    return "i32" if abs(value) < 2**31 else "i64"


def compile_launches(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Compiled]:
    """Replace a module's kernels for the duration of a test."""
    compiled = []
    for name, kernel in vars(module).copy().items():
        if isinstance(kernel, triton.JITFunction) and name.endswith("_kernel"):
            compiled.append(Compiled(kernel))
            monkeypatch.setattr(module, name, compiled[-1])
    return compiled
