"""Sorts, top-k, kthvalue and medians against eager, with what comes before and after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

from fulgurite import fuser
from fulgurite.compile import compile
from fulgurite.fuse import fuse
from fulgurite.fuser.frontend.lower_graph import find_unsupported_reason
from tests.fuser import support
from tests.fuser.support import check_fused, check_interpreted, lower_for_target, to_target
from tests.suites.operator_database import sample_inputs

RUNS_ON_TRITON = True

INF, NAN = float("inf"), float("nan")
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def make_rows(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Values with ties and, of floats, NaN, infinities and both zeros; of integers, extremes."""
    x = torch.randint(-9, 9, shape).to(dtype)
    if x.numel() < 8:
        return x
    flat = x.view(-1)
    if dtype.is_floating_point:
        special = torch.tensor([NAN, INF, -INF, -0.0, 0.0, -0.0, 1e-3, NAN], dtype=dtype)
        flat[torch.randperm(flat.numel())[:8]] = special
        x += torch.where(torch.rand(shape) < 0.5, torch.rand(shape), 0.0).to(dtype)
        # arithmetic makes other NaNs; eager's GPU kernels sort some of those first
        x.masked_fill_(x.isnan(), NAN)
    elif dtype != torch.bool:
        info = torch.iinfo(dtype)
        flat[:4] = torch.tensor([info.min, info.max, info.max, info.min], dtype=dtype)
    return x


