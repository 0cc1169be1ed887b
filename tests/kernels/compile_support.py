"""Triton kernels compiled for a GPU that is not there: launches become compilations.

In: a module of kernels. Out: the same module whose launches compile their kernel for an H200, with
the types, sizes and divisibility of the arguments, and note what came of it.
"""

from __future__ import annotations

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

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 << 10  # of a program on an H200
TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "i8",
    torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv", torch.float64: "fp64",
}  # fmt: skip
EVEN = [["tt.divisibility", 16]]


@dataclass
class Compiled:
    """Stands where a kernel stood; `kernels` are what its launches became."""

    function: Any
    kernels: list[Any] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(0 < size < 2**31 for size in grid), f"{self.function.__name__}{grid}"
        return self._compile

    def _compile(self, *args: Any, **named: Any) -> None:
        options = {
            key: named.pop(key) for key in ("num_warps", "num_stages", "maxnreg") if key in named
        }
        given = dict(zip(self.function.arg_names, args, strict=False)) | named
        types: dict[str, str] = {}
        constants: dict[tuple[int], Any] = {}
        attributes: dict[tuple[int], Any] = {}
        for position, parameter in enumerate(self.function.params):
            value, place = given[parameter.name], (position,)
            fixed = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
            if parameter.is_constexpr or fixed or value is None:
                types[parameter.name], constants[place] = "constexpr", value
                continue
            types[parameter.name] = type_of(value)
            even = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
            if even and not parameter.do_not_specialize:
                attributes[place] = EVEN
        source = ASTSource(self.function, types, constants, attributes)
        made = triton.compile(source, target=HOPPER, options=options)
        assert made.asm["cubin"], "no machine code"
        assert made.metadata.shared <= SHARED_BYTES, (
            f"{made.metadata.shared} bytes of shared memory"
        )
        self.kernels.append(made)


def stack_bytes(made: Any, folder: Path) -> int:
    """What a thread of a compiled kernel keeps in memory because its registers don't hold it."""
    path = folder / "kernel.cubin"
    path.write_bytes(made.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"STACK:(\d+)", told.stdout + told.stderr)
    assert found, told.stdout
    return int(found.group(1))


def type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
    if isinstance(value, float):
        return "fp32"
    return "i32" if abs(value) < 2**31 else "i64"


def compile_launches(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Compiled]:
    """Replace a module's kernels until the test is over."""
    made = []
    for name, kernel in vars(module).copy().items():
        if isinstance(kernel, triton.JITFunction) and name.endswith("_kernel"):
            made.append(Compiled(kernel))
            monkeypatch.setattr(module, name, made[-1])
    return made
