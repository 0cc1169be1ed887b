"""MLA's projections of one input: q_a (or q) and kv_a run as one GEMM, dense and quantized."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fulgurite.kernels.gemm import fused_projections
from fulgurite.kernels.gemm.merged_linear import find_merged_linear
from fulgurite.kernels.gemm.modules import QuantLinear
from fulgurite.models.config import ConfigFields
from fulgurite.models.families.deepseek import MLAttention
from fulgurite.models.families.registry import find_family
from fulgurite.models.loading.loader import build_random_model
from fulgurite.quant import quantize
from fulgurite.serve.engine.runner import merge_projection_weights

FIELDS = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 128,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}


def build(q_lora_rank: int | None) -> tuple[nn.Module, MLAttention]:
    torch.manual_seed(0)
    fields = ConfigFields({**FIELDS, "q_lora_rank": q_lora_rank}, "a test")
    family = find_family(fields)
    model = build_random_model(family.read_config(fields), family, std=0.1)
    attention = model.layers[0].attention
    assert isinstance(attention, MLAttention)
    return model, attention


@pytest.mark.parametrize("q_lora_rank", [256, None])
def test_dense_weights_are_adjacent(q_lora_rank: int | None) -> None:
    model, attention = build(q_lora_rank)
    names = ("q_a_proj" if q_lora_rank else "q_proj", "kv_a_proj")
    assert attention.fused_projections == tuple(getattr(attention, name) for name in names)
    before = [linear.weight.clone() for linear in attention.fused_projections]
    merge_projection_weights(model)
    first, second = (linear.weight for linear in attention.fused_projections)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert second.data_ptr() == first.data_ptr() + first.nbytes
    assert torch.equal(first, before[0]) and torch.equal(second, before[1])


@pytest.mark.parametrize("format", ["fp8_e4m3_128x128", "int4_g128", "mxfp4"])
@pytest.mark.parametrize("q_lora_rank", [256, None])
@torch.no_grad()
def test_quantized_weights_merge(q_lora_rank: int | None, format: str) -> None:
    """kv_a ends within a block of 128 rows, as in DeepSeek-V3."""
    model, attention = build(q_lora_rank)
    for name in ("q_a_proj" if q_lora_rank else "q_proj", "kv_a_proj"):
        weight = getattr(attention, name).weight
        setattr(attention, name, QuantLinear(quantize(weight.detach(), format), None))
    x = torch.randn(3, 128)
    expected = [linear(x) for linear in attention.fused_projections]
    merge_projection_weights(model)
    merged = find_merged_linear(x, attention.fused_projections)
    assert merged is not None and merged.out_features == (q_lora_rank or 4 * 128) + 192
    fused = fused_projections.fused_linears(x, attention.fused_projections)
    for out, alone in zip(fused, expected, strict=True):
        torch.testing.assert_close(out, alone, rtol=1e-4, atol=1e-4)
