"""Elementwise ops over dtypes, shapes, strides and special values, against eager."""

from __future__ import annotations

import math

import pytest
import torch

import fulgurite
from fulgurite.errors import FusionError
from tests.fuser import support
from tests.fuser.support import check_fused, check_interpreted

RUNS_ON_TRITON = True

F = torch.nn.functional
INF, NAN = math.inf, math.nan
SPECIAL_VALUES = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -0.5,
    2.0,
    3.0,
    -3.0,
    1e-3,
    7.3,
    -7.7,
    20.5,
    -19.0,
    INF,
    -INF,
    NAN,
]


def make_special_values(dtype: torch.dtype, count: int = 67) -> torch.Tensor:
    """Returns all special values, then random ones; the count is no multiple of a vector width."""
    torch.manual_seed(0)
    rest = torch.randn(count - len(SPECIAL_VALUES)) * 3
    return torch.cat([torch.tensor(SPECIAL_VALUES), rest]).to(dtype)


UNARY = {
    name: getattr(torch, name)
    for name in [
        "exp",
        "exp2",
        "expm1",
        "log",
        "log2",
        "log10",
        "log1p",
        "sqrt",
        "rsqrt",
        "sin",
        "cos",
        "tan",
        "asin",
        "acos",
        "atan",
        "sinh",
        "cosh",
        "tanh",
        "asinh",
        "acosh",
        "atanh",
        "erf",
        "erfc",
        "sigmoid",
        "reciprocal",
        "neg",
        "abs",
        "sign",
        "floor",
        "ceil",
        "trunc",
        "round",
        "frac",
        "square",
        "isnan",
        "isinf",
        "signbit",
        "logical_not",
        "lgamma",
    ]
}
UNARY |= {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "elu": lambda x: F.elu(x, 1.5),
    "softplus": F.softplus,
    "softplus_beta": lambda x: F.softplus(x, 2.0, 5.0),
    "hardtanh": lambda x: F.hardtanh(x, -2, 0.5),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "mish": F.mish,
    "threshold": lambda x: F.threshold(x, 0.1, 20.0),
    "clamp": lambda x: x.clamp(-1, 2),
    "clamp_min": lambda x: x.clamp(min=0.25),
    "clamp_tenths": lambda x: x.clamp(0.1, 0.7),  # not representable in float32
    "nan_to_num": torch.nan_to_num,
    "pow2": lambda x: x**2,
    "pow3": lambda x: x**3,
    "pow_half": lambda x: x**0.5,
    "pow_minus": lambda x: x**-1.5,
    "rpow": lambda x: 2.0**x,
    "add_alpha": lambda x: torch.add(x, x * 2, alpha=0.3),
    "rsub": lambda x: 3.0 - x,
    "div_scalar": lambda x: x / 3.0,
    "floor_divide": lambda x: torch.div(x, 0.7, rounding_mode="floor"),
    "trunc_divide": lambda x: torch.div(x, 0.7, rounding_mode="trunc"),
    "remainder": lambda x: torch.remainder(x, 1.3),
    "fmod": lambda x: torch.fmod(x, -1.3),
    "to_int": lambda x: x.nan_to_num(0.0, 100.0, -100.0).to(torch.int32),
    "to_bool": lambda x: x.to(torch.bool),
    "to_int8": lambda x: x.nan_to_num(0.0, 100.0, -100.0).to(torch.int8),
    "neg_bit": lambda x: torch.signbit(-x.nan_to_num(1.0)),  # zeros too
    "to_bf16": lambda x: x.to(torch.bfloat16),
    "to_f16_and_back": lambda x: x.to(torch.float16).to(torch.float32) * 1,
}

HARD_ACTIVATIONS = {name: UNARY[name] for name in ("hardsigmoid", "hardswish")}

BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "floor_divide": torch.floor_divide,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "pow": lambda a, b: torch.pow(a.abs(), b),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "copysign": torch.copysign,
    "logaddexp": torch.logaddexp,
    "xlogy": torch.xlogy,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "logical_and": torch.logical_and,
    "logical_xor": torch.logical_xor,
    "where": lambda a, b: torch.where(a > b, a, b * 2),
    "masked_fill": lambda a, b: a.masked_fill(b > 0, -1.0),
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "addcmul": lambda a, b: torch.addcmul(a, b, b, value=0.5),
    "addcdiv": lambda a, b: torch.addcdiv(a, b, b + 2, value=0.5),
    "silu_backward": lambda a, b: torch.ops.aten.silu_backward(a, b),
    "gelu_backward": lambda a, b: torch.ops.aten.gelu_backward(a, b),
    "gelu_tanh_backward": lambda a, b: torch.ops.aten.gelu_backward(a, b, approximate="tanh"),
    "sigmoid_backward": lambda a, b: torch.ops.aten.sigmoid_backward(a, b),
    "tanh_backward": lambda a, b: torch.ops.aten.tanh_backward(a, b),
    "threshold_backward": lambda a, b: torch.ops.aten.threshold_backward(a, b, 0.5),
}


