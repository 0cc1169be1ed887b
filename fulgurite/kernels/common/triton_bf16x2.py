# mypy: allow-untyped-defs, allow-incomplete-defs
"""Device functions: bfloat16 values two at a time (bf16x2), as the 32-bit words that hold them.

In: words of two bfloat16, the first in the low half. Out: their largest magnitudes, and packed
codes of 4 and 8 bits, equal to those that `triton_numerics.py` computes one value at a time.

A multiprocessor of an H200 must cast seven values a cycle to keep up with its memory. It compares,
shifts or selects 64 values a cycle: nine instructions a value, loads and stores included. So
magnitudes are compared in pairs, four words become bytes in one block of inline assembly
(`NATIVE`), and non-finite values are looked for once a program. The other branches compute the same
in plain Triton, for the interpreter.
"""

from __future__ import annotations

from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.common.triton_numerics import INFINITY_BITS, finite_bits, quantize_8bit

ABS_MASK = tl.constexpr(0x7FFF7FFF)
MAX_BFLOAT16 = tl.constexpr(3.3895313892515355e38)
_ROUND_MAGIC_BITS = 0x4B400000  # the bits of `triton_numerics.ROUND_MAGIC`


# ---- assembly ------------------------------------------------------------------------------------


def _register_names(first: int, count: int) -> list[str]:
    return [f"${first + i}" for i in range(count)]


def _mxfp4_asm() -> str:
    """Four words to four bytes of e2m1 codes. The scale is a power of two, so bf16x2 is exact.

    The code is the smallest of three counts of steps (`triton_numerics.e2m1_magnitude`). Here 192
    rounds them.
    """
    words, inverses, valid_mask = _register_names(1, 4), _register_names(5, 4), "$9"
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
            f"shr.u32 s, {word}, 12;",  # signs to their bit of a code
            f"lop3.b32 {m}, s, {m}, 0x00080008, 0xE4;",
        ]
    lines += [
        "prmt.b32 p, m0, m1, 0x6240; prmt.b32 q, m2, m3, 0x6240;",
        "prmt.b32 s, p, q, 0x5410; prmt.b32 t, p, q, 0x7632;",
        f"shl.b32 t, t, 4; lop3.b32 s, s, t, 0x0F0F0F0F, 0xE4; and.b32 $0, s, {valid_mask}; }}",
    ]
    return "\n".join(lines)


def _divide_asm(word: str, half: int, scale: str, inverse: str, sign: bool) -> list[str]:
    """x = a half of a word, or its magnitude; q = x / scale, exact (`triton_numerics.divide`)."""
    mask = 0xFFFF0000 if sign else 0x7FFF0000
    extract = [f"and.b32 x, {word}, {mask};"]
    if half == 0:
        extract = [f"shl.b32 x, {word}, 16;", *([] if sign else ["and.b32 x, x, 0x7FFFFFFF;"])]
    return [
        *extract,
        f"mul.rn.f32 q, x, {inverse}; neg.f32 x, x; fma.rn.f32 r, q, {scale}, x;",
        f"neg.f32 r, r; fma.rn.f32 q, r, {inverse}, q;",
    ]


