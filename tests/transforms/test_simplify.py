"""Each simplification applies where it should, and not where it would change a bit."""

from __future__ import annotations

import math

import pytest
import torch

import fulgurite
from fulgurite.transforms import SIMPLIFY

pytestmark = pytest.mark.usefixtures("torch_only")

SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.5, math.inf, -math.inf, math.nan, 1e-45, 3e38])


def ops_after(function, *inputs):
    """The targets that remain after simplification; checks bitwise equality with eager."""
    compiled = fulgurite.compile(function)
    ours, eager = compiled(*inputs), function(*inputs)
    for mine, theirs in zip(ours, eager, strict=True):
        assert mine.dtype == theirs.dtype and mine.stride() == theirs.stride()
        assert torch.equal(
            mine.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)
        )
    stage = next(t for t in compiled.history if t.stage == "eliminate_dead_code")
    return [str(node.target).removeprefix("aten.") for node in stage.ops]


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (lambda x: (x * 1 + 2,), ["add.Tensor"]),
        (lambda x: (x / 1 + 2,), ["add.Tensor"]),
        (lambda x: (x - 0 + 2,), ["add.Tensor"]),
        (lambda x: (x**1 + 2,), ["add.Tensor"]),
        (lambda x: ((-(-x)) + 2,), ["add.Tensor"]),
        (lambda x: (x + 0 + 2,), ["add.Tensor", "add.Tensor"]),  # -0.0 + 0 is 0.0
        (lambda x: (x * 0,), ["mul.Tensor"]),  # NaN * 0 is NaN
        (lambda x: (x - x,), ["sub.Tensor"]),
        (lambda x: (x.double().float() + 2,), ["add.Tensor"]),
        (lambda x: (x.half().float() + 2,), ["_to_copy.default", "_to_copy.default", "add.Tensor"]),
        (lambda x: (x.view(3, 3).view(9) + 1,), ["add.Tensor"]),
        (lambda x: (x.sin() + x.sin(),), ["sin.default", "add.Tensor"]),
        (lambda x: (x.clone() + 1,), ["add.Tensor"]),
        (lambda x: (x.clone(),), ["clone.default"]),
        (lambda x: (x.sin(), x.sin()), ["sin.default", "sin.default"]),  # two results, two memories
        (lambda x: (x * 1,), ["mul.Tensor"]),  # the result must not be the input
        (lambda x: ((x * 1).view(3, 3),), ["mul.Tensor", "view.default"]),  # nor a view of it
        (lambda x: (x - -0.0 + 2,), ["sub.Tensor", "add.Tensor"]),  # -0.0 - -0.0 is 0.0
        (lambda x: (x.sum() * 1.0 + x * True,), ["sum.default", "mul.Tensor", "add.Tensor"]),
    ],
)
def test_rewrites(function, left):
    assert ops_after(function, SPECIAL.clone()) == left


def test_integers_and_promotion():
    x = torch.tensor([0, -1, 5])
    assert ops_after(lambda x: (x + 0 + 2,), x) == ["add.Tensor"]
    assert ops_after(lambda x: (x / 1,), x) == ["div.Tensor"]  # the result is a float
    assert ops_after(lambda x: (x * 1.0 + 2,), x) == ["mul.Tensor", "add.Tensor"]


def test_complex_multiplication_by_one_stays():
    x = torch.tensor([complex(math.inf, 1), complex(-0.0, -1), complex(1, math.nan)])
    assert ops_after(lambda x: ((x * 1).conj().clone(),), x)[0] == "mul.Tensor"
    assert ops_after(lambda x: (-(x / 1),), x) == ["div.Tensor", "neg.default"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * 1).t(),
        lambda x: (x.view(-1) / 1).view(x.shape),
        lambda x: x.split(1)[0] * 1,
        lambda x: (r := x.relu(), (r * 1).t(), r.t() * 1),
        lambda x: ((r := x.relu()) * 1 * 1, (r * 1).t()),
    ],
)
def test_outputs_do_not_become_aliases(function):
    x = torch.randn(3, 3)
    before, expected = x.clone(), function(x)
    results = fulgurite.compile(function)(x)
    for mine, theirs in zip(results, expected, strict=True):
        assert torch.equal(mine.add_(1), theirs.add_(1))
    assert torch.equal(x, before)


def test_a_detached_output_needs_no_gradient():
    """It shares memory with another output that needs one."""

    def function(x):
        rows = (x * 2).repeat(2, 1)[2:]
        return rows[:-1], rows.detach()

    x = torch.randn(3, 2, requires_grad=True)
    ours, eager = fulgurite.compile(function)(x), function(x)
    assert [y.requires_grad for y in ours] == [y.requires_grad for y in eager] == [True, False]
    ours[0].sum().backward()
    assert x.grad is not None


