"""The Triton module of a region: one file, one function a kernel.

In: stages in the order they run. Out: the text of a Python module, which the launcher writes into the
kernel cache, imports and compiles.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import torch

from fulgurite.fuser.codegen.triton.kernel import Stage, write_stages
from fulgurite.fuser.codegen.triton.values import TYPES
from fulgurite.fuser.frontend.random import SEED

POINTERS: dict[torch.dtype, str] = {
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


def write_module(stages: Sequence[Stage]) -> str:
    """Imports, then every kernel."""
    text = "\n\n\n".join(stage.text for stage in stages)
    lines = ["import triton", "import triton.language as tl"]
    if "libdevice." in text:
        lines.append("from triton.language.extra import libdevice")
    functions = sorted({name for stage in stages for name in stage.functions})
    if functions:
        names = ", ".join(functions)
        imported = f"from fulgurite.fuser.codegen.triton.device_functions import {names}"
        if len(imported) > 100:
            body = textwrap.fill(names, 92, initial_indent="    ", subsequent_indent="    ")
            imported = imported.removesuffix(names) + f"(\n{body},\n)"
        lines.append(imported)
    return "\n".join(lines) + "\n\n\n" + text + "\n"


def argument_types(stage: Stage) -> tuple[str, ...]:
    """The types of a stage's arguments, as Triton spells them."""
    pointers = [f"*{POINTERS[tensor.dtype]}" for tensor in stage.tensors]
    sizes = ["i64" if stage.wide or s == SEED else "i32" for s in stage.symbols]
    return (*pointers, *sizes)


__all__ = ["POINTERS", "TYPES", "Stage", "argument_types", "write_module", "write_stages"]