def _quantize_4bit_asm(kind: str) -> str:
    """Four words by their scales and inverses to eight nibbles.

    A code is the surplus over ROUND_MAGIC. Codes are summed, each times the power of 16 of its
    position. The sum of the ROUND_MAGIC terms is a constant and is subtracted at the end.
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
    """Four words by their scales and inverses to eight bytes in two registers."""
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
NVFP4_ASM = tl.constexpr(_quantize_4bit_asm("nvfp4"))
INT4_ASM = tl.constexpr(_quantize_4bit_asm("int4"))
MXFP4_CONSTRAINTS = tl.constexpr("=r," + ",".join("r" * 12))
QUANTIZE_4BIT_CONSTRAINTS = tl.constexpr("=r," + ",".join("r" * 4 + "f" * 8))
FP8_CONSTRAINTS = tl.constexpr("=r,=r," + ",".join("r" * 4 + "f" * 8))
FP8_TRANSPOSED_CONSTRAINTS = tl.constexpr("=r,=r," + ",".join("r" * 4 + "f" * 4))


# ---- magnitudes ----------------------------------------------------------------------------------


@triton.jit
def max_bf16x2_asm(a, b):
    """The larger of two magnitudes, in both halves; NaN is the largest."""
    return tl.inline_asm_elementwise(
        "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def max_bf16x2(a, b, NATIVE: tl.constexpr):
    """`max_bf16x2_asm`, in the interpreter too."""
    if NATIVE:
        return max_bf16x2_asm(a, b)
    return (tl.maximum(a >> 16, b >> 16) << 16) | tl.maximum(a & 0xFFFF, b & 0xFFFF)


@triton.jit
def reduce_max_bf16x2(magnitudes, AXIS: tl.constexpr, NATIVE: tl.constexpr):
    """The largest magnitudes of the low and of the high halves along an axis."""
    if NATIVE:
        return tl.reduce(magnitudes, AXIS, max_bf16x2_asm)
    return (tl.max(magnitudes >> 16, AXIS) << 16) | tl.max(magnitudes & 0xFFFF, AXIS)


@triton.jit
def max_of_halves(pair):
    """The larger of two magnitudes as the bits of a float32."""
    return tl.maximum(pair << 16, pair & 0x7FFF0000)


@triton.jit
def zero_nonfinite(magnitudes, KEEP_NAN: tl.constexpr):
    """Magnitudes with 0 for an infinity, and for a NaN unless KEEP_NAN."""
    low = finite_bits(magnitudes << 16, KEEP_NAN)
    high = finite_bits(magnitudes & 0x7FFF0000, KEEP_NAN)
    return high | (low >> 16)


@triton.jit
def saturation_bits(scale, STEPS: tl.constexpr):
    """The bits of STEPS times the scale, or of the largest bfloat16 if that is less."""
    MAX_SCALE: tl.constexpr = 1.001 * MAX_BFLOAT16 / STEPS  # the product does not overflow float32
    limit = tl.minimum(tl.minimum(scale, MAX_SCALE) * STEPS, MAX_BFLOAT16)
    return limit.to(tl.int32, bitcast=True)


@triton.jit
def saturate_infinities(words, low_scale, high_scale, STEPS: tl.constexpr):
    """Words with ± STEPS times the scale of their half for infinities: they become the last
    code."""
    infinite = ((words << 16) & 0x7FFFFFFF) == INFINITY_BITS
    low = tl.where(infinite, (saturation_bits(low_scale, STEPS) >> 16) & 0x7FFF, words & 0x7FFF)
    infinite = (words & 0x7FFF0000) == INFINITY_BITS
    high = tl.where(infinite, saturation_bits(high_scale, STEPS) & 0x7FFF0000, words & 0x7FFF0000)
    return (words & ~ABS_MASK) | low | high


# ---- codes ---------------------------------------------------------------------------------------


@triton.jit
def quantize_mxfp4_bf16x2(words, inverse, valid):
    """byte = two e2m1 codes of a word times a power of two; 0 if not `valid`."""
    bits = inverse.to(tl.int32, bitcast=True)
    return tl.inline_asm_elementwise(
        MXFP4_ASM, MXFP4_CONSTRAINTS, [words, bits | (bits >> 16), tl.where(valid, -1, 0)],
        dtype=tl.uint8, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def quantize_4bit_bf16x2(words, scale, inverse, KIND: tl.constexpr):
    """byte = two codes of a word divided by its scale; the word has no infinities."""
    return tl.inline_asm_elementwise(
        NVFP4_ASM if KIND == "nvfp4" else INT4_ASM, QUANTIZE_4BIT_CONSTRAINTS, [words, scale, inverse],
        dtype=tl.uint8, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def quantize_fp8_bf16x2(words, scale, inverse, QMAX: tl.constexpr, NATIVE: tl.constexpr):
    """Two FP8 codes in an int16: the values of a word divided by their scale. NATIVE: all
    finite."""
    E5M2: tl.constexpr = QMAX > 448.0
    if NATIVE:
        return tl.inline_asm_elementwise(
            FP8_ASM[E5M2],
            FP8_CONSTRAINTS,
            [words, scale, inverse],
            dtype=tl.int16,
            is_pure=True,
            pack=4,
        )
    low = quantize_fp8_scalar(words << 16, scale, inverse, QMAX)
    high = quantize_fp8_scalar(words & -65536, scale, inverse, QMAX)
    return (low | (high << 8)).to(tl.int16)


@triton.jit
def quantize_fp8_transposed(one, two, three, four, low, low_inverse, high, high_inverse,
                QMAX: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """Words of four rows to four bytes of their first column and four of their second column.

    `low` and `high` are the scales of the columns. NATIVE: all values are finite.
    """
    E5M2: tl.constexpr = QMAX > 448.0
    if NATIVE:
        return tl.inline_asm_elementwise(
            FP8_TRANSPOSED_ASM[E5M2], FP8_TRANSPOSED_CONSTRAINTS,
            [one, two, three, four, low, low_inverse, high, high_inverse],
            dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    left = quantize_fp8_scalar(one << 16, low, low_inverse, QMAX)
    left |= quantize_fp8_scalar(two << 16, low, low_inverse, QMAX) << 8
    left |= quantize_fp8_scalar(three << 16, low, low_inverse, QMAX) << 16
    left |= quantize_fp8_scalar(four << 16, low, low_inverse, QMAX) << 24
    right = quantize_fp8_scalar(one & -65536, high, high_inverse, QMAX)
    right |= quantize_fp8_scalar(two & -65536, high, high_inverse, QMAX) << 8
    right |= quantize_fp8_scalar(three & -65536, high, high_inverse, QMAX) << 16
    right |= quantize_fp8_scalar(four & -65536, high, high_inverse, QMAX) << 24
    return left, right


@triton.jit
def quantize_fp8_scalar(bits, scale, inverse, QMAX: tl.constexpr):
    """The code of a float32, given by its bits, in an int32."""
    type: tl.constexpr = tl.float8e5 if QMAX > 448.0 else tl.float8e4nv
    code = quantize_8bit(bits.to(tl.float32, bitcast=True), scale, inverse, QMAX, type, False)
    return code.to(tl.uint8, bitcast=True).to(tl.int32)
