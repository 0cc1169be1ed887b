# mypy: allow-untyped-defs, allow-incomplete-defs
"""Device functions: quantized weights in registers to bfloat16 for the tensor cores.

In: nibbles as they are stored, read as 16-bit words of four. Out: four tiles of exact bfloat16
values. Tile j holds the j-th nibble of every word; a GEMM multiplies one tile after the other.

To keep up with its memory, an H200 has three instructions for each 4-bit weight, loads included. So
two words are dequantized at once by bit operations on a 32-bit register (`NATIVE`): in the layout
of the tensor cores two neighbouring words share a register, and so do their results. The other
branches compute the same in plain Triton, for the interpreter and for other GPUs.

e2m1 to bfloat16: the three magnitude bits go to the lowest two bits of the bfloat16 exponent and
the highest bit of the mantissa. That is the value times 2^-126, including the subnormal 0.5. 4-bit
integers: a nibble in the low bits of 128 is 128 + nibble; in those of 1024 (float16), 1024 +
nibble.
"""

from __future__ import annotations

from fulgurite.kernels.common.triton_import import tl, triton


def _shift_asm(target: str, left: int) -> str:
    """Shift the word to the left, or to the right where `left` is negative."""
    return f"shl.b32 {target}, $1, {left};" if left >= 0 else f"shr.b32 {target}, $1, {-left};"


def _e2m1_asm(nibble: int, multiply: str) -> str:
    """Move sign and magnitude of two nibbles to their positions in a pair of bfloat16.

    One multiplication moves a nibble to both positions, 12 and 6 bits up. A mask then keeps the
    bits that belong there.
    """
    mask, factor = (0x000F000F, 2**12 + 2**6) if nibble % 2 == 0 else (0x00F000F0, 2**8 + 2**2)
    return f"""{{ .reg .b32 a, m;
{_shift_asm("a", -8 * (nibble // 2))} and.b32 a, a, {mask}; mul.lo.u32 a, a, {factor};
and.b32 a, a, 0x81C081C0;
{multiply} }}"""


def _int4_asm(nibble: int, offset: int | None, is_float16: bool = False) -> str:
    """Put two nibbles into the low bits of 128 (float16: 1024); subtract that and `offset`, or $2.

    `lop3` 0xEA is (a & m) | one. It is named because the assembler does not merge `and` and `or`.
    """
    one, type = (0x64006400, "f16x2") if is_float16 else (0x43004300, "bf16x2")
    subtrahend = "$2" if offset is None else one + offset * 0x00010001
    return f"""{{ .reg .b32 a, m, one;
{_shift_asm("a", -4 * nibble)} mov.b32 m, 0x000F000F; mov.b32 one, {one}; lop3.b32 a, a, m, one, 0xEA;
mov.b32 m, {subtrahend}; sub.rn.{type} $0, a, m; }}"""


def _int4_scaled_asm(nibble: int, kind: str) -> str:
    """Two nibbles times a scale that is split in two: $2 its nearest bfloat16, $3 the remainder.

    The result is as good as rounded once: one value in a thousand is the other neighbour. "zero":
    $4 is 128 + the zero point. "minimum": adds $4, the value of code 8, rounded; up to 1.4 times
    the error.
    """
    subtrahend = "$4" if kind == "zero" else "m"
    small = "fma.rn.bf16x2 t, a, $3, $4;" if kind == "minimum" else "mul.rn.bf16x2 t, a, $3;"
    return f"""{{ .reg .b32 a, m, one, t;
{_shift_asm("a", -4 * nibble)} mov.b32 m, 0x000F000F; mov.b32 one, 0x43004300; lop3.b32 a, a, m, one, 0xEA;
mov.b32 m, 0x43084308; sub.rn.bf16x2 a, a, {subtrahend}; {small} fma.rn.bf16x2 $0, a, $2, t; }}"""


