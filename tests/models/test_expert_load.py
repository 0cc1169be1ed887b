"""Expert load, recorded while a model runs."""

from __future__ import annotations

import pytest
import torch

from fulgurite.errors import ArgumentError
from fulgurite.models import build_random_model
from fulgurite.models.config import ConfigFields
from fulgurite.models.expert_load import record_expert_load
from fulgurite.models.families.llama import LLAMA
from fulgurite.models.families.qwen import QWEN3_MOE
from fulgurite.models.moe import Router

FIELDS = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [1],
}


def test_load_matches_the_routers() -> None:
    model = build_random_model(
        QWEN3_MOE.read_config(ConfigFields(FIELDS, "test")), QWEN3_MOE, std=0.3
    )
    routed_experts: list[torch.Tensor] = []
    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(
                lambda m, i, routes: routed_experts.append(routes.experts_Tk)
            )
    ids = torch.randint(0, 97, (2, 19), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(19).expand(2, -1)
    with torch.no_grad(), record_expert_load(model) as load:
        model(ids, positions)
        once = load.clone()
        model(ids, positions)
    assert load.shape == (2, 6) and torch.equal(load, 2 * once)
    expected = torch.stack(
        [(routes.flatten()[:, None] == torch.arange(6)).sum(0) for routes in routed_experts[:2]]
    )
    assert torch.equal(once, expected) and once.sum(1).tolist() == [2 * 19 * 2] * 2
    with torch.no_grad():
        model(ids, positions)
    assert torch.equal(load, 2 * once)  # no counting afterwards


def test_dense_model_is_rejected() -> None:
    model = build_random_model(LLAMA.read_config(ConfigFields(FIELDS, "test")), LLAMA)
    with pytest.raises(ArgumentError, match="no experts"), record_expert_load(model):
        pass
