"""A model with repeated layers is one graph; each distinct layer is a sub-graph, compiled once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fulgurite
from fulgurite.session import Session
from fulgurite.trace import verify
from fulgurite.trace.subgraph import inline_subgraphs, subgraph_calls

WIDTH, HEADS = 16, 2


class Layer(nn.Module):
    """A layer of eight ops."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(F.gelu(self.up(self.norm(x))), self.dropout, self.training)
        return x + torch.tanh(self.down(hidden) * 2)


class AttentionLayer(nn.Module):
    """A transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), Layer()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).movedim(-2, 1).unbind(3)
        mixed = F.scaled_dot_product_attention(q, k, v).movedim(1, -2).flatten(-2)
        return self.layer(x + self.out(mixed))


class Model(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module] = Layer, count: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(count))
        self.last = nn.Linear(WIDTH, 5)

    def run_layers(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.run_layers(self.first(x)))


def inputs(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 4)), WIDTH, requires_grad=True)


def check(
    model: nn.Module, *args: Any, groups: list[str], tolerance: float = 1e-5, **options: Any
) -> Any:
    """Compare inference and training with eager. `groups`: the expected sub-graphs."""
    compiled = fulgurite.compile(model, **{"executors": ["torch"], **options})
    for training in (False, True):
        with torch.set_grad_enabled(training):
            right, got = model(*args), compiled(*args)
        torch.testing.assert_close(got, right, rtol=tolerance, atol=tolerance)
        if training:
            wanted = [p for p in (*model.parameters(), *args) if p.requires_grad]
            expected = torch.autograd.grad(right.square().sum(), wanted, allow_unused=True)
            gradients = torch.autograd.grad(got.square().sum(), wanted, allow_unused=True)
            for ours, theirs in zip(gradients, expected, strict=True):
                if theirs is None:
                    assert ours is None or not ours.any()
                else:
                    torch.testing.assert_close(
                        ours, theirs, rtol=20 * tolerance, atol=20 * tolerance
                    )
    found = [record.called_for for record in compiled.graphs if record.is_subgraph]
    assert sorted(set(found)) == sorted(set(groups)), found
    assert not compiled.compiled.whole_model or not compiled.compiled.whole_model.reason
    for record in compiled.graphs:
        for graph in record.compiled_graphs.values():
            flat = graph.trace.with_module(inline_subgraphs(graph.trace.module))
            assert not subgraph_calls(flat.graph)
            verify(flat)
    return compiled


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def test_equal_layers_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    original = Session.build

    def build(self: Session, record: Any, kind: Any, graph: Any, names: Any) -> Any:
        built.append(f"{record.called_for} {kind}")
        return original(self, record, kind, graph, names)

    monkeypatch.setattr(Session, "build", build)
    compiled = fulgurite.compile(Model(count=12), executors=["torch"])
    compiled(inputs()).sum().backward()
    layers = "12 × Layer"
    assert sorted(built) == [" backward", " forward", f"{layers} backward", f"{layers} forward"]
    assert len(subgraph_calls(compiled.last_trace("backward").graph)) == 12


def test_inference_and_training_agree_with_eager() -> None:
    layers = ["5 × AttentionLayer"]
    check(Model(AttentionLayer), inputs(), groups=layers, executors=["fuser", "torch"])


@pytest.mark.parametrize("remat", ["none", "mincut", "full"])
def test_remat_policies(remat: Any) -> None:
    check(Model(), inputs(), groups=["5 × Layer"], remat=remat)


def test_dynamic_sizes() -> None:
    model = Model()
    compiled = fulgurite.compile(model, executors=["torch"])
    for length in (4, 5, 7, 9):
        x = inputs(2, length)
        right, got = model(x), compiled(x)
        torch.testing.assert_close(got, right)
        wanted = list(model.parameters())
        expected = torch.autograd.grad(right.sum(), wanted)
        torch.testing.assert_close(
            torch.autograd.grad(got.sum(), wanted), expected, atol=1e-4, rtol=1e-4
        )
    assert len(compiled.graphs) == 4  # a layer and the model, of one length and dynamic


def test_gradients_of_inputs_only() -> None:
    check(Model().requires_grad_(False), inputs(), groups=["5 × Layer"])


def test_frozen_layers_are_sub_graphs_of_their_own() -> None:
    model = Model(count=10)
    for layer in model.layers[:5]:
        layer.requires_grad_(False)
    model.first.requires_grad_(False)
    x = inputs().detach()
    # training: five frozen ones, one whose input needs no gradient, four others
    check(model, x, groups=["10 × Layer", "5 × Layer", "4 × Layer"])


def test_layers_of_two_kinds() -> None:
    class Mixed(Model):
        def __init__(self) -> None:
            super().__init__(count=8)
            for layer in self.layers[::2]:
                layer.up, layer.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    check(Mixed(), inputs(), groups=["4 × Layer"])


def test_layers_with_different_input_shapes() -> None:
    class Pooled(Model):
        def run_layers(self, x: Tensor) -> Tensor:
            for k, layer in enumerate(self.layers):
                x = layer(x[:, ::2].contiguous() if k == 4 else x)
            return x

    check(Pooled(count=8), inputs(2, 8), groups=["4 × Layer"])


def test_tied_parameters() -> None:
    model = Model()
    for layer in model.layers[1:]:
        layer.up.weight = model.layers[0].up.weight
    check(model, inputs(), groups=["5 × Layer"])


def test_parameters_tied_inside_a_layer() -> None:
    class Tied(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up.weight = self.down.weight

    check(Model(Tied), inputs(), groups=["5 × Tied"])


def test_one_layer_called_many_times() -> None:
    class Recurrent(Model):
        def run_layers(self, x: Tensor) -> Tensor:
            for _ in range(5):
                x = self.layers[0](x)
            return x

    check(
        Recurrent(count=4), inputs(), groups=["5 × Layer"]
    )  # the first one's input is like the others'


class Pair(Layer):
    """Takes and returns a tuple, a dict and None."""

    def forward(self, state: Any) -> Any:
        x, extra, nothing = state
        y = super().forward(x)
        return y, {"total": extra["total"] + y.mean(-1), "view": y[:, :1]}, nothing


def test_layers_that_return_tuples_dicts_views_and_none() -> None:
    class Structured(Model):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            x, extra, nothing = self.run_layers((x, {"total": x.sum(-1), "view": x}, None))
            assert nothing is None
            return self.last(x) + extra["total"].unsqueeze(-1) + extra["view"].sum()

    check(Structured(Pair), inputs(), groups=["4 × Pair"])


def test_layers_that_return_views_of_inputs_and_of_each_other() -> None:
    class Views(Layer):
        def forward(self, state: Any) -> Any:
            x, _, _ = state
            y = super().forward(x).transpose(0, 1)
            return y.transpose(0, 1), y, x[..., :4]

    class Structured(Model):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            x, turned, before = self.run_layers((x, x, x))
            return self.last(x) + turned.sum() + before.sum()

    check(Structured(Views), inputs(), groups=["4 × Views"])


def test_results_may_be_written_in_place() -> None:
    class Hidden(Model):
        def forward(self, x: Tensor) -> list[Tensor]:
            states = [self.first(x)]
            for layer in self.layers:
                states.append(layer(states[-1]))
            return states

    model = Hidden()
    compiled = fulgurite.compile(model, executors=["torch"])
    x = inputs()
    with torch.no_grad():
        ours, right = compiled(x), model(x)
        ours[2].zero_()
        right[2].zero_()
        torch.testing.assert_close(ours, right)
        torch.testing.assert_close(compiled(x)[-1], model(x)[-1])


def test_mutated_buffers_stay_in_the_models_graph() -> None:
    class Counted(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.mean.mul_(0.9).add_(0.1 * y.detach().mean((0, 1)))
            return y

    model = Model(Counted)
    models = model, copy.deepcopy(model)
    compiled = fulgurite.compile(model, executors=["torch"])
    for training in (False, True):
        x = inputs()
        with torch.set_grad_enabled(training):
            torch.testing.assert_close(compiled(x), models[1](x))
    torch.testing.assert_close(dict(models[0].named_buffers()), dict(models[1].named_buffers()))
    assert not any(record.is_subgraph for record in compiled.graphs)


def test_in_place_ops_on_a_layers_own_tensors() -> None:
    class InPlace(Layer):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            y *= 2
            return F.relu(y, inplace=True) + x

    check(Model(InPlace), inputs(), groups=["5 × InPlace"])


def test_layers_that_write_to_their_input() -> None:
    class Writing(Layer):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            x += 1
            return y + x

    class Copied(Model):
        def run_layers(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x.clone() * 2) / 4
            return x

    with torch.no_grad():
        model = Copied(Writing)
        compiled = fulgurite.compile(model, executors=["torch"])
        x = inputs()
        torch.testing.assert_close(compiled(x), model(x))
    assert not any(record.is_subgraph for record in compiled.graphs)


def test_dropout_draws_anew_in_every_layer_and_call() -> None:
    model = Model(lambda: Layer(dropout=0.5))
    for layer in model.layers[1:]:
        layer.load_state_dict(model.layers[0].state_dict())
    compiled = fulgurite.compile(model, executors=["torch"])
    x = inputs()
    assert not torch.equal(compiled(x), compiled(x))
    torch.manual_seed(3)
    first = compiled(x)
    torch.manual_seed(3)
    assert torch.equal(first, compiled(x))
    (trace,) = (r for r in compiled.graphs if r.is_subgraph)
    assert trace.called_for == "5 × Layer"
    # the gradient belongs to the draws of its own forward
    y = compiled(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("where", ["outside", "inside", "around the layers"])
def test_autocast(where: str) -> None:
    def autocast() -> Any:
        return torch.autocast("cpu", torch.bfloat16)

    class Inside(Layer):
        def forward(self, x: Tensor) -> Tensor:
            with autocast():
                return super().forward(x).float()

    class Around(Model):
        def run_layers(self, x: Tensor) -> Tensor:
            with autocast():
                return super().run_layers(x).float()

    class Outside(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).float()

    model, groups = {
        "outside": (Outside(), ["5 × Layer"]),
        "inside": (Model(Inside), ["5 × Inside"]),
        "around the layers": (Around(), []),  # a context of the model is open
    }[where]
    if where == "outside":
        with autocast():
            check(model, inputs(), groups=groups, tolerance=0.05)
    else:
        check(model, inputs(), groups=groups, tolerance=0.05)


def test_no_grad_around_some_layers() -> None:
    class Partly(Model):
        def run_layers(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                for layer in self.layers[:4]:
                    x = layer(x)
            for layer in self.layers[4:]:
                x = layer(x)
            return x

    check(Partly(count=12), inputs(), groups=["7 × Layer", "12 × Layer"])


def test_layers_without_gradients() -> None:
    class Detached(Layer):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                return super().forward(x)

    class Added(Model):
        def run_layers(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x

    check(Added(Detached), inputs(), groups=["5 × Detached"])


def test_activation_checkpointing() -> None:
    class Checkpointed(Model):
        def run_layers(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    check(Checkpointed(), inputs(), groups=["5 × Layer"])


def test_hooks_of_layers() -> None:
    model = Model()
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, out: out * 1.5)
    check(model, inputs(), groups=["5 × Layer"])
    other = Model()
    other.layers[0].register_forward_hook(lambda module, args, out: out * 1.5)
    check(other, inputs(), groups=["4 × Layer"])


def test_hook_added_later_is_called() -> None:
    model = Model()
    compiled = fulgurite.compile(model, executors=["torch"])
    x = inputs()
    torch.testing.assert_close(compiled(x), model(x))
    model.layers[2].register_forward_hook(lambda module, args, out: out * 1.5)
    torch.testing.assert_close(compiled(x), model(x))


def test_randomly_skipped_layers() -> None:
    class Skipping(Model):
        def run_layers(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if torch.rand(()) > 0.5:  # a graph break
                    x = layer(x)
            return x

    model = Skipping()
    compiled = fulgurite.compile(model, executors=["torch"])
    x = inputs()
    for _ in range(3):
        torch.manual_seed(5)
        right = model(x)
        torch.manual_seed(5)
        torch.testing.assert_close(compiled(x), right)
    reason = compiled.compiled.whole_model.reason
    assert "data-dependent" in reason.lower()
    assert reason in str(compiled.explain())


def test_graph_break_in_a_layer() -> None:
    class Breaking(Layer):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            torch._dynamo.graph_break()
            return y * 2

    model = Model(Breaking)
    compiled = fulgurite.compile(model, executors=["torch"])
    x = inputs()
    torch.testing.assert_close(compiled(x), model(x))
    assert compiled.compiled.whole_model.reason and not any(r.is_subgraph for r in compiled.graphs)


@pytest.mark.parametrize("where", ["before", "after", "both"])
def test_graph_break_outside_the_layers(where: str) -> None:
    """One more graph for each break; the layers stay one sub-graph."""

    class Breaking(Model):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            if where != "after":
                torch._dynamo.graph_break()
            x = self.run_layers(x * 2)
            if where != "before":
                torch._dynamo.graph_break()
            return self.last(x * 2)

    model = Breaking()
    compiled = fulgurite.compile(model, executors=["torch"])
    for _ in range(2):
        x = inputs()
        right, got = model(x), compiled(x)
        torch.testing.assert_close(got, right)
        torch.testing.assert_close(
            torch.autograd.grad(got.sum(), [x, *model.parameters()]),
            torch.autograd.grad(right.sum(), [x, *model.parameters()]),
        )
    assert len(compiled.breaks) == (2 if where == "both" else 1)
    assert sum(record.is_subgraph for record in compiled.graphs) == 1
    assert len(compiled.graphs) == (4 if where == "both" else 3)
    assert "model: one graph between graph breaks; 5 × Layer, one" in str(compiled.explain())


def test_graph_break_in_a_helper_of_a_layer() -> None:
    """The calls that lead to the break go through a layer, whatever calls it."""

    def helper(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x * 2

    class Breaking(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return helper(super().forward(x))

    class BreaksTwice(Model):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()  # the first break says nothing of the layers
            return super().forward(x)

    for kind in (Model, BreaksTwice):
        model = kind(Breaking)
        compiled = fulgurite.compile(model, executors=["torch"])
        for _ in range(3):
            x = inputs()
            torch.testing.assert_close(compiled(x), model(x))
        assert compiled.compiled.whole_model.reason


def test_state_that_changes_at_every_call() -> None:
    class Counting(Model):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) * self.calls

    model = Counting()
    compiled = fulgurite.compile(model, executors=["torch"])
    x = inputs()
    with torch.no_grad():
        for _ in range(6):
            right = Model.forward(model, x) * (model.calls + 1)
            torch.testing.assert_close(compiled(x), right)
    assert "state" in compiled.compiled.whole_model.reason


def test_user_exceptions_are_raised() -> None:
    class Raising(Model):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 3:
                raise ValueError("three is too many")
            return super().forward(x)

    compiled = fulgurite.compile(Raising(), executors=["torch"])
    compiled(inputs())
    with pytest.raises(ValueError, match="three is too many"):
        compiled(inputs(3, 4))


def test_equal_layers_of_another_capture_are_reused() -> None:
    class WithLoss(Model):
        def forward(self, x: Tensor, scale: float | None = None) -> Tensor:
            y = super().forward(x)
            return y if scale is None else y * scale

    model = WithLoss()
    compiled = fulgurite.compile(model, executors=["torch"])
    x = inputs()
    torch.testing.assert_close(compiled(x), model(x))
    torch.testing.assert_close(compiled(x, 2.0), model(x, 2.0))
    assert [record.called_for for record in compiled.graphs] == ["5 × Layer", "", ""]


def test_nested_blocks() -> None:
    class Group(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    check(Model(Group, count=4), inputs(), groups=["4 × Group"])
    check(Model(Group, count=3), inputs(), groups=["6 × Layer"])


def test_layers_of_a_function() -> None:
    model = Model()

    @fulgurite.compile
    def loss(x: Tensor) -> Tensor:
        return model(x).square().mean()

    x = inputs()
    torch.testing.assert_close(loss(x), model(x).square().mean())
    loss(x).backward()
    assert [record.called_for for record in loss.graphs] == ["5 × Layer", ""]


def test_granularity_model_has_no_sub_graphs() -> None:
    check(Model(), inputs(), groups=[], granularity="model")


def test_text_of_a_trace_runs_and_shows_a_layer_once() -> None:
    model = Model()
    compiled = fulgurite.compile(model, executors=["torch"])
    x = inputs()
    with torch.no_grad():
        right = compiled(x)
        trace = compiled.last_trace()
        assert trace.text.count("@fulgurite.subgraph") == 1 and trace.text.count(" Layer(") == 6
        compiled.replace_trace(trace.text)
        torch.testing.assert_close(compiled(x), right)


def test_edited_layer_runs_in_every_call() -> None:
    model = Model()
    compiled = fulgurite.compile(model, executors=["torch"])
    x = inputs()
    with torch.no_grad():
        compiled(x)
        text = compiled.last_trace(graph=0).text
        name = text.rpartition("return (")[2].partition(",")[0]
        edited = text.replace(f"return ({name},)", f"return ({name} * 2,)")
        assert edited != text
        compiled.replace_trace(edited, graph=0)
        right = model.first(x)
        for layer in model.layers:
            right = layer(right) * 2
        right = model.last(right)
        torch.testing.assert_close(compiled(x), right)


def test_explain_names_the_sub_graph() -> None:
    compiled = fulgurite.compile(Model(), executors=["torch"])
    compiled(inputs()).sum().backward()
    text = str(compiled.explain())
    assert "5 × Layer, one sub-graph" in text


def test_saved_bytes_are_those_of_separate_layers() -> None:
    model = Model()
    saved = {}
    for granularity in ("auto", "blocks"):
        compiled = fulgurite.compile(model, granularity=granularity)
        compiled(inputs(4, 32)).sum().backward()
        kept: dict[int, int] = {}

        def pack(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            compiled(inputs(4, 32)).sum()
        saved[granularity] = sum(kept.values())
    assert saved["auto"] <= 1.05 * saved["blocks"], saved


class PositionLayer(Layer):
    """A layer that reads views of a table that every layer gets."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        first, second = table.view(-1, 2 * WIDTH).split(WIDTH, 1)
        return super().forward(x + (x @ first.t()) @ second)


class PositionModel(Model):
    def run_layers(self, x: Any) -> Any:
        table = self.table[:, 6:10]
        for layer in self.layers:
            x = layer(x, table)
        return x


@pytest.mark.parametrize("requires_grad", [False, True])
def test_layers_that_get_a_slice_of_a_larger_tensor(requires_grad: bool) -> None:
    """A layer is traced once, with an input at the start of its storage; inlined, it is in the middle."""
    torch.manual_seed(0)
    model = PositionModel(PositionLayer, 4)
    model.register_buffer("table", torch.randn(1, 16, 2 * WIDTH))
    compiled = fulgurite.compile(model)
    x = torch.randn(3, WIDTH, requires_grad=requires_grad)
    with torch.set_grad_enabled(requires_grad):
        for _ in range(3):  # sub-graphs are inlined after the first call
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
