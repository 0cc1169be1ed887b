"""Random numbers: standard generator, distributions, seeds, and the same draw in backward."""

from __future__ import annotations

import math

import pytest
import torch

import fulgurite
from fulgurite import fuser
from fulgurite.compile import compile
from fulgurite.fuser.frontend.lower_graph import lower_graph
from fulgurite.fuser.ir.interpreter import interpret_region
from fulgurite.fuser.ir.primitives import philox
from fulgurite.fuser.ir.statement import Region, verify_region
from tests.fuser.support import trace

F = torch.nn.functional
aten = torch.ops.aten
COUNT = 40_003  # odd, and large enough that five standard errors are small


def test_philox_matches_random123() -> None:
    """Random123's known answers for a counter and key of zeros."""
    zero = torch.zeros(1, dtype=torch.int64)
    words = [int(word) for word in philox(zero, zero)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def draw_all(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    half = torch.full_like(x, 0.25)
    return (
        torch.rand_like(x),
        torch.rand(COUNT, dtype=torch.float64),
        torch.randn_like(x),
        torch.randn(COUNT, dtype=torch.float64),
        torch.bernoulli(half),
        aten.bernoulli.p(x, 0.7),
        aten.uniform(x, -1.0, 3.0),
        aten.exponential(x, 2.0),
        aten.normal_functional(x, 1.0, 0.5),
        torch.normal(half, 2.0),
        aten.cauchy(x),
        aten.geometric(x, 0.2),
        aten.log_normal(x, 0.0, 0.25),
        torch.randint(3, 17, (COUNT,)),
        torch.randint_like(x, 5),
        torch.rand(COUNT, dtype=torch.bfloat16),
        aten.native_dropout(x, 0.3, True)[1],
    )


@pytest.fixture(scope="module")
def lowered() -> tuple[Region, fuser.FusedRegion]:
    graph = trace(draw_all, (torch.randn(COUNT),))
    region = lower_graph(graph)
    verify_region(region)
    return region, fuser.lower_region(graph)


def test_kernels_match_the_interpreter(lowered) -> None:
    region, kernels = lowered
    x = torch.randn(COUNT)
    torch.manual_seed(3)
    ours = kernels(x)
    torch.manual_seed(3)
    for a, b in zip(ours, interpret_region(region, (x,)), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=3e-4, atol=1e-5)


def test_seeds(lowered) -> None:
    """The same seed repeats the numbers; another call and another seed change them."""
    _, kernels = lowered
    x = torch.randn(COUNT)
    torch.manual_seed(0)
    first, second = kernels(x)[0], kernels(x)[0]
    torch.manual_seed(0)
    assert torch.equal(kernels(x)[0], first)
    torch.manual_seed(1)
    assert not torch.equal(first, second) and not torch.equal(kernels(x)[0], first)


MOMENTS = [  # mean and variance of each result of `draw_all`; None if it has none
    (0.5, 1 / 12),
    (0.5, 1 / 12),
    (0.0, 1.0),
    (0.0, 1.0),
    (0.25, 0.1875),
    (0.7, 0.21),
    (1.0, 16 / 12),
    (0.5, 0.25),
    (1.0, 0.25),
    (0.25, 4.0),
    None,
    (5.0, 20.0),
    (math.exp(0.03125), (math.exp(0.0625) - 1) * math.exp(0.0625)),
    (9.5, 195 / 12),
    (2.0, 2.0),
    (0.5 - 2**-9, 1 / 12),
    (0.7, 0.21),
]


def test_means_and_variances(lowered) -> None:
    torch.manual_seed(7)
    for result, moments in zip(lowered[1](torch.randn(COUNT)), MOMENTS, strict=True):
        if moments is None:
            continue
        mean, variance = moments
        values = result.double()
        assert abs(values.mean() - mean) < 5 * math.sqrt(variance / COUNT)
        spread = (values - mean) ** 2
        assert abs(spread.mean() - variance) < 5 * float(spread.std()) / math.sqrt(COUNT)


def kolmogorov_smirnov(values: torch.Tensor, cumulative) -> float:
    """Returns the scaled Kolmogorov-Smirnov statistic; it exceeds 2 once in a thousand."""
    ordered = values.double().sort().values
    steps = torch.arange(1, len(ordered) + 1, dtype=torch.float64) / len(ordered)
    expected = cumulative(ordered)
    gap = torch.maximum((steps - expected).abs(), (expected - steps + 1 / len(ordered)).abs())
    return float(gap.max()) * math.sqrt(len(ordered))


def test_distributions(lowered) -> None:
    torch.manual_seed(11)
    results = lowered[1](torch.randn(COUNT))
    normal = torch.special.ndtr
    assert kolmogorov_smirnov(results[0], lambda u: u) < 2
    assert kolmogorov_smirnov(results[1], lambda u: u) < 2
    assert kolmogorov_smirnov(results[2], normal) < 2
    assert kolmogorov_smirnov(results[3], normal) < 2
    assert kolmogorov_smirnov(results[7], lambda e: 1 - torch.exp(-2 * e)) < 2
    assert kolmogorov_smirnov(results[10], lambda c: 0.5 + torch.atan(c) / math.pi) < 2
    counts = torch.bincount(results[13] - 3, minlength=14).double()
    assert float(((counts - COUNT / 14) ** 2).sum() / (COUNT / 14)) < 38  # chi-square, 13 degrees
    assert results[0].min() >= 0 and results[0].max() < 1 and results[15].max() < 1
    assert results[13].min() == 3 and results[13].max() == 16 and results[7].min() > 0


def test_neighbors_and_streams_are_uncorrelated(lowered) -> None:
    torch.manual_seed(5)
    results = lowered[1](torch.randn(COUNT))
    a, b = results[0].double() - 0.5, results[1].double() - 0.5
    for left, right in ((a[1:], a[:-1]), (a[4:], a[:-4]), (a, b)):
        assert abs(float((left * right).mean()) * 12) < 5 / math.sqrt(COUNT)


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_dropout(p: float) -> None:
    """Kept elements are scaled, dropped ones are 0, and the gradient has the same mask."""
    function = compile(lambda x: F.dropout(x, p), executors=["fuser", "torch"])
    x = (torch.rand(501) + 0.5).requires_grad_()
    torch.manual_seed(2)
    y = function(x)
    y.sum().backward()
    mask = y.detach() != 0
    scale = 0.0 if p == 1 else 1 / (1 - p)
    torch.testing.assert_close(y.detach(), x.detach() * mask * scale)
    torch.testing.assert_close(x.grad, mask.float() * scale)
    assert abs(mask.float().mean() - (1 - p)) < 0.11


@pytest.mark.parametrize("remat", ["none", "mincut", "full"])
def test_backward_uses_the_numbers_of_forward(remat: str) -> None:
    """Saved or recomputed: y = x * noise * mask has the gradient noise * mask."""

    def noisy(x):
        return F.dropout(x * torch.rand_like(x), 0.4) * torch.randn(x.shape).exp()

    function = compile(noisy, executors=["fuser", "torch"], remat=remat)
    x = torch.ones(257, requires_grad=True)
    y = function(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, y.detach())


def test_dropout_is_one_kernel() -> None:
    """Mask, product and the following ops are one pass."""
    region = fuser.lower_region(
        trace(lambda x: (aten.native_dropout(x, 0.1, True)[0] + x).relu(), (torch.randn(64, 33),))
    )
    assert len(region.kernels) == 1


def test_explicit_generator_is_unsupported() -> None:
    generator = torch.Generator().manual_seed(0)
    graph = trace(lambda x: x * 2, (torch.randn(3),))
    node = next(n for n in graph.graph.nodes if n.op == "call_function")
    node.target, node.args, node.kwargs = (
        aten.bernoulli.p,
        (node.args[0], 0.5),
        {"generator": generator},
    )
    assert "generator" in str(fuser.unsupported_reason(node))
    assert fulgurite.__version__
