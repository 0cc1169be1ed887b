"""GGUF files, mapped into memory: a path in; metadata and tensors by name, shaped with K last, out.

`GGUFContainer` is the file as it is, for whoever needs its metadata or its bytes. `read_gguf` makes
tensors of it: quantized blocks become `QuantTensor`s whose packed data is the file's own memory,
without a copy; F32, F16 and BF16 become plain tensors, since those are dtypes of torch. Writing to
a tensor changes this process's memory, never the file.

The container and the blocks of `GGUF_TYPES` are read by our own code. The gguf package is asked for
only by `dequantize`, for blocks that no format of ours holds.
"""

from __future__ import annotations

from collections.abc import Collection
from os import PathLike
from pathlib import Path

import numpy
import torch
from torch import Tensor

from fulgurite.errors import FormatError, WeightsError
from fulgurite.quant.blocks import Packed
from fulgurite.quant.codec import decode, unpack
from fulgurite.quant.format import FORMATS
from fulgurite.quant.gguf_header import read_header
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


class GGUFContainer:
    """One GGUF file: its header read, its tensors mapped."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self._mapped = _map(self.path)
        header = read_header(memoryview(self._mapped.numpy()), str(path))
        self.metadata = header.metadata
        self.tensors = header.tensors

    def data(self, name: str) -> Tensor:
        """A view of the mapped file: plain types as what they are, others as bytes [.., a row's]."""
        info = self.tensors[name]
        data = self._mapped[info.start : info.start + info.size]
        if info.type.name in PLAIN_TYPES:
            return data.view(PLAIN_TYPES[info.type.name]).view(info.shape)
        columns = info.shape[-1] if info.shape else 1
        return data.view(*info.shape[:-1], columns // info.type.block * info.type.size)


def _map(path: Path) -> Tensor:
    """The file's bytes, mapped copy-on-write: torch wants writable memory, the file stays as it is."""
    if path.stat().st_size == 0:  # which can't be mapped
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(numpy.memmap(path, dtype=numpy.uint8, mode="c"))


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
    file = GGUFContainer(path)
    missing = sorted(set(names or ()) - set(file.tensors))
    if missing:
        raise WeightsError(
            f"the file has no tensor {missing[0]!r}"
            + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""),
            where=str(path),
            next=f"it holds {len(file.tensors)} tensors, such as "
            + ", ".join(list(file.tensors)[:5]),
        )
    wanted = file.tensors if names is None else names
    return {name: _read(file, name, dtype, check) for name in wanted}


def _read(file: GGUFContainer, name: str, dtype: torch.dtype, check: bool) -> Tensor:
    kind, data = file.tensors[name].type.name, file.data(name)
    if kind in PLAIN_TYPES:
        return data
    where = f"{name} in {file.path}"
    if kind not in GGUF_TYPES:
        raise FormatError(
            f"{kind} blocks can't be read",
            where=where,
            next=f"use a file in {', '.join([*GGUF_TYPES, *PLAIN_TYPES])}",
        )
    packed = QuantTensor(GGUF_TYPES[kind], data, {}, dtype)
    return packed.check(where) if check else packed


def dequantize(data: Tensor, kind: str) -> Tensor:
    """Packed rows, uint8 [.., bytes], as float32: by our own formats, else by the gguf package."""
    if kind in GGUF_TYPES:
        format = FORMATS[GGUF_TYPES[kind]]
        return decode(unpack(Packed(data, {}), format), format)
    gguf = require("gguf", f"unpacking {kind} blocks", "gguf")
    try:
        numbers = gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[kind])
    except (KeyError, NotImplementedError) as error:
        raise FormatError(
            f"{kind} blocks can't be read, neither by us nor by the gguf package installed",
            next="use a file of another type, or a newer gguf package",
        ) from error
    return torch.from_numpy(numbers)
