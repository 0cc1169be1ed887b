"""The outer graph is compiled unless inference passes a cache; block parents are not captured."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fulgurite
from fulgurite.capture import runner
from fulgurite.capture.outer_graph import OUTER_RECOMPILE_LIMIT, is_plain_data

compile = functools.partial(fulgurite.compile, granularity="blocks")
WIDTH, VOCAB = 32, 24


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(5))
        self.calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1  # not captured
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


class Causal(nn.Module):
    """A language model: a decoder, a head, a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.decoder(tokens))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


@pytest.fixture
def model() -> Causal:
    torch.manual_seed(0)
    return Causal()


TOKENS = torch.arange(24).reshape(2, 12) * 7 % VOCAB


def gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    model(TOKENS).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_head_and_loss_are_one_graph(model: Causal) -> None:
    wanted, loss = gradients(model), model(TOKENS)
    compiled = compile(model)
    calls = model.decoder.calls
    for _ in range(2):
        assert torch.allclose(compiled(TOKENS), loss)
    for ours, right in zip(gradients(compiled), wanted, strict=True):
        assert torch.allclose(ours, right, atol=1e-6)
    assert model.decoder.calls == calls + 3  # it runs at every call
    layer, outer = compiled.graphs
    assert "gelu" in str(layer.captured) and "cross_entropy" in str(outer.captured)
    assert "embedding" not in str(outer.captured)
    assert not compiled.breaks
    assert "with the outer graph of decoder (except for inference with a cache)" in str(
        compiled.explain()
    )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_compiles_the_outer_graph(model: Causal, mode: Any) -> None:
    compiled = compile(model)
    with mode():
        for _ in range(2):
            assert torch.allclose(compiled(TOKENS), model(TOKENS))
    layer, outer = compiled.graphs
    assert "gelu" in str(layer.captured) and "cross_entropy" in str(outer.captured)
    assert list(outer.compiled_graphs) == ["inference"]


@torch.no_grad()
def test_sequence_lengths_are_captured_at_most_twice(model: Causal) -> None:
    compiled = compile(model)
    for length in (12, 9, 7, 11, 5, 8):
        tokens = TOKENS[:, :length]
        assert torch.allclose(compiled(tokens), model(tokens))
        assert len(compiled.graphs) <= 4  # a layer and an outer graph, of one length and dynamic


@torch.no_grad()
def test_each_mode_is_captured_once(model: Causal) -> None:
    compiled = compile(model)
    for _ in range(2):
        for training in (True, False):
            model.train(training)
            assert torch.allclose(compiled(TOKENS), model(TOKENS))
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.allclose(compiled(TOKENS), model(TOKENS), atol=1e-2)
    assert (
        len(compiled.graphs) == 4
    )  # autocast has its own graphs; training makes no difference here


class Cache:
    """A KV cache: another object, of another length, at every call."""

    def __init__(self, *seen: Tensor) -> None:
        self.seen = list(seen)


class CausalWithCache(Causal):
    """Passes the sum of all hidden states so far through the head; takes and returns a cache."""

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        cache = Cache(*(cache.seen if cache else ()), self.decoder(tokens))
        return self.head(sum(cache.seen)), cache


@torch.no_grad()
def test_calls_with_a_cache_compile_no_outer_graph() -> None:
    torch.manual_seed(0)
    model = CausalWithCache()
    compiled = compile(model)
    ours, right = compiled(TOKENS), model(TOKENS)
    assert torch.allclose(ours[0], right[0], atol=1e-6)
    known = len(compiled.graphs)
    for _ in range(10):
        ours, right = compiled(TOKENS, ours[1]), model(TOKENS, cache=right[1])
        assert torch.allclose(ours[0], right[0], atol=1e-5)
    assert len(compiled.graphs) == known


def test_is_plain_data() -> None:
    class Pair(NamedTuple):
        left: Any
        right: Any

    data = [None, 1, 2.5, True, 1j, "left", b"", torch.float16, torch.device("cpu"), TOKENS]
    assert all(map(is_plain_data, data))
    assert is_plain_data((data, {"a": data, "b": (data, [])}, Pair(TOKENS, 3), torch.Size([2])))
    for state in (Cache(), object(), nn.Linear(1, 1), {1}, len, iter([])):
        assert not is_plain_data(state) and not is_plain_data({"a": [1, (state,)]})
        assert not is_plain_data(Pair(1, state))