def apply_all(table, *arguments):
    """Applies every function of a table to the same arguments: one region, few kernels."""
    return tuple(function(*arguments) for function in table.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_unary(dtype: torch.dtype) -> None:
    skipped = set()
    if dtype != torch.float32:
        # This case casts to float16 itself.
        skipped = {"to_f16_and_back"}
    if dtype == torch.float64 and support.TARGET == "cuda":
        skipped |= set(HARD_ACTIVATIONS)
    table = {name: f for name, f in UNARY.items() if name not in skipped}
    check_fused(lambda x: apply_all(table, x), make_special_values(dtype))


def test_hard_activations_in_float64() -> None:
    """Compares with the formula: CUDA's eager functions multiply by 1/6 rounded to float32."""
    x = make_special_values(torch.float64)
    gate = (x + 3).clamp(0, 6) / 6
    arguments = (support.to_target(x),)
    region = support.lower_for_target(lambda x: apply_all(HARD_ACTIVATIONS, x), arguments)
    for ours, exact in zip(region(*arguments), (gate, x * gate), strict=True):
        support.check_close(ours.cpu(), exact, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_binary(dtype: torch.dtype) -> None:
    a = make_special_values(dtype, 71)
    b = a.flip(0).roll(5)
    check_fused(lambda a, b: apply_all(BINARY, a, b), a, b)


INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]

INTEGER_OPS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "true_divide": lambda a, b: a / b,
    "floor": lambda a, b: a // 3,
    "floor_negative": lambda a, b: torch.div(a, 7, rounding_mode="floor"),
    "trunc": lambda a, b: torch.div(a, 5, rounding_mode="trunc"),
    "remainder": lambda a, b: a % 5,
    "fmod": lambda a, b: torch.fmod(a, 5),
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "not": lambda a, b: ~a,
    "left": lambda a, b: a << (b & 3),
    "right": lambda a, b: a >> (b & 3),
    "max": torch.maximum,
    "min": torch.minimum,
    "abs": lambda a, b: a.abs(),
    "neg": lambda a, b: -a,
    "sign": lambda a, b: a.sign(),
    "pow": lambda a, b: a**3,
    "pow5": lambda a, b: a**5,
    "clamp": lambda a, b: a.clamp(1, 50),
    "eq": torch.eq,
    "lt": torch.lt,
    "where": lambda a, b: torch.where(a > b, a, b),
    "float_mixed": lambda a, b: a * 0.5,
    "to_float": lambda a, b: a.float(),
    "to_bf16": lambda a, b: a.to(torch.bfloat16),
    "to_int8": lambda a, b: a.to(torch.int8),
    "to_uint8": lambda a, b: a.to(torch.uint8),
    "to_bool": lambda a, b: a.bool(),
    "exp": lambda a, b: torch.exp(a.clamp(max=20)),
    "logical_or": torch.logical_or,
    "logical_not": lambda a, b: a.logical_not(),
    "relu": lambda a, b: F.relu(a),
}


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    info = torch.iinfo(dtype)
    edges = torch.tensor([0, 1, 2, 3, 5, info.max, info.min, info.max - 1], dtype=dtype)
    a = torch.cat([edges, torch.randint(0, 100, (25,)).to(dtype)])
    check_fused(lambda a, b: apply_all(INTEGER_OPS, a, b), a, a.flip(0))


def test_integer_shifts_beyond_the_width() -> None:
    a = torch.tensor([1, -1, 127, -128, 5], dtype=torch.int32)
    b = torch.tensor([31, 32, 40, 33, -1], dtype=torch.int32)
    check_fused(lambda a, b: (a << b, a >> b), a, b)


def test_bools() -> None:
    a = torch.tensor([True, False, True, False, True] * 7)
    b = torch.tensor([True, True, False, False, False] * 7)
    x = torch.arange(35.0)

    def function(a, b, x):
        return (
            *(a & b, a | b, a ^ b, ~a, a == b, a != b, a + b, a * b, a < b),
            *(a.float(), a.long() + 1, a * x, torch.where(a, x, 0.0), x.masked_fill(b, -1)),
            *(a.to(torch.bfloat16), torch.logical_not(a), a * 2, torch.maximum(a, b)),
        )

    check_fused(function, a, b, x)


