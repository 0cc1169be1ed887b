"""Tensors of a .gguf file, mapped into memory.

In: a path. Out: tensors by name, shaped with K last. Quantized blocks become `QuantTensor`s whose
packed data is the file's own memory, without a copy; F32, F16 and BF16 become plain tensors, since
those are dtypes of torch. Writing to a tensor changes this process's memory, never the file.

The `gguf` package reads the container (its header and offsets); the blocks are ours.
"""

from __future__ import annotations

from collections.abc import Collection
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from fulgurite.errors import FormatError, WeightsError
from fulgurite.quant.optional import require
from fulgurite.quant.tensor import QuantTensor

GGUF_TYPES: dict[str, str] = {
    "Q4_0": "q4_0",
    "Q4_1": "q4_1",
    "Q8_0": "q8_0",
    "Q4_K": "q4_k",
    "Q6_K": "q6_k",
}
PLAIN_TYPES: dict[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def read_gguf(
    path: str | PathLike[str],
    names: Collection[str] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    check: bool = True,
) -> dict[str, Tensor]:
    """The file's tensors, or those of `names`; `dtype` is what quantized ones dequantize to.

    `check` looks for scales that are NaN or infinite. They lie inside the blocks, so this reads the
    file once; without it pages are read when they are used.
    """
    reader = require("gguf", "reading a .gguf file", "gguf").GGUFReader(path, "c")
    found = {tensor.name: tensor for tensor in reader.tensors}
    missing = sorted(set(names or ()) - set(found))
    if missing:
        raise WeightsError(
            f"the file has no tensor {missing[0]!r}"
            + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""),
            where=str(path),
            next=f"it holds {len(found)} tensors, such as {', '.join(list(found)[:5])}",
        )
    wanted = found if names is None else {name: found[name] for name in names}
    return {name: _read(tensor, path, dtype, check) for name, tensor in wanted.items()}


def _read(tensor: Any, path: str | PathLike[str], dtype: torch.dtype, check: bool) -> Tensor:
    kind = tensor.tensor_type.name
    shape = [int(size) for size in reversed(tensor.shape)]
    data = torch.from_numpy(tensor.data)
    if kind in PLAIN_TYPES:
        return data.view(torch.uint8).reshape(-1).view(PLAIN_TYPES[kind]).reshape(shape)
    where = f"{tensor.name} in {path}"
    if kind not in GGUF_TYPES:
        raise FormatError(
            f"{kind} blocks can't be read",
            where=where,
            next=f"use a file in {', '.join([*GGUF_TYPES, *PLAIN_TYPES])}",
        )
    packed = QuantTensor(GGUF_TYPES[kind], data, {}, dtype)
    if list(packed.shape) != shape:
        raise WeightsError(
            f"the header says {shape}, and the bytes are those of {list(packed.shape)}",
            where=where,
            next="the file is damaged: download it again",
        )
    return packed.check(where) if check else packed
