"""What is around repeated layers is compiled where gradients are recorded, and the modules that call layers are not captured."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fulgurite.capture import blocks
from fulgurite.compile import compile

WIDTH, WORDS = 32, 24


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(x))


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(5))
        self.calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1  # nobody captures this
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


class Causal(nn.Module):
    """As language models are: a body, a head, a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.body(tokens))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


@pytest.fixture
def model() -> Causal:
    torch.manual_seed(0)
    return Causal()


TOKENS = torch.arange(24).reshape(2, 12) * 7 % WORDS


def gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    model(TOKENS).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_a_head_and_a_loss_are_a_graph(model: Causal) -> None:
    wanted, loss = gradients(model), model(TOKENS)
    compiled = compile(model)
    calls = model.body.calls
    for _ in range(2):
        assert torch.allclose(compiled(TOKENS), loss)
    for ours, right in zip(gradients(compiled), wanted, strict=True):
        assert torch.allclose(ours, right, atol=1e-6)
    assert model.body.calls == calls + 3  # it runs, each time
    layer, behind = compiled.graphs
    assert "gelu" in str(layer.captured) and "cross_entropy" in str(behind.captured)
    assert "embedding" not in str(behind.captured)
    assert not compiled.breaks
    assert "with what is around body where gradients are recorded" in str(compiled.explain())


def test_inference_leaves_it_alone(model: Causal) -> None:
    compiled = compile(model)
    with torch.no_grad():
        assert torch.allclose(compiled(TOKENS), model(TOKENS))
    assert len(compiled.graphs) == 1


def test_the_users_breaks_are_told_and_ours_are_not(model: Causal) -> None:
    class Printing(Causal):
        def forward(self, tokens: Tensor) -> Tensor:
            loss = super().forward(tokens)
            torch._dynamo.graph_break()
            return 2 * loss

    other = Printing()
    other.load_state_dict(model.state_dict())
    compiled = compile(other)
    assert torch.allclose(compiled(TOKENS), 2 * model(TOKENS))
    assert len(compiled.breaks) == 1 and blocks.REASON not in compiled.breaks[0].reason


def test_somebody_elses_capture_goes_through(model: Causal) -> None:
    compiled = compile(model)
    loss = compiled(TOKENS)
    whole = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.allclose(whole(TOKENS), loss)


def test_copies_and_pickles_are_plain(model: Causal) -> None:
    compiled = compile(model)
    loss = compiled(TOKENS)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.allclose(other(TOKENS), loss)
        other.body.layers[0].linear.weight.data.zero_()
        assert not torch.allclose(other(TOKENS), loss)
    assert torch.allclose(compiled(TOKENS), loss)


def test_hooks_of_a_body_are_called(model: Causal) -> None:
    seen = []
    compiled = compile(model)
    compiled(TOKENS)
    handle = model.body.register_forward_hook(lambda *_: seen.append(1))
    compiled(TOKENS)
    handle.remove()
    compiled(TOKENS)
    assert seen == [1]


def test_two_bodies(model: Causal) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = Body(), Body()

        def forward(self, tokens: Tensor) -> Tensor:
            return (self.left(tokens) * self.right(tokens)).sigmoid().sum()

    two = Two()
    compiled = compile(two)
    assert torch.allclose(compiled(TOKENS), two(TOKENS))
    for ours, right in zip(gradients(compiled), gradients(two), strict=True):
        assert torch.allclose(ours, right, atol=1e-6)
    assert "sigmoid" in str(compiled.graphs[-1].captured)


def test_layers_that_are_called_past_their_body(model: Causal) -> None:
    class Past(Causal):
        def forward(self, tokens: Tensor) -> Tensor:
            logits = self.head(self.body.forward(tokens))
            return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())

    past = Past()
    past.load_state_dict(model.state_dict())
    compiled = compile(past)
    assert torch.allclose(compiled(TOKENS), past(TOKENS))
    assert len(compiled.graphs) == 2 and compiled.compiled.blocks
    assert "embedding" not in str(compiled.graphs[1].captured)


def test_a_model_that_calls_its_layers_has_no_bodies(model: Causal) -> None:
    compiled = compile(model.body)
    compiled(TOKENS).sum().backward()
    assert len(compiled.graphs) == 1
