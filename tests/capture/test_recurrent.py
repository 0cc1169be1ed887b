"""`nn.LSTM`, `nn.GRU` and `nn.RNN` in inference are captured; what the operator does not take runs as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fulgurite

KINDS = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": lambda *args, **options: nn.RNN(*args, nonlinearity="relu", **options),
}


class Tagger(nn.Module):
    """Scores of each step, and the last states."""

    def __init__(self, recurrent: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.recurrent = recurrent
        self.scores = nn.Linear(recurrent.hidden_size * (1 + recurrent.bidirectional), 5)

    def forward(self, ids: Tensor, state: Any = None) -> tuple[Tensor, Any, Tensor]:
        out, last = self.recurrent(self.embedding(ids), state)
        return out, last, self.scores(out).relu()


def make_tagger(kind: str = "lstm", **options: Any) -> Tagger:
    torch.manual_seed(0)
    return Tagger(KINDS[kind](8, 21, **options)).eval()


def check(model: nn.Module, compiled: Any, *args: Any) -> Any:
    """Compare two calls with eager: values and strides. Returns eager's result."""
    with torch.no_grad():
        expected = model(*args)
        for _ in range(2):
            pairs = zip(*map(pytree.tree_leaves, (compiled(*args), expected)), strict=True)
            for actual, wanted in pairs:
                torch.testing.assert_close(actual, wanted, atol=2e-6, rtol=1e-5)
                assert actual.stride() == wanted.stride()
    return expected


@pytest.mark.covering
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_layers": 2, "bidirectional": True, "batch_first": True},
        {"num_layers": 2, "bias": False, "batch_first": True},
        {"bidirectional": True},
    ],
    ids=str,
)
def test_recurrent_module_equals_eager(kind: str, options: dict[str, Any]) -> None:
    model = make_tagger(kind, **options)
    compiled = fulgurite.compile(model)
    ids = torch.arange(12).reshape(3, 4) % 11
    _, last, _ = check(model, compiled, ids)
    assert not compiled.breaks
    assert "fulgurite.recurrence" in str(compiled.last_trace())
    check(model, compiled, ids, pytree.tree_map(torch.randn_like, last))


def test_another_length_needs_no_other_graph() -> None:
    model = make_tagger(batch_first=True)
    compiled = fulgurite.compile(model, dynamic=True)
    for length in (3, 5, 9):
        check(model, compiled, torch.arange(2 * length).reshape(2, length) % 11)
    assert len(compiled.graphs) == 1


def test_one_sequence_without_a_batch() -> None:
    model = make_tagger("gru", num_layers=2)
    check(model, fulgurite.compile(model), torch.arange(5))


def test_changed_recurrent_weights_are_noticed() -> None:
    model = make_tagger("gru")
    compiled = fulgurite.compile(model)
    ids = torch.arange(6).reshape(3, 2)
    check(model, compiled, ids)
    with torch.no_grad():
        model.recurrent.weight_hh_l0.mul_(2)
        model.recurrent.bias_hh_l0.add_(1)
    check(model, compiled, ids)


def test_recurrent_weights_are_packed_once() -> None:
    model = make_tagger(bidirectional=True)
    compiled = fulgurite.compile(model)
    check(model, compiled, torch.arange(6).reshape(3, 2))
    text = str(compiled.last_trace())
    assert "recurrent_weight_hh_l0_packed_weight" in text
    assert "pack_weight.default" not in text.partition("def forward")[2]


def test_weights_that_are_inputs() -> None:
    model = make_tagger("rnn_tanh")

    def call(weights: dict[str, Tensor], ids: Tensor) -> Any:
        return torch.func.functional_call(model, weights, (ids,))

    compiled = fulgurite.compile(call)
    weights = {name: 2 * weight for name, weight in model.named_parameters()}
    with torch.no_grad():
        actual, expected = (f(weights, torch.arange(4)[:, None])[2] for f in (compiled, call))
    torch.testing.assert_close(actual, expected, atol=2e-6, rtol=1e-5)


def test_empty_sequence_raises_as_in_eager_mode() -> None:
    model = make_tagger("gru")
    with torch.no_grad(), pytest.raises(RuntimeError, match="larger than 0"):
        fulgurite.compile(model)(torch.zeros(0, 2, dtype=torch.int64))


@pytest.mark.parametrize(
    "model",
    [
        nn.LSTM(8, 6).double(),
        nn.GRU(8, 6).bfloat16(),
        nn.LSTM(8, 6, proj_size=3),
        nn.GRU(8, 6, num_layers=2, dropout=0.5),
    ],
    ids=str,
)
def test_other_recurrent_modules_run_as_before(model: nn.Module) -> None:
    model.train(getattr(model, "dropout", 0.0) > 0)
    compiled = fulgurite.compile(model)
    x = torch.randn(3, 2, 8).to(next(model.parameters()).dtype)
    with torch.no_grad():
        torch.manual_seed(0)
        expected = model(x)[0]
        torch.manual_seed(0)
        torch.testing.assert_close(compiled(x)[0], expected)


def test_training_step_of_a_recurrent_module() -> None:
    model = make_tagger().train()
    compiled = fulgurite.compile(model)
    ids = torch.arange(6).reshape(3, 2)
    gradients = []
    for run in (model, compiled):
        model.zero_grad()
        run(ids)[2].sum().backward()
        gradients.append(model.recurrent.weight_hh_l0.grad.clone())
    torch.testing.assert_close(*gradients)


def test_packed_sequences() -> None:
    module = nn.GRU(8, 6, batch_first=True).eval()

    def run(x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        out, _ = module(packed)
        return nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0]

    x, lengths = torch.randn(2, 4, 8), torch.tensor([4, 2])
    with torch.no_grad():
        torch.testing.assert_close(fulgurite.compile(run)(x, lengths), run(x, lengths))
