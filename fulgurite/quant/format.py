"""The one table of number formats: what each stores, in which blocks, and what runs it.

In: a format's name. Out: its entry in `FORMATS`, from which everything else about it follows.

The last dimension of a tensor is K, the one a matmul contracts; the one before it counts rows, and
dimensions further left (experts) each start their own matrix. A block is `(rows, columns)`, where
`WHOLE` stands for all of that dimension, so one table row describes a scale per tensor
(`(WHOLE, WHOLE)`), per row (`(1, WHOLE)`), per 16 elements of K (`(1, 16)`) or per tile
(`(128, 128)`). "Per tensor" means per matrix: a stack of experts has one such scale per expert.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

import torch

from fulgurite.errors import FormatError

WHOLE = 0
Block = tuple[int, int]


@dataclass(frozen=True)
class Element:
    """A number type of few bits. `lowest` and `highest` are its finite ends."""

    name: str
    bits: int
    lowest: float
    highest: float
    smallest_normal: float
    smallest_subnormal: float
    has_nan: bool = False
    has_infinity: bool = False


@dataclass(frozen=True)
class Scale:
    """One level of scales (or of zero points). `stored` is false where it lies inside the data."""

    name: str
    type: str
    dtype: torch.dtype
    block: Block
    stored: bool = True


@dataclass(frozen=True)
class Format:
    """One entry of `FORMATS`.

    `elements_per_group` elements along K are stored in `items_per_group` items of `data_dtype`;
    `may_end_early` says that the last block of a row or column may be partial, as published.
    """

    name: str
    family: str
    element: Element
    block: Block
    scales: tuple[Scale, ...]
    packing: str
    data_dtype: torch.dtype
    native: tuple[str, ...]
    elsewhere: str
    elements_per_group: int = 1
    items_per_group: int = 1
    may_end_early: bool = False

    @property
    def stored_scales(self) -> tuple[Scale, ...]:
        """The scales that are tensors of their own, beside the packed data."""
        return tuple(scale for scale in self.scales if scale.stored)

    @property
    def bits_per_element(self) -> float:
        """Bits of storage per element, scales included (those per row or tensor count as none)."""
        bits = self.items_per_group * self.data_dtype.itemsize * 8 / self.elements_per_group
        for scale in self.stored_scales:
            rows, columns = scale.block
            if rows != WHOLE and columns != WHOLE:
                bits += scale.dtype.itemsize * 8 / (rows * columns)
        return bits


E4M3 = Element("e4m3", 8, -448.0, 448.0, 2.0**-6, 2.0**-9, has_nan=True)
E5M2 = Element("e5m2", 8, -57344.0, 57344.0, 2.0**-14, 2.0**-16, has_nan=True, has_infinity=True)
E2M1 = Element("e2m1", 4, -6.0, 6.0, 1.0, 0.5)
INT8 = Element("int8", 8, -127.0, 127.0, 1.0, 1.0)
INT8_FULL = Element("int8", 8, -128.0, 127.0, 1.0, 1.0)
INT6 = Element("int6", 6, -32.0, 31.0, 1.0, 1.0)
INT4 = Element("int4", 4, -8.0, 7.0, 1.0, 1.0)
UINT4 = Element("uint4", 4, 0.0, 15.0, 1.0, 1.0)
F16 = Element("float16", 16, -65504.0, 65504.0, 2.0**-14, 2.0**-24, True, True)
BF16 = Element("bfloat16", 16, -(2 - 2.0**-7) * 2.0**127, (2 - 2.0**-7) * 2.0**127, 2.0**-126,
               2.0**-133, True, True)  # fmt: skip

# Tensor cores with float8, by how their scales are applied. gfx942's float8 is another one (fnuz).
FP8_GPUS = ("sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121", "gfx950", "gfx1201")
FP8_BLOCK_GPUS = ("sm_90", "sm_100", "sm_103")
BLACKWELL = ("sm_100", "sm_103", "sm_120", "sm_121")
INT8_MACHINES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942",
                 "gfx950", "avx512_vnni", "amx_int8")  # fmt: skip
BF16_MACHINES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "gfx942",
                 "gfx950", "avx512_bf16", "amx_bf16")  # fmt: skip
F16_MACHINES = ("sm_70", "sm_75", *BF16_MACHINES[:-2], "avx512_fp16")
DEQUANTIZED = "weight only: dequantized inside the matmul, activations stay 16 or 32 bit"


def _fp8(element: Element, block: Block, suffix: str) -> Format:
    tiles = WHOLE not in block
    return Format(
        name=f"fp8_{element.name}_{suffix}",
        family="fp8",
        element=element,
        block=block,
        scales=(Scale("scale", "float32", torch.float32, block),),
        packing="one byte an element",
        data_dtype=torch.float8_e4m3fn if element is E4M3 else torch.float8_e5m2,
        native=FP8_BLOCK_GPUS if tiles else FP8_GPUS,
        elsewhere=DEQUANTIZED,
        may_end_early=tiles,
    )


def _mx(name: str, element: Element, data_dtype: torch.dtype) -> Format:
    return Format(
        name=name,
        family="mx",
        element=element,
        block=(1, 32),
        scales=(Scale("scale", "e8m0", torch.float8_e8m0fnu, (1, 32)),),
        packing="two a byte, low nibble first" if element.bits == 4 else "one byte an element",
        data_dtype=data_dtype,
        native=(*BLACKWELL, "gfx950"),
        elsewhere=DEQUANTIZED,
        elements_per_group=8 // element.bits,
    )


def _int4(group: int, kind: str = "") -> Format:
    block = (1, group)
    scales: tuple[Scale, ...] = (Scale("scale", "float32", torch.float32, block),)
    if kind == "_asym":
        scales += (Scale("zero_point", "uint4", torch.uint8, block),)
    elif kind == "_min":
        scales += (Scale("minimum", "float32", torch.float32, block),)
    return Format(
        name=f"int4_g{group}{kind}",
        family="int",
        element=UINT4 if kind else INT4,
        block=block,
        scales=scales,
        packing="two a byte, low nibble first, " + ("unsigned" if kind else "plus 8"),
        data_dtype=torch.uint8,
        native=(),
        elsewhere=DEQUANTIZED,
        elements_per_group=2,
    )


def _int8(group: int) -> Format:
    block = (1, group)
    return Format(
        name="int8" if group == WHOLE else f"int8_g{group}",
        family="int",
        element=INT8,
        block=block,
        scales=(Scale("scale", "float32", torch.float32, block),),
        packing="one byte an element",
        data_dtype=torch.int8,
        native=INT8_MACHINES if group == WHOLE else (),
        elsewhere=DEQUANTIZED,
    )


def _gguf(
    name: str, element: Element, width: int, size: int, packing: str, *inside: Scale
) -> Format:
    return Format(
        name=name,
        family="gguf",
        element=element,
        block=(1, width),
        scales=inside,
        packing=packing,
        data_dtype=torch.uint8,
        native=(),
        elsewhere=DEQUANTIZED,
        elements_per_group=width,
        items_per_group=size,
    )


def _cast(name: str, element: Element, dtype: torch.dtype, native: tuple[str, ...]) -> Format:
    elsewhere = "widened to float32 inside the matmul"
    packing = "one item of torch's own dtype an element"
    return Format(name, "cast", element, (1, 1), (), packing, dtype, native, elsewhere)


def _inside(name: str, type: str, dtype: torch.dtype, width: int) -> Scale:
    return Scale(name, type, dtype, (1, width), stored=False)


_ALL: tuple[Format, ...] = (
    _fp8(E4M3, (WHOLE, WHOLE), "tensor"),
    _fp8(E4M3, (1, WHOLE), "row"),
    _fp8(E4M3, (1, 128), "1x128"),
    _fp8(E4M3, (128, 128), "128x128"),
    _fp8(E5M2, (WHOLE, WHOLE), "tensor"),
    _fp8(E5M2, (1, WHOLE), "row"),
    _fp8(E5M2, (1, 128), "1x128"),
    _fp8(E5M2, (128, 128), "128x128"),
    Format(
        name="nvfp4",
        family="nvfp4",
        element=E2M1,
        block=(1, 16),
        scales=(
            Scale("scale", "e4m3", torch.float8_e4m3fn, (1, 16)),
            Scale("tensor_scale", "float32", torch.float32, (WHOLE, WHOLE)),
        ),
        packing="two a byte, low nibble first",
        data_dtype=torch.uint8,
        native=BLACKWELL,
        elsewhere=DEQUANTIZED,
        elements_per_group=2,
    ),
    _mx("mxfp4", E2M1, torch.uint8),
    _mx("mxfp8_e4m3", E4M3, torch.float8_e4m3fn),
    _mx("mxfp8_e5m2", E5M2, torch.float8_e5m2),
    _int8(WHOLE),
    _int8(16),
    _int8(32),
    _int4(32),
    _int4(64),
    _int4(128),
    _int4(32, "_asym"),
    _int4(64, "_asym"),
    _int4(128, "_asym"),
    _int4(32, "_min"),
    _gguf("q4_0", INT4, 32, 18, "float16 d, 16 bytes: element i low, i+16 high",
          _inside("scale", "float16", torch.float16, 32)),
    _gguf("q4_1", UINT4, 32, 20, "float16 d, float16 m, 16 bytes: element i low, i+16 high",
          _inside("scale", "float16", torch.float16, 32),
          _inside("minimum", "float16", torch.float16, 32)),
    _gguf("q8_0", INT8_FULL, 32, 34, "float16 d, 32 bytes",
          _inside("scale", "float16", torch.float16, 32)),
    _gguf("q4_k", UINT4, 256, 144, "float16 d, float16 dmin, 12 bytes of 6-bit pairs, 128 bytes",
          _inside("scale", "float16", torch.float16, 256),
          _inside("minimum_scale", "float16", torch.float16, 256),
          _inside("sub_scale", "uint6", torch.uint8, 32),
          _inside("sub_minimum", "uint6", torch.uint8, 32)),
    _gguf("q6_k", INT6, 256, 210, "128 bytes low, 64 bytes high, 16 int8 scales, float16 d",
          _inside("scale", "float16", torch.float16, 256),
          _inside("sub_scale", "int8", torch.int8, 16)),
    _cast("f16", F16, torch.float16, F16_MACHINES),
    _cast("bf16", BF16, torch.bfloat16, BF16_MACHINES),
)  # fmt: skip
FORMATS: dict[str, Format] = {entry.name: entry for entry in _ALL}

ALIASES: dict[str, str] = {
    "fp8": "fp8_e4m3_row",
    "mxfp8": "mxfp8_e4m3",
    "int4": "int4_g128",
    "int4_asym": "int4_g128_asym",
}


def resolve(format: str | Format) -> Format:
    """The table's entry for a name or an alias."""
    if isinstance(format, Format):
        return format
    name = ALIASES.get(format.lower(), format.lower())
    if name in FORMATS:
        return FORMATS[name]
    near = difflib.get_close_matches(name, [*FORMATS, *ALIASES], n=3, cutoff=0.5)
    raise FormatError(
        f"{format!r} is not a number format of the table",
        next=f"one of {', '.join(near or [*ALIASES, *FORMATS])}; "
        "fulgurite.quant.describe_formats() prints them all",
    )


