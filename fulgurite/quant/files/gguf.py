"""Memory-mapped GGUF files: a path in; metadata and tensors by name out, with K last.

`GGUFReader` gives access to the metadata and the raw data. `read_gguf` builds tensors: quantized
blocks become `QuantTensor`s that share the file's memory; F32, F16 and BF16 become plain tensors.
Writing to a tensor changes the memory of this process, never the file.

Our own code reads the container and the block types of `FORMAT_OF_GGUF_TYPE`. The optional gguf
package is needed only by `dequantize_gguf`, for block types without a format here.
"""

from __future__ import annotations

from collections.abc import Collection
from os import PathLike
from pathlib import Path

import numpy
import torch
from torch import Tensor

from fulgurite.errors import FormatError, WeightsError
from fulgurite.quant.codecs.blocks import PackedData
from fulgurite.quant.codecs.codec import dequantize_codes, unpack
from fulgurite.quant.files.gguf_header import read_gguf_header
from fulgurite.quant.format import FORMATS
from fulgurite.quant.optional_package import import_optional
from fulgurite.quant.tensor import QuantTensor

FORMAT_OF_GGUF_TYPE: dict[str, str] = {
    "Q4_0": "q4_0",
    "Q4_1": "q4_1",
    "Q8_0": "q8_0",
    "Q4_K": "q4_k",
    "Q6_K": "q6_k",
}
DTYPE_OF_GGUF_TYPE: dict[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class GGUFReader:
    """An open GGUF file: the header is read, the tensors are mapped."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self._mapped = _map_file(self.path)
        header = read_gguf_header(memoryview(self._mapped.numpy()), str(path))
        self.metadata = header.metadata
        self.tensors = header.tensors

    def read_data(self, name: str) -> Tensor:
        """A view of the mapped file: plain types with their dtype, quantized types as bytes of
        rows.
        """
        info = self.tensors[name]
        data = self._mapped[info.offset : info.offset + info.nbytes]
        if info.type.name in DTYPE_OF_GGUF_TYPE:
            return data.view(DTYPE_OF_GGUF_TYPE[info.type.name]).view(info.shape)
        columns = info.shape[-1] if info.shape else 1
        return data.view(*info.shape[:-1], columns // info.type.block_size * info.type.block_bytes)


def _map_file(path: Path) -> Tensor:
    """Map the file copy-on-write: torch needs writable memory, and the file must not change."""
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(numpy.memmap(path, dtype=numpy.uint8, mode="c"))


def read_gguf(
    path: str | PathLike[str],
    names: Collection[str] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    check: bool = True,
) -> dict[str, Tensor]:
    """Read the file's tensors, or those of `names`; `dtype` is the dtype they dequantize to.

    `check` raises for scales that are NaN or infinite. Scales are inside the blocks, so this reads
    the whole file; otherwise data is read when it is first used.
    """
    file = GGUFReader(path)
    missing = sorted(set(names or ()) - set(file.tensors))
    if missing:
        raise WeightsError(
            f"the file has no tensor {missing[0]!r}"
            + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""),
            where=str(path),
            next=f"it contains {len(file.tensors)} tensors, such as "
            + ", ".join(list(file.tensors)[:5]),
        )
    selected = file.tensors if names is None else names
    return {name: _read_tensor(file, name, dtype, check) for name in selected}


def _read_tensor(file: GGUFReader, name: str, dtype: torch.dtype, check: bool) -> Tensor:
    type_name, data = file.tensors[name].type.name, file.read_data(name)
    if type_name in DTYPE_OF_GGUF_TYPE:
        return data
    where = f"{name} in {file.path}"
    if type_name not in FORMAT_OF_GGUF_TYPE:
        raise FormatError(
            f"GGUF type {type_name} is not supported",
            where=where,
            next=f"use a file in {', '.join([*FORMAT_OF_GGUF_TYPE, *DTYPE_OF_GGUF_TYPE])}",
        )
    packed = QuantTensor(FORMAT_OF_GGUF_TYPE[type_name], data, {}, dtype)
    return packed.check_scales(where) if check else packed


def dequantize_gguf(data: Tensor, type_name: str) -> Tensor:
    """Dequantize packed rows, uint8 [.., bytes], to float32: by our codec, else by the gguf
    package.
    """
    if type_name in FORMAT_OF_GGUF_TYPE:
        format = FORMATS[FORMAT_OF_GGUF_TYPE[type_name]]
        return dequantize_codes(unpack(PackedData(data, {}), format), format)
    gguf = import_optional("gguf", f"dequantizing GGUF type {type_name}", "gguf")
    try:
        numbers = gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[type_name])
    except (KeyError, NotImplementedError) as error:
        raise FormatError(
            f"GGUF type {type_name} is not supported, nor by the installed gguf package",
            next="use a file of another type, or upgrade the gguf package",
        ) from error
    return torch.from_numpy(numbers)
