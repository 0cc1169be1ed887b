"""LoRA on linears and stacked experts: nothing frozen by accident, the base untouched, merges."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="transformers builds the families' small models")

import fulgurite
from fulgurite.errors import ArgumentError
from fulgurite.models import CausalLM, load_model
from fulgurite.train.batch import IGNORED
from fulgurite.train.loss import LossModule
from fulgurite.train.tune.lora import (
    LoRAConfig,
    adapter_weights,
    adapters_disabled,
    adapters_merged,
    add_adapters,
    merge_adapters,
)
from tests.models.reference_models import VOCAB_SIZE, build_reference

FAMILIES = ["llama", "qwen3", "phi3", "dots1", "mixtral", "gpt_oss", "llama4", "deepseek_v3"]


def build(name: str, folder: object, **fields: object) -> CausalLM:
    build_reference(name, num_hidden_layers=2, **fields).save_pretrained(folder)
    return load_model(folder)  # type: ignore[arg-type]


def randomize(model: nn.Module, std: float = 0.1) -> None:
    """Adapters that matter: B is zero at first."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weights in adapter_weights(model):
            weights.b.normal_(0.0, std, generator=generator)


def make_tokens(rows: int = 2, length: int = 12) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB_SIZE, (rows, length), generator=torch.Generator().manual_seed(2))
    return tokens, torch.arange(length).expand(rows, -1)


def compute_loss(model: nn.Module, tokens: Tensor, positions: Tensor) -> Tensor:
    labels = torch.cat((tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORED)), dim=1)
    total: Tensor = LossModule(model)(tokens, labels, positions).total  # type: ignore[arg-type]
    return total


@pytest.mark.parametrize("name", FAMILIES)
def test_every_adapter_gets_a_gradient_and_nothing_else(name: str, tmp_path) -> None:
    model = build(name, tmp_path)
    names = add_adapters(model, LoRAConfig(rank=3))
    randomize(model)
    linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    assert all(n == "lm_head" or n.endswith(".base_layer") for n in linears), (
        "a linear was left out"
    )
    compute_loss(model, *make_tokens(4, 24)).backward()
    for weights in adapter_weights(model):
        for part in (weights.a, weights.b):
            assert part.grad is not None and bool(part.grad.ne(0).any()), weights.path
            if part.dim() == 3:  # every expert that has a token
                assert int(part.grad.flatten(1).ne(0).any(1).sum()) >= 3, weights.path
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    assert trainable == {id(p) for w in adapter_weights(model) for p in (w.a, w.b)}
    assert len(names) == len(set(names)) == len(adapter_weights(model))


@pytest.mark.parametrize("name", FAMILIES)
def test_merged_modules_compute_the_same(name: str, tmp_path) -> None:
    model = build(name, tmp_path)
    tokens, positions = make_tokens()
    with torch.no_grad():
        base = model(tokens, positions)
        add_adapters(model, LoRAConfig(rank=3, alpha=4.0))
        torch.testing.assert_close(model(tokens, positions), base, rtol=1e-5, atol=1e-4)  # B is 0
        randomize(model)
        adapted = model(tokens, positions)
        assert float((adapted - base).abs().max()) > 0.1
        with adapters_disabled(model):
            assert torch.equal(model(tokens, positions), base)
        with adapters_merged(model):
            assert not adapter_weights(model)
            merged = model(tokens, positions)
        assert torch.equal(model(tokens, positions), adapted)
        merge_adapters(model)
        assert torch.equal(model(tokens, positions), merged)
    scale = float(adapted.abs().max())
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-4 * scale)