def level(format: Format, name: str) -> Scale:
    """A format's scale level by name."""
    return next(scale for scale in format.scales if scale.name == name)


def describe_formats() -> str:
    """`FORMATS` as a table of text, one format a line."""
    header = ("format", "element", "block", "scales", "bits", "largest", "normal", "subnormal")
    lines = [header, *(_describe(format) for format in FORMATS.values())]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def block_text(block: Block) -> str:
    """`(1, 16)` as `1x16`, `(1, WHOLE)` as `row`, `(WHOLE, WHOLE)` as `tensor`."""
    if block == (WHOLE, WHOLE):
        return "tensor"
    return "row" if block[1] == WHOLE else f"{block[0]}x{block[1]}"


def _describe(format: Format) -> tuple[str, ...]:
    element = format.element
    levels = [f"{scale.type} {block_text(scale.block)}" for scale in format.scales]
    counted = [f"{levels.count(text)} {text}" for text in dict.fromkeys(levels)]
    return (
        format.name,
        element.name,
        block_text(format.block),
        ", ".join(text.removeprefix("1 ") for text in counted) or "none",
        f"{format.bits_per_element:.4g}",
        f"{element.highest:.3g}" if element.highest > 1e5 else f"{element.highest:.5g}",
        f"{element.smallest_normal:.3g}",
        f"{element.smallest_subnormal:.3g}",
    )