# Biased: the scale carries the factor 2^126. Full range: a scale could overflow with it, so the
# value is multiplied by 2^126 first.
_MULTIPLY_BIASED = "mul.rn.bf16x2 $0, a, $2;"
_MULTIPLY_FULL_RANGE = "mov.b32 m, 0x7E807E80; mul.rn.bf16x2 a, a, m; mul.rn.bf16x2 $0, a, $2;"
E2M1_BIASED_ASM = tl.constexpr(tuple(_e2m1_asm(nibble, _MULTIPLY_BIASED) for nibble in range(4)))
E2M1_FULL_RANGE_ASM = tl.constexpr(
    tuple(_e2m1_asm(nibble, _MULTIPLY_FULL_RANGE) for nibble in range(4))
)
INT4_ASM = tl.constexpr(  # bfloat16 minus 8, bfloat16, float16 minus 8, float16
    tuple(
        _int4_asm(nibble, offset, is_float16)
        for is_float16 in (False, True)
        for offset in (8, 0)
        for nibble in range(4)
    )
)
INT4_ZERO_POINT_ASM = tl.constexpr(tuple(_int4_asm(nibble, None) for nibble in range(4)))
INT4_SCALED_ASM = tl.constexpr(
    tuple(_int4_scaled_asm(nibble, kind) for kind in ("", "zero", "minimum") for nibble in range(4))
)
# An e4m3 scale is multiplied by 2^119: its largest value, 448, is then still a bfloat16. The output
# is multiplied by the other 2^7.
E4M3_SCALE_BIAS = tl.constexpr(2.0**119)
E4M3_SCALE_UNBIAS = tl.constexpr(2.0**7)
# The largest e8m0 code, 2^1, that is still a bfloat16 when it is multiplied by 2^126.
MAX_BIASED_E8M0 = tl.constexpr(128)