def run(function: Callable[..., Any], *arguments: Any) -> tuple[list[Any], list[Any]]:
    """Runs the generated kernels and eager, on the target's device."""
    with support.target_device():
        given = tuple(map(to_target, arguments))
        region = lower_for_target(function, given)
        return list(region(*given)), list(support.as_tuple(function(*given)))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same elements; NaN equals NaN, and -0.0 differs from 0.0."""
    is_nan = (
        a.isnan() & b.isnan() if a.is_floating_point() else torch.zeros_like(a, dtype=torch.bool)
    )
    if a.is_floating_point():
        return bool((((a == b) & (a.signbit() == b.signbit())) | is_nan).all())
    return torch.equal(a, b)


def check_selected(function: Callable[..., Any], x: torch.Tensor, dim: int) -> None:
    """Checks a (values, indices) op whose indices eager leaves open where there are ties."""
    (values, positions), (expected, _) = run(function, x)
    check_selection(to_target(x), dim, values, positions, expected)


def check_selection(
    x: torch.Tensor, dim: int, values: torch.Tensor, positions: torch.Tensor, expected: torch.Tensor
) -> None:
    """Checks values, and that positions are distinct and those of the values."""
    assert values.dtype == expected.dtype and values.shape == expected.shape
    equal = (values == expected) | ((values != values) & (expected != expected))
    assert bool(equal.all()), f"{values} instead of {expected}"
    if x.dim() and values.dim() == x.dim():
        assert same_bits(x.gather(dim, positions), values)
        in_order = positions.sort(dim).values
        assert not bool((in_order.diff(dim=dim) == 0).any()), "a position appears twice"


def supports(dtype: torch.dtype) -> bool:
    """Whether the target sorts this dtype: Triton kernels sort values of at most 32 bits."""
    return support.TARGET == "cpp" or dtype.itemsize < 8


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool], ids=str)
def test_a_stable_sort_equals_eager(dtype: torch.dtype) -> None:
    if not supports(dtype):
        pytest.skip("64-bit values are sorted by torch on GPUs")

    def function(*inputs: torch.Tensor) -> Any:
        results: list[torch.Tensor] = []
        for x, dim in zip(inputs, (1, 0, 1, 0, 1), strict=True):
            for descending in (False, True):
                results += torch.sort(x, dim=dim, stable=True, descending=descending)
        return tuple(results)

    shapes = ((5, 37), (5, 37), (3, 50, 2), (64,), (2, 1))
    got, expected = run(function, *(make_rows(dtype, *shape) for shape in shapes))
    for ours, theirs in zip(got, expected, strict=True):
        assert same_bits(ours, theirs), f"{ours} instead of {theirs}"
        assert ours.dtype == theirs.dtype
        support.check_layout(ours, theirs)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_topk_selects_the_extreme_elements(dtype: torch.dtype) -> None:
    if not supports(dtype):
        pytest.skip("64-bit values are sorted by torch on GPUs")
    x = make_rows(dtype, 4, 70)
    cases = ((1, 1, True), (8, 1, False), (8, 1, True), (40, 1, True), (3, 0, True), (70, 1, True))

    def function(x: torch.Tensor) -> Any:
        results: list[torch.Tensor] = [*torch.topk(x, 7, sorted=False)]
        for k, dim, largest in cases:
            results += torch.topk(x, k, dim=dim, largest=largest)
        return tuple(results)

    got, expected = run(function, x)
    for k, (_, dim, _) in enumerate(cases):
        check_selection(to_target(x), dim, *got[2 * k + 2 : 2 * k + 4], expected[2 * k + 2])
    unsorted = (values.nan_to_num(99).sort().values for values in (got[0], expected[0]))
    assert torch.equal(*unsorted)
    assert same_bits(to_target(x).gather(1, got[1]), got[0])


def test_kthvalue() -> None:
    x = make_rows(torch.float32, 6, 37)
    cases = ((1, 1), (5, 1), (30, 1), (37, 1), (1, 0), (6, 0))

    def function(x: torch.Tensor) -> Any:
        return tuple(r for k, dim in cases for r in torch.kthvalue(x, k, dim=dim, keepdim=True))

    got, expected = run(function, x)
    for k, (_, dim) in enumerate(cases):
        check_selection(to_target(x), dim, *got[2 * k : 2 * k + 2], expected[2 * k])


@pytest.mark.parametrize("name", ["median", "nanmedian"])
def test_medians_of_rows_with_and_without_nan(name: str) -> None:
    function: Any = getattr(torch, name)
    x = make_rows(torch.float32, 6, 37)
    x[3] = NAN
    for dim, keepdim in ((1, False), (0, True)):
        check_selected(lambda x: function(x, dim, keepdim), x, dim)
    (whole,), (expected,) = run(lambda x: (function(x),), x)
    torch.testing.assert_close(whole, expected, equal_nan=True)
    check_selected(lambda x: function(x, 0), make_rows(torch.int32, 8, 5), 0)


def test_empty_short_and_scalar_rows() -> None:
    def function(a: Any, b: Any, c: Any, d: Any) -> Any:
        results = [*torch.sort(a, stable=True), *torch.sort(b, dim=0, stable=True)]
        results += [*torch.topk(b, 1), *torch.topk(c, 0), *torch.sort(d), *torch.topk(d, 1)]
        return *results, *torch.kthvalue(d, 1), *torch.median(d, 0)

    inputs = torch.randn(3, 0), torch.randn(4, 1), torch.randn(2, 9), torch.tensor(2.5)
    check_fused(function, *inputs)
    check_interpreted(function, *inputs)


def test_strided_and_overlapping_inputs() -> None:
    def function(a: Any, b: Any, c: Any) -> Any:
        return (
            *torch.sort(a, stable=True),
            *torch.sort(b, dim=1, stable=True),
            *torch.sort(c, stable=True),
        )

    a = torch.randn(40, 12).t()[::2, 1::3]
    b = torch.randn(4, 1, 6).expand(4, 5, 6)
    c = torch.randn(50).as_strided((6, 9), (3, 1))
    check_fused(function, a, b, c)
    check_interpreted(function, a, b, c)


def test_threshold_search_of_long_rows() -> None:
    """Rows that a CPU kernel does not search element by element: the threshold and radix paths."""
    x = torch.randn(3, 2000)
    x[1] = 1.0
    for k in (12, 100, 700):
        if support.TARGET == "cpp" or k < 100:
            check_selected(lambda x: torch.topk(x, k), x, 1)
    if support.TARGET == "cpp":
        check_selected(lambda x: torch.kthvalue(x, 900), x, 1)
        check_selected(lambda x: torch.topk(x, 100), x.double(), 1)
        check_selected(lambda x: torch.kthvalue(x, 900), (x * 100).to(torch.int64), 1)


# what comes before and after


def route(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    weights, experts = logits.softmax(-1).topk(k, -1)
    return weights / weights.sum(-1, keepdim=True), experts


def route_in_groups(
    logits: torch.Tensor, bias: torch.Tensor, groups: int, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = logits.sigmoid()
    choice = scores + bias
    best = choice.view(len(logits), groups, -1).topk(2, -1).values.sum(-1).topk(groups // 2, -1)
    mask = torch.zeros(len(logits), groups, device=logits.device).scatter(1, best.indices, 1.0)
    mask = mask.repeat_interleave(logits.shape[1] // groups, 1)
    experts = choice.masked_fill(mask == 0, -INF).topk(k, -1).indices
    weights = scores.gather(1, experts)
    return weights / weights.sum(-1, keepdim=True) * 2.5, experts


@pytest.mark.parametrize("shape", [(37, 64), (5, 60), (1, 128)], ids=str)
def test_a_router_is_one_kernel(shape: tuple[int, int]) -> None:
    region = check_fused(lambda x: route(x, 8), torch.randn(shape))
    assert len(region.kernels) == 1, [k.reason for k in region.kernels]


@pytest.mark.parametrize("shape", [(37, 64), (5, 96), (1, 128)], ids=str)
def test_a_router_with_groups(shape: tuple[int, int]) -> None:
    """One kernel; on GPUs two, because sorts across each other's rows are kept apart."""
    bias = torch.randn(shape[1])
    region = check_fused(lambda x, b: route_in_groups(x, b, 8, 6), torch.randn(shape), bias)
    most = 1 if support.TARGET == "cpp" else 2
    assert len(region.kernels) <= most, [k.reason for k in region.kernels]


