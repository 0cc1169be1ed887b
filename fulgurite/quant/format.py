"""The table of number formats: elements, blocks, scales, packing and native hardware of each
format.

In: a format name. Out: its entry in `FORMATS`, which defines everything about the format.

The last dimension of a tensor is K, the one a matmul contracts. The dimension before it is rows;
dimensions further left (experts) each hold a separate matrix. A block is `(rows, columns)`, and
`WHOLE_DIM` means the whole dimension. So one entry describes a scale per tensor (`(WHOLE_DIM,
WHOLE_DIM)`), per row (`(1, WHOLE_DIM)`), per 16 elements of K (`(1, 16)`) or per 2-D block (`(128,
128)`). "Per tensor" means per matrix: stacked experts have one such scale per expert.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

import torch

from fulgurite.errors import FormatError

WHOLE_DIM = 0
Block = tuple[int, int]


@dataclass(frozen=True)
class ElementType:
    """The number type of the elements. `min_value` and `max_value` are its finite range."""

    name: str
    bits: int
    min_value: float
    max_value: float
    smallest_normal: float
    smallest_subnormal: float
    has_nan: bool = False
    has_infinity: bool = False


@dataclass(frozen=True)
class ScaleSpec:
    """One kind of scales (or zero points, or minima) of a format.

    `is_separate` is false if the scales are stored inside the packed data (GGUF).
    """

    name: str
    type: str
    dtype: torch.dtype
    block: Block
    is_separate: bool = True


@dataclass(frozen=True)
class Format:
    """One entry of `FORMATS`.

    elements_per_pack       elements along K stored in `items_per_pack` items of `data_dtype`
    allows_partial_blocks   whether the last block of a row or column may be partial
    native_archs            devices with matmul instructions for the format
    fallback                what other devices do
    """

    name: str
    family: str
    element: ElementType
    block: Block
    scales: tuple[ScaleSpec, ...]
    packing: str
    data_dtype: torch.dtype
    native_archs: tuple[str, ...]
    fallback: str
    elements_per_pack: int = 1
    items_per_pack: int = 1
    allows_partial_blocks: bool = False

    @property
    def separate_scales(self) -> tuple[ScaleSpec, ...]:
        """The scales that are tensors of their own, not inside the packed data."""
        return tuple(scale for scale in self.scales if scale.is_separate)

    @property
    def bits_per_element(self) -> float:
        """Storage bits per element, including scales (scales per row or tensor count as 0)."""
        bits = self.items_per_pack * self.data_dtype.itemsize * 8 / self.elements_per_pack
        for scale in self.separate_scales:
            rows, columns = scale.block
            if rows != WHOLE_DIM and columns != WHOLE_DIM:
                bits += scale.dtype.itemsize * 8 / (rows * columns)
        return bits


E4M3 = ElementType("e4m3", 8, -448.0, 448.0, 2.0**-6, 2.0**-9, has_nan=True)
E5M2 = ElementType(
    "e5m2", 8, -57344.0, 57344.0, 2.0**-14, 2.0**-16, has_nan=True, has_infinity=True
)
E2M1 = ElementType("e2m1", 4, -6.0, 6.0, 1.0, 0.5)
INT8 = ElementType("int8", 8, -127.0, 127.0, 1.0, 1.0)
INT8_FULL = ElementType("int8", 8, -128.0, 127.0, 1.0, 1.0)
INT6 = ElementType("int6", 6, -32.0, 31.0, 1.0, 1.0)
INT4 = ElementType("int4", 4, -8.0, 7.0, 1.0, 1.0)
UINT4 = ElementType("uint4", 4, 0.0, 15.0, 1.0, 1.0)
# Codebooks of bitsandbytes, with values from -1 to 1: `codecs/codebook.py`.
NF4 = ElementType("nf4", 4, -1.0, 1.0, 0.07958029955625534, 0.07958029955625534)
FP4 = ElementType("fp4", 4, -1.0, 1.0, 0.0052083334885537624, 0.0052083334885537624)
F16 = ElementType("float16", 16, -65504.0, 65504.0, 2.0**-14, 2.0**-24, True, True)
BF16 = ElementType("bfloat16", 16, -(2 - 2.0**-7) * 2.0**127, (2 - 2.0**-7) * 2.0**127, 2.0**-126,
               2.0**-133, True, True)  # fmt: skip

# GPUs with FP8 tensor cores. gfx942 has another float8 type (fnuz).
FP8_ARCHS = ("sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121", "gfx950", "gfx1201")
FP8_BLOCK_ARCHS = ("sm_90", "sm_100", "sm_103")
BLACKWELL_ARCHS = ("sm_100", "sm_103", "sm_120", "sm_121")
INT8_ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942",
                 "gfx950", "avx512_vnni", "amx_int8")  # fmt: skip
BF16_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "gfx942",
                 "gfx950", "avx512_bf16", "amx_bf16")  # fmt: skip
F16_ARCHS = ("sm_70", "sm_75", *BF16_ARCHS[:-2], "avx512_fp16")
WEIGHT_ONLY = "weight-only: dequantized inside the GEMM; activations stay 16 or 32 bit"


def _fp8(element: ElementType, block: Block, suffix: str) -> Format:
    is_blockwise = WHOLE_DIM not in block
    return Format(
        name=f"fp8_{element.name}_{suffix}",
        family="fp8",
        element=element,
        block=block,
        scales=(ScaleSpec("scale", "float32", torch.float32, block),),
        packing="one byte per element",
        data_dtype=torch.float8_e4m3fn if element is E4M3 else torch.float8_e5m2,
        native_archs=FP8_BLOCK_ARCHS if is_blockwise else FP8_ARCHS,
        fallback=WEIGHT_ONLY,
        allows_partial_blocks=is_blockwise,
    )


def _mx(name: str, element: ElementType, data_dtype: torch.dtype) -> Format:
    return Format(
        name=name,
        family="mx",
        element=element,
        block=(1, 32),
        scales=(ScaleSpec("scale", "e8m0", torch.float8_e8m0fnu, (1, 32)),),
        packing="two per byte, low nibble first" if element.bits == 4 else "one byte per element",
        data_dtype=data_dtype,
        native_archs=(*BLACKWELL_ARCHS, "gfx950"),
        fallback=WEIGHT_ONLY,
        elements_per_pack=8 // element.bits,
    )


def _int4(group: int, kind: str = "") -> Format:
    block = (1, group)
    scales: tuple[ScaleSpec, ...] = (ScaleSpec("scale", "float32", torch.float32, block),)
    if kind == "_asym":
        scales += (ScaleSpec("zero_point", "uint4", torch.uint8, block),)
    elif kind == "_min":
        scales += (ScaleSpec("minimum", "float32", torch.float32, block),)
    return Format(
        name=f"int4_g{group}{kind}",
        family="int",
        element=UINT4 if kind else INT4,
        block=block,
        scales=scales,
        packing="two per byte, low nibble first, " + ("unsigned" if kind else "plus 8"),
        data_dtype=torch.uint8,
        native_archs=(),
        fallback=WEIGHT_ONLY,
        elements_per_pack=2,
    )


def _int8(group: int, kind: str = "") -> Format:
    block = (1, group)
    scales: tuple[ScaleSpec, ...] = (ScaleSpec("scale", "float32", torch.float32, block),)
    if kind == "_asym":
        scales += (ScaleSpec("zero_point", "int8", torch.int8, block),)
    return Format(
        name="int8" + (f"_g{group}" if group != WHOLE_DIM else "") + kind,
        family="int",
        element=INT8_FULL if kind else INT8,
        block=block,
        scales=scales,
        packing="one byte per element",
        data_dtype=torch.int8,
        native_archs=INT8_ARCHS if group == WHOLE_DIM and not kind else (),
        fallback=WEIGHT_ONLY,
    )


def _codebook(element: ElementType) -> Format:
    return Format(
        name=element.name,
        family="codebook",
        element=element,
        block=(1, 64),
        scales=(ScaleSpec("scale", "float32", torch.float32, (1, 64)),),
        packing="two per byte, low nibble first",
        data_dtype=torch.uint8,
        native_archs=(),
        fallback=WEIGHT_ONLY,
        elements_per_pack=2,
    )


def _gguf(
    name: str,
    element: ElementType,
    block_size: int,
    block_bytes: int,
    packing: str,
    *scales: ScaleSpec,
) -> Format:
    return Format(
        name=name,
        family="gguf",
        element=element,
        block=(1, block_size),
        scales=scales,
        packing=packing,
        data_dtype=torch.uint8,
        native_archs=(),
        fallback=WEIGHT_ONLY,
        elements_per_pack=block_size,
        items_per_pack=block_bytes,
    )


def _cast(
    name: str, element: ElementType, dtype: torch.dtype, native_archs: tuple[str, ...]
) -> Format:
    fallback = "converted to float32 inside the GEMM"
    packing = "one item of the torch dtype per element"
    return Format(name, "cast", element, (1, 1), (), packing, dtype, native_archs, fallback)


def _inline_scale(name: str, type: str, dtype: torch.dtype, width: int) -> ScaleSpec:
    return ScaleSpec(name, type, dtype, (1, width), is_separate=False)


_ALL_FORMATS: tuple[Format, ...] = (
    _fp8(E4M3, (WHOLE_DIM, WHOLE_DIM), "tensor"),
    _fp8(E4M3, (1, WHOLE_DIM), "row"),
    _fp8(E4M3, (1, 128), "1x128"),
    _fp8(E4M3, (128, 128), "128x128"),
    _fp8(E5M2, (WHOLE_DIM, WHOLE_DIM), "tensor"),
    _fp8(E5M2, (1, WHOLE_DIM), "row"),
    _fp8(E5M2, (1, 128), "1x128"),
    _fp8(E5M2, (128, 128), "128x128"),
    Format(
        name="nvfp4",
        family="nvfp4",
        element=E2M1,
        block=(1, 16),
        scales=(
            ScaleSpec("scale", "e4m3", torch.float8_e4m3fn, (1, 16)),
            ScaleSpec("tensor_scale", "float32", torch.float32, (WHOLE_DIM, WHOLE_DIM)),
        ),
        packing="two per byte, low nibble first",
        data_dtype=torch.uint8,
        native_archs=BLACKWELL_ARCHS,
        fallback=WEIGHT_ONLY,
        elements_per_pack=2,
    ),
    _mx("mxfp4", E2M1, torch.uint8),
    _mx("mxfp8_e4m3", E4M3, torch.float8_e4m3fn),
    _mx("mxfp8_e5m2", E5M2, torch.float8_e5m2),
    _int8(WHOLE_DIM),
    _int8(16),
    _int8(32),
    _int8(WHOLE_DIM, "_asym"),
    _int8(16, "_asym"),
    _int8(32, "_asym"),
    _int4(32),
    _int4(64),
    _int4(128),
    _int4(32, "_asym"),
    _int4(64, "_asym"),
    _int4(128, "_asym"),
    _int4(32, "_min"),
    _codebook(NF4),
    _codebook(FP4),
    _gguf("q4_0", INT4, 32, 18, "float16 d, 16 bytes: element i low, i+16 high",
          _inline_scale("scale", "float16", torch.float16, 32)),
    _gguf("q4_1", UINT4, 32, 20, "float16 d, float16 m, 16 bytes: element i low, i+16 high",
          _inline_scale("scale", "float16", torch.float16, 32),
          _inline_scale("minimum", "float16", torch.float16, 32)),
    _gguf("q8_0", INT8_FULL, 32, 34, "float16 d, 32 bytes",
          _inline_scale("scale", "float16", torch.float16, 32)),
    _gguf("q4_k", UINT4, 256, 144, "float16 d, float16 dmin, 12 bytes of 6-bit pairs, 128 bytes",
          _inline_scale("scale", "float16", torch.float16, 256),
          _inline_scale("minimum_scale", "float16", torch.float16, 256),
          _inline_scale("sub_scale", "uint6", torch.uint8, 32),
          _inline_scale("sub_minimum", "uint6", torch.uint8, 32)),
    _gguf("q6_k", INT6, 256, 210, "128 bytes low, 64 bytes high, 16 int8 scales, float16 d",
          _inline_scale("scale", "float16", torch.float16, 256),
          _inline_scale("sub_scale", "int8", torch.int8, 16)),
    _cast("f16", F16, torch.float16, F16_ARCHS),
    _cast("bf16", BF16, torch.bfloat16, BF16_ARCHS),
)  # fmt: skip
FORMATS: dict[str, Format] = {entry.name: entry for entry in _ALL_FORMATS}

ALIASES: dict[str, str] = {
    "fp8": "fp8_e4m3_row",
    "mxfp8": "mxfp8_e4m3",
    "int4": "int4_g128",
    "int4_asym": "int4_g128_asym",
}


def resolve_format(format: str | Format) -> Format:
    """The entry of `FORMATS` for a name or an alias."""
    if isinstance(format, Format):
        return format
    name = ALIASES.get(format.lower(), format.lower())
    if name in FORMATS:
        return FORMATS[name]
    near = difflib.get_close_matches(name, [*FORMATS, *ALIASES], n=3, cutoff=0.5)
    raise FormatError(
        f"unknown number format {format!r}",
        next=f"one of {', '.join(near or [*ALIASES, *FORMATS])}; "
        "fulgurite.quant.describe_formats() lists all formats",
    )


def get_scale_spec(format: Format, name: str) -> ScaleSpec:
    """The scale spec of a format by name."""
    return next(scale for scale in format.scales if scale.name == name)


def describe_formats() -> str:
    """`FORMATS` as a text table, one format per line."""
    header = ("format", "element", "block", "scales", "bits", "max", "min normal", "min subnormal")
    lines = [header, *(_describe_format(format) for format in FORMATS.values())]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def format_block(block: Block) -> str:
    """`1x16` for `(1, 16)`, `row` for `(1, WHOLE_DIM)`, `tensor` for `(WHOLE_DIM, WHOLE_DIM)`."""
    if block == (WHOLE_DIM, WHOLE_DIM):
        return "tensor"
    return "row" if block[1] == WHOLE_DIM else f"{block[0]}x{block[1]}"


def _describe_format(format: Format) -> tuple[str, ...]:
    element = format.element
    texts = [f"{scale.type} {format_block(scale.block)}" for scale in format.scales]
    counted = [f"{texts.count(text)} {text}" for text in dict.fromkeys(texts)]
    return (
        format.name,
        element.name,
        format_block(format.block),
        ", ".join(text.removeprefix("1 ") for text in counted) or "none",
        f"{format.bits_per_element:.4g}",
        f"{element.max_value:.3g}" if element.max_value > 1e5 else f"{element.max_value:.5g}",
        f"{element.smallest_normal:.3g}",
        f"{element.smallest_subnormal:.3g}",
    )
