# mypy: allow-untyped-defs, allow-incomplete-defs
"""Device functions: bfloat16 numbers two at a time, as the 32-bit words they lie in.

In: words of two bfloat16, the first in the low half. Out: their largest magnitudes, and codes of 4
and 8 bits, packed, equal to what `numbers.py` makes of the same numbers one at a time.

A processor of an H200 has to cast seven numbers a cycle to keep up with its memory, and compares,
shifts or selects 64 in a cycle: nine times a number, loads and stores included. So magnitudes are
compared in pairs, four words become bytes in one piece of assembly (`PACKED`), and what is no
number is looked for once a program. The other branches say the same in plain Triton, for the
interpreter.
"""

from __future__ import annotations

from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.common.triton_numerics import INFINITY_BITS, finite_bits, quantize_8bit

ABS_MASK = tl.constexpr(0x7FFF7FFF)
MAX_BFLOAT16 = tl.constexpr(3.3895313892515355e38)
_ROUND_MAGIC_BITS = 0x4B400000  # the bits of `numbers.ROUNDER`


# ---- assembly ------------------------------------------------------------------------------------


def _register_names(first: int, count: int) -> list[str]:
    return [f"${first + i}" for i in range(count)]


def _mxfp4_asm() -> str:
    """Four words, each times a power of two: all in pairs of bfloat16.

    Of three counts of steps the least is the code (`numbers.e2m1_magnitude`); here 192 rounds them.
    """
    words, inverses, kept = _register_names(1, 4), _register_names(5, 4), "$9"
    lines = ["{ .reg .b32 m0, m1, m2, m3, h, o, t, s, p, q, zero, two, one, half, c0, c2, c4, c7;"]
    constants = {"zero": 0x80008000, "two": 0x40004000, "one": 0x3F803F80, "half": 0x3F003F00,
                 "c0": 0x43404340, "c2": 0x43424342, "c4": 0x43444344, "c7": 0x43474347}  # fmt: skip
    lines += [f"mov.b32 {name}, {value};" for name, value in constants.items()]
    for i, (word, inverse) in enumerate(zip(words, inverses, strict=True)):
        m = f"m{i}"
        lines += [
            f"and.b32 {m}, {word}, {ABS_MASK.value};",
            f"fma.rn.bf16x2 {m}, {m}, {inverse}, zero;",
            f"fma.rn.bf16x2 h, {m}, two, c0;",
            f"fma.rn.bf16x2 o, {m}, one, c2;",
            f"fma.rn.bf16x2 t, {m}, half, c4;",
            "min.bf16x2 h, h, o; min.bf16x2 t, t, c7;",
            f"min.bf16x2 {m}, h, t;",
            f"shr.u32 s, {word}, 12;",  # the signs to where codes have them
            f"lop3.b32 {m}, s, {m}, 0x00080008, 0xE4;",
        ]
    lines += [
        "prmt.b32 p, m0, m1, 0x6240; prmt.b32 q, m2, m3, 0x6240;",
        "prmt.b32 s, p, q, 0x5410; prmt.b32 t, p, q, 0x7632;",
        f"shl.b32 t, t, 4; lop3.b32 s, s, t, 0x0F0F0F0F, 0xE4; and.b32 $0, s, {kept}; }}",
    ]
    return "\n".join(lines)


def _divide_asm(word: str, half: int, scale: str, inverse: str, sign: bool) -> list[str]:
    """x = a half of a word, or its magnitude; q = x / scale to the last bit (`numbers.divide`)."""
    mask = 0xFFFF0000 if sign else 0x7FFF0000
    take = [f"and.b32 x, {word}, {mask};"]
    if half == 0:
        take = [f"shl.b32 x, {word}, 16;", *([] if sign else ["and.b32 x, x, 0x7FFFFFFF;"])]
    return [
        *take,
        f"mul.rn.f32 q, x, {inverse}; neg.f32 x, x; fma.rn.f32 r, q, {scale}, x;",
        f"neg.f32 r, r; fma.rn.f32 q, r, {inverse}, q;",
    ]