PROMOTED = [
    (torch.int32, torch.float32),
    (torch.int64, torch.bfloat16),
    (torch.uint8, torch.int8),
    (torch.bfloat16, torch.float16),
    (torch.float32, torch.float64),
    (torch.bool, torch.int16),
    (torch.bool, torch.float16),
    (torch.int16, torch.int64),
]


@pytest.mark.parametrize(("left", "right"), PROMOTED)
def test_promotion(left: torch.dtype, right: torch.dtype) -> None:
    a = torch.arange(1, 20).to(left)
    b = torch.arange(2, 21).to(right)
    zero = torch.tensor(3).to(right)

    def function(a, b, zero):
        return a + b, a * zero, a * 2, a * 2.5, a / b, torch.where(a > b, a, b), a < 1.5

    check_fused(function, a, b, zero)


SHAPES = [(), (1,), (0,), (7,), (3, 0), (1, 1), (5, 1), (1, 13), (2, 3, 5), (31, 33), (4, 1, 9)]


def test_shapes() -> None:
    torch.manual_seed(1)
    inputs = [torch.randn(shape) for shape in SHAPES]
    check_fused(lambda *xs: tuple(torch.exp(x) * 2 + x for x in xs), *inputs)


def layouts() -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    base = torch.randn(12, 10, 14)
    return {
        "transposed": torch.randn(14, 10).t(),
        "permuted": base.permute(2, 0, 1),
        "offset": torch.randn(300)[17:157].view(10, 14),
        "stepped": torch.randn(20, 42)[::2, 1::3],
        "expanded": torch.randn(10, 1).expand(10, 14),
        "expanded_front": torch.randn(14).expand(10, 14),
        "overlapping": torch.randn(40).as_strided((10, 14), (2, 1)),
        "channels_last": torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last),
        "flipped": torch.randn(10, 14).flip(0),
        "one_column": torch.randn(10, 14)[:, 3:4],
    }


def test_layouts() -> None:
    """Outputs have torch's strides."""
    inputs = layouts()

    def function(*xs):
        return tuple(torch.sigmoid(x) + x * 2 for x in xs)

    check_fused(function, *inputs.values())


def test_broadcast() -> None:
    torch.manual_seed(3)
    a, b, c, d = torch.randn(5, 1, 7), torch.randn(3, 1), torch.randn(7), torch.tensor(2.0)

    def function(a, b, c, d):
        return a + b, a * c + d, b * d, (a + b + c).t() if a.dim() == 2 else a - c, c - b

    check_fused(function, a, b, c, d)