def test_values_around_a_sort_are_fused() -> None:
    def function(x: torch.Tensor) -> Any:
        values, order = (x.exp() * 0.5).sort(dim=-1, descending=True, stable=True)
        return values.cos() + x, order + 1, values.sum(-1), values[:, 2:5] * 2

    region = check_fused(function, torch.randn(7, 50))
    assert len(region.kernels) == 1, [k.reason for k in region.kernels]
    check_interpreted(function, torch.randn(7, 50))


def test_sorted_values_in_other_kernels() -> None:
    def function(x: torch.Tensor) -> Any:
        values, order = x.sort(dim=0, stable=True)
        probabilities = values.softmax(0).cumsum(0)
        return probabilities, order.flip(0), values.t().contiguous(), values.sum()

    check_fused(function, torch.randn(33, 6))
    check_interpreted(function, torch.randn(33, 6))


def test_two_sorts_along_different_axes() -> None:
    def function(x: torch.Tensor) -> Any:
        rows = x.sort(dim=1, stable=True).values
        order = x.argsort(dim=1, stable=True).int()
        return rows.sort(dim=0, stable=True).values, order.argsort(dim=1, stable=True)

    check_fused(function, torch.randn(12, 20))


def test_a_sort_across_the_rows_of_another() -> None:
    def function(x: torch.Tensor) -> Any:
        return x.topk(2, -1)[0].msort(), x.topk(2, 0)[0].topk(1, 1)[0]

    check_fused(function, torch.randint(-9, 9, (5, 5)).float())


def test_scatter_at_top_positions() -> None:
    def function(x: torch.Tensor) -> Any:
        values, positions = x.topk(3, 1)
        old = x.cos()
        return (
            old.scatter(1, positions, values * 2),
            old.scatter(1, positions, 7.0),
            torch.zeros_like(x, dtype=torch.int64).scatter(1, positions, positions + 1),
        )

    check_fused(function, torch.randn(6, 11))
    check_interpreted(function, torch.randn(6, 11))


@pytest.mark.parametrize("interpolation", ["linear", "lower", "higher", "midpoint", "nearest"])
def test_quantiles(interpolation: str) -> None:
    x = torch.randn(6, 41)
    x[2, 3] = NAN

    def function(x: torch.Tensor, q: torch.Tensor) -> Any:
        options: Any = {"interpolation": interpolation}
        of_rows = torch.quantile(x, 0.3, 1, **options), torch.quantile(x, q, 1, True, **options)
        return *of_rows, torch.nanquantile(x, q, 0, **options), torch.nanquantile(x, q, **options)

    q = torch.tensor([0.0, 0.25, 0.5, 1.0])
    (got, expected) = run(function, x, q)
    torch.testing.assert_close(got, expected, equal_nan=True)


