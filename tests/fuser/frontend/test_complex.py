"""Complex arithmetic, functions, views and concatenation against eager, part by part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fulgurite
from fulgurite import fuser
from fulgurite.fuser.frontend.lower_graph import lower_graph
from fulgurite.fuser.ir.interpreter import interpret_region
from fulgurite.fuser.ir.split_axes import split_axes
from fulgurite.fuser.ir.statement import verify_region
from tests.fuser import support
from tests.fuser.support import as_tuple, check_close, check_layout, to_float64, trace

RUNS_ON_TRITON = True

INF, NAN = float("inf"), float("nan")
FUNCTIONS = {
    name: getattr(torch, name)
    for name in (
        "abs angle sgn exp log log2 log10 sqrt rsqrt sinh cosh tanh sin cos tan sigmoid reciprocal square "
        "isnan isinf".split()
    )
}
CASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "neg": lambda z: -z,
    "conj": lambda z: z.conj() * 1,
    "powers": lambda z: (z**2, z**3, z**0.5, z ** (1.5 + 0.5j), 2.0**z),
    "parts": lambda z: (z.real * 2, z.imag + 1, torch.view_as_real(z).exp()),
    "numbers": lambda z: (z * (1 + 2j) + 3, z * 2.5, z / 3, 1 - z),
    "with_real": lambda z: (z + z.real, z * z.imag, z / z.real, z.real / z),
    "where": lambda z: (torch.where(z.real > 0, z, z * 2), z.masked_fill(z.real > 0, 1 + 1j)),
    "sums": lambda z: (z.sum(), z.sum(0), z.mean(-1), z.cumsum(0)),
    "moved": lambda z: (z.t() * 2, z.flip(0), z[1] * 2, z.tril(), (z * 2).view(-1), z[::2, 1:] + 1),
    "concatenated": lambda z: (torch.cat([z, z * 2]), torch.stack([z, z * 2], 1)),
    "gathered": lambda z: z[torch.arange(3)] * 2,
    "padded": lambda z: torch.nn.functional.pad(z, (1, 2)),
    "cast": lambda z: (z.to(torch.complex128) * 2, z.abs().to(z.dtype) + 1j),
    "truth": lambda z: (
        z.bool(),
        torch.complex(z.real * 0, z.imag * 1).bool(),
        (z * 0).bool().sum(),
    ),
    "equal": lambda z: (z == z * 1, z != z.conj()),
    "made": lambda z: (
        torch.polar(z.abs(), z.angle()),
        torch.complex(z.imag * 1, z.real * 1),
        torch.view_as_complex(torch.view_as_real(z) * 2),
        torch.ones_like(z) * z,
        torch.full_like(z, 2 + 1j) + z,
    ),
    "made like it": lambda z: (
        torch.zeros_like(z, dtype=torch.int64),
        torch.full_like(z, 2.5, dtype=torch.float64) + z.real,
        z.new_ones(z.shape, dtype=torch.bool),
    ),
    "combined": lambda z: (torch.addcmul(z, z, z, value=0.5), torch.lerp(z, z * 2, 0.3)),
    "windows": lambda z: (z.t(), z[1:], z.real, z.imag),
}


def parts(x: Any) -> Any:
    complex_ = isinstance(x, torch.Tensor) and x.is_complex()
    return torch.view_as_real(x.resolve_conj()) if complex_ else x


def wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.complex128) if x.is_complex() else to_float64(x)


def check_complex(function: Callable[..., Any], *arguments: torch.Tensor) -> fuser.FusedRegion:
    """Compares the interpreter, before and after `split_axes`, and the kernels with eager."""
    if support.TARGET == "cpp":
        region = lower_graph(trace(function, arguments))
        verify_region(region)
        for variant in (region, split_axes(region)):
            compare(interpret_region(variant, arguments), function, arguments)
    with support.target_device():
        arguments = tuple(map(support.to_target, arguments))
        lowered = support.lower_for_target(function, arguments)
        compare(lowered(*arguments), function, arguments)
    return lowered


def compare(got: Any, function: Callable[..., Any], arguments: Any) -> None:
    eager, exact = as_tuple(function(*arguments)), as_tuple(function(*map(wide, arguments)))
    for ours, theirs, reference in zip(got, eager, exact, strict=True):
        check_layout(ours, theirs)
        check_close(parts(ours), parts(theirs), parts(reference))


def all_functions(z: torch.Tensor) -> tuple[torch.Tensor, ...]:
    cases = [*FUNCTIONS.values(), *CASES.values()]
    return tuple(result for case in cases for result in as_tuple(case(z)))


@pytest.mark.parametrize(
    "dtype", [torch.complex64, pytest.param(torch.complex128, marks=pytest.mark.slow)]
)
def test_all_functions(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check_complex(all_functions, torch.randn(6, 6, dtype=dtype))


@pytest.mark.parametrize("name", ["sum", "cumsum", "mean"])
@pytest.mark.parametrize(
    ("dtype", "to"), [(torch.complex64, torch.float64), (torch.float32, torch.complex128)]
)
@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_reductions_that_cast(name: str, dtype: torch.dtype, to: torch.dtype) -> None:
    """A cast to a real dtype drops the imaginary part, one to a complex dtype adds zeros."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return getattr(x, name)(0, dtype=to) * 2

    x = torch.randn(3, 5, dtype=dtype)
    torch.testing.assert_close(fulgurite.compile(function)(x), function(x))