def test_operands_with_different_strides() -> None:
    torch.manual_seed(4)
    a = torch.randn(9, 11)
    check_fused(lambda a, b: (a + b.t(), b + a.t()), a, torch.randn(11, 9))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_casts(dtype: torch.dtype) -> None:
    """Every float8 code upcasts, and every kind of number rounds, as in torch."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    torch.manual_seed(5)
    values = torch.cat(
        [
            torch.tensor(SPECIAL_VALUES),
            torch.randn(400) * 10.0 ** torch.arange(-6, 6).repeat(34)[:400],
        ]
    )
    steps = torch.arange(0, 4000) * 0.5
    check_fused(lambda c: (c.to(torch.float32) * 1,), codes)
    region_values = torch.cat(
        [values, steps, torch.tensor([447.9, 464.0, 464.1, 480.0, 57344.0, 61440.0, 61439.0])]
    )
    check_fused(lambda v: (v.to(dtype).to(torch.float32) * 1,), region_values)
    stored = check_fused(lambda v: (v.to(dtype).to(torch.float32) + 0, v * 2), region_values)
    assert stored.kernels


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_half_values(dtype: torch.dtype) -> None:
    """All 65536 codes upcast exactly, and rounding is half to even."""
    codes = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    check_fused(lambda c: (c.to(torch.float32) * 1,), codes)
    values = torch.arange(0, 1 << 18, dtype=torch.int32) * 16381 + 0x30000000
    check_fused(lambda v: (v.to(dtype),), values.view(torch.float32))


def test_python_scalars() -> None:
    x = torch.randn(10)
    check_fused(lambda x: (x + math.pi, x * 1e-30, x - 1e30, x * INF, x + NAN, x * -0.0), x)


def test_recomputed_cast_still_rounds() -> None:
    """An explicit cast rounds even if the value is not stored."""
    x = torch.randn(100)
    check_interpreted(lambda x: x - x.to(torch.bfloat16).float(), x)
    check_fused(lambda x: x - x.to(torch.bfloat16).float(), x)


def test_float_to_integer_drops_negative_zero() -> None:
    """-0.3 becomes 0, not -0: its reciprocal is inf."""
    small = torch.tensor([-0.3, -0.0, 0.0, 0.3, -1.5, 2.5] * 5)
    check_fused(lambda x: (1 / x.int().float(), 1 / x.long().float(), 1 / x.double().int()), small)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64], ids=str)
def test_negative_factors_wrap_around(dtype):
    """Unsigned numbers too, whose negative literals Triton refuses."""
    x = torch.tensor([0, 1, 5, 100], dtype=dtype)
    check_fused(lambda x: (torch.sub(x, x, alpha=-2), torch.add(x, 7, alpha=-1), x * -3), x)


@pytest.mark.parametrize("exponent", [-1, -2, -7])
def test_negative_constant_power_of_integers_is_left_to_torch(exponent):
    """torch raises for a scalar exponent; tensors of exponents are computed."""
    with pytest.raises(FusionError, match="negative constant power"):
        fulgurite.fuse(lambda x: x**exponent)(torch.arange(5))
    base, exponents = torch.meshgrid(torch.arange(-3, 4), torch.arange(-3, 4), indexing="ij")
    check_fused(lambda a, b: a**b, base, exponents)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.float32])
def test_arange_with_fractions(dtype):
    """torch truncates start and step before it multiplies, not after."""

    def f(x):
        down = torch.arange(2.1, -2.9, -1.0, dtype=dtype, device=x.device)
        up = torch.arange(-0.9, 7.1, 1.9, dtype=dtype, device=x.device)
        return x + down[:4], x + up[:4]

    check_fused(f, torch.zeros(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_nextafter_steps_in_the_dtype_of_the_result(dtype):
    x = torch.cat([make_special_values(dtype), torch.tensor([6e4, 1e-7], dtype=dtype)])
    compiled = fulgurite.compile(lambda x, y: torch.nextafter(x * 1, y))
    for y in (x.flip(0), torch.zeros((), dtype=dtype)):
        torch.testing.assert_close(
            compiled(x, y), torch.nextafter(x, y), rtol=0, atol=0, equal_nan=True
        )


SIGNS_OF_ZERO = [  # torch's vector and scalar code agree on these
    lambda x, y: torch.relu(x),
    lambda x, y: torch.relu(x * y),
    lambda x, y: F.relu6(x),
    lambda x, y: x.clamp(min=0.0),
    lambda x, y: x.clamp(min=-0.0),
    lambda x, y: x.clamp(max=0.0),
    lambda x, y: x.clamp(max=-0.0),
    lambda x, y: x.clamp(0.0, 1.0),
    torch.fmax,
    torch.fmin,
]


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("number", range(len(SIGNS_OF_ZERO)))
def test_signs_of_zero(number, dtype):
    f = SIGNS_OF_ZERO[number]
    x, y = torch.tensor([0.0, -0.0, 0.0, -0.0, NAN, 1, -1] * 9), torch.tensor([0.0, 0.0, -0.0] * 21)
    x, y = x.to(dtype), y.to(dtype)
    ours, eager = fulgurite.fuse(f)(x, y), f(x, y)
    torch.testing.assert_close(ours, eager, rtol=0, atol=0, equal_nan=True)
    is_zero = eager == 0
    assert torch.equal(ours.signbit()[is_zero], eager.signbit()[is_zero])


@pytest.mark.covering
@pytest.mark.parametrize("alpha", [0, 0.0, -0.0, 1, -1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sign_of_a_zero_difference(dtype, alpha):
    a = torch.tensor([0.0, -0.0, 0.0, -0.0, 2.0], dtype=dtype)
    b = torch.tensor([0.0, 0.0, -0.0, -0.0, 1.0], dtype=dtype)

    def signs(a, b):
        return (
            torch.sub(a, b, alpha=alpha).signbit(),
            torch.rsub(a, b, alpha=alpha).signbit(),
            torch.add(a, b, alpha=alpha).signbit(),
        )

    assert all(map(torch.equal, fulgurite.fuse(signs)(a, b), signs(a, b)))


@pytest.mark.parametrize("rounding_mode", [None, "trunc"])
def test_division_by_a_number_has_eagers_bits(rounding_mode):
    """On a GPU torch multiplies by the reciprocal: the last bit decides what a cast returns."""
    x = torch.arange(-4096.0, 4096.0)

    def divide(x):
        quotients = [torch.div(x, n, rounding_mode=rounding_mode) for n in (49.0, 3, math.log(16))]
        return (*quotients, *(quotient.long() for quotient in quotients))

    with support.target_device():
        x = support.to_target(x)
        region = support.lower_for_target(divide, (x,))
        for ours, theirs in zip(region(x), divide(x), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
