"""Buffer donation: an executor that overwrites all donated inputs must not change any result."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fulgurite import transforms
from fulgurite.compile import compile
from fulgurite.executors import Executor, donation
from fulgurite.executors.fuser import FUSER
from fulgurite.trace.node_meta import is_donated


class OverwritingExecutor(Executor):
    """Runs the fuser's regions by torch; then fills all donated inputs with NaN."""

    name = "overwriting"

    def __init__(self) -> None:
        self.overwritten: list[str] = []

    def claims(self, node: fx.Node) -> bool:
        return FUSER.claims(node)

    def lower(self, region: fx.GraphModule):
        places = [node for node in region.graph.nodes if node.op == "placeholder"]

        def run(*inputs):
            results = tuple(fx.Interpreter(region).run(*inputs))
            for place, value in zip(places, inputs, strict=True):
                if is_donated(place):
                    self.overwritten.append(place.name)
                    value.fill_(float("nan"))
            return results

        return run


@pytest.fixture(autouse=True)
def donate_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(donation, "MIN_DONATED_BYTES", 0)


def donated_inputs(function, *inputs, grad=False) -> list[str]:
    """Compare with eager; return the names of the donated inputs."""
    executor = OverwritingExecutor()
    compiled = compile(function, executors=[executor, "torch"])
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            torch.testing.assert_close(compiled(*inputs), function(*inputs))
    return executor.overwritten[: len(executor.overwritten) // 2]


X, W = torch.randn(12, 12), torch.randn(12, 12)


def test_matmuls_and_convolutions_are_donated() -> None:
    assert len(donated_inputs(lambda x, w: (x @ w).relu() + 1, X, W)) == 1
    assert len(donated_inputs(lambda x, w: F.linear(x, w, w[0]).relu(), X, W)) == 1
    assert len(donated_inputs(lambda x, w: torch.bmm(x[None], w[None]).relu(), X, W)) == 1
    assert len(donated_inputs(lambda x, w: F.conv1d(x[None], w[:, :, None]).relu(), X, W)) == 1
    assert len(donated_inputs(lambda x, w: F.silu(x @ w) * (w @ x), X, W)) == 2
    assert len(donated_inputs(lambda x, w: (x @ w).view(3, 4, 12) + x.view(3, 4, 12), X, W)) == 1


def test_buffers_that_are_read_later_are_not_donated() -> None:
    def read_by_a_product(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        return y.relu() @ (y @ w)

    def returned(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w
        return y, y.relu()

    def returned_as_a_view(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w
        return y.t()[2:], y.relu()

    def read_through_a_view(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        return y.relu() @ y[3:5].t()

    for function in (read_by_a_product, returned, returned_as_a_view, read_through_a_view):
        assert donated_inputs(function, X, W) == [], function.__name__


def test_values_written_to_an_input_are_not_donated() -> None:
    """Writes that no region takes in come at the end."""

    def written(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        x.copy_(y)
        return y.relu()

    ours, theirs, executor = X.clone(), X.clone(), OverwritingExecutor()
    with torch.no_grad():
        result = compile(written, executors=[executor, "torch"])(ours, W)
    torch.testing.assert_close((result, ours), (written(theirs, W), theirs))


def test_graph_inputs_and_partial_views_are_not_donated() -> None:
    def two_parts(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        left, right = y[:, :6].contiguous() @ w[:6], y.view(-1)
        return (left.view(-1) * right).view(12, 12) + torch.sin(y)

    assert donated_inputs(lambda x, w: x.relu() + w, X, W) == []
    donated_inputs(two_parts, X, W)


def test_saved_tensors_are_not_donated() -> None:
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return (F.silu(x @ w) * (w @ x).sin()).square().sum()

    executor = OverwritingExecutor()
    found = torch.autograd.grad(compile(loss, executors=[executor, "torch"])(x, w), (x, w))
    torch.testing.assert_close(found, torch.autograd.grad(loss(x, w), (x, w)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.side = nn.Conv2d(3, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.norm(self.first(x)))) + self.side(x))


@pytest.mark.parametrize("training", [False, True])
def test_a_network_of_convolutions(training: bool) -> None:
    net, x = Net().train(training), torch.randn(2, 3, 9, 11)
    assert len(donated_inputs(net, x)) >= 2
    donated_inputs(net, x, grad=True)


def lines(compiled, *inputs) -> str:
    with torch.no_grad():
        compiled(*inputs)
    return str(compiled.last_trace())


def test_donation_is_in_the_trace_and_done_by_kernels() -> None:
    function = lambda x, w: F.gelu(x @ w)  # noqa: E731
    text = lines(compile(function), X, W)
    assert "donated: matmul" in text or "donated: mm" in text
    torch.testing.assert_close(compile(function)(X, W), function(X, W))


def test_equal_regions_with_and_without_donation() -> None:
    """They share kernels only if both may."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, z = x @ w, w @ x
        return F.gelu(y) @ w, z, F.gelu(z) @ x

    text = lines(compile(function), X, W)
    assert text.count("donated:") <= 1
    torch.testing.assert_close(compile(function)(X, W), function(X, W))


def test_no_donation_with_later_transforms() -> None:
    function = lambda x, w: F.gelu(x @ w)  # noqa: E731
    watched = compile(function, transforms=[transforms.find_nonfinite])
    assert "donated:" not in lines(watched, X, W)
    assert "donated:" in lines(compile(function, cudagraph=True), X, W)


def test_an_edited_trace_runs() -> None:
    compiled = compile(lambda x, w: F.gelu(x @ w))
    text = lines(compiled, X, W)
    compiled.replace_trace(text)
    torch.testing.assert_close(compiled(X, W), F.gelu(X @ W))


def test_small_buffers_are_not_donated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(donation, "MIN_DONATED_BYTES", 12 * 12 * 4 + 1)
    assert donated_inputs(lambda x, w: (x @ w).relu(), X, W) == []


def test_donation_lowers_the_peak(peak_bytes) -> None:
    gate, up, x = torch.randn(3, 256, 256).unbind()

    def gated(x: Tensor) -> Tensor:
        return F.silu(x @ gate) * (x @ up)

    with torch.no_grad():
        one = x.numel() * 4
        assert peak_bytes(gated, x) > 2.9 * one
        assert peak_bytes(compile(gated), x) < 2.2 * one


def program(seed: int):
    """Products, elementwise ops and views of what came before; some of it is returned."""

    def run(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        draw = random.Random(seed)
        known = [x @ w, w @ x]
        for _ in range(draw.randint(4, 10)):
            a, b = draw.choice(known), draw.choice(known)
            made = draw.choice(
                [
                    lambda a, b: a @ b,
                    lambda a, b: a @ b,
                    lambda a, b: torch.sin(a) + b,
                    lambda a, b: a.sigmoid(),
                    lambda a, b: a.t(),
                    lambda a, b: a.reshape(6, 24).view(12, 12) * 0.5,
                    lambda a, b: torch.cat([a[:6], b[6:]]),
                    lambda a, b: a - a.mean(-1, keepdim=True),
                ]
            )(a, b)
            known.append(made.tanh() if draw.random() < 0.3 else made * 0.1)
        return tuple(draw.sample(known, draw.randint(1, 3)))

    return run


@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed: int) -> None:
    donated_inputs(program(seed), X, W)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12, 150))
def test_more_random_programs(seed: int) -> None:
    donated_inputs(program(seed), X, W)
