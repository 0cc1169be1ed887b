# mypy: disable-error-code="no-untyped-def"
"""DeviceInfo functions of generated Triton kernels, where Triton has none with torch's semantics.

In: blocks of one dtype. Out: the same. Only generated kernels import this module, and only it and
they import Triton, so that the package works where Triton is not installed.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# Triton before 3.7 compiles some reductions of reshaped blocks wrong (runtime/reduction_layouts.py), but none of
# two elements.
HAS_WRONG_REDUCTIONS = tl.constexpr(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
    and not triton.knobs.runtime.interpret
)

# reductions: max and min propagate NaN


@triton.jit
def nan_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def nan_min(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def atomic_max_float(pointer, value, mask):
    """Stores the maximum of memory and a value; NaN is the largest number.

    Non-negative floats are ordered like their bits, negative ones the other way round, as unsigned
    numbers. A NaN in memory must be positive.
    """
    value, pointer = tl.broadcast(value, pointer)
    if value.dtype == tl.float64:
        bits = value.to(tl.int64, bitcast=True)
        bits = tl.where(value != value, 0x7FF8000000000000, bits)
        signed = pointer.to(tl.pointer_type(tl.int64), bitcast=True)
        unsigned = pointer.to(tl.pointer_type(tl.uint64), bitcast=True)
        unsigned_bits = bits.to(tl.uint64, bitcast=True)
    else:
        bits = value.to(tl.int32, bitcast=True)
        bits = tl.where(value != value, 0x7FC00000, bits)
        signed = pointer.to(tl.pointer_type(tl.int32), bitcast=True)
        unsigned = pointer.to(tl.pointer_type(tl.uint32), bitcast=True)
        unsigned_bits = bits.to(tl.uint32, bitcast=True)
    tl.atomic_max(signed, bits, mask=(bits >= 0) & mask, sem="relaxed")
    tl.atomic_min(unsigned, unsigned_bits, mask=(bits < 0) & mask, sem="relaxed")


@triton.jit
def sum_combine(a, b):
    """a + b"""
    return a + b


@triton.jit
def prod_combine(a, b):
    """a * b"""
    return a * b


@triton.jit
def logaddexp(a, b):
    """log(exp(a) + exp(b))"""
    high = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    low = tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    both_infinite = (a == b) & (tl.abs(a) == float("inf"))
    return tl.where(both_infinite, a, high + libdevice.log1p(libdevice.exp(low - high)))


# register-resident rows


@triton.jit
def optimization_barrier(x, pass_number: tl.constexpr):
    """x, of a 16-bit type, as a value that the compiler can't merge with x of another pass.

    Otherwise it would hold the float32 values of an earlier pass, in twice the registers. The
    barrier adds `pass_number` times a zero that the compiler doesn't know: the program id along the
    grid's third dimension.
    """
    if INTERPRETED:
        result = x
    else:
        result = tl.inline_asm_elementwise(
            "{ .reg .b32 zero; mov.u32 zero, %ctaid.z; mad.lo.u32 $0, zero, $2, $1; }",
            "=r,r,r,r",
            [x, pass_number],
            dtype=x.dtype,
            is_pure=False,
            pack=2,
        )
    return result


# floats


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x))"""
    return 1.0 / (1.0 + libdevice.exp(-x))


@triton.jit
def fast_sigmoid(x):
    """1 / (1 + exp(-x)), approximately"""
    return libdevice.fast_dividef(1.0, 1.0 + libdevice.fast_expf(-x))


@triton.jit
def fast_tanh(x):
    """tanh(x) within 2e-6: near zero by its series, which does not cancel."""
    square = x * x
    series = x * (1.0 - square * (0.33333334 - square * 0.13333334))
    return tl.where(square < 0.01, series, 2.0 * fast_sigmoid(2.0 * x) - 1.0)


@triton.jit
def sign(x):
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@triton.jit
def signbit(x):
    if x.dtype == tl.float64:
        negative = x.to(tl.int64, bitcast=True) < 0
    else:
        negative = x.to(tl.int32, bitcast=True) < 0
    return negative


@triton.jit
def div_rn(a, b):
    """a / b, correctly rounded"""
    return tl.div_rn(a, b) if a.dtype == tl.float32 else a / b


@triton.jit
def softmax_div(x, total):
    """x / total where 0 <= x <= 1 <= total: one division a row, three products an element.

    Multiplies by the reciprocal and corrects by the remainder (Markstein): correctly rounded,
    within 1 ulp where x is below 2**-99. A general division has a branch for numbers out of range,
    and a stack for it.
    """
    estimate = 1.0 / total
    reciprocal = tl.fma(tl.fma(estimate, -total, 1.0), estimate, estimate)
    quotient = x * reciprocal
    remainder = tl.fma(quotient, -total, x)
    return tl.fma(remainder, reciprocal, quotient)


@triton.jit
def truncated_divide(a, b):
    """trunc(a / b)"""
    return libdevice.trunc(div_rn(a, b))