def test_zero_and_minus_zero_are_different_constants():
    x = SPECIAL.clone()
    left = ops_after(lambda x: ((x + 0.0) * (x + -0.0), x * 2 + x * 2.0), x)
    assert left.count("add.Tensor") == 3 and left.count("mul.Tensor") == 3


def test_inverse_views_cancel():
    x = torch.randn(3, 4)
    assert ops_after(lambda x: (x.t().t() + 1,), x) == ["add.Tensor"]
    assert ops_after(lambda x: (x.transpose(0, 1).transpose(0, 1) * 2,), x) == ["mul.Tensor"]
    assert ops_after(lambda x: (x[:] + 1, x[:, 0:4] * 2, x[1:] * 3), x) == [
        "add.Tensor",
        "mul.Tensor",
        "slice.Tensor",
        "mul.Tensor",
    ]


def test_double_conjugate_cancels():
    """Also in backward, where a region returns the inner one and its reader needs resolved numbers."""
    z = torch.randn(3, dtype=torch.complex64)
    assert ops_after(lambda z: (z.conj().conj() * 2,), z) == ["mul.Tensor"]
    x = torch.randn(5, 6, 7, requires_grad=True)
    compiled = fulgurite.compile(lambda x: torch.fft.hfft(x, n=10, dim=1, norm="ortho"))
    (got,) = torch.autograd.grad(compiled(x).sum(), x)
    (want,) = torch.autograd.grad(torch.fft.hfft(x, n=10, dim=1, norm="ortho").sum(), x)
    assert torch.allclose(got, want, atol=1e-5)


def test_folded_constants_are_not_shared_with_the_caller():
    def f(x):
        table = torch.tensor([1.0, 2.0]) * 3 + torch.arange(2)
        return x + table, table

    compiled = fulgurite.compile(f)
    first = compiled(torch.zeros(2))
    first[1].fill_(99)  # the caller may mutate an output
    second = compiled(torch.zeros(2))
    assert second[0].tolist() == [3.0, 7.0] and second[1].tolist() == [3.0, 7.0]

    folded = fulgurite.compile(lambda x: x + torch.tensor([1.0, 2.0]) * 3)
    assert folded(torch.zeros(2)).tolist() == [3.0, 6.0]
    assert len(folded.last_trace().ops) == 1 and "[3.0, 6.0]" in str(folded.last_trace())


def test_folding_twice_keeps_the_first_constants():
    def times_a_constant(graph):
        aten, output = torch.ops.aten, graph.output_node()
        (result,) = output.all_input_nodes
        with graph.inserting_before(output):
            five = graph.call_function(aten.full.default, ([2], 5.0))
            ten = graph.call_function(aten.mul.Tensor, (five, 2.0))
            scaled = graph.call_function(aten.mul.Tensor, (result, ten))
        output.replace_input_with(result, scaled)

    fold = SIMPLIFY[0]
    compiled = fulgurite.compile(
        lambda x: x + torch.tensor([1.0, 2.0]) * 3,
        transforms=[lambda trace: trace.edit(times_a_constant), fold],
    )
    assert compiled(torch.zeros(2)).tolist() == [30.0, 60.0]


def test_random_ops_are_not_merged_or_removed():
    def f(x):
        return torch.rand_like(x) - torch.rand_like(x)

    torch.manual_seed(0)
    expected = f(SPECIAL)
    torch.manual_seed(0)
    assert torch.equal(fulgurite.compile(f)(SPECIAL), expected) and expected.abs().sum() > 0


def test_assertions_stay():
    def f(x):
        torch._assert_async((x > 0).all(), "x must be positive")
        return x + 1

    compiled = fulgurite.compile(f)
    compiled(torch.ones(3))
    with pytest.raises(RuntimeError, match="positive"):
        compiled(-torch.ones(3))


def test_views_that_order_the_dimensions_of_a_result_stay():
    """The strides of a dimension of size 1 decide the strides of `mul`."""

    def f(x):
        return torch.einsum("bi,bj->ij", x, x)

    x = torch.randn(1, 5, requires_grad=True)
    compiled = fulgurite.compile(f)
    for result in (compiled(x), compiled(x)):
        assert torch.equal(result, f(x)) and result.stride() == f(x).stride()


def test_sizes_that_a_guard_makes_equal():
    """Chunks of one row: that their number is the number of rows follows from two guards."""
    compiled = fulgurite.compile(lambda x: [part.sum(0) for part in x.chunk(3)], dynamic=True)
    for rows in (7, 2):
        x = torch.randn(rows, 5, requires_grad=True)
        torch.stack(compiled(x)).sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x))
