"""The Triton module of a region: one file, one function a kernel.

In: kernel sources in the order they run. Out: the text of a Python module, which the runtime writes
into the kernel cache, imports and compiles.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import torch

from fulgurite.fuser.codegen.triton.kernel import TritonKernelSource

POINTER_TYPES: dict[torch.dtype, str] = {
    torch.bool: "i1",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.float32: "fp32",
    torch.float64: "fp64",
}
DEVICE_FUNCTIONS = "fulgurite.fuser.codegen.triton.device_functions"


def write_module(sources: Sequence[TritonKernelSource]) -> str:
    """Imports, then every kernel."""
    text = "\n\n\n".join(source.text for source in sources)
    lines = ["import triton", "import triton.language as tl"]
    if "libdevice." in text:
        lines.append("from triton.language.extra import libdevice")
    functions = sorted({name for source in sources for name in source.functions})
    if functions:
        names = ", ".join(functions)
        line = f"from {DEVICE_FUNCTIONS} import {names}"
        if len(line) > 100:
            body = textwrap.fill(names, 92, initial_indent="    ", subsequent_indent="    ")
            line = line.removesuffix(names) + f"(\n{body},\n)"
        lines.append(line)
    return "\n".join(lines) + "\n\n\n" + text + "\n"


def argument_types(source: TritonKernelSource) -> tuple[str, ...]:
    """The types of a kernel's arguments, as Triton names them."""
    pointers = [f"*{POINTER_TYPES[tensor.dtype]}" for tensor in source.tensors]
    sizes = ["i64" if source.int64_index or s.is_64_bit else "i32" for s in source.symbols]
    return (*pointers, *sizes)