def test_dynamic_sizes() -> None:
    if support.TARGET != "cpp":
        pytest.skip("torch sorts along dynamic dimensions on GPUs")

    def function(x: torch.Tensor) -> Any:
        values, order = x.softmax(-1).sort(dim=-1, stable=True)
        return values * 2, order, *x.topk(3, 0), x.median(0).values

    compiled = compile(function, dynamic=True)
    for shape in ((4, 9), (7, 33), (5, 300)):
        x = torch.randn(shape)
        torch.testing.assert_close(compiled(x), function(x))


def test_ranks_that_the_launcher_computes() -> None:
    """`n // 2 + 1` is no polynomial of the size, so it reaches the kernel as an argument."""
    if support.TARGET != "cpp":
        pytest.skip("torch sorts along dynamic dimensions on GPUs")

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).kthvalue(x.size(1) // 2 + 1, 1)[0]

    compiled = compile(function, dynamic=True)
    for columns in (7, 2, 30):
        x = torch.randn(3, columns)
        assert torch.equal(compiled(x), function(x))


def test_gradients() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        weights, _ = route(x, 4)
        return (weights * x.sort(-1).values[:, :4]).sum() + x.median(-1).values.sum()

    x = torch.randn(9, 16, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(function(x), x)
    (got,) = torch.autograd.grad(compile(function)(x), x)
    torch.testing.assert_close(got, expected)


def test_long_rows_stay_with_torch() -> None:
    graph = support.trace(lambda x: x.sort(-1), [torch.randn(2, 40_000)])
    (node,) = [n for n in graph.graph.nodes if n.op == "call_function" and "sort" in str(n.target)]
    reason = find_unsupported_reason(node)
    assert reason is not None and "sort of 40000 elements" in reason
    x = torch.randn(2, 40_000)
    torch.testing.assert_close(compile(lambda x: x.sort(-1).values * 2)(x), x.sort(-1).values * 2)


def test_fuse_takes_a_router() -> None:
    if support.TARGET != "cpp":
        pytest.skip("`fuse` lowers CPU tensors to C++")
    fused = fuse(lambda x: route(x, 8))
    x = torch.randn(64, 128)
    torch.testing.assert_close(fused(x), route(x, 8))
    assert len(fused.kernels) == 1


# the operator database

# Quantiles have tests of their own: a tensor q must be an input.
NAMES = ("sort", "topk", "argsort", "msort", "kthvalue", "median", "nanmedian")
OPS = [op for op in op_db if op.name in NAMES]


@pytest.mark.covering
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.full_name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_operator_database(op: Any, dtype: torch.dtype) -> None:
    if dtype not in op.supported_dtypes("cpu") or not supports(dtype):
        pytest.skip("eager or the target has no kernel for this dtype")
    samples = [s for s in sample_inputs(op, "cpu", dtype) if is_comparable(s)][::2]

    def function(*inputs: torch.Tensor) -> Any:
        calls = [op(x, *s.args, **s.kwargs) for x, s in zip(inputs, samples, strict=True)]
        if op.name == "argsort":  # eager leaves the order of ties open
            return tuple(
                x.take_along_dim(i, find_dim(s))
                for x, i, s in zip(inputs, calls, samples, strict=True)
            )
        return tuple(call if isinstance(call, torch.Tensor) else call[0] for call in calls)

    got, expected = run(function, *(sample.input for sample in samples))
    torch.testing.assert_close(got, expected, equal_nan=True)


def is_comparable(sample: Any) -> bool:
    """Whether a sample has one right answer, and rows that GPU kernels sort."""
    is_sorted = sample.kwargs.get("sorted") is not False
    x = sample.input
    return x.numel() > 0 and x.dim() > 0 and max(x.shape) <= 256 and is_sorted


def find_dim(sample: Any) -> int:
    return int(sample.kwargs.get("dim", (*sample.args, -1)[0]))


def test_every_kernel_says_what_it_sorts() -> None:
    region = check_fused(lambda x: x.topk(3), torch.randn(4, 20))
    assert isinstance(region, fuser.FusedRegion)
    assert "row_program" in str(region.kernels[0].schedule)
