"""Visits of experts, counted while a model runs."""

from __future__ import annotations

import pytest
import torch

from fulgurite.errors import ArgumentError
from fulgurite.models import random_model
from fulgurite.models.config import Fields
from fulgurite.models.llama import LLAMA
from fulgurite.models.moe import Router
from fulgurite.models.qwen import QWEN3_MOE
from fulgurite.models.visits import count_visits

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


def test_visits_are_those_of_the_routers() -> None:
    model = random_model(QWEN3_MOE.read_config(Fields(FIELDS, "a test")), QWEN3_MOE, std=0.3)
    seen: list[torch.Tensor] = []
    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(lambda m, i, routes: seen.append(routes.experts_Tk))
    ids = torch.randint(0, 97, (2, 19), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(19).expand(2, -1)
    with torch.no_grad(), count_visits(model) as visits:
        model(ids, positions)
        once = visits.clone()
        model(ids, positions)
    assert visits.shape == (2, 6) and torch.equal(visits, 2 * once)
    wanted = torch.stack(
        [(routes.flatten()[:, None] == torch.arange(6)).sum(0) for routes in seen[:2]]
    )
    assert torch.equal(once, wanted) and once.sum(1).tolist() == [2 * 19 * 2] * 2
    with torch.no_grad():
        model(ids, positions)
    assert torch.equal(visits, 2 * once)  # nothing is counted afterwards


def test_a_model_without_experts_is_refused() -> None:
    model = random_model(LLAMA.read_config(Fields(FIELDS, "a test")), LLAMA)
    with pytest.raises(ArgumentError, match="no experts"), count_visits(model):
        pass
