"""Partial reads of every conversion against the whole conversion; filling dense and quantized
shards.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from fulgurite.models import ARCHITECTURES, weight_mapping
from fulgurite.models.config import ConfigFields, LinearAttentionConfig, MoEConfig
from fulgurite.models.families.deepseek import DEEPSEEK_V3
from fulgurite.models.families.llama import LLAMA
from fulgurite.models.loading.checkpoint_tensor import CheckpointTensor
from fulgurite.models.loading.fill import (
    PARTIAL_READERS,
    fill_parameter,
    find_target_ranges,
    read_converted,
)
from fulgurite.models.loading.quantized import fill_packed_parameter
from fulgurite.models.weight_mapping import WeightAssignment, WeightMapping
from fulgurite.parallel.sharding import ShardSlice
from fulgurite.quant import QuantTensor, quantize

CONFIG = LLAMA.read_config(
    ConfigFields(
        {
            "vocab_size": 9,
            "hidden_size": 24,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 8,
        },
        "test",
    )
)
CONFIG = replace(
    CONFIG,
    moe=MoEConfig(num_experts=3, top_k=1, intermediate_size=5),
    linear_attention=LinearAttentionConfig(
        conv_taps=4, num_key_heads=2, num_value_heads=4, key_dim=3, value_dim=5
    ),
)
ROWS = (CONFIG.num_heads + 2 * CONFIG.num_kv_heads) * CONFIG.head_dim
SHAPES = {
    weight_mapping.transpose: (3, 5, 8),
    weight_mapping.deinterleave_gate_up: (3, 10, 7),
    weight_mapping.transpose_deinterleave_gate_up: (3, 7, 10),
    weight_mapping.orient_gate_up: (3, 24, 10),
    weight_mapping.orient_down: (3, 5, 24),
    weight_mapping.group_qkvz: (2 * (3 + 3 + 10 + 10), 7),
    weight_mapping.group_ba: (8, 7),
    weight_mapping.transpose_conv: (22, 1, 4),
}


def assign(mapping: WeightMapping, expert: int = 0, parameter: str = "weight") -> WeightAssignment:
    return WeightAssignment(mapping, parameter, expert)


def arange_tensor(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


@pytest.mark.parametrize("convert", PARTIAL_READERS, ids=lambda convert: convert.__name__)
def test_partial_reads_match_the_whole_conversion(convert):
    whole = arange_tensor(*SHAPES.get(convert, (ROWS, 7)))
    expected, tensor = convert(whole, CONFIG), CheckpointTensor("weight", whole)
    edges = [sorted({0, 1, size // 2, size - 1, size}) for size in expected.shape]
    pairs = [[(a, b) for a, b in itertools.combinations(dim, 2)] for dim in edges]
    for ranges in itertools.product(*pairs):
        slices = tuple(slice(*pair) for pair in ranges)
        assert torch.equal(read_converted(tensor, convert, CONFIG, slices), expected[slices]), (
            ranges
        )


def test_every_conversion_has_a_partial_reader():
    """A family with a new conversion needs a partial reader for it."""
    for family in ARCHITECTURES.values():
        tables = family.weights + (family.gguf.select_mappings(()) if family.gguf else ())
        assert {mapping.convert for mapping in tables} <= set(PARTIAL_READERS), family.name


TARGET_VIEWS = [
    (weight_mapping.whole_parameter, (4, 6, 5), [(0, 4), (0, 6), (0, 5)]),
    (weight_mapping.view_expert, (4, 6, 5), [(2, 3), (0, 6), (0, 5)]),
    (weight_mapping.view_expert_gate, (4, 6, 5), [(2, 3), (0, 3), (0, 5)]),
    (weight_mapping.view_expert_up, (4, 6, 5), [(2, 3), (3, 6), (0, 5)]),
    (weight_mapping.view_all_gates, (4, 6), [(0, 4), (0, 3)]),
    (weight_mapping.view_all_ups, (4, 6, 1), [(0, 4), (3, 6), (0, 1)]),
    (weight_mapping.whole_parameter, (0, 5), [(0, 0), (0, 0)]),
]


@pytest.mark.parametrize(
    ("target_view", "shape", "expected"), TARGET_VIEWS, ids=lambda value: str(value)[:24]
)
def test_find_target_ranges(target_view, shape, expected):
    assert find_target_ranges(target_view, shape, CONFIG, 2) == expected


def test_experts_in_any_order_and_repeated():
    shard_slice = ShardSlice.full("weight", (4, 6, 5)).narrow(0, (3, 4), (1, 2), (3, 4))
    shard = torch.zeros(3, 6, 5)
    for expert in range(4):
        for target_view, rows in (
            (weight_mapping.view_expert_gate, 0),
            (weight_mapping.view_expert_up, 3),
        ):
            family = arange_tensor(4, 6, 5)[expert, rows : rows + 3]
            fill_parameter(
                shard,
                shard_slice,
                CheckpointTensor("weight", family),
                assign(WeightMapping("", "", target_view=target_view), expert),
                CONFIG,
            )
    assert torch.equal(shard, arange_tensor(4, 6, 5)[[3, 1, 3]])


def test_copy_in_chunks(monkeypatch):
    monkeypatch.setattr("fulgurite.models.loading.fill.MAX_STAGING_BYTES", 4 * 7 * 3)
    shard_slice = ShardSlice.full("weight", (ROWS, 7)).narrow(0, (5, 18))
    shard = torch.zeros(13, 7)
    mapping = WeightMapping("", "", weight_mapping.unpermute_rope)
    fill_parameter(
        shard,
        shard_slice,
        CheckpointTensor("weight", arange_tensor(ROWS, 7)),
        assign(mapping),
        CONFIG,
    )
    assert torch.equal(shard, mapping.convert(arange_tensor(ROWS, 7), CONFIG)[5:18])


def test_split_kv_b_proj():
    """GGUF stores the key rows and value rows of kv_b_proj as separate tensors."""
    fields = {
        "vocab_size": 9,
        "hidden_size": 16,
        "intermediate_size": 8,
        "moe_intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 8,
        "kv_lora_rank": 6,
        "qk_nope_head_dim": 3,
        "qk_rope_head_dim": 2,
        "v_head_dim": 5,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
    }
    config = DEEPSEEK_V3.read_config(ConfigFields(fields, "test"))
    whole = arange_tensor(4, 8, 6)
    shard = torch.zeros(16, 6)
    shard_slice = ShardSlice.full("weight", (32, 6)).narrow(0, (16, 32))
    keys = CheckpointTensor("k", whole[:, :3].transpose(1, 2).contiguous())
    values = CheckpointTensor("v", whole[:, 3:].contiguous())
    fill_parameter(
        shard,
        shard_slice,
        keys,
        assign(WeightMapping("", "", weight_mapping.transpose, weight_mapping.view_kv_b_keys)),
        config,
    )
    fill_parameter(
        shard,
        shard_slice,
        values,
        assign(WeightMapping("", "", target_view=weight_mapping.view_kv_b_values)),
        config,
    )
    assert torch.equal(shard, whole.flatten(0, 1)[16:])


def test_shard_of_a_quantized_gguf_weight():
    """Rows are reordered within heads, and columns are sliced at blocks."""
    weight = quantize(torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(0)), "q8_0")
    tensor = CheckpointTensor("weight", weight)
    mapping = WeightMapping("", "", weight_mapping.unpermute_rope)
    shard_slice = ShardSlice.full("weight", (ROWS, 64)).narrow(0, (6, 24)).narrow(1, (32, 64))
    shard = torch.empty_like(weight[:18, :32])
    assert isinstance(shard, QuantTensor)
    fill_packed_parameter(shard, shard_slice, tensor, assign(mapping), CONFIG)
    expected = mapping.convert(weight.dequantize(), CONFIG)[6:24, 32:]
    assert torch.equal(shard.dequantize(), expected)
