"""Indexed stores (scatter, index_put and their relatives) against eager and the interpreter."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fulgurite
from fulgurite import fuser
from fulgurite.errors import FusionError
from fulgurite.fuser.frontend.lower_graph import lower_graph
from fulgurite.fuser.ir.interpreter import interpret_region
from fulgurite.fuser.ir.split_axes import split_axes
from fulgurite.fuser.ir.statement import verify_region
from tests.fuser import support

RUNS_ON_TRITON = True

INF, NAN = float("inf"), float("nan")
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
REDUCTIONS = ["sum", "prod", "mean", "amax", "amin"]


def trace(function: Callable[..., Any], arguments: tuple[Any, ...], mode: str) -> Any:
    """Traces without decompositions: each op is lowered as it is."""
    graph = make_fx(function, tracing_mode=mode)(*arguments)
    functional = torch.func.functionalize(graph, remove="mutations")
    graph = make_fx(functional, tracing_mode=mode)(*arguments)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def check(
    function: Callable[..., Any], *arguments: Any, mode: str = "fake"
) -> fuser.FusedRegion | None:
    """Compares the interpreter and generated kernels with eager. None if there are no kernels."""
    if support.TARGET == "cpp":
        region = lower_graph(trace(function, arguments, mode))
        for variant in (region, split_axes(region)):
            verify_region(variant)
            result = interpret_region(variant, arguments)
            support.check_against_eager(result, function, arguments)
    with support.target_device():
        arguments = tuple(map(support.to_target, arguments))
        graph = trace(function, arguments, mode)
        try:
            fused = fuser.lower_region(graph, use_triton=support.TARGET == "triton")
        except FusionError as error:
            assert support.TARGET != "cpp" and "atomic prod" in str(error)
            return None
        support.check_against_eager(fused(*arguments), function, arguments)
    return fused


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    return torch.randint(0, 5, shape).to(dtype)


# ---- one op in all dtypes ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    base, rows = values(7, 5, dtype=dtype), values(9, 5, dtype=dtype)
    index, positions = torch.randint(0, 7, (9,)), torch.randint(0, 5, (7, 4))

    def function(base, rows, index, positions):
        return (
            base.index_add(0, index, rows),
            base.scatter_add(1, positions, rows[:7, :4]),
            base.index_put((index,), rows, accumulate=True),
            torch.zeros_like(base).index_add(0, index, rows),
        )

    def extrema(base, rows, positions):
        return (
            base.scatter_reduce(1, positions, rows[:7, :4], "amax"),
            base.scatter_reduce(1, positions, rows[:7, :4], "amin", include_self=False),
        )

    check(function, base, rows, index, positions)
    if support.TARGET != "cuda" or dtype != torch.bool:  # which torch can't on a GPU
        check(extrema, base, rows, positions)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool], ids=str)
def test_overwriting_stores(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    base, rows = values(7, 5, dtype=dtype), values(4, 5, dtype=dtype)
    index, positions = torch.tensor([6, 0, 3, 2]), torch.tensor([[4, 0], [1, 3], [2, 0], [3, 4]])

    def function(base, rows, index, positions):
        return (
            base.index_copy(0, index, rows),
            base.index_fill(0, index, 2),
            base.index_fill(1, positions[0] - 5, rows[0, 0]),
            base.scatter(1, positions, rows),
            base.scatter(1, positions, 1),
            base.index_put((index - 7,), rows),
            base.put(index, rows[0, :4]),
        )

    check(function, base, rows, index, positions)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.bool], ids=str)
def test_accumulate_under_a_mask(dtype: torch.dtype) -> None:
    base, row = values(5, 3, dtype=dtype), values(3, dtype=dtype)
    mask = torch.tensor([True, False, True, True, False])

    def function(base, row, mask):
        return base.index_put((mask,), row, accumulate=True), base.index_put((mask,), row)

    check(function, base, row, mask)


@pytest.mark.covering
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_reductions(dtype: torch.dtype, reduce: str, include_self: bool) -> None:
    torch.manual_seed(2)
    base, source = values(6, 5, dtype=dtype), values(9, 4, dtype=dtype)
    index = torch.randint(0, 6, (9, 4))
    index[:, 0] = 5
    check(
        lambda b, i, s: b.scatter_reduce(0, i, s, reduce, include_self=include_self),
        base,
        index,
        source,
    )
    if reduce != "sum":
        check(
            lambda b, i, s: b.index_reduce(0, i[:, 0], s, reduce, include_self=include_self),
            base[:, :4],
            index,
            source,
        )


def test_nan_infinities_and_signed_zeros() -> None:
    base = torch.tensor([NAN, -NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0])
    source = torch.tensor([1.0, -1.0, NAN, INF, -0.0, 0.0, -INF, NAN, 2.0, -2.0, 3.0])
    index = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 7])

    def function(base, source, index):
        return tuple(
            base.scatter_reduce(0, index, source, reduce, include_self=include)
            for reduce in ("sum", "amax", "amin", "mean")
            for include in (True, False)
        )

    check(function, base, source, index)


# ---- shapes --------------------------------------------------------------------------------------


def test_last_of_several_values_wins() -> None:
    """In program order, as in eager on a CPU. On a GPU the order is undefined."""
    if support.TARGET != "cpp":
        pytest.skip("a GPU stores in any order")
    base, source = torch.zeros(3, 40), torch.arange(200.0).view(5, 40)
    index = torch.tensor([2, 0, 2, 0, 2])

    def function(base, source, index):
        where = index[:, None].expand(5, 40)
        return (
            base.index_put((index,), source),
            base.index_copy(0, index, source),
            base.scatter(0, where, source),
            base.t().scatter(1, where.t(), source.t()),
        )

    check(function, base, source, index)


def test_empty_index_and_empty_result() -> None:
    index = torch.zeros(0, dtype=torch.int64)

    def function(base, index, none, second):
        return (
            base.index_add(0, index, base[:0]),
            base.scatter(1, index[None].expand(3, 0), 1.0),
            base.index_put((index,), base[:0]),
            none.index_add(0, index, none),
            none.scatter_add(0, index[:, None].expand(0, 4), none),
            none.index_fill(1, second, 2.0),
        )

    check(function, torch.randn(3, 4), index, torch.randn(0, 4), torch.tensor([1]))


def test_scalars() -> None:
    zero = torch.tensor(0)

    def function(base, zero, source):
        return (
            base.scatter(0, zero, source),
            base.scatter_add(0, zero, source),
            base.index_add(0, zero, source),
            base.index_copy(0, zero, source),
            base.index_fill(0, zero, 3.0),
            base.put(zero, source, accumulate=True),
            base[None].expand(1, 4).index_add(0, zero[None], source.expand(1, 4)),
        )

    check(function, torch.tensor(2.0), zero, torch.tensor(5.0))


def test_index_put_of_several_dimensions() -> None:
    torch.manual_seed(3)
    base = torch.randn(4, 5, 6)
    rows, columns = torch.tensor([0, 3, 3, -1]), torch.tensor([[-1], [2]])

    def function(base, rows, columns):
        one = base.new_ones(())
        return (
            base.index_put((rows, columns), base[:2, :4], accumulate=True),
            torch.ops.aten.index_put(base, [None, rows], base[:, :4] * 2, True),
            torch.ops.aten.index_put(base, [rows, None, columns], base[:2, :4, :5], True),
            torch.ops.aten.index_put(base, [None, rows, columns], one, True),
            torch.ops.aten._unsafe_index_put(base, [None, None, rows], one, True),
            torch.ops.aten.index_put(base, [rows], base[0], True),
        )

    check(function, base, rows, columns)


def test_strided_bases_and_sources() -> None:
    torch.manual_seed(4)
    base, source = torch.randn(9, 6).t(), torch.randn(6, 16)[:, ::2]
    index = torch.randint(0, 9, (16,))[::2]

    def function(base, source, index):
        return (
            base.index_add(1, index, source),
            base[:, 1:8].scatter_add(1, index[None].expand(6, 8) % 7, source),
            base[1].expand(6, 9).index_add(1, index, source),
            (base * 2).t().index_add(0, index, source.t().sin()),
        )

    check(function, base, source, index)


def test_values_of_other_axes_are_computed_in_the_kernel() -> None:
    torch.manual_seed(5)
    gate, hidden, index = torch.randn(12), torch.randn(3, 4, 10), torch.randint(0, 5, (3, 4))

    def function(gate, hidden, index):
        rows = hidden.reshape(12, 10) * torch.sigmoid(gate)[:, None]
        return gate.new_zeros(5, 10).index_add(0, index.reshape(-1), rows)

    fused = check(function, gate, hidden, index)
    assert fused is not None
    assert [kernel.name.rpartition("_")[0] for kernel in fused.kernels] == [
        "fill",
        "sigmoid_index_add",
    ]


def test_readers_of_a_store() -> None:
    torch.manual_seed(6)
    x, index = torch.randn(8, 6), torch.randint(0, 8, (5,))

    def function(x, index):
        added = x.index_add(0, index, x[:5])
        again = added.exp().index_add(0, index, added[:5])
        return again.sum(0), added * 2, again.index_fill(0, index, 0.0)

    check(function, x, index)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_constant_initial_values_are_rounded(dtype: torch.dtype) -> None:
    rows, index = torch.full((3, 4), 2.0**-8, dtype=dtype), torch.tensor([0, 1, 0])

    def function(rows, index):
        return torch.full_like(rows, 1 / 3).index_add(0, index, rows)

    check(function, rows, index)


def test_chained_stores_share_one_buffer() -> None:
    torch.manual_seed(7)
    x, index = torch.randn(40, 6), torch.randperm(40)[:9]

    def function(x, index):
        y = (x * 2).index_fill(0, index[:3], 1.0)
        return y.index_copy(0, index[3:6], x[:3]).index_add(0, index, x[:9])

    fused = check(function, x, index)
    assert fused is not None
    assert not any(kernel.name.startswith("clone") for kernel in fused.kernels)


@pytest.mark.parametrize("count", [0, 1, 3, 64])
def test_dynamic_sizes(count: int) -> None:
    torch.manual_seed(8)

    def function(x, index, source):
        return x.index_add(0, index, source * 2), torch.zeros_like(x).scatter_add(
            1, index[:, None].expand(index.shape[0], 3) % 3, source
        )

    def arguments(rows: int, points: int) -> tuple[torch.Tensor, ...]:
        index = torch.randint(0, rows, (points,))
        return torch.randn(rows, 3), index, torch.randn(points, 3)

    fused = check(function, *arguments(70, 6), mode="symbolic")
    assert fused is not None
    support.check_fused_again(fused, function, *arguments(65, count))


# ---- masks ---------------------------------------------------------------------------------------


def test_assignments_to_a_mask_are_selections() -> None:
    torch.manual_seed(9)
    x, mask = torch.randn(4, 5, 6), torch.randn(4, 5) > 0

    def function(x, mask):
        put, value = torch.ops.aten.index_put, x[0, 0, 0]
        return (
            put(x, [x > 0], value),
            put(x, [mask], value),
            put(x, [mask], x[1, 2]),
            put(x, [mask], x[1, :1], True),
            put(x, [None, mask.t()[:, :1].expand(5, 6)], x[:, 0, :1]),
        )

    fused = check(function, x, mask)
    assert fused is not None and len(fused.kernels) == 1


def test_masked_scatter() -> None:
    torch.manual_seed(10)
    x, mask = torch.randn(4, 5, 6), torch.randn(4, 5, 6) > 0

    def function(x, mask):
        return (
            x.masked_scatter(mask, x.cos()),
            x.masked_scatter(mask[:, :1], x),
            x[0, 0].masked_scatter(mask, x.exp()),
            x.masked_scatter(torch.zeros_like(mask), x[:0]),
        )

    check(function, x, mask)


# ---- gradients and histograms --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_embedding_gradients(dtype: torch.dtype) -> None:
    torch.manual_seed(11)
    gradient, index = values(3, 7, 20, dtype=dtype), torch.randint(0, 9, (3, 7))

    def function(gradient, index):
        backward = torch.ops.aten.embedding_dense_backward
        return (
            backward(gradient, index, 9, -1, False),
            backward(gradient.relu() * 2, index, 9, 4, False),
            backward(gradient, index.int(), 9, -1, True),
        )

    check(function, gradient, index)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_gradients_of_lookups_are_fused(mode: str) -> None:
    """The gradient's indexed stores are all in generated kernels, and right."""
    if support.TARGET == "triton":
        pytest.skip("compile runs C++ kernels on CPU tensors")
    torch.manual_seed(12)
    device = "cuda" if support.TARGET == "cuda" else "cpu"
    weight = torch.randn(9, 6, device=device, requires_grad=True)
    index = torch.randint(0, 9, (4, 5), device=device)

    def lookups(weight: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        terms = (
            torch.nn.functional.embedding_bag(index, weight, mode=mode),
            torch.nn.functional.embedding(index, weight, padding_idx=2),
            weight[index, index % 6],
            weight.gather(1, index % 6),
            weight.index_select(0, index[0]),
            weight.take(index),
        )
        return torch.cat([(term * term).flatten() for term in terms])

    compiled = fulgurite.compile(lookups, executors=["fuser", "torch"])
    gradients = []
    for function in (lookups, compiled):
        (gradient,) = torch.autograd.grad(function(weight, index).sum(), weight)
        gradients.append(gradient)
    torch.testing.assert_close(gradients[1], gradients[0])
    _, _, final = str(compiled.last_trace("backward")).rpartition("def forward(")
    stores = ("embedding_dense_backward", "index_put", "scatter_add", "index_add", "put")
    assert not any(f"aten.{store}." in final for store in (*stores, "_embedding_bag_backward"))


def test_histc() -> None:
    torch.manual_seed(13)
    x = torch.randn(7, 33)
    x[0, :4] = torch.tensor([NAN, 3.0, -3.0, 9.0])

    def function(x, same):
        return (
            torch.histc(x, 10, -3, 3),
            torch.histc(x[1:], 7),
            torch.histc(x[1:].double(), 1),
            torch.histc(same, 4),
            torch.histc(x[:0], 3),
        )

    check(function, x, torch.full((5,), 2.0))


# ---- threads, errors, modes ----------------------------------------------------------------------


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    if support.TARGET != "cpp":
        pytest.skip("of C++ kernels")
    torch.manual_seed(14)
    x, index = torch.randn(500, 257), torch.randint(0, 40, (500,))

    def function(x, index):
        positions = index[:, None].expand(500, 257)
        return (
            x.new_zeros(40, 257).index_add(0, index, x),
            x.scatter_add(1, positions, x.t()[:257, :].t() * 2),
            x.scatter(0, positions, x.exp()),
            x.new_zeros(40).index_add(0, index, x[:, 0]),
        )

    fused = check(function, x, index)
    assert fused is not None
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(fused(x, index))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("bad", [-7, 6])
def test_indices_out_of_range_raise_the_error_of_eager(bad: int) -> None:
    if support.TARGET != "cpp":
        pytest.skip("a GPU kernel traps on a device-side assert, like torch's")
    x, index = torch.randn(6, 3), torch.tensor([0, bad])
    functions = [
        lambda x, i: x.index_add(0, i, x[:2]),
        lambda x, i: x.index_put((i,), x[:2]),
        lambda x, i: x.scatter(0, i[:, None], 1.0),
        lambda x, i: x[:1].index_add(0, i, x[:2]),
    ]
    for function in functions:
        fused = fuser.lower_region(trace(function, (x, index), "fake"))
        with pytest.raises((IndexError, RuntimeError)) as eager:
            function(x, index)
        with pytest.raises(eager.type, match=re.escape(str(eager.value))):
            fused(x, index)


def test_deterministic_mode_leaves_float_sums_to_torch() -> None:
    x, index = torch.randn(6, 3), torch.tensor([0, 1])
    if support.TARGET == "cuda":
        x, index = x.cuda(), index.cuda()

    def lower(function: Callable[..., Any]) -> str | None:
        graph = trace(function, (x, index), "fake")
        try:
            fuser.lower_region(graph, use_triton=support.TARGET == "triton")
        except FusionError as error:
            return str(error)
        return None

    def add(x, i):
        return x.index_add(0, i, x[:2])

    def copy(x, i):
        return x.index_copy(0, i, x[:2])

    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        reasons = [lower(add), lower(copy)]
        allowed = [lower(lambda x, i: x.long().index_add(0, i, x[:2].long()))]
        allowed += [lower(lambda x, i: x.index_fill(0, i, 1.0))]
    finally:
        torch.use_deterministic_algorithms(before)
    assert allowed == [None, None]
    if support.TARGET == "cpp":
        assert reasons == [None, None], "C++ kernels are deterministic"
    else:
        assert all(r is not None and "deterministic mode" in r for r in reasons)
    assert lower(add) is None


def test_gradient_of_an_empty_bag_of_maxima():
    """Its index of the maximum is 0 on CPUs, and row 0 must get nothing."""
    indices, offsets = torch.tensor([5, 6, 7, 8]), torch.tensor([0, 2, 2])
    weights = [torch.randn(10, 4, generator=torch.Generator().manual_seed(0)) for _ in range(2)]

    def f(weight):
        return torch.nn.functional.embedding_bag(indices, weight, offsets, mode="max")

    for weight, function in zip(weights, (f, fulgurite.compile(f)), strict=True):
        function(weight.requires_grad_()).backward(torch.arange(1.0, 13).view(3, 4))
    assert torch.equal(weights[0].grad, weights[1].grad)


REFUSED = {
    "rows": lambda x, i, y: x.index_put((i,), y[:2]),
    "columns": lambda x, i, y: x.index_put((i,), y[:, :2], accumulate=True),
    "rank": lambda x, i, y: x.index_put((i, i), y[:, :3], accumulate=True),
    "dtype": lambda x, i, y: x.index_put((i,), y.double()),
    "indices": lambda x, i, y: x.index_put((i, i[:2]), x.new_ones(())),
    "mask": lambda x, i, y: x.index_put((x[0] > 0,), x.new_ones(())),
    "values of a mask": lambda x, i, y: x.index_put((x[:, 0] > 0,), y[0, :2]),
    "index_add": lambda x, i, y: x.index_add(0, i, y[:, :1]),
    "index_add of another dtype": lambda x, i, y: x.index_add(0, i, y.double()),
    "index_copy of another dtype": lambda x, i, y: x.index_copy(0, i, y.double()),
    "index_reduce": lambda x, i, y: x.index_reduce(0, i, y[:2], "amax"),
    "index_reduce sum": lambda x, i, y: x.index_reduce(0, i, y, "sum"),
    "put": lambda x, i, y: x.put(i, y[0, :2]),
    "slice_scatter": lambda x, i, y: torch.slice_scatter(x, x, 0, 1),
    "select_scatter": lambda x, i, y: torch.select_scatter(x, x, 0, 1),
    "diagonal_scatter": lambda x, i, y: torch.diagonal_scatter(x, x[0, :3]),
    "index_select": lambda x, i, y: x.index_select(0, i[None]),
    "bucketize": lambda x, i, y: torch.bucketize(x, y),
    "mean of bool": lambda x, i, y: (x > 0).scatter_reduce(0, i[None], y[:1, :3] > 0, "mean"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sizes_and_dtypes_that_torch_refuses(name):
    """FakeTensor rules accept them, and a kernel would read outside of the values."""
    inputs = torch.randn(4, 5), torch.tensor([2, 0, 3]), torch.randn(3, 5)
    with pytest.raises((RuntimeError, IndexError)) as expected:
        REFUSED[name](*inputs)
    compiled = fulgurite.compile(lambda x, i, y: REFUSED[name](x * 1, i, y) * 2)
    with pytest.raises(expected.type):
        compiled(*inputs)


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_gradient_of_bags(mode, dtype):
    """The kernel leaves out the bags of some sums, not always those of the FakeTensor rule."""
    indices, offsets = torch.randint(0, 10, (20,)), torch.tensor([0, 3, 3, 8])
    weights = [torch.linspace(-1, 1, 40).view(10, 4).to(dtype) for _ in range(2)]

    def f(weight):
        return torch.nn.functional.embedding_bag(indices, weight, offsets, mode=mode) * 2

    for weight, function in zip(weights, (f, fulgurite.compile(f)), strict=True):
        function(weight.requires_grad_()).sum().backward()
    torch.testing.assert_close(weights[0].grad, weights[1].grad)


@pytest.mark.parametrize("op", ["scatter", "scatter_add", "scatter_reduce"])
def test_source_of_another_rank_with_an_empty_index(op):
    """torch takes any source then."""
    options = ("sum",) if op == "scatter_reduce" else ()

    def f(t, index, source):
        return getattr(t, op)(1, index, source, *options)

    index = torch.zeros(0, 2, 1, dtype=torch.int64)
    for source in (torch.randn(2, 2), torch.randn(0, 0)):
        t = torch.randn(3, 4, 5)
        assert torch.equal(fulgurite.compile(f, dynamic=False)(t, index, source), t)
