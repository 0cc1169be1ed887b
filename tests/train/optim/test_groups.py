"""Parameter groups: weight decay, Muon, tied embeddings once, the balance bias in none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fulgurite.errors import ArgumentError
from fulgurite.models import ARCHITECTURES, CausalLM
from fulgurite.models.config import ConfigFields
from fulgurite.models.loading.load_plan import build_model
from fulgurite.train.config import OptimizerSection
from fulgurite.train.optim import build_optimizer
from fulgurite.train.optim.groups import build_groups
from tests.train.test_balance import FIELDS

SECTION = OptimizerSection(learning_rate=1e-3)


def make_model(architecture: str, **fields: object) -> CausalLM:
    family = ARCHITECTURES[architecture]
    values = {**FIELDS[architecture], "architectures": [architecture], **fields}
    config = family.read_config(ConfigFields(values, "config.json"))
    return build_model(config, family, torch.float32)


def names_by_kind(model, section=SECTION):
    return {group["kind"]: group["names"] for group in build_groups(model, section)}


def test_dots_groups():
    model = make_model("Dots1ForCausalLM", tie_word_embeddings=False)
    groups = names_by_kind(model)
    assert groups["embeddings"] == ["embed_tokens.weight"]
    assert groups["lm_head"] == ["lm_head.weight"]
    assert all("norm" in name for name in groups["vectors"])
    assert "layers.1.feed_forward.experts.gate_up_proj" in groups["matrices"]
    assert "layers.1.feed_forward.router.weight" in groups["matrices"]
    names = [name for group in groups.values() for name in group]
    expected = [n for n, _ in model.named_parameters() if not n.endswith("correction_bias")]
    assert sorted(names) == sorted(expected)


def test_weight_decay_and_algorithm():
    groups = build_groups(
        make_model("Dots1ForCausalLM", tie_word_embeddings=False),
        OptimizerSection(name="muon", learning_rate=1.0, adam_learning_rate=0.1),
    )
    found = {g["kind"]: (g["algorithm"], g["weight_decay"], g["lr"]) for g in groups}
    assert found == {
        "matrices": ("muon", 0.1, 1.0),
        "vectors": ("adamw", 0.0, 0.1),
        "embeddings": ("adamw", 0.0, 0.1),
        "lm_head": ("adamw", 0.1, 0.1),
    }


def test_tied_embeddings_are_updated_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed_tokens = nn.Embedding(5, 3)
            self.lm_head = nn.Linear(3, 5, bias=False)
            self.lm_head.weight = self.embed_tokens.weight

    model = Tied()
    groups = build_groups(model, SECTION)
    assert [(g["kind"], len(g["params"])) for g in groups] == [("embeddings", 1)]
    optimizer = build_optimizer(model, OptimizerSection(learning_rate=0.1, warmup=0), 10)
    before = model.lm_head.weight.detach().clone()
    model.lm_head.weight.grad = torch.ones(5, 3)
    optimizer.step()
    torch.testing.assert_close(model.lm_head.weight, before - 0.1)


def test_stacked_biases_and_convolutions_are_no_matrices():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.down_proj_bias = nn.Parameter(torch.zeros(4, 8))
            self.conv = nn.Conv1d(8, 8, 3, groups=8)
            self.proj = nn.Linear(8, 8)

    assert names_by_kind(Odd())["matrices"] == ["proj.weight"]


def test_frozen_parameters_are_left_out_and_nothing_to_train_is_an_error():
    model = nn.Linear(3, 3)
    model.weight.requires_grad_(False)
    assert names_by_kind(model) == {"vectors": ["bias"]}
    model.bias.requires_grad_(False)
    with pytest.raises(ArgumentError, match="no parameter to train"):
        build_groups(model, SECTION)
    with pytest.raises(ArgumentError, match="name='sgd'"):
        build_groups(model, OptimizerSection(name="sgd", learning_rate=1.0))
