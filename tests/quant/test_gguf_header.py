"""Headers of GGUF files, written by hand: what they may hold, and everything that can be wrong."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

import pytest

from fulgurite.errors import WeightsError
from fulgurite.quant.gguf_header import DEEPEST_ARRAY, TYPES, Header, read_header

UINT32, FLOAT32, STRING, ARRAY, UINT64 = 4, 6, 8, 9, 10
F32, Q8_0 = 0, 8


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def number(value: int) -> bytes:
    return struct.pack("<I", value)


def tensor(name: str, dims: Sequence[int], code: int = F32, offset: int = 0) -> bytes:
    return (
        text(name)
        + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        + struct.pack("<IQ", code, offset)
    )


def file(
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    size: int = 0,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """A whole file with `size` bytes of data."""
    counts = struct.pack("<IQQ", version, len(tensors), len(keys))
    header = b"GGUF" + counts + b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + bytes(size)


def read(data: bytes) -> Header:
    return read_header(memoryview(data), "model.gguf")


GOOD = file(
    [
        key("general.architecture", STRING, text("llama")),
        key("general.alignment", UINT32, number(64)),
        key("ids", ARRAY, struct.pack("<IQ3I", UINT32, 3, 5, 6, 7)),
        key("words", ARRAY, struct.pack("<IQ", STRING, 2) + text("ä") + text("")),
        key("nested", ARRAY, struct.pack("<IQIQIIQ", ARRAY, 2, UINT32, 1, 9, FLOAT32, 0)),
    ],
    [tensor("a", [3, 2]), tensor("b", [64, 2], Q8_0, 64), tensor("scalar", [], F32, 256)],
    size=260,
    alignment=64,
)


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_and_tensors(version: int) -> None:
    header = read(GOOD[:4] + number(version) + GOOD[8:])
    assert header.metadata == {
        "general.architecture": "llama",
        "general.alignment": 64,
        "ids": [5, 6, 7],
        "words": ["ä", ""],
        "nested": [[9], []],
    }
    base = len(GOOD) - 260
    found = [(t.name, t.shape, t.type, t.start - base, t.size) for t in header.tensors.values()]
    assert found == [
        ("a", (2, 3), TYPES[F32], 0, 24),
        ("b", (2, 64), TYPES[Q8_0], 64, 2 * 2 * 34),
        ("scalar", (), TYPES[F32], 256, 4),
    ]


def test_a_file_without_anything() -> None:
    assert read(file()) == Header({}, {})


def test_every_cut_is_an_error() -> None:
    for length in range(len(GOOD)):
        with pytest.raises(WeightsError, match="cut short") as caught:
            read(GOOD[:length])
    assert f"it has {length} bytes and needs at least {len(GOOD)}" in str(caught.value)
    assert "model.gguf" in str(caught.value)


HUGE = 2**64 - 1
BAD: dict[str, tuple[bytes, str]] = {
    "magic": (b"GGML" + GOOD[4:], "no GGUF file"),
    "version": (GOOD[:4] + number(9) + GOOD[8:], "version 9 is not supported"),
    "version 0": (GOOD[:4] + number(0) + GOOD[8:], "version 0 is not supported"),
    "big-endian": (GOOD[:4] + struct.pack(">I", 3) + GOOD[8:], "is big-endian"),
    "tensor count": (GOOD[:8] + struct.pack("<Q", HUGE) + GOOD[16:], "cut short|damaged"),
    "key count": (GOOD[:16] + struct.pack("<Q", HUGE) + GOOD[24:], "cut short|damaged"),
    "counts of zeros": (b"GGUF" + struct.pack("<IQQ", 3, HUGE, HUGE) + bytes(10**6), "there twice"),
    "string length": (file([struct.pack("<Q", HUGE)], size=64), "cut short"),
    "numbers": (file([key("x", ARRAY, struct.pack("<IQ", UINT64, HUGE))]), "cut short"),
    "strings": (file([key("x", ARRAY, struct.pack("<IQ", STRING, HUGE))], size=64), "cut short"),
    "arrays": (file([key("x", ARRAY, struct.pack("<IQ", ARRAY, HUGE))], size=64), "cut short"),
    "nesting": (
        file([key("x", ARRAY, struct.pack("<IQ", ARRAY, 1) * 10_000)]),
        f"more than {DEEPEST_ARRAY} deep",
    ),
    "value type": (file([key("x", 13, number(0))]), "unknown GGUF value type 13"),
    "item type": (file([key("x", ARRAY, struct.pack("<IQ", 99, 1))]), "unknown GGUF value type 99"),
    "text": (file([key("x", STRING, text(b"\xff\xfe"))]), "damaged: .*utf-8"),
    "same key": (file([key("x", UINT32, number(0))] * 2), "key 'x' is there twice"),
    "same tensor": (file([], [tensor("x", [1])] * 2, size=4), "tensor 'x' is there twice"),
    "type": (file([], [tensor("x", [1], 200)], size=4), "x has the unknown GGUF type 200"),
    "dimensions": (file([], [tensor("x", [1] * 5)], size=4), "x has 5 dimensions"),
    "many dimensions": (file([], [text("x") + number(2**32 - 1)], size=99), "dimensions"),
    "rows": (file([], [tensor("x", [48, 2], Q8_0)], size=99), "rows of 48, no multiple .* of 32"),
    "packed scalar": (file([], [tensor("x", [], Q8_0)], size=99), "rows of 1, no multiple"),
    "offset": (file([], [tensor("x", [1], F32, 4)], size=8), "misaligned: it starts at 4"),
    "far offset": (file([], [tensor("x", [1], F32, 2**63)], size=4), "cut short"),
    "large shape": (file([], [tensor("x", [2**20, 2**20])], size=4), "cut short"),
    "larger shape": (file([], [tensor("x", [2**32, 2**32])], size=4), "impossible shape"),
    "empty and large": (file([], [tensor("x", [0, HUGE])], size=4), "impossible shape"),
    "alignment 0": (file([key("general.alignment", UINT32, number(0))]), "alignment is 0"),
    "alignment 4": (file([key("general.alignment", UINT32, number(4))]), "alignment is 4"),
    "alignment 48": (file([key("general.alignment", UINT32, number(48))]), "no power of two"),
    "alignment text": (file([key("general.alignment", STRING, text("32"))]), "alignment is '32'"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_header_is_an_error(name: str) -> None:
    data, message = BAD[name]
    with pytest.raises(WeightsError, match=message) as caught:
        read(data)
    assert "model.gguf" in str(caught.value)


def test_any_changed_byte_is_read_or_an_error() -> None:
    """Whatever a damaged header says, what comes out lies inside the file."""
    refused = 0
    for _ in range(3000):
        data = bytearray(GOOD)
        for _ in range(random.choice((1, 1, 2, 8))):
            data[random.randrange(len(data) - 260)] = random.choice((0, 1, 8, 127, 128, 255))
        try:
            header = read(bytes(data))
        except WeightsError:
            refused += 1
        else:
            assert all(
                0 <= t.start <= t.start + t.size <= len(data) for t in header.tensors.values()
            )
    assert 1000 < refused < 3000