@torch.no_grad()
def test_recompile_limit_falls_back_to_eager(model: Causal) -> None:
    """A counter that forward reads: recompiled a few times, then eager, with compiled layers."""

    class Counting(Causal):
        calls = 0

        def forward(self, tokens: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(tokens) * self.calls

    counting = Counting()
    counting.load_state_dict(model.state_dict())
    compiled = compile(counting, executors=["torch"])
    known = []
    for _ in range(20):
        loss = compiled(TOKENS)
        known.append(len(compiled.graphs))
        assert torch.allclose(loss, model(TOKENS) * counting.calls)
    assert counting.calls == 20
    assert known[-1] == known[-8] <= 1 + 2 * OUTER_RECOMPILE_LIMIT
    layer = counting.decoder.layers[0]
    with record_calls(layer) as calls:
        compiled(TOKENS)
    assert calls == []  # the layer's own forward does not run


@contextmanager
def record_calls(module: nn.Module) -> Iterator[list[int]]:
    """A list that grows by one entry for every call of the module's forward."""
    calls: list[int] = []
    code = type(module).forward.__code__

    def look(frame: Any, event: str, argument: Any) -> None:
        if frame.f_code is code:
            calls.append(1)

    sys.setprofile(look)
    try:
        yield calls
    finally:
        sys.setprofile(None)


@pytest.mark.slow
@torch.no_grad()
def test_generation_with_transformers_does_not_recompile() -> None:
    transformers = pytest.importorskip("transformers", reason="its models bring caches")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, **heads, eos_token_id=None, pad_token_id=0)
    model = transformers.LlamaForCausalLM(config).eval()
    compiled = compile(model, executors=["torch"])
    assert isinstance(compiled(TOKENS).past_key_values, transformers.DynamicCache)
    assert "lm_head_weight" in str(compiled.graphs[-1].captured)
    known = []
    for length in (9, 7, 11, 10):
        out, right = compiled(TOKENS[:, :length]), model(TOKENS[:, :length])
        for _ in range(5):
            assert torch.allclose(out.logits, right.logits, atol=1e-5)
            token = right.logits[:, -1:].argmax(-1)
            out = compiled(token, past_key_values=out.past_key_values)
            right = model(token, past_key_values=right.past_key_values)
        known.append(len(compiled.graphs))
    assert known[1] == known[-1]  # prefill and decode of any length are compiled after two of each
    outer = [g for g in compiled.graphs if "q_proj" not in str(g.captured)]
    assert len(outer) == 2  # the head, of one length and dynamic; none for decode


@torch.no_grad()
def test_logits_are_stored_once(model: Causal, peak_bytes: Callable[..., int]) -> None:
    """The loss reads the logits in place; eager copies them twice."""
    vocab = 8192
    model.head = nn.Linear(WIDTH, vocab, bias=False)
    compiled = compile(model)
    tokens = torch.arange(2 * 64).reshape(2, 64) % VOCAB
    logits = tokens.numel() * vocab * 4
    assert torch.allclose(compiled(tokens), model(tokens))
    assert peak_bytes(model, tokens) > 2.9 * logits
    assert peak_bytes(compiled, tokens) < 1.2 * logits


def test_only_user_graph_breaks_are_reported(model: Causal) -> None:
    class Printing(Causal):
        def forward(self, tokens: Tensor) -> Tensor:
            loss = super().forward(tokens)
            torch._dynamo.graph_break()
            return 2 * loss

    other = Printing()
    other.load_state_dict(model.state_dict())
    compiled = compile(other)
    assert torch.allclose(compiled(TOKENS), 2 * model(TOKENS))
    assert len(compiled.breaks) == 1 and runner.BREAK_REASON not in compiled.breaks[0].reason


def test_another_capture_sees_the_original_model(model: Causal) -> None:
    compiled = compile(model)
    loss = compiled(TOKENS)
    theirs = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.allclose(theirs(TOKENS), loss)


def test_copies_and_pickles_are_not_compiled(model: Causal) -> None:
    compiled = compile(model)
    loss = compiled(TOKENS)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.allclose(other(TOKENS), loss)
        other.decoder.layers[0].linear.weight.data.zero_()
        assert not torch.allclose(other(TOKENS), loss)
    assert torch.allclose(compiled(TOKENS), loss)


def test_hooks_of_a_block_parent_are_called(model: Causal) -> None:
    seen = []
    compiled = compile(model)
    compiled(TOKENS)
    handle = model.decoder.register_forward_hook(lambda *_: seen.append(1))
    compiled(TOKENS)
    handle.remove()
    compiled(TOKENS)
    assert seen == [1]


def test_two_block_parents(model: Causal) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = Decoder(), Decoder()

        def forward(self, tokens: Tensor) -> Tensor:
            return (self.left(tokens) * self.right(tokens)).sigmoid().sum()

    two = Two()
    compiled = compile(two)
    assert torch.allclose(compiled(TOKENS), two(TOKENS))
    for ours, right in zip(gradients(compiled), gradients(two), strict=True):
        assert torch.allclose(ours, right, atol=1e-6)
    assert "sigmoid" in str(compiled.graphs[-1].captured)


def test_layers_called_without_their_parent(model: Causal) -> None:
    class Past(Causal):
        def forward(self, tokens: Tensor) -> Tensor:
            logits = self.head(self.decoder.forward(tokens))
            return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())

    past = Past()
    past.load_state_dict(model.state_dict())
    compiled = compile(past)
    assert torch.allclose(compiled(TOKENS), past(TOKENS))
    assert len(compiled.graphs) == 2 and compiled.compiled.blocks
    assert "embedding" not in str(compiled.graphs[1].captured)


def test_model_that_calls_its_layers_has_no_outer_graph(model: Causal) -> None:
    compiled = compile(model.decoder)
    compiled(TOKENS).sum().backward()
    assert len(compiled.graphs) == 1