@triton.jit
def floored_remainder(a, b):
    """a - floor(a / b) * b, with the sign of b"""
    rest = libdevice.fmod(a, b)
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def floored_divide(a, b):
    """floor(a / b), as torch rounds it"""
    rest = libdevice.fmod(a, b)
    quotient = div_rn(a - rest, b)
    low = tl.where((rest != 0) & ((b < 0) != (rest < 0)), quotient - 1, quotient)
    whole = tl.floor(low)
    whole = tl.where(low - whole > 0.5, whole + 1, whole)
    exact = div_rn(a, b)
    whole = tl.where(low != 0, whole, libdevice.copysign(exact * 0, exact))
    return tl.where(b == 0, exact, whole)


@triton.jit
def to_e4m3(x):
    """x as float8_e4m3fn, rounded as torch before 2.13 does: overflow becomes NaN."""
    return tl.where(tl.abs(x) <= 464.0, x, float("nan")).to(tl.float8e4nv)


@triton.jit
def to_e5m2(x):
    """x as float8_e5m2, rounded as torch does: overflow becomes infinity; Triton saturates."""
    code = x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    infinite = tl.where(x < 0, 0xFC, 0x7C).to(tl.uint8)
    return tl.where(tl.abs(x) >= 61440.0, infinite, code).to(tl.float8e5, bitcast=True)


# integers: the divisor is a constant that is not zero


@triton.jit
def hide_range(x):
    """x, as a value that the compiler knows no bounds of.

    It divides a number that is not negative, and small if it has 64 bits, as an unsigned 32-bit one. ptxas (12.8,
    12.9) compiles a 64-bit difference whose first operand is such a quotient wrong: it is 2**32 too small if the
    lower half of the second operand is 0.
    """
    if INTERPRETED or x.dtype.primitive_bitwidth < 32:
        result = x
    elif x.dtype.primitive_bitwidth == 64:
        result = tl.inline_asm_elementwise(
            "mov.b64 $0, $1;", "=l,l", [x], dtype=x.dtype, is_pure=True, pack=1
        )
    else:
        result = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=1
        )
    return result


@triton.jit
def int_truncated_divide(a, b):
    if a.dtype.is_int_unsigned():
        return hide_range(a) // b
    else:  # Triton compiles code that follows a returning `if`
        return tl.where(b == -1, -a, hide_range(a) // tl.where(b == -1, 1, b))


@triton.jit
def int_truncated_remainder(a, b):
    if a.dtype.is_int_unsigned():
        return a % b
    else:
        return tl.where(b == -1, 0, a % tl.where(b == -1, 1, b))


@triton.jit
def int_floored_remainder(a, b):
    rest = int_truncated_remainder(a, b)
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def int_floored_divide(a, b):
    rest = int_truncated_remainder(a, b)
    quotient = int_truncated_divide(a, b)
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), quotient - 1, quotient)


@triton.jit
def int_pow(a, b):
    """a ** b by squaring; a negative power is 0, except of 1 and -1."""
    a, b = a + b * 0, b + a * 0
    result, base, left = a * 0 + 1, a, tl.where(b < 0, 0, b)
    for _ in range(a.dtype.primitive_bitwidth):
        result = tl.where((left & 1) != 0, result * base, result)
        base = base * base
        left = left >> 1
    if a.dtype.is_int_unsigned():
        return result
    else:
        odd = (b & 1) != 0
        inverse = tl.where((a == 1) | ((a == -1) & odd), a, tl.where(a == -1, -a, 0))
        return tl.where(b < 0, inverse, result)


@triton.jit
def int_gcd(a, b):
    """Euclid's algorithm, with as many steps as integers of this width may need: 1.44 a bit."""
    a, b = a + b * 0, b + a * 0
    if not a.dtype.is_int_unsigned():
        a, b = tl.abs(a), tl.abs(b)
    for _ in range(a.dtype.primitive_bitwidth * 3 // 2):
        rest = a % tl.where(b == 0, 1, b)
        a, b = tl.where(b == 0, a, b), tl.where(b == 0, 0, rest)
    return a


@triton.jit
def int_lcm(a, b):
    divisor = int_gcd(a, b)
    factor = a // tl.where(divisor == 0, 1, divisor)
    if a.dtype.primitive_bitwidth < 32:  # as in C, then truncated
        return tl.abs(factor.to(tl.int32) * b.to(tl.int32)).to(a.dtype)
    else:
        return tl.abs(factor * b)


@triton.jit
def shift_left(a, b):
    bits: tl.constexpr = a.dtype.primitive_bitwidth
    out = (b < 0) | (b >= bits)
    return tl.where(out, 0, a << tl.where(out, 0, b)).to(a.dtype)


@triton.jit
def shift_right(a, b):
    bits: tl.constexpr = a.dtype.primitive_bitwidth
    out = (b < 0) | (b >= bits)
    shifted = a >> tl.where(out, bits - 1, b)
    return tl.where(out & (a >= 0), 0, shifted).to(a.dtype)


# random numbers: word p % 4 of Philox 4x32-10 with the counter p // 4 and the key `seed`


@triton.jit
def philox_word(seed, position):
    counter = position >> 2
    a = counter.to(tl.uint32)
    b = (counter >> 32).to(tl.uint32)
    c = a * 0
    d = a * 0
    left = seed.to(tl.uint32)
    right = (seed >> 32).to(tl.uint32)
    first = tl.full([], 0xD2511F53, tl.uint32)
    second = tl.full([], 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        upper_a = tl.umulhi(a, first)
        upper_c = tl.umulhi(c, second)
        lower_a = a * first
        a = upper_c ^ b ^ left
        b = c * second
        c = upper_a ^ d ^ right
        d = lower_a
        left = left + tl.full([], 0x9E3779B9, tl.uint32)
        right = right + tl.full([], 0xBB67AE85, tl.uint32)
    word = position & 3
    return tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d))