def test_view_of_a_written_input_with_dynamic_sizes() -> None:
    """AOTAutograd replays the views of the result's base on the input: both must be complex."""

    def function(z: torch.Tensor) -> torch.Tensor:
        z.mul_(2)
        return z.reshape(z.size(0), -1)

    z = torch.randn(4, dtype=torch.complex64)
    ours = z.clone()
    result = fulgurite.compile(function, dynamic=True)(ours)
    torch.testing.assert_close(result, function(z))
    torch.testing.assert_close(ours, z)


def test_two_tensors() -> None:
    torch.manual_seed(1)
    a, b, c = (
        torch.randn(5, 7, dtype=torch.complex64),
        torch.randn(7, 5, dtype=torch.complex64).t(),
        torch.randn(7),
    )

    def function(a, b, c):
        return a + b, a - b, a * b, a / b, a**b, a == b, torch.add(a, b, alpha=2j), a * c, c - a

    check_complex(function, a, b, c)


def test_layouts_and_shapes() -> None:
    torch.manual_seed(2)
    layouts = [
        torch.randn(5, 7, dtype=torch.complex64).t(),
        torch.randn(40, dtype=torch.complex64)[3:33].view(5, 6),
        torch.randn(5, 1, dtype=torch.complex64).expand(5, 4),
        torch.randn(9, 8, dtype=torch.complex64)[::2, 1::3],
        *(
            torch.randn(shape, dtype=torch.complex64)
            for shape in ((), (1,), (0,), (3, 0), (5, 1, 3))
        ),
    ]
    check_complex(
        lambda *zs: tuple(r for z in zs for r in (z.exp() * 2, z.abs(), z.sum())), *layouts
    )


def test_infinities_and_nan() -> None:
    odd = torch.tensor([0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 1e30, 1e-30])
    z = torch.complex(odd[:, None].expand(9, 9).contiguous(), odd[None].expand(9, 9).contiguous())
    functions = (
        torch.abs,
        torch.angle,
        torch.exp,
        torch.log,
        torch.sqrt,
        torch.reciprocal,
        torch.neg,
    )
    check_complex(
        lambda z: (*(f(z) for f in functions), z.isnan(), z.isinf(), z.conj() * 1, z.sum(0)), z
    )


