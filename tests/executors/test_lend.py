"""What regions may overwrite: a region that ruins all that is lent to it must not change any result."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fulgurite import transforms
from fulgurite.compile import compile
from fulgurite.executors import Executor, lend
from fulgurite.executors.fuser import FUSER


class Ruin(Executor):
    """Runs what the fuser would, by torch; then everything that was lent is NaN."""

    name = "ruin"

    def __init__(self) -> None:
        self.ruined: list[str] = []

    def claims(self, node: fx.Node) -> bool:
        return FUSER.claims(node)

    def lower(self, region: fx.GraphModule):
        places = [node for node in region.graph.nodes if node.op == "placeholder"]

        def run(*inputs):
            results = tuple(fx.Interpreter(region).run(*inputs))
            for place, value in zip(places, inputs, strict=True):
                if place.meta.get("lent"):
                    self.ruined.append(place.name)
                    value.fill_(float("nan"))
            return results

        return run


@pytest.fixture(autouse=True)
def small_tensors_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lend, "LEAST", 0)


def ruined(function, *inputs, grad=False) -> list[str]:
    """Compares with eager; what was lent."""
    ruin = Ruin()
    compiled = compile(function, executors=[ruin, "torch"])
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            torch.testing.assert_close(compiled(*inputs), function(*inputs))
    return ruin.ruined[: len(ruin.ruined) // 2]


X, W = torch.randn(12, 12), torch.randn(12, 12)


def test_products_and_convolutions_are_lent() -> None:
    assert len(ruined(lambda x, w: (x @ w).relu() + 1, X, W)) == 1
    assert len(ruined(lambda x, w: F.linear(x, w, w[0]).relu(), X, W)) == 1
    assert len(ruined(lambda x, w: torch.bmm(x[None], w[None]).relu(), X, W)) == 1
    assert len(ruined(lambda x, w: F.conv1d(x[None], w[:, :, None]).relu(), X, W)) == 1
    assert len(ruined(lambda x, w: F.silu(x @ w) * (w @ x), X, W)) == 2
    assert len(ruined(lambda x, w: (x @ w).view(3, 4, 12) + x.view(3, 4, 12), X, W)) == 1


def test_what_is_read_later_is_not() -> None:
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
        assert ruined(function, X, W) == [], function.__name__


def test_what_is_written_to_an_input_is_not() -> None:
    """Writes that no region takes in come at the end."""

    def written(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        x.copy_(y)
        return y.relu()

    ours, theirs, ruin = X.clone(), X.clone(), Ruin()
    with torch.no_grad():
        result = compile(written, executors=[ruin, "torch"])(ours, W)
    torch.testing.assert_close((result, ours), (written(theirs, W), theirs))


def test_inputs_and_two_parts_of_one_are_not() -> None:
    def two_parts(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        left, right = y[:, :6].contiguous() @ w[:6], y.view(-1)
        return (left.view(-1) * right).view(12, 12) + torch.sin(y)

    assert ruined(lambda x, w: x.relu() + w, X, W) == []
    ruined(two_parts, X, W)


def test_what_backward_needs_is_not() -> None:
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return (F.silu(x @ w) * (w @ x).sin()).square().sum()

    ruin = Ruin()
    found = torch.autograd.grad(compile(loss, executors=[ruin, "torch"])(x, w), (x, w))
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
    assert len(ruined(net, x)) >= 2
    ruined(net, x, grad=True)


def lines(compiled, *inputs) -> str:
    with torch.no_grad():
        compiled(*inputs)
    return str(compiled.last_trace())


def test_the_trace_says_it_and_kernels_do_it() -> None:
    function = lambda x, w: F.gelu(x @ w)  # noqa: E731
    text = lines(compile(function), X, W)
    assert "in the place of matmul" in text or "in the place of mm" in text
    torch.testing.assert_close(compile(function)(X, W), function(X, W))


def test_equal_regions_that_may_and_may_not() -> None:
    """They share kernels only if both may."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, z = x @ w, w @ x
        return F.gelu(y) @ w, z, F.gelu(z) @ x

    text = lines(compile(function), X, W)
    assert text.count("in the place of") <= 1
    torch.testing.assert_close(compile(function)(X, W), function(X, W))


def test_not_where_a_trace_is_added_to_or_replayed() -> None:
    function = lambda x, w: F.gelu(x @ w)  # noqa: E731
    watched = compile(function, transforms=[transforms.find_nonfinite])
    assert "in the place of" not in lines(watched, X, W)
    assert "in the place of" not in lines(compile(function, cudagraph=True), X, W)


def test_an_edited_trace_runs() -> None:
    compiled = compile(lambda x, w: F.gelu(x @ w))
    text = lines(compiled, X, W)
    compiled.replace_trace(text)
    torch.testing.assert_close(compiled(X, W), F.gelu(X @ W))


def test_small_ones_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lend, "LEAST", 12 * 12 * 4 + 1)
    assert ruined(lambda x, w: (x @ w).relu(), X, W) == []


def test_a_peak_is_lower(peak_bytes) -> None:
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
    ruined(program(seed), X, W)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12, 150))
def test_more_random_programs(seed: int) -> None:
    ruined(program(seed), X, W)