def _4bit_asm(kind: str) -> str:
    """Four words by their scales and inverses to eight nibbles.

    A code is what stands above ROUNDER: they are added up, each times 16 to its place, ROUNDER and
    all, and what ROUNDER came to is a constant.
    """
    words, scales, inverses = _register_names(1, 4), _register_names(5, 4), _register_names(9, 4)
    lines = ["{ .reg .b32 a, s, t, p, u; .reg .f32 x, q, r, h, o;"]
    for i in reversed(range(8)):
        lines += _divide_asm(words[i // 2], i % 2, scales[i // 2], inverses[i // 2], kind == "int4")
        if kind == "int4":
            lines += ["add.rn.f32 h, q, 0f4B400008; min.f32 h, h, 0f4B40000F;"]
        else:
            lines += [
                "fma.rn.f32 h, q, 0f40000000, 0f4B400000; add.rn.f32 o, q, 0f4B400002;",
                "min.f32 h, h, o;",
                "fma.rn.f32 o, q, 0f3F000000, 0f4B400004; min.f32 o, o, 0f4B400007;",
                "min.f32 h, h, o;",
            ]
        lines += ["mov.b32 t, h;", "mov.b32 a, t;" if i == 7 else "mad.lo.u32 a, a, 16, t;"]
    surplus = -sum(_ROUND_MAGIC_BITS << 4 * i for i in range(8)) % 2**32
    if kind == "int4":
        return "\n".join([*lines, f"add.u32 $0, a, {surplus}; }}"])
    lines += [
        f"add.u32 a, a, {surplus};",
        f"prmt.b32 s, {words[0]}, {words[1]}, 0x7351; prmt.b32 t, {words[2]}, {words[3]}, 0x7351;",
        "prmt.b32 p, s, t, 0x5410; prmt.b32 u, s, t, 0x7632; shr.u32 p, p, 4;",
        "lop3.b32 p, u, p, 0x80808080, 0xE4; lop3.b32 $0, p, a, 0x88888888, 0xE4; }",
    ]
    return "\n".join(lines)


def _fp8_asm(type: str) -> str:
    """Four words by their scales and inverses to eight bytes, in two registers."""
    words, scales, inverses = _register_names(2, 4), _register_names(6, 4), _register_names(10, 4)
    lines = ["{ .reg .f32 x, q, r, l; .reg .b16 a, b;"]
    for i, (word, scale, inverse) in enumerate(zip(words, scales, inverses, strict=True)):
        lines += [*_divide_asm(word, 0, scale, inverse, sign=True), "mov.f32 l, q;"]
        lines += _divide_asm(word, 1, scale, inverse, sign=True)
        lines += [f"cvt.rn.satfinite.{type}x2.f32 {'ab'[i % 2]}, q, l;"]
        lines += [f"mov.b32 ${i // 2}, {{a, b}};"] if i % 2 else []
    return "\n".join([*lines, "}"])


def _fp8_transposed_asm(type: str) -> str:
    """A word of each of four rows to four bytes of the first column and four of the second."""
    words = _register_names(2, 4)
    lines = ["{ .reg .f32 x, q, r, l; .reg .b16 a, b;"]
    for half in range(2):
        scale, inverse = f"${6 + 2 * half}", f"${7 + 2 * half}"
        for i in range(0, 4, 2):
            lines += [*_divide_asm(words[i], half, scale, inverse, sign=True), "mov.f32 l, q;"]
            lines += _divide_asm(words[i + 1], half, scale, inverse, sign=True)
            lines += [f"cvt.rn.satfinite.{type}x2.f32 {'ab'[i // 2]}, q, l;"]
        lines += [f"mov.b32 ${half}, {{a, b}};"]
    return "\n".join([*lines, "}"])


FP8_ASM = tl.constexpr((_fp8_asm("e4m3"), _fp8_asm("e5m2")))
FP8_TRANSPOSED_ASM = tl.constexpr((_fp8_transposed_asm("e4m3"), _fp8_transposed_asm("e5m2")))
MXFP4_ASM = tl.constexpr(_mxfp4_asm())
NVFP4_ASM = tl.constexpr(_4bit_asm("nvfp4"))
INT4_ASM = tl.constexpr(_4bit_asm("int4"))
MXFP4_CONSTRAINTS = tl.constexpr("=r," + ",".join("r" * 12))
QUANTIZE_4BIT_CONSTRAINTS = tl.constexpr("=r," + ",".join("r" * 4 + "f" * 8))
FP8_CONSTRAINTS = tl.constexpr("=r,=r," + ",".join("r" * 4 + "f" * 8))
FP8_TRANSPOSED_CONSTRAINTS = tl.constexpr("=r,=r," + ",".join("r" * 4 + "f" * 4))


# ---- magnitudes ----------------------------------------------------------------------------------


@triton.jit
def max_bf16x2_asm(a, b):
    """The larger of two magnitudes, in both halves; NaN is on top."""
    return tl.inline_asm_elementwise(
        "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def max_bf16x2(a, b, PACKED: tl.constexpr):
    """`max_bf16x2_asm`, in the interpreter too."""
    if PACKED:
        return max_bf16x2_asm(a, b)
    return (tl.maximum(a >> 16, b >> 16) << 16) | tl.maximum(a & 0xFFFF, b & 0xFFFF)


@triton.jit
def reduce_max_bf16x2(size, AXIS: tl.constexpr, PACKED: tl.constexpr):
    """The largest magnitudes of the low and of the high halves along an axis."""
    if PACKED:
        return tl.reduce(size, AXIS, max_bf16x2_asm)
    return (tl.max(size >> 16, AXIS) << 16) | tl.max(size & 0xFFFF, AXIS)


@triton.jit
def max_of_halves(pair):
    """The larger of two magnitudes as the bits of a float32."""
    return tl.maximum(pair << 16, pair & 0x7FFF0000)


@triton.jit
def zero_nonfinite(size, KEEP_NAN: tl.constexpr):
    """Magnitudes, 0 in the place of an infinity, and of a NaN unless it is to be kept."""
    low, high = finite_bits(size << 16, KEEP_NAN), finite_bits(size & 0x7FFF0000, KEEP_NAN)
    return high | (low >> 16)


@triton.jit
def saturation_bits(scale, STEPS: tl.constexpr):
    """The bits of STEPS scales, or of the largest bfloat16 if that is less."""
    HIGHEST: tl.constexpr = 1.001 * MAX_BFLOAT16 / STEPS  # the product overflows no float32
    limit = tl.minimum(tl.minimum(scale, HIGHEST) * STEPS, MAX_BFLOAT16)
    return limit.to(tl.int32, bitcast=True)


@triton.jit
def saturate_infinities(words, low_scale, high_scale, STEPS: tl.constexpr):
    """Words whose infinities became ± STEPS times the scale of their half: the last code."""
    infinite = ((words << 16) & 0x7FFFFFFF) == INFINITY_BITS
    low = tl.where(infinite, (saturation_bits(low_scale, STEPS) >> 16) & 0x7FFF, words & 0x7FFF)
    infinite = (words & 0x7FFF0000) == INFINITY_BITS
    high = tl.where(infinite, saturation_bits(high_scale, STEPS) & 0x7FFF0000, words & 0x7FFF0000)
    return (words & ~ABS_MASK) | low | high


# ---- codes ---------------------------------------------------------------------------------------


@triton.jit
def quantize_mxfp4_bf16x2(words, inverse, valid):
    """byte = two e2m1 codes of a word times a power of two, 0 where it is not valid."""
    bits = inverse.to(tl.int32, bitcast=True)
    return tl.inline_asm_elementwise(
        MXFP4_ASM, MXFP4_CONSTRAINTS, [words, bits | (bits >> 16), tl.where(valid, -1, 0)],
        dtype=tl.uint8, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def quantize_4bit_bf16x2(words, scale, inverse, KIND: tl.constexpr):
    """byte = two codes of a word over its scale; the word has no infinities."""
    return tl.inline_asm_elementwise(
        NVFP4_ASM if KIND == "nvfp4" else INT4_ASM, QUANTIZE_4BIT_CONSTRAINTS, [words, scale, inverse],
        dtype=tl.uint8, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def quantize_fp8_bf16x2(words, scale, inverse, HIGHEST: tl.constexpr, PACKED: tl.constexpr):
    """Two bytes in an int16: the numbers of a word over their scale; PACKED: none is infinite."""
    E5M2: tl.constexpr = HIGHEST > 448.0
    if PACKED:
        return tl.inline_asm_elementwise(
            FP8_ASM[E5M2], FP8_CONSTRAINTS, [words, scale, inverse], dtype=tl.int16, is_pure=True, pack=4
        )
    low = quantize_fp8_scalar(words << 16, scale, inverse, HIGHEST)
    high = quantize_fp8_scalar(words & -65536, scale, inverse, HIGHEST)
    return (low | (high << 8)).to(tl.int16)


@triton.jit
def quantize_fp8_transposed(one, two, three, four, low, low_inverse, high, high_inverse,
                HIGHEST: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """Words of four rows to four bytes of their first column and four of their second, by the scales
    of the columns; PACKED: no number is infinite."""
    E5M2: tl.constexpr = HIGHEST > 448.0
    if PACKED:
        return tl.inline_asm_elementwise(
            FP8_TRANSPOSED_ASM[E5M2], FP8_TRANSPOSED_CONSTRAINTS,
            [one, two, three, four, low, low_inverse, high, high_inverse],
            dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    left = quantize_fp8_scalar(one << 16, low, low_inverse, HIGHEST)
    left |= quantize_fp8_scalar(two << 16, low, low_inverse, HIGHEST) << 8
    left |= quantize_fp8_scalar(three << 16, low, low_inverse, HIGHEST) << 16
    left |= quantize_fp8_scalar(four << 16, low, low_inverse, HIGHEST) << 24
    right = quantize_fp8_scalar(one & -65536, high, high_inverse, HIGHEST)
    right |= quantize_fp8_scalar(two & -65536, high, high_inverse, HIGHEST) << 8
    right |= quantize_fp8_scalar(three & -65536, high, high_inverse, HIGHEST) << 16
    right |= quantize_fp8_scalar(four & -65536, high, high_inverse, HIGHEST) << 24
    return left, right


@triton.jit
def quantize_fp8_scalar(bits, scale, inverse, HIGHEST: tl.constexpr):
    """The code of a float32, given by its bits, in an int32."""
    type: tl.constexpr = tl.float8e5 if HIGHEST > 448.0 else tl.float8e4nv
    code = quantize_8bit(bits.to(tl.float32, bitcast=True), scale, inverse, HIGHEST, type, False)
    return code.to(tl.uint8, bitcast=True).to(tl.int32)
