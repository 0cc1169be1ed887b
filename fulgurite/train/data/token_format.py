"""Layouts of token files: a path in, where its tokens are out.

    ours      64 bytes of numbers; a JSON header; tokens; the offsets and hashes of documents
    llm.c     256 int32 (magic, version, number of tokens), then uint16 or uint32 tokens
    raw       uint16 tokens, nothing else (nanoGPT)

A file whose size does not fit its header is rejected.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fulgurite.errors import ArgumentError

MAGIC = b"FULGTOK1"
HEAD_BYTES = 8192  # magic, length of the JSON text, the JSON text, zeros
LLMC_MAGICS = {20240520: np.uint16, 20240801: np.uint32}
LLMC_HEADER_BYTES = 1024


@dataclass(frozen=True)
class TokenLayout:
    """Where tokens and documents are in a file.

    Attributes:
        dtype: of tokens.
        start: the byte of the first token.
        num_tokens, num_documents: how many; -1 documents: the file has no index.
        header: the JSON header of our own files.
    """

    dtype: np.dtype[Any]
    start: int
    num_tokens: int
    num_documents: int
    header: dict[str, Any]

    @property
    def offsets_start(self) -> int:
        """The byte of the document offsets, aligned to 8."""
        return -(-(self.start + self.num_tokens * self.dtype.itemsize) // 8) * 8

    @property
    def hashes_start(self) -> int:
        return self.offsets_start + 8 * (self.num_documents + 1)

    @property
    def num_bytes(self) -> int:
        """The size that the file must have."""
        if self.num_documents < 0:
            return self.start + self.num_tokens * self.dtype.itemsize
        return self.hashes_start + 8 * self.num_documents


def is_token_file(path: Path) -> bool:
    """Whether a file says of itself that it holds tokens."""
    try:
        with open(path, "rb") as file:
            head = file.read(8)
    except OSError:
        return False
    return head == MAGIC or (len(head) == 8 and struct.unpack("<ii", head)[0] in LLMC_MAGICS)


def pack_header(header: dict[str, Any]) -> bytes:
    """The first `HEAD_BYTES` of a file of ours."""
    text = json.dumps(header, ensure_ascii=True).encode()
    head = MAGIC + struct.pack("<Q", len(text)) + text
    assert len(head) <= HEAD_BYTES, f"the header has {len(head)} bytes, more than {HEAD_BYTES}"
    return head.ljust(HEAD_BYTES, b"\0")


def read_layout(path: Path) -> TokenLayout:
    """The layout of a file; raise if it is damaged."""
    try:
        size = os.stat(path).st_size
        with open(path, "rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise ArgumentError(
            f"can't read the token file {path}: {error.strerror}", next="check the path"
        ) from error
    if head[:8] == MAGIC:
        layout = _read_own(path, head)
    elif len(head) >= LLMC_HEADER_BYTES and struct.unpack("<i", head[:4])[0] in LLMC_MAGICS:
        magic, _, tokens = struct.unpack("<iii", head[:12])
        dtype = np.dtype(LLMC_MAGICS[magic])
        layout = TokenLayout(dtype, LLMC_HEADER_BYTES, tokens, -1, {})
    else:
        layout = TokenLayout(np.dtype(np.uint16), 0, size // 2, -1, {})
    if layout.num_bytes != size:
        raise ArgumentError(
            f"the token file {path} has {size:,} bytes, but its layout needs {layout.num_bytes:,}",
            next="it is truncated or no token file: write it again",
        )
    return layout


def _read_own(path: Path, head: bytes) -> TokenLayout:
    try:
        (length,) = struct.unpack("<Q", head[8:16])
        header = json.loads(head[16 : 16 + length])
        dtype = {"uint16": np.uint16, "uint32": np.uint32}[header["dtype"]]
        tokens, documents = int(header["tokens"]), int(header["documents"])
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise ArgumentError(
            f"the header of the token file {path} is damaged", next="delete it; it is written again"
        ) from error
    return TokenLayout(np.dtype(dtype), HEAD_BYTES, tokens, documents, header)
