"""Backward graphs of calls of which only some outputs have a gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fulgurite
from fulgurite.capture import training, training_native
from fulgurite.capture.unused_outputs import remove_tangents
from fulgurite.trace.node_meta import fake_value, set_fake_value


class LanguageModel(nn.Module):
    """Returns its loss, its logits and a hidden state, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.unused = nn.Linear(16, 4)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.tanh(self.embedding(tokens))
        logits = self.head(hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        return loss, logits, self.unused(hidden)


USES = {
    "loss": lambda results: results[0],
    "logits": lambda results: results[1].square().sum(),
    "hidden": lambda results: results[2].sum(),
    "loss and hidden": lambda results: results[0] + results[2].square().sum(),
    "all": lambda results: sum(value.square().sum() for value in results),
}


@pytest.fixture(params=["native", "python"])
def entry(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(training, "load_library", lambda: None)
        monkeypatch.setattr(training_native, "load_library", lambda: None)


def find_gradients(model: nn.Module, use, tokens: Tensor) -> list[Tensor | None]:
    model.zero_grad(set_to_none=True)
    use(model(tokens)).backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("first", USES)
def test_gradients_are_those_of_eager(first, entry):
    torch.manual_seed(0)
    model, tokens = LanguageModel(), torch.randint(0, 50, (2, 5))
    compiled = fulgurite.compile(model)
    for name in [first, *USES, first]:
        expected = find_gradients(model, USES[name], tokens)
        for _ in range(2):
            found = find_gradients(compiled, USES[name], tokens)
            for ours, theirs in zip(found, expected, strict=True):
                assert (ours is None) == (theirs is None), name
                if ours is not None:
                    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_backward_takes_no_gradient_of_the_logits():
    model, tokens = LanguageModel(), torch.randint(0, 50, (2, 5))
    compiled = fulgurite.compile(model)
    for _ in range(3):
        compiled(tokens)[0].backward()
    (record,) = compiled.graphs
    final = record.compiled_graphs["backward"].trace
    assert "tangent" not in "".join(n.name for n in final.inputs if n.meta["val"].dim() == 3)
    assert len({trace.stage for trace in record.stages("backward")}) == len(
        record.stages("backward")
    ), "one backward graph was built"
    assert not [n for n in final.ops if "full" in str(n.target) or "zeros" in str(n.target)]


def test_zeros_that_an_op_needs_are_made(entry):
    """`cumsum` is not known to be linear: its gradient is computed from zeros."""

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin().sum(), x.t().cumsum(0).exp()

    x = torch.randn(3, 4, requires_grad=True)
    compiled = fulgurite.compile(f)
    for _ in range(3):
        (found,) = torch.autograd.grad(compiled(x)[0], x)
        torch.testing.assert_close(found, x.cos().detach())


def test_zeros_of_one_layout_are_made_once():
    x, graph, mode = torch.randn(3, 3), fx.Graph(), FakeTensorMode()
    nodes = [graph.placeholder(name) for name in "xabc"]
    for node, value in zip(nodes, [x, x, x, x.t()], strict=True):
        set_fake_value(node, mode.from_tensor(value))
    sums = [graph.call_function(torch.ops.aten.cumsum.default, (n, 0)) for n in nodes]
    sums += [graph.call_function(torch.ops.aten.hypot.default, (sums[0], n)) for n in sums]
    for node in sums:
        set_fake_value(node, fake_value(nodes[0]))
    graph.output(tuple(sums[4:]))
    found = remove_tangents(fx.GraphModule({}, graph), 4, (1, 2, 3))
    fills = (torch.ops.aten.full.default, torch.ops.aten.fill.Scalar)
    made = [node.target for node in found.graph.nodes if node.target in fills]
    assert sorted(made, key=fills.index) == [*fills]
    total = x.cumsum(0)
    for result, value in zip(found(x), [total, 0 * x, 0 * x, 0 * x], strict=True):
        torch.testing.assert_close(result, total.hypot(value))


def test_constants_of_the_graph_are_shared():
    """With symbolic sizes, backward is built during capture, where tensors can't be copied."""
    graph, mode, constant = fx.Graph(), FakeTensorMode(), torch.eye(3)
    read, tangent = graph.get_attr("constant"), graph.placeholder("tangent")
    result = graph.call_function(torch.ops.aten.mm.default, (tangent, read))
    for node in (read, tangent, result):
        set_fake_value(node, mode.from_tensor(constant))
    graph.output((result,))
    module = fx.GraphModule({"constant": constant}, graph)
    with mode:
        found = remove_tangents(module, 1, ())
    assert found.constant is module.constant


def test_double_backward_and_batched_gradients(entry):
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), x.exp() * 2

    x = torch.randn(3, requires_grad=True)
    compiled = fulgurite.compile(f)
    for _ in range(3):
        (first,) = torch.autograd.grad(compiled(x)[0].sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        torch.testing.assert_close(second, -x.sin().detach())
        (jacobian,) = torch.autograd.grad(compiled(x)[0], x, torch.eye(3), is_grads_batched=True)
        torch.testing.assert_close(jacobian, x.cos().detach().diag())


def test_retained_graph_with_other_outputs(entry):
    x = torch.randn(3, requires_grad=True)
    compiled = fulgurite.compile(lambda x: (x.sin(), x.exp()))
    for _ in range(3):
        left, right = compiled(x)
        (first,) = torch.autograd.grad(left.sum(), x, retain_graph=True)
        (second,) = torch.autograd.grad(right.sum(), x, retain_graph=True)
        (both,) = torch.autograd.grad((left + right).sum(), x)
        torch.testing.assert_close(first + second, both)
        torch.testing.assert_close(first, x.cos().detach())


def test_symbolic_sizes():
    compiled = fulgurite.compile(lambda x: (x.sin(), x.exp()), dynamic=True)
    for size in (3, 4, 5):
        x = torch.randn(size, requires_grad=True)
        (found,) = torch.autograd.grad(compiled(x)[0].sum(), x)
        torch.testing.assert_close(found, x.cos().detach())


@pytest.mark.parametrize("first", ["all", "loss"])
def test_symbolic_sizes_without_zeros(first, entry):
    """Parameters that no gradient reaches get None, not zeros, whatever the number of tokens is."""
    torch.manual_seed(0)
    model = LanguageModel()
    compiled = fulgurite.compile(model, dynamic=True)
    for size in (5, 7):
        tokens = torch.randint(0, 50, (size - 3, size))
        for name in [first, *USES, first]:
            expected = find_gradients(model, USES[name], tokens)
            found = find_gradients(compiled, USES[name], tokens)
            for ours, theirs in zip(found, expected, strict=True):
                assert (ours is None) == (theirs is None), name
                if ours is not None:
                    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert len(compiled.graphs) == 1


def test_zeros_of_symbolic_sizes_that_an_op_needs(entry):
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin().sum(), x.t().cumsum(0).exp() * y.t().flatten().cumsum(0).sum()

    compiled = fulgurite.compile(f, dynamic=True)
    for size in (3, 5, 4):
        x, y = (torch.randn(size, 4, requires_grad=True) for _ in range(2))
        found = torch.autograd.grad(compiled(x, y)[0], (x, y), allow_unused=True)
        torch.testing.assert_close(found[0], x.cos().detach())
        assert found[1] is None