@triton.jit
def uniform(seed, position):
    return (philox_word(seed, position) >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def uniform53(seed, position):
    upper = philox_word(seed, 2 * position).to(tl.int64)
    lower = philox_word(seed, 2 * position + 1).to(tl.int64)
    return ((upper >> 5 << 26) | (lower >> 6)).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def random_integer(seed, position):
    upper = philox_word(seed, 2 * position).to(tl.int64)
    lower = philox_word(seed, 2 * position + 1).to(tl.int64)
    return (upper >> 1 << 32) | lower


# row programs: rows of keys and values, all of which are in registers


@triton.jit
def sum_of_rows(x, BY_PAIRS: tl.constexpr):
    """The sums of a block's rows, as a block [rows, 1]."""
    if BY_PAIRS and HAS_WRONG_REDUCTIONS:
        rest = x
        for level in tl.static_range(x.shape[1].bit_length() - 1):
            rest = tl.sum(tl.reshape(rest, [x.shape[0], x.shape[1] >> (level + 1), 2]), 2)
        result = tl.reshape(rest, [x.shape[0], 1])
    else:
        result = tl.sum(x, 1, keep_dims=True)
    return result


@triton.jit
def min_of_rows(x, BY_PAIRS: tl.constexpr):
    """The smallest numbers of a block's rows, as a block [rows, 1]."""
    if BY_PAIRS and HAS_WRONG_REDUCTIONS:
        rest = x
        for level in tl.static_range(x.shape[1].bit_length() - 1):
            rest = tl.min(tl.reshape(rest, [x.shape[0], x.shape[1] >> (level + 1), 2]), 2)
        result = tl.reshape(rest, [x.shape[0], 1])
    else:
        result = tl.min(x, 1, keep_dims=True)
    return result


@triton.jit
def smallest_keys(
    keys,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    BY_PAIRS: tl.constexpr,
):
    """The COUNT smallest of the distinct keys of each row, in order, in a block [rows, BLOCK]."""
    rank = tl.arange(0, BLOCK)[None, :]
    found = tl.full([keys.shape[0], BLOCK], LARGEST, keys.dtype)
    for k in range(COUNT):
        smallest = min_of_rows(keys, BY_PAIRS)
        found = tl.where(rank == k, smallest, found)
        keys = tl.where(keys == smallest, LARGEST, keys)
    return found


@triton.jit
def row_bits(x):
    """A value as an integer of at least 32 bits, so that a sum with zeros keeps every bit."""
    if x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
    elif x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True)
    elif x.dtype == tl.int64:
        bits = x
    else:
        bits = x.to(tl.int32)
    return bits


@triton.jit
def select_along_rows(
    source, index, LENGTH: tl.constexpr, COUNT: tl.constexpr, BY_PAIRS: tl.constexpr
):
    """source[row, index[row, j]] of blocks [rows, LENGTH] and [rows, COUNT].

    The loop is over the shorter one. A position outside the row selects a 0. `tl.gather` takes minutes
    to compile for long rows, and an assertion of Triton 3.6 fails in it.
    """
    bits = row_bits(source)
    found = tl.zeros([source.shape[0], COUNT], bits.dtype)
    if LENGTH <= COUNT:
        column = tl.arange(0, LENGTH)[None, :]
        for k in range(LENGTH):
            value = sum_of_rows(tl.where(column == k, bits, 0), BY_PAIRS)
            found = tl.where(index == k, value, found)
    else:
        row_column = tl.arange(0, LENGTH)[None, :]
        column = tl.arange(0, COUNT)[None, :]
        for k in range(COUNT):
            at = sum_of_rows(tl.where(column == k, index, 0), BY_PAIRS)
            value = sum_of_rows(tl.where(row_column == at, bits, 0), BY_PAIRS)
            found = tl.where(column == k, value, found)
    if source.dtype == tl.float32:
        result = found.to(tl.float32, bitcast=True)
    elif source.dtype == tl.float64:
        result = found.to(tl.float64, bitcast=True)
    elif source.dtype == tl.int1:
        result = found != 0
    else:
        result = found.to(source.dtype)
    return result