@triton.jit
def dequantize_e2m1(
    words, scale, NIBBLE: tl.constexpr, FULL_RANGE: tl.constexpr, NATIVE: tl.constexpr
):
    """One nibble of each word times `scale` (bfloat16, expanded over the tile).

    FULL_RANGE: the scale as it is. Otherwise it is biased by 2^126, or by 2^119 for 2^-7 of the
    value.
    """
    if NATIVE:
        return tl.inline_asm_elementwise(
            E2M1_FULL_RANGE_ASM[NIBBLE] if FULL_RANGE else E2M1_BIASED_ASM[NIBBLE], "=r,r,r",
            [words, scale], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    code = words.to(tl.int32) >> (4 * NIBBLE)
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    value = bits.to(tl.float32, bitcast=True) * (2.0**126)
    unbias: tl.constexpr = 1.0 if FULL_RANGE else 2.0**-126
    return (value * (scale.to(tl.float32) * unbias)).to(tl.bfloat16)


@triton.jit
def dequantize_int4(
    words, NIBBLE: tl.constexpr, NATIVE: tl.constexpr, OFFSET: tl.constexpr = 8,
    type: tl.constexpr = tl.bfloat16,
):  # fmt: skip
    """One nibble of each word minus OFFSET (8 or 0), as bfloat16 or float16."""
    kind: tl.constexpr = NIBBLE if OFFSET == 8 else 4 + NIBBLE
    if not NATIVE:
        return (((words.to(tl.int32) >> (4 * NIBBLE)) & 15) - OFFSET).to(tl.float32).to(type)
    elif type == tl.float16:
        return tl.inline_asm_elementwise(
            INT4_ASM[8 + kind], "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            INT4_ASM[kind], "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2
        )


@triton.jit
def dequantize_int4_zero_point(words, zero_point, NIBBLE: tl.constexpr, NATIVE: tl.constexpr):
    """One nibble of each word minus its zero point, which is float32 and has the tile's rows."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            INT4_ZERO_POINT_ASM[NIBBLE], "=r,r,r", [words, (128 + zero_point).to(tl.bfloat16)],
            dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    return (((words.to(tl.int32) >> (4 * NIBBLE)) & 15).to(tl.float32) - zero_point).to(tl.bfloat16)


@triton.jit
def scale_and_round(
    codes, scale, aux, DEQUANT: tl.constexpr, ZERO_POINTS: tl.constexpr, type: tl.constexpr
):
    """Integers times float32 scales, rounded once. `aux`: minima of "uint4", otherwise zero
    points."""
    value = codes.to(tl.float32)
    if DEQUANT == "uint4":
        value = value * scale + aux
    elif ZERO_POINTS:
        value = (value + (8.0 - aux)) * scale
    else:
        value = value * scale
    return value.to(type)


@triton.jit
def dequantize_int4_scaled(
    words, scale, aux, NIBBLE: tl.constexpr, DEQUANT: tl.constexpr, ZERO_POINTS: tl.constexpr,
    type: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """`scale_and_round` of one nibble of each word; `scale` and `aux` are expanded over the
    tile."""
    if NATIVE and type == tl.bfloat16:
        high = scale.to(tl.bfloat16)
        low = (scale - high.to(tl.float32)).to(tl.bfloat16)
        if DEQUANT == "uint4":
            return tl.inline_asm_elementwise(
                INT4_SCALED_ASM[8 + NIBBLE], "=r,r,r,r,r",
                [words, high, low, (8 * scale + aux).to(tl.bfloat16)],
                dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        elif ZERO_POINTS:
            return tl.inline_asm_elementwise(
                INT4_SCALED_ASM[4 + NIBBLE], "=r,r,r,r,r",
                [words, high, low, (128 + aux).to(tl.bfloat16)],
                dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                INT4_SCALED_ASM[NIBBLE], "=r,r,r,r", [words, high, low], dtype=tl.bfloat16,
                is_pure=True, pack=2,
            )  # fmt: skip
    else:
        codes = dequantize_int4(words, NIBBLE, NATIVE, 0 if DEQUANT == "uint4" else 8)
        return scale_and_round(codes, scale, aux, DEQUANT, ZERO_POINTS, type)


@triton.jit
def cast_8bit(w, type: tl.constexpr, NATIVE: tl.constexpr):
    """8-bit weights as 16-bit floats, exactly.

    float8 is converted by way of float32: its direct conversion to bfloat16 is a quarter as fast on
    an H200.
    """
    if NATIVE and (w.dtype == tl.int8 or type == tl.float16):
        return w.to(type)
    else:
        return w.to(tl.float32).to(type)


@triton.jit
def multiply_bfloat16(w, scale):
    """w * scale in bfloat16, for scales that leave it exact."""
    return (w.to(tl.float32) * scale.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def deinterleave_by_4(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns 0, 4, 8, … of x; 1, 5, 9, …; and so on: the operands of the four nibbles of a
    word."""
    pairs = tl.reshape(x, [ROWS, COLUMNS // 4, 2, 2])
    even, odd = tl.split(pairs)
    zero, two = tl.split(even)
    one, three = tl.split(odd)
    return zero, one, two, three


@triton.jit
def expand_blocks(scale, ROWS: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, BLOCKS] as [ROWS, BLOCKS * WIDTH], each value repeated WIDTH times."""
    wide = tl.broadcast_to(scale[:, :, None], [ROWS, BLOCKS, WIDTH])
    return tl.reshape(wide, [ROWS, BLOCKS * WIDTH])


@triton.jit
def e8m0_to_bfloat16(code):
    """2^(code - 127), exactly: 0 is the subnormal 2^-127, 255 is NaN."""
    wide = code.to(tl.int32)
    bits = tl.where(wide == 0, 0x00400000, tl.where(wide == 255, 0x7FC00000, wide << 23))
    return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def e8m0_to_biased_bfloat16(code):
    """2^(code - 127) * 2^126, exactly, of codes up to MAX_BIASED_E8M0."""
    return ((code.to(tl.int16) + 126) << 7).to(tl.bfloat16, bitcast=True)
