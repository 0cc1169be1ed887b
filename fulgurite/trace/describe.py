"""Short descriptions of values and source lines: `bf16[4, s0]`, `model.py:57`.

In: a node's fake value, and the stack trace that capture recorded on it. Out: strings for signatures,
comments, tables and errors.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from fulgurite.trace.node_meta import module_stack, stack_trace

DTYPE_NAMES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8e4m3fn",
    torch.float8_e4m3fnuz: "f8e4m3fnuz",
    torch.float8_e5m2: "f8e5m2",
    torch.float8_e5m2fnuz: "f8e5m2fnuz",
    torch.float8_e8m0fnu: "f8e8m0fnu",
    torch.float4_e2m1fn_x2: "f4e2m1x2",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint64: "u64",
    torch.uint32: "u32",
    torch.uint16: "u16",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex128: "c128",
    torch.complex64: "c64",
    torch.complex32: "c32",
}


def dtype_name(dtype: torch.dtype) -> str:
    return DTYPE_NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def describe(value: Any) -> str:
    """A value in a few characters: dtype and shape, and strides unless they are contiguous."""
    if isinstance(value, torch.Tensor):
        text = f"{dtype_name(value.dtype)}[{', '.join(map(str, value.shape))}]"
        if value.layout is not torch.strided:
            return f"{text} {str(value.layout).removeprefix('torch.')}"
        if not _is_row_major(value):
            text += f" strides [{', '.join(map(str, value.stride()))}]"
        return text
    if isinstance(value, (bool, torch.SymBool)):
        return "bool"
    if isinstance(value, (int, torch.SymInt)):
        return "int"
    if isinstance(value, (float, torch.SymFloat)):
        return "float"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(describe(item) for item in value)})"
    return "None" if value is None else type(value).__name__


def _is_row_major(value: torch.Tensor) -> bool:
    """Whether the tensor is contiguous. Compares printed strides, so that no guard is added."""
    expected: list[str] = []
    running: Any = 1
    for size in reversed(value.shape):
        expected.append(str(running))
        running = running * size
    strides = [str(stride) for stride in value.stride()]
    expected.reverse()
    return all(
        actual == wanted or str(size) in ("0", "1")
        for actual, wanted, size in zip(strides, expected, value.shape, strict=True)
    )


@dataclass(frozen=True)
class Source:
    """The line of the user's program that a node comes from. Empty fields are unknown."""

    module: str = ""
    file: str = ""
    line: int = 0
    code: str = ""
    function: str = ""

    @property
    def location(self) -> str:
        """`model.py:57`; empty if unknown."""
        return f"{os.path.basename(self.file)}:{self.line}" if self.file else ""

    def __str__(self) -> str:
        location = f"{self.file}:{self.line}, in {self.function}" if self.file else ""
        return "   ".join(part for part in (self.code, location, self.module) if part)


_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)')
_PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_INTERNAL_PATHS = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.join(_PACKAGE_ROOT, "op.py"),
    os.path.join(_PACKAGE_ROOT, "capture") + os.sep,
)


def is_user_file(file: str) -> bool:
    """Whether a file is neither torch's nor one of ours that lie between the user and torch."""
    return not file.startswith(_INTERNAL_PATHS)


def source_of(node: fx.Node) -> Source:
    """The user's module path and source line of a node, if capture recorded them."""
    return _parse_source(stack_trace(node), module_path(node))


def module_path(node: fx.Node) -> str:
    """The innermost nn.Module that the node was captured in: `self.layers.0.mlp`."""
    stack = module_stack(node)
    if not stack:
        return ""
    path = next(reversed(stack.values()))[0]
    return clean_path(path if isinstance(path, str) else "")


@lru_cache(maxsize=4096)
def clean_path(path: str) -> str:
    """`L['self']._modules['layers']._modules['0'].mlp` → `self.layers.0.mlp`."""
    path = re.sub(r"^L\['fn'\]", "self", path)  # TorchDynamo's name for the module it is given
    path = re.sub(r"^L\['(\w+)'\]", r"\1", path)
    path = re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", path)
    path = re.sub(r"\[(?:'([^']+)'|(\d+))\]", lambda m: f".{m[1] or m[2]}", path)
    return path.strip(".")


@lru_cache(maxsize=4096)
def _parse_source(stack_trace: str, module: str) -> Source:
    lines = stack_trace.strip().splitlines()
    frames = [(m, i) for i, line in enumerate(lines) if (m := _FRAME.search(line))]
    if not frames:
        return Source(module=module)
    own = [frame for frame in frames if is_user_file(frame[0]["file"])]
    match, index = (own or frames)[-1]
    follows = lines[index + 1].strip() if index + 1 < len(lines) else ""
    code = "" if _FRAME.search(follows) else follows
    return Source(module, match["file"], int(match["line"]), code, match["function"].strip())