def test_gradients_are_those_of_the_formula(tmp_path) -> None:
    """Against autograd through the merged weight W + s B A, per expert."""
    model = build("mixtral", tmp_path)
    add_adapters(model, LoRAConfig(rank=3, targets=("experts",)))
    randomize(model)
    tokens, positions = make_tokens()
    compute_loss(model, tokens, positions).backward()
    weights = adapter_weights(model)
    expected = build("mixtral", tmp_path)
    pairs = [(w.a.detach().requires_grad_(), w.b.detach().requires_grad_()) for w in weights]
    merged = {
        w.path: expected.get_parameter(w.path).detach() + w.scaling * b @ a
        for w, (a, b) in zip(weights, pairs, strict=True)
    }
    loss = torch.func.functional_call(
        LossModule(expected),
        {f"model.{path}": value for path, value in merged.items()},
        (tokens, torch.cat((tokens[:, 1:], tokens.new_full((2, 1), IGNORED)), 1), positions),
    ).total
    loss.backward()
    for w, (a, b) in zip(weights, pairs, strict=True):
        torch.testing.assert_close(w.a.grad, a.grad, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(w.b.grad, b.grad, rtol=1e-3, atol=1e-3)


def test_a_target_without_a_match_is_an_error(tmp_path) -> None:
    model = build("mixtral", tmp_path)
    with pytest.raises(ArgumentError, match="'gate_proj', 'nope'") as error:
        add_adapters(model, LoRAConfig(targets=("q_proj", "gate_proj", "nope")))
    assert "experts.gate_up_proj" in str(error.value) and "attention.q_proj" in str(error.value)
    assert not adapter_weights(model) and all(p.requires_grad for p in model.parameters())


def test_targets_choose_linears_and_parts_of_experts(tmp_path) -> None:
    model = build("mixtral", tmp_path)
    names = add_adapters(model, LoRAConfig(targets=("*.1.*.q_proj", "experts.down_proj")))
    assert names == [
        "layers.0.feed_forward.experts.down_proj",
        "layers.1.attention.q_proj",
        "layers.1.feed_forward.experts.down_proj",
    ]
    with pytest.raises(ArgumentError, match="adapters already"):
        add_adapters(model, LoRAConfig())


def test_values_do_not_depend_on_which_other_modules_are_adapted(tmp_path) -> None:
    models = [build("llama", tmp_path) for _ in range(3)]
    for model, targets, seed in zip(models, [("q_proj",), (), ()], [0, 0, 1], strict=True):
        add_adapters(model, LoRAConfig(targets=targets, seed=seed))
    values = [{w.path: w.a for w in adapter_weights(model)} for model in models]
    name = "layers.1.attention.q_proj"
    assert torch.equal(values[0][name], values[1][name])
    assert not torch.equal(values[1][name], values[2][name])


def test_dropout_applies_to_the_adapter_while_training(tmp_path) -> None:
    model = build("mixtral", tmp_path)
    tokens, positions = make_tokens()
    add_adapters(model, LoRAConfig(dropout=0.5))
    with torch.no_grad():
        base = model(tokens, positions)
        assert torch.equal(model.train()(tokens, positions), base)  # B is zero
        randomize(model)
        first, second = model(tokens, positions), model(tokens, positions)
        assert not torch.equal(first, second)
        model.eval()
        assert torch.equal(model(tokens, positions), model(tokens, positions))
    for bad in ({"rank": 0}, {"dropout": 1.0}):
        with pytest.raises(ArgumentError):
            add_adapters(build("llama", tmp_path), LoRAConfig(**bad))


def test_rslora_scales_by_the_root_of_the_rank() -> None:
    assert LoRAConfig(rank=16, alpha=8.0).scaling == 0.5
    assert LoRAConfig(rank=16, alpha=8.0, use_rslora=True).scaling == 2.0


def test_compiled_loss_has_the_same_gradients(tmp_path) -> None:
    model = build("dots1", tmp_path)
    add_adapters(model, LoRAConfig(rank=3))
    randomize(model)
    tokens, positions = make_tokens()
    labels = tokens.roll(-1, 1)
    gradients = []
    for module in (LossModule(model), fulgurite.compile(LossModule(model))):
        module(tokens, labels, positions).total.backward()
        gradients.append([(w.path, p.grad) for w in adapter_weights(model) for p in (w.a, w.b)])
        model.zero_grad()
    for (path, eager), (_, compiled) in zip(*gradients, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-3, atol=1e-3, msg=path)
