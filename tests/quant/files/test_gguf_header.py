"""Hand-written GGUF headers: valid ones, and every kind of error."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from fulgurite.errors import WeightsError
from fulgurite.quant.files.gguf_header import (
    MAX_ARRAY_DEPTH,
    TENSOR_TYPES,
    GGUFHeader,
    read_gguf_header,
    read_gguf_metadata,
)

UINT32, FLOAT32, STRING, ARRAY, UINT64 = 4, 6, 8, 9, 10
F32, Q8_0 = 0, 8


def pack_string(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def pack_key(name: str, type_code: int, value: bytes) -> bytes:
    return pack_string(name) + struct.pack("<I", type_code) + value


def pack_uint32(value: int) -> bytes:
    return struct.pack("<I", value)


def pack_tensor(name: str, dims: Sequence[int], code: int = F32, offset: int = 0) -> bytes:
    return (
        pack_string(name)
        + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        + struct.pack("<IQ", code, offset)
    )


def build_file(
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    size: int = 0,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """A file with `size` bytes of data."""
    counts = struct.pack("<IQQ", version, len(tensors), len(keys))
    header = b"GGUF" + counts + b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + bytes(size)


def read_header(data: bytes) -> GGUFHeader:
    return read_gguf_header(memoryview(data), "model.gguf")


VALID = build_file(
    [
        pack_key("general.architecture", STRING, pack_string("llama")),
        pack_key("general.alignment", UINT32, pack_uint32(64)),
        pack_key("ids", ARRAY, struct.pack("<IQ3I", UINT32, 3, 5, 6, 7)),
        pack_key(
            "words", ARRAY, struct.pack("<IQ", STRING, 2) + pack_string("ä") + pack_string("")
        ),
        pack_key("nested", ARRAY, struct.pack("<IQIQIIQ", ARRAY, 2, UINT32, 1, 9, FLOAT32, 0)),
    ],
    [
        pack_tensor("a", [3, 2]),
        pack_tensor("b", [64, 2], Q8_0, 64),
        pack_tensor("scalar", [], F32, 256),
    ],
    size=260,
    alignment=64,
)


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_and_tensors(version: int) -> None:
    header = read_header(VALID[:4] + pack_uint32(version) + VALID[8:])
    assert header.metadata == {
        "general.architecture": "llama",
        "general.alignment": 64,
        "ids": [5, 6, 7],
        "words": ["ä", ""],
        "nested": [[9], []],
    }
    base = len(VALID) - 260
    found = [(t.name, t.shape, t.type, t.offset - base, t.nbytes) for t in header.tensors.values()]
    assert found == [
        ("a", (2, 3), TENSOR_TYPES[F32], 0, 24),
        ("b", (2, 64), TENSOR_TYPES[Q8_0], 64, 2 * 2 * 34),
        ("scalar", (), TENSOR_TYPES[F32], 256, 4),
    ]


def test_empty_file() -> None:
    assert read_header(build_file()) == GGUFHeader({}, {})


def test_every_truncation_is_an_error() -> None:
    for length in range(len(VALID)):
        with pytest.raises(WeightsError, match="truncated") as caught:
            read_header(VALID[:length])
    assert f"it has {length} bytes and needs at least {len(VALID)}" in str(caught.value)
    assert "model.gguf" in str(caught.value)


MAX_UINT64 = 2**64 - 1
INVALID: dict[str, tuple[bytes, str]] = {
    "magic": (b"GGML" + VALID[4:], "not a GGUF file"),
    "version": (VALID[:4] + pack_uint32(9) + VALID[8:], "version 9 is not supported"),
    "version 0": (VALID[:4] + pack_uint32(0) + VALID[8:], "version 0 is not supported"),
    "big-endian": (VALID[:4] + struct.pack(">I", 3) + VALID[8:], "big-endian"),
    "tensor count": (
        VALID[:8] + struct.pack("<Q", MAX_UINT64) + VALID[16:],
        "truncated|damaged",
    ),
    "key count": (
        VALID[:16] + struct.pack("<Q", MAX_UINT64) + VALID[24:],
        "truncated|damaged",
    ),
    "counts of zeros": (
        b"GGUF" + struct.pack("<IQQ", 3, MAX_UINT64, MAX_UINT64) + bytes(10**6),
        "occurs twice",
    ),
    "string length": (build_file([struct.pack("<Q", MAX_UINT64)], size=64), "truncated"),
    "numbers": (
        build_file([pack_key("x", ARRAY, struct.pack("<IQ", UINT64, MAX_UINT64))]),
        "truncated",
    ),
    "strings": (
        build_file([pack_key("x", ARRAY, struct.pack("<IQ", STRING, MAX_UINT64))], size=64),
        "truncated",
    ),
    "arrays": (
        build_file([pack_key("x", ARRAY, struct.pack("<IQ", ARRAY, MAX_UINT64))], size=64),
        "truncated",
    ),
    "nesting": (
        build_file([pack_key("x", ARRAY, struct.pack("<IQ", ARRAY, 1) * 10_000)]),
        f"more than {MAX_ARRAY_DEPTH} deep",
    ),
    "value type": (build_file([pack_key("x", 13, pack_uint32(0))]), "unknown GGUF value type 13"),
    "item type": (
        build_file([pack_key("x", ARRAY, struct.pack("<IQ", 99, 1))]),
        "unknown GGUF value type 99",
    ),
    "string": (
        build_file([pack_key("x", STRING, pack_string(b"\xff\xfe"))]),
        "damaged: .*utf-8",
    ),
    "same key": (
        build_file([pack_key("x", UINT32, pack_uint32(0))] * 2),
        "key 'x' occurs twice",
    ),
    "same tensor": (
        build_file([], [pack_tensor("x", [1])] * 2, size=4),
        "tensor 'x' occurs twice",
    ),
    "type": (build_file([], [pack_tensor("x", [1], 200)], size=4), "x has unknown GGUF type 200"),
    "dimensions": (build_file([], [pack_tensor("x", [1] * 5)], size=4), "x has 5 dimensions"),
    "many dimensions": (
        build_file([], [pack_string("x") + pack_uint32(2**32 - 1)], size=99),
        "dimensions",
    ),
    "rows": (
        build_file([], [pack_tensor("x", [48, 2], Q8_0)], size=99),
        "rows of 48, not a multiple .* 32",
    ),
    "packed scalar": (
        build_file([], [pack_tensor("x", [], Q8_0)], size=99),
        "rows of 1, not a multiple",
    ),
    "offset": (build_file([], [pack_tensor("x", [1], F32, 4)], size=8), "misaligned: offset 4"),
    "far offset": (build_file([], [pack_tensor("x", [1], F32, 2**63)], size=4), "truncated"),
    "large shape": (build_file([], [pack_tensor("x", [2**20, 2**20])], size=4), "truncated"),
    "larger shape": (build_file([], [pack_tensor("x", [2**32, 2**32])], size=4), "invalid shape"),
    "empty and large": (
        build_file([], [pack_tensor("x", [0, MAX_UINT64])], size=4),
        "invalid shape",
    ),
    "alignment 0": (
        build_file([pack_key("general.alignment", UINT32, pack_uint32(0))]),
        "alignment=0 must be",
    ),
    "alignment 4": (
        build_file([pack_key("general.alignment", UINT32, pack_uint32(4))]),
        "alignment=4 must be",
    ),
    "alignment 48": (
        build_file([pack_key("general.alignment", UINT32, pack_uint32(48))]),
        "power of two",
    ),
    "alignment string": (
        build_file([pack_key("general.alignment", STRING, pack_string("32"))]),
        "alignment='32' must be",
    ),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_header_is_an_error(name: str) -> None:
    data, message = INVALID[name]
    with pytest.raises(WeightsError, match=message) as caught:
        read_header(data)
    assert "model.gguf" in str(caught.value)


def test_corrupted_bytes_never_point_outside_the_file() -> None:
    """A damaged header is rejected, or all of its tensors are inside the file."""
    rejected = 0
    for _ in range(3000):
        data = bytearray(VALID)
        for _ in range(random.choice((1, 1, 2, 8))):
            data[random.randrange(len(data) - 260)] = random.choice((0, 1, 8, 127, 128, 255))
        try:
            header = read_header(bytes(data))
        except WeightsError:
            rejected += 1
        else:
            assert all(
                0 <= t.offset <= t.offset + t.nbytes <= len(data) for t in header.tensors.values()
            )
    assert 1000 < rejected < 3000


def test_metadata_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    key = pack_key("general.name", STRING, pack_string("sand"))
    path.write_bytes(build_file([key], [pack_tensor("a", [4])], size=32))
    assert read_gguf_metadata(path) == {"general.name": "sand"}
    for content in (b"", b"GGUF", path.read_bytes()[:30]):
        path.write_bytes(content)
        with pytest.raises(WeightsError, match="model.gguf"):
            read_gguf_metadata(path)