def check_against_cpu(function: Callable[..., Any], z: torch.Tensor, rtol: float) -> None:
    """Compares parts of results with eager's on a CPU, which follows C, in float64.

    C leaves the signs of some zeros open, and those of infinities beside a NaN.
    """
    with support.target_device():
        lowered = support.lower_for_target(function, (support.to_target(z),))
        found = as_tuple(lowered(support.to_target(z)))
    for ours, expected in zip(found, as_tuple(function(wide(z))), strict=True):
        ours, expected = parts(ours).cpu().double(), parts(expected)
        is_open = expected.isnan().any(-1, keepdim=True)
        ours, expected = (torch.where(is_open, x.abs(), x) for x in (ours, expected))
        torch.testing.assert_close(ours, expected, rtol=rtol, atol=0, equal_nan=True)


def test_sums_multiply_infinities_by_their_factor_of_one() -> None:
    """(1 + 0i) * (inf + 0i) is inf + nan i: torch multiplies the second operand of a sum."""
    odd = torch.tensor([0.0, 1.0, -1.0, INF, -INF, NAN])
    z = torch.complex(odd[:, None].expand(6, 6).contiguous(), odd[None].expand(6, 6).contiguous())
    check_complex(
        lambda a, b: (
            a + b,
            a - b,
            torch.add(a, b, alpha=1),
            torch.rsub(a, b),
            a + 1,
            1 - a,
            a.addcmul(b, a),
            a.addcdiv(b, b),
        ),
        torch.ones_like(z),
        z,
    )


def test_hyperbolic_functions_of_infinities_and_nan() -> None:
    odd = torch.tensor([0.0, -0.0, 1.0, -1.0, 700.0, INF, -INF, NAN], dtype=torch.float64)
    z = torch.complex(odd[:, None].expand(8, 8).contiguous(), odd[None].expand(8, 8).contiguous())
    functions = (torch.sinh, torch.cosh, torch.tanh, torch.sin, torch.cos, torch.tan)
    check_against_cpu(lambda z: tuple(f(z) for f in (*functions, torch.log2, torch.log10)), z, 1e-6)


def test_digits_of_small_parts() -> None:
    """The imaginary part of tanh for large real parts, and the real part of log near 1."""
    parts_ = torch.tensor([1e-4, -0.5, 1.5, 3.75, -8.0, 20.0])
    z = torch.complex(
        parts_[:, None].expand(6, 6).contiguous(), parts_[None].expand(6, 6).contiguous()
    )
    check_against_cpu(lambda z: (z.tanh(), z.tan()), z, 2e-5)
    near_one = torch.tensor([1 + 1e-4j, 0.999 + 1e-4j, 1e-4 - 1.001j, -1 + 1e-3j, 1.2 + 0.1j])
    check_against_cpu(lambda z: (z.log(), z.log2(), z.log10()), near_one, 1e-5)


EXPONENTS = (-1, -2, -3, 0, 4, -0.5, 0.25, -1.5, 1j, 2 + 1j, -1 + 1j)


def test_powers_of_zeros_and_infinities() -> None:
    """0 ** -1 is infinite, and 0 ** 0 is 1 if the exponent is a number; z ** 0 was NaN at infinity."""
    z = torch.tensor([0j, complex(-0.0, -0.0), complex(INF, 0), complex(0, INF), complex(NAN, 0)])
    z = torch.cat([z, torch.tensor([complex(-INF, 1), 1 + 2j, complex(INF, INF)])])
    for start in range(0, len(EXPONENTS), 4):  # g++ takes far longer for all of them in one kernel
        some = EXPONENTS[start : start + 4]
        check_against_cpu(lambda z: tuple(z**exponent for exponent in some), z, 1e-5)
    if support.TARGET == "cpp":
        check_complex(lambda z, b: z[:, None] ** b, z, torch.tensor(EXPONENTS))


def test_complex_half() -> None:
    """torch supports only views of the parts and casts on a CPU."""
    h = torch.randn(4, 3, 2).half()

    def function(h):
        z = torch.view_as_complex(h)
        return z, torch.view_as_real(z) * 2, z.to(torch.complex64) * 2

    check_complex(function, h)


def test_views_of_inputs_are_returned_as_views() -> None:
    z = support.to_target(torch.randn(6, 8, dtype=torch.complex64))
    region = support.lower_for_target(lambda z: (z.t(), z.real, z * 2), (z,))
    for alias in region(z)[:2]:
        assert alias.untyped_storage().data_ptr() == z.untyped_storage().data_ptr()


