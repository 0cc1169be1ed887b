"""Short words for values and places: `bf16[4, s0]`, `self.mlp · model.py:57`.

In: whatever stands in `node.meta["val"]`, and the stack traces that capture left on nodes.
Out: the strings that signatures, comments, tables and errors print.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx

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
    """One value in a few characters: dtype and shape, and the strides where they are not contiguous."""
    if isinstance(value, torch.Tensor):
        text = f"{dtype_name(value.dtype)}[{', '.join(map(str, value.shape))}]"
        if value.layout is not torch.strided:
            return f"{text} {str(value.layout).removeprefix('torch.')}"
        if not _is_plainly_contiguous(value):
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


def _is_plainly_contiguous(value: torch.Tensor) -> bool:
    """Row-major, decided on the printed strides so that a symbolic shape adds no guard."""
    expected: list[str] = []
    running: Any = 1
    for size in reversed(value.shape):
        expected.append(str(running))
        running = running * size
    strides = [str(stride) for stride in value.stride()]
    expected.reverse()
    return all(
        have == want or str(size) in ("0", "1")
        for have, want, size in zip(strides, expected, value.shape, strict=True)
    )


@dataclass(frozen=True)
class Source:
    """Where in the user's program a node comes from. Empty fields are unknown."""

    module: str = ""
    file: str = ""
    line: int = 0
    code: str = ""
    function: str = ""

    @property
    def place(self) -> str:
        """`model.py:57`, or nothing."""
        return f"{os.path.basename(self.file)}:{self.line}" if self.file else ""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}, in {self.function}" if self.file else ""
        return "   ".join(part for part in (self.code, place, self.module) if part)


_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)')
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_NOT_THE_USERS = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.join(_HERE, "op.py"),
    os.path.join(_HERE, "capture") + os.sep,
)


def is_the_users(file: str) -> bool:
    """A file that is neither torch's nor one of ours that stand between the user and torch."""
    return not file.startswith(_NOT_THE_USERS)


def source_of(node: fx.Node) -> Source:
    """The user's module path and source line of a node, as far as capture recorded them."""
    return _source(node.meta.get("stack_trace") or "", module_path(node))


def module_path(node: fx.Node) -> str:
    """`self.layers.0.mlp`, from the stack of modules capture was in when it met the node."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = next(reversed(stack.values()))[0]
    return clean_path(path if isinstance(path, str) else "")


@lru_cache(maxsize=4096)
def clean_path(path: str) -> str:
    """`L['self']._modules['layers']._modules['0'].mlp` → `self.layers.0.mlp`."""
    path = re.sub(r"^L\['fn'\]", "self", path)  # what TorchDynamo calls the module it is given
    path = re.sub(r"^L\['(\w+)'\]", r"\1", path)
    path = re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", path)
    path = re.sub(r"\[(?:'([^']+)'|(\d+))\]", lambda m: f".{m[1] or m[2]}", path)
    return path.strip(".")


@lru_cache(maxsize=4096)
def _source(stack_trace: str, module: str) -> Source:
    lines = stack_trace.strip().splitlines()
    frames = [(m, i) for i, line in enumerate(lines) if (m := _FRAME.search(line))]
    if not frames:
        return Source(module=module)
    own = [frame for frame in frames if is_the_users(frame[0]["file"])]
    match, index = (own or frames)[-1]
    follows = lines[index + 1].strip() if index + 1 < len(lines) else ""
    code = "" if _FRAME.search(follows) else follows
    return Source(module, match["file"], int(match["line"]), code, match["function"].strip())
