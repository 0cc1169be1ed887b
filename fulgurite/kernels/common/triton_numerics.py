# mypy: allow-untyped-defs, allow-incomplete-defs
"""Device functions: magnitudes, exact division, codes of 4 and 8 bits.

In: float32 registers. Out: the same values as `fulgurite.quant`, bit for bit. Magnitudes are
compared as integers: the bits of |x| have the order of |x|, and NaN is the largest.

    NATIVE  compiled for a GPU, not run by Triton's interpreter
    QMAX    the largest value that a code stands for
"""

from __future__ import annotations

from fulgurite.kernels.common.triton_import import INTERPRETED, tl, triton

NATIVE = not INTERPRETED
INFINITY_BITS = tl.constexpr(0x7F800000)
ROUND_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves an integer in the low bits
ROUND_MAGIC_BITS = tl.constexpr(0x4B400000)
MIN_SCALE = tl.constexpr(2.0**-126)


@triton.jit
def magnitude_bits(x, KEEP_NAN: tl.constexpr):
    """The bits of |x|; 0 for an infinity, and for a NaN unless KEEP_NAN."""
    return finite_bits(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, KEEP_NAN)


@triton.jit
def finite_bits(bits, KEEP_NAN: tl.constexpr):
    """`magnitude_bits` of the bits of magnitudes."""
    if KEEP_NAN:
        return tl.where(bits == INFINITY_BITS, 0, bits)
    return tl.where(bits >= INFINITY_BITS, 0, bits)


@triton.jit
def compute_scale(amax, QMAX: tl.constexpr):
    """amax / QMAX, at least 2^-126; 1 for zeros; NaN stays NaN."""
    scale = tl.div_rn(amax, QMAX)
    scale = tl.where(scale < MIN_SCALE, MIN_SCALE, scale)
    return tl.where(amax == 0.0, 1.0, scale)


@triton.jit
def divide(x, divisor, inverse, NATIVE: tl.constexpr):
    """x / divisor to the last bit, given the rounded inverse of the divisor.

    Two fused multiply-adds correct the quotient (Markstein): a third of the instructions of a
    division. The interpreter has no fused multiply-add and divides.
    """
    if NATIVE:
        quotient = x * inverse
        surplus = tl.fma(quotient, divisor, -x)
        # the minus is here to keep the sign of -0: Triton's -x is 0 - x, which is +0 for +0
        corrected = tl.fma(surplus, -inverse, quotient)
        # an infinity has no surplus: it stays what it is, and saturates later
        return tl.where(tl.abs(x) == float("inf"), quotient, corrected)
    return tl.div_rn(x, divisor)


@triton.jit
def reciprocal(x, NATIVE: tl.constexpr):
    """1 / x to the last bit; cheaper than a division."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "rcp.rn.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.div_rn(1.0, x)


@triton.jit
def saturate(x, QMAX: tl.constexpr):
    """x within ±QMAX; NaN stays NaN."""
    return tl.clamp(x, -QMAX, QMAX, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def to_float8(x, type: tl.constexpr, NATIVE: tl.constexpr):
    """x as float8, round to nearest even, saturating; NaN stays NaN.

    The interpreter's own cast neither rounds to even nor knows NaN. There x is rounded to the
    values of the type first.
    """
    if NATIVE:
        return x.to(type)
    x = saturate(x, 448.0 if type == tl.float8e4nv else 57344.0)
    mantissa_bits: tl.constexpr = 3 if type == tl.float8e4nv else 2
    min_normal: tl.constexpr = 2.0**-6 if type == tl.float8e4nv else 2.0**-14
    bits = x.to(tl.int32, bitcast=True)
    odd = (bits >> (23 - mantissa_bits)) & 1
    half: tl.constexpr = 1 << (22 - mantissa_bits)
    rounded = ((bits + (half - 1) + odd) & (-2 * half)).to(tl.float32, bitcast=True)
    # adding it rounds to the spacing of the subnormals
    magic: tl.constexpr = 1.5 * min_normal * 2.0 ** (23 - mantissa_bits)
    small = (tl.abs(x) + magic) - magic
    small = tl.where(bits < 0, -small, small)
    nan: tl.constexpr = 480.0 if type == tl.float8e4nv else float("nan")  # what is cast to NaN
    return tl.where(tl.abs(x) < min_normal, small, tl.where(x == x, rounded, nan)).to(type)


@triton.jit
def round_to_int(x):
    """Nearest even of |x| < 2^22, as int32; 0 for NaN."""
    integer = (x + ROUND_MAGIC).to(tl.int32, bitcast=True) - ROUND_MAGIC_BITS
    return tl.where(x == x, integer, 0)


@triton.jit
def divide_positive(x, divisor, inverse, NATIVE: tl.constexpr):
    """x / divisor to the last bit for x >= 0; NaN for an infinity."""
    if NATIVE:
        quotient = x * inverse
        return tl.fma(tl.fma(quotient, divisor, -x), -inverse, quotient)
    return tl.div_rn(x, divisor)


@triton.jit
def e2m1_magnitude(quotient):
    """The e2m1 code 0 to 7 of quotient >= 0, in the last bits of an int32: nearest even,
    saturating.

    Codes count steps of 0.5 up to 2, of 1 up to 4, of 2 above. So the code is the smallest of the
    three counts. Adding ROUND_MAGIC rounds each of them. NaN, which the quotient of an infinity may
    be, counts as 6. Additions are cheap here, comparisons are not.
    """
    halves = quotient * 2.0 + ROUND_MAGIC
    ones = quotient + (ROUND_MAGIC + 2.0)
    twos = quotient * 0.5 + (ROUND_MAGIC + 4.0)
    least = tl.minimum(tl.minimum(halves, ones), tl.minimum(twos, ROUND_MAGIC + 7.0))
    return least.to(tl.int32, bitcast=True)


@triton.jit
def quantize_int4(quotient):
    """round(quotient) + 8 within 0 to 15, in the last bits of an int32."""
    code = tl.minimum(tl.maximum(quotient + (ROUND_MAGIC + 8.0), ROUND_MAGIC), ROUND_MAGIC + 15.0)
    return code.to(tl.int32, bitcast=True)


@triton.jit
def max_propagate_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def has_nonfinite(amax):
    """Whether one of these magnitudes is infinite or NaN."""
    return tl.max(tl.where(amax < float("inf"), 0, 1), 0) > 0


@triton.jit
def finite_amax(x, AXIS: tl.constexpr, KEEP_NAN: tl.constexpr, NATIVE: tl.constexpr):
    """The largest finite |x| along an axis. Infinities don't count; NaN counts if KEEP_NAN.

    One comparison an element: the bits are examined only if the maximum is not finite. The
    interpreter always examines them, because it is slow at custom reductions.
    """
    if NATIVE:
        amax = tl.reduce(tl.abs(x), AXIS, max_propagate_nan)
        if has_nonfinite(amax):
            amax = tl.max(magnitude_bits(x, KEEP_NAN), AXIS).to(tl.float32, bitcast=True)
        return amax
    else:
        return tl.max(magnitude_bits(x, KEEP_NAN), AXIS).to(tl.float32, bitcast=True)


@triton.jit
def quantize_8bit(x, scale, inverse, QMAX: tl.constexpr, type: tl.constexpr, NATIVE: tl.constexpr):
    """code = round(x / scale) in one byte: float8 by its own cast, int8 by rounding."""
    quotient = divide(x, scale, inverse, NATIVE)
    if type == tl.int8:
        return round_to_int(saturate(quotient, QMAX)).to(tl.int8)
    return to_float8(quotient, type, NATIVE)
