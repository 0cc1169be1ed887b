"""Expert balance: counts without padding, once under recomputation; transformers' loss; the bias."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("transformers", reason="transformers is the reference")

from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func

import fulgurite
from fulgurite.errors import ArgumentError
from fulgurite.models import ARCHITECTURES, build_random_model
from fulgurite.models.config import ConfigFields
from fulgurite.train.balance import (
    balance_loss,
    choose_balance,
    find_routers,
    measure_balance,
    record_routes,
    score_experts,
    update_balance,
)
from fulgurite.train.config import LossSection

COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
DOTS = {
    **COMMON,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
FIELDS = {
    "Dots1ForCausalLM": DOTS,
    "OlmoeForCausalLM": {**COMMON, "num_experts": 8, "norm_topk_prob": False},
    "LlamaForCausalLM": COMMON,
}


def make_model(architecture="Dots1ForCausalLM"):
    family = ARCHITECTURES[architecture]
    fields = {**FIELDS[architecture], "architectures": [architecture]}
    config = family.read_config(ConfigFields(fields, "config.json"))
    torch.manual_seed(0)
    model = build_random_model(config, family, dtype=torch.float32, device="cpu")
    for router in find_routers(model):
        nn.init.normal_(router.weight)
        if router.correction_bias is not None:
            nn.init.zeros_(router.correction_bias)
    return model


class Forward(nn.Module):
    """A loss with all that a recorder gives; `recompute`: layers run again in backward."""

    def __init__(self, model, recompute=False):
        super().__init__()
        self.model, self.recompute = model, recompute

    def forward(self, tokens, positions, documents):
        with record_routes(self.model, documents, needs_scores=True) as recorder:
            if self.recompute:
                hidden = checkpoint(
                    self.model.compute_hidden_states, tokens, positions, use_reentrant=False
                )
            else:
                hidden = self.model.compute_hidden_states(tokens, positions)
        aux = recorder.aux_loss()
        return hidden.square().mean() + aux, aux.detach(), recorder.load_LE()


def make_inputs(padding=6):
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 97, (2, 16), generator=generator)
    positions, documents = torch.arange(16).repeat(2, 1), torch.zeros(2, 16, dtype=torch.long)
    if padding:
        positions[1, -padding:] = -1
        documents[1, -padding:] = -1
    return tokens, positions, documents


def run(module, inputs):
    module.zero_grad()
    loss, aux, load = module(*inputs)
    loss.backward()
    grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return loss.detach(), aux, load, {n.removeprefix("_orig_mod."): g for n, g in grads.items()}


@pytest.mark.parametrize("architecture", ["Dots1ForCausalLM", "OlmoeForCausalLM"])
def test_padding_does_not_count(architecture):
    model = make_model(architecture)
    tokens, positions, documents = make_inputs()
    load = run(Forward(model), (tokens, positions, documents))[2]
    assert load.dtype == torch.int64
    assert load.sum(1).tolist() == [26 * 2] * len(find_routers(model))
    rows = [run(Forward(model), (t[None], p[None], torch.zeros_like(t)[None]))[2]
            for t, p in ((tokens[0], positions[0]), (tokens[1, :10], positions[1, :10]))]  # fmt: skip
    assert torch.equal(load, rows[0] + rows[1])


def test_without_documents_every_token_counts():
    load = run(Forward(make_model()), (*make_inputs(padding=0)[:2], None))[2]
    assert load.sum(1).tolist() == [64, 64]


@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_and_recomputed_forwards_count_once(recompute):
    model = make_model()
    loss, aux, load, grads = run(Forward(model), make_inputs())
    eager = run(Forward(model, recompute), make_inputs())
    compiled = fulgurite.compile(Forward(model, recompute))
    for found in (eager, run(compiled, make_inputs()), run(compiled, make_inputs())):
        assert torch.equal(found[2], load)
        torch.testing.assert_close(found[0], loss)
        torch.testing.assert_close(found[1], aux)
        assert found[3].keys() == grads.keys()
        for name, gradient in grads.items():
            torch.testing.assert_close(found[3][name], gradient, rtol=1e-4, atol=1e-6)
    assert all(router.observer is None for router in find_routers(model))


def test_backward_inside_the_block_does_not_count_again():
    model = make_model()
    tokens, positions, documents = make_inputs()
    with record_routes(model, documents) as recorder:
        hidden = checkpoint(model.compute_hidden_states, tokens, positions, use_reentrant=False)
        hidden.sum().backward()
    assert recorder.load_LE().sum(1).tolist() == [52, 52]


def test_an_error_removes_the_observers():
    model = make_model()
    with (
        pytest.raises(ArgumentError, match="32 tokens, and documents_BT has 8"),
        record_routes(model, torch.zeros(2, 4, dtype=torch.long)),
    ):
        model(*make_inputs()[:2])
    assert all(router.observer is None for router in find_routers(model))


def test_a_dense_model_has_no_load():
    with record_routes(make_model("LlamaForCausalLM"), needs_scores=True) as recorder:
        recorder.routers[:0] = []
    assert recorder.load_LE() is None and recorder.aux_loss() is None


@pytest.mark.parametrize("padding", [0, 6])
def test_loss_equals_transformers(padding):
    model = make_model("OlmoeForCausalLM")
    tokens, positions, documents = make_inputs(padding)
    logits = []
    handles = [
        router.register_forward_hook(
            lambda r, inputs, _: logits.append(torch.nn.functional.linear(inputs[0], r.weight))
        )
        for router in find_routers(model)
    ]
    _, aux, _, _ = run(Forward(model), (tokens, positions, documents))
    for handle in handles:
        handle.remove()
    mask = (documents >= 0).long() if padding else None
    expected = load_balancing_loss_func(tuple(logits), 8, 2, mask)
    torch.testing.assert_close(aux, expected.detach())


def test_sigmoid_scores_are_probabilities_and_an_even_load_costs_least():
    router = find_routers(make_model())[0]
    scores = score_experts(router, torch.randn(5, 8))
    torch.testing.assert_close(scores.sum(-1), torch.ones(5))
    even = balance_loss([torch.full((8,), 4)], [torch.full((8,), 2.0)], 16)
    assert even.item() == pytest.approx(2.0)  # experts of a token
    uneven = balance_loss([torch.tensor([32] + [0] * 7)], [torch.tensor([16.0] + [0.0] * 7)], 16)
    assert uneven.item() == pytest.approx(16.0)
    none = balance_loss([torch.zeros(8, dtype=torch.int64)], [torch.zeros(8)], torch.tensor(0))
    assert none.item() == 0.0


def test_bias_follows_the_sign_of_the_load_error():
    model = make_model()
    load = torch.tensor([[4, 4, 4, 4, 4, 4, 4, 4], [9, 1, 4, 4, 4, 4, 4, 2]])
    update_balance(model, load, 0.5)
    first, second = (router.correction_bias for router in find_routers(model))
    assert first.tolist() == [0.0] * 8
    assert second.tolist() == [-0.5, 0.5, 0, 0, 0, 0, 0, 0.5]
    update_balance(model, torch.zeros_like(load), 0.5)  # a step without tokens
    assert first.tolist() == [0.0] * 8
    with pytest.raises(ArgumentError, match="3 layers for 2 routers"):
        update_balance(model, torch.zeros(3, 8), 0.5)


def test_bias_evens_the_load():
    model = make_model()
    inputs = make_inputs()
    for router in find_routers(model):
        router.weight.data[0] += 3 * router.weight.data.norm(dim=1).mean() / 32**0.5
    start = measure_balance(run(Forward(model), inputs)[2])
    for _ in range(60):
        update_balance(model, run(Forward(model), inputs)[2], 0.02)
    end = measure_balance(run(Forward(model), inputs)[2])
    assert end.max_violation < start.max_violation / 2
    assert end.entropy > start.entropy


def test_metrics():
    metrics = measure_balance(torch.tensor([[2, 2, 2, 2], [0, 4, 4, 0], [0, 0, 0, 0]]))
    assert metrics.max_violation == 1.0
    assert metrics.entropy == pytest.approx(0.5)
    assert metrics.dead_experts == 2
    assert measure_balance(torch.zeros(2, 4)).max_violation == 0.0


def test_choice_of_balance():
    dots, olmoe, llama = (make_model(name) for name in FIELDS)
    assert choose_balance(dots, LossSection()) == "bias"
    assert choose_balance(olmoe, LossSection()) == "aux"
    assert choose_balance(llama, LossSection(balance="bias")) == "none"
    assert choose_balance(dots, LossSection(balance="aux")) == "aux"
    with pytest.raises(ArgumentError, match="no selection bias"):
        choose_balance(olmoe, LossSection(balance="bias"))
    with pytest.raises(ArgumentError, match="balance='even'"):
        choose_balance(olmoe, LossSection(balance="even"))