def test_pointwise_chain_is_one_kernel() -> None:
    z = torch.randn(33, 7, dtype=torch.complex64)
    assert len(check_complex(lambda z: (z * z.conj()).real.sqrt() + (z * 2j).imag, z).kernels) == 1


LAZY = {
    "conj": lambda x: x.conj() * 2,
    "conj_output": lambda x: ((x * 2).conj(), x.conj()[1:]),
    "imaginary_of_conj": lambda x: (x.conj().imag * 2, (x * 2).conj().imag),
    "resolved": lambda x: torch.view_as_real(x.conj().resolve_conj()) * 2,
    "resolved_neg": lambda x: x.conj().imag.resolve_neg() * 2,
    "transposed": lambda x: x.conj()[1:].t() + x.mH[:, 1:],
    "twice": lambda x: x.conj().conj() + x.conj().sum(),
    "neg_view": lambda x: torch._neg_view(x.real) + 1,
}


@pytest.mark.parametrize("name", LAZY)
def test_lazy_conjugate_and_negative_bits(name: str) -> None:
    function = LAZY[name]
    x = torch.randn(4, 6, dtype=torch.complex64)
    for given in (x, x.conj()):
        torch._dynamo.reset()
        want, got = function(given), fulgurite.compile(function)(given)
        for ours, theirs in zip(_tensors(got), _tensors(want), strict=True):
            assert (ours.is_conj(), ours.is_neg()) == (theirs.is_conj(), theirs.is_neg())
            torch.testing.assert_close(_resolve(ours), _resolve(theirs))


def test_input_with_a_negative_bit() -> None:
    x = torch.randn(4, 6, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    torch.testing.assert_close(fulgurite.compile(lambda x: x * 2 + x[0])(x), x * 2 + x[0])


def _tensors(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _resolve(x: torch.Tensor) -> torch.Tensor:
    return x.resolve_conj().resolve_neg()


def test_gradients_of_products_with_complex_numbers():
    def f(c):
        return torch.view_as_real(c * (1 + 2j)).square().sum()

    c = torch.randn(3, dtype=torch.complex64, requires_grad=True)
    (found,) = torch.autograd.grad(fulgurite.compile(f)(c), c)
    torch.testing.assert_close(found, torch.autograd.grad(f(c), c)[0])


@pytest.mark.parametrize(
    "function",
    [
        lambda z: z.view(torch.int16).sum(0, dtype=torch.float32),
        lambda z: (z * 2).view(torch.float32) + 1,
        lambda z: (z.view(torch.int32) & 255).sum(),
        lambda z: (z + 1).view(torch.complex128).imag * 1,
        lambda z: (torch.view_as_real(z * 2).flatten(-2) + 1).view(torch.complex64) * 2,
    ],
)
def test_bytes_as_another_dtype(function):
    """`view(dtype)` of complex numbers is torch's: their parts are not what it counts in."""
    z = torch.randn(3, 4, dtype=torch.complex64)
    torch.testing.assert_close(fulgurite.compile(function)(z), function(z))


def rows_and_all(z: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return z[:, z.shape[1] // 2 :], z


@pytest.mark.parametrize(
    "function",
    [
        lambda x: rows_and_all(torch.complex(x, x + 1)),
        lambda x: rows_and_all(torch.complex(x, x + 1).roll(1, -1))[::-1],
        lambda x: rows_and_all(torch.complex(x, x + 1).conj()),
    ],
)
def test_results_that_are_views_of_another_result_with_dynamic_sizes(function):
    """AOTAutograd takes the offset of a view from the compiled function's result."""
    compiled = fulgurite.compile(function, dynamic=True)
    for sizes in ((2, 6, 5), (3, 9, 4)):
        x = torch.randn(sizes, requires_grad=True)
        found, expected = compiled(x), function(x)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.storage_offset() == theirs.storage_offset()
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        assert found[0].untyped_storage().data_ptr() == found[1].untyped_storage().data_ptr()
