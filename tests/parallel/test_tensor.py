"""Divided models against whole ones: logits and every gradient, for all families and kinds of meshes."""

from __future__ import annotations

import pytest
import torch

from fulgurite.errors import ArgumentError, RankError
from fulgurite.models import ModelConfig
from fulgurite.models.config import ConfigFields
from fulgurite.models.families.registry import find_family
from fulgurite.parallel import Axis, Mesh, MeshShape, launch, parallelize
from fulgurite.parallel.sharding import Sharder
from tests.parallel import model_cases as cases

COMMON = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
# name -> architecture, fields on top of COMMON
DENSE = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "tied": ("Llama", {"tie_word_embeddings": True, "intermediate_size": 90}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 24, "attention_bias": True}),
    "gemma2": ("Gemma2", {"head_dim": 20, "final_logit_softcapping": 3.0, "sliding_window": 6}),
    "gemma3": ("Gemma3", {"head_dim": 20, "sliding_window": 6}),
    "phi3": ("Phi3", {}),
}
MIXTURES = {
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "deepseek_v2": ("DeepseekV2", {**LATENT, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3", LATENT | {"q_lora_rank": None}),
    "llama4": (
        "Llama4",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size_mlp": 80,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 7},
    ),
}
# Families with something of their own to shard.
OTHERS = {
    "olmo2": ("Olmo2", {}),  # a norm over the heads of all ranks
    "granite": ("Granite", {"residual_multiplier": 0.3, "logits_scaling": 5.0}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "cohere": ("Cohere", {"use_qk_norm": True}),  # parallel blocks, norm weights of each head
    "starcoder2": ("Starcoder2", {}),  # LayerNorm, an MLP without a gate
    "hunyuan": ("HunYuanDenseV1", {}),
}
OTHER_MIXTURES = {
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "granite_moe_shared": (
        "GraniteMoeShared",
        {"num_local_experts": 8, "shared_intermediate_size": 56, "residual_multiplier": 0.3},
    ),
    "glm4_moe": (
        "Glm4Moe",
        {**LATENT, "num_key_value_heads": 2, "use_qk_norm": True, "norm_topk_prob": True},
    ),
    "phi_moe": (  # biases of norms and of the head
        "Phimoe",
        {"num_local_experts": 8, "attention_bias": True, "lm_head_bias": True},
    ),
    "qwen2_moe": (  # a gated shared expert
        "Qwen2Moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
        },
    ),
    "ernie_moe": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 40, "use_bias": True},
    ),
}
ALL = DENSE | MIXTURES | OTHERS | OTHER_MIXTURES
LENGTHS = (11, 6, 0, 3)  # of the data ranks: uneven, and one without tokens
TENSOR, BOTH = (1, 4, 1), (2, 2, 1)
SPREAD = {"data": (4, 1, 4), "tensor": (1, 4, 4), "mixed": (2, 2, 4)}
MORE = [(4, 1, 2), (1, 4, 2), (2, 2, 2), *SPREAD.values(), TENSOR, BOTH]


def config_of(name: str, **changed: object) -> ModelConfig:
    architecture, fields = ALL[name]
    values = COMMON | fields | {"architectures": [f"{architecture}ForCausalLM"]} | changed
    return find_family(ConfigFields(values, name)).read_config(ConfigFields(values, name))


def check(pool, config, shape, lengths=LENGTHS, placement=None):
    """float32: a matmul's sum is taken in another order, over up to 96 terms and 3 layers."""
    for rank, found in enumerate(pool.run(cases.compare, config, shape, lengths, placement)):
        assert found.logits < 2e-5, f"rank {rank}: logits\n{found.report}"
        for name, error in found.gradients.items():
            assert error < 2e-4, f"rank {rank}: {name} {error}\n{found.report}"


@pytest.mark.parametrize("name", ALL)
def test_everything_tensor_parallel(ranks, name):
    check(ranks(4), config_of(name), TENSOR)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_data_and_tensor(ranks, name):
    check(ranks(4), config_of(name), BOTH)


@pytest.mark.covering
@pytest.mark.parametrize("shape", SPREAD.values(), ids=SPREAD)
@pytest.mark.parametrize("name", ["deepseek_v3", "llama4"])
def test_experts_over_ranks(ranks, name, shape):
    check(ranks(4), config_of(name), shape)


@pytest.mark.parametrize(
    "name", [n for n in MIXTURES | OTHER_MIXTURES if n not in ("deepseek_v3", "llama4")]
)
def test_experts_and_attention_over_ranks(ranks, name):
    check(ranks(4), config_of(name), SPREAD["mixed"])


@pytest.mark.slow
@pytest.mark.parametrize("shape", MORE, ids=str)
@pytest.mark.parametrize("name", MIXTURES)
def test_every_mesh_of_four(ranks, name, shape):
    check(ranks(4), config_of(name), shape)


@pytest.mark.slow
@pytest.mark.parametrize("name", DENSE)
def test_every_dense_family_with_data(ranks, name):
    check(ranks(4), config_of(name), BOTH)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8, 1, 8), (1, 8, 8), (2, 4, 8), (4, 2, 4), (2, 4, 1)], ids=str)
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_eight_ranks(ranks, name, shape):
    config = config_of(name, num_attention_heads=8, num_key_value_heads=8 if "deep" in name else 2)
    check(ranks(8), config, shape)


@pytest.mark.parametrize("shape", [(1, 2, 1), (2, 1, 2), (1, 2, 2)], ids=str)
def test_two_ranks(ranks, shape):
    check(ranks(2), config_of("qwen3_moe"), shape, lengths=(7, 0))


def test_heads_that_do_not_divide(ranks):
    """Attention stays whole on every rank; the rest is divided."""
    for shape in (TENSOR, SPREAD["tensor"]):
        config = config_of("qwen3_moe", num_attention_heads=6, num_key_value_heads=3, head_dim=16)
        check(ranks(4), config, shape)


def test_no_tokens_anywhere(ranks):
    check(ranks(4), config_of("mixtral"), SPREAD["mixed"], lengths=(0,))


def test_fewer_tokens_than_ranks(ranks):
    check(ranks(4), config_of("mixtral"), SPREAD["tensor"], lengths=(1,))


@pytest.mark.parametrize("shape", [(2, 1, 1), (1, 2, 1), (1, 2, 2), (2, 1, 2)], ids=str)
def test_two_models_trained_alternately(ranks, shape):
    """Two gradients a step, summed over ranks once; what one model leaves behind is not the other's."""
    for errors in ranks(2).run(cases.compare_trained, config_of("qwen3_moe"), shape, (6, 3)):
        assert max(errors) < 1e-5, errors  # rotations and norms are float32 also in float64 models


@pytest.mark.parametrize("recipe", ["int8", "fp8_e4m3_1x128", "int4_g32", "nvfp4"])
def test_quantized_weights_are_sharded_at_blocks(ranks, recipe):
    config = config_of("qwen3", hidden_size=128, intermediate_size=256, head_dim=64)
    for error in ranks(2).run(cases.compare_packed, config, (1, 2, 1), recipe):
        assert error < 2e-5


@pytest.mark.parametrize("recipe", ["int8", "fp8_e4m3_128x128", "nvfp4"])
def test_quantized_experts_are_sharded(ranks, recipe):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 128}
    config = config_of("mixtral", num_local_experts=4, **sizes)
    for shape in ((1, 2, 1), (1, 2, 2), (2, 1, 2)):
        for error in ranks(2).run(cases.compare_packed, config, shape, recipe):
            assert error < 2e-5, shape


def test_indivisible_blocks_raise():
    """Two shares of 128 are inside of blocks of 128."""
    config = config_of("qwen3", hidden_size=128, intermediate_size=128, head_dim=64)
    with pytest.raises(RankError, match="128 can't be sharded over 2 ranks") as caught:
        launch(cases.compare_packed, 2, config, (1, 2, 1), "fp8_e4m3_1x128")
    assert "use a tensor axis of 1" in str(caught.value)


@pytest.mark.parametrize(
    "total, step, ranks, says",
    [
        (10, 1, 6, "2 x 5 = 10 leave nothing for the last rank\n.* where .*layer\n.* axis of 5"),
        (50, 1, 30, "2 x 29 = 58 leave nothing .*\n.*\n.* axis of 25"),
        (
            96,
            32,
            4,
            "32 x 3 = 96 leave .*\n.* where .*layer, sharded at multiples of 32\n.* axis of 3",
        ),
    ],
)
def test_empty_shards_raise(total, step, ranks, says):
    """Fewer ranks than parts may still be too many: 10 in shares of 2 are 5."""
    axis = Axis("tensor", tuple(range(ranks)), 0)
    cutter = Sharder(torch.nn.Module(), axis, sharding=None)
    with pytest.raises(ArgumentError, match=says) as caught:
        cutter.check_divisible("layer", total, step)
    advised = Axis("tensor", tuple(range(int(str(caught.value).split()[-1]))), 0)
    Sharder(torch.nn.Module(), advised, sharding=None).check_divisible("layer", total, step)


def test_generation_with_a_cache(ranks):
    for name, shape in (("qwen3", (1, 2, 1)), ("deepseek_v2", (1, 2, 2)), ("mixtral", (2, 1, 2))):
        for ours, wanted in ranks(2).run(cases.compare_cached, config_of(name), shape, 12):
            assert ours == wanted


def test_unknown_sharding_style_raises():
    with pytest.raises(ArgumentError, match="diagonal"):
        parallelize(torch.nn.Linear(2, 2), Mesh(), {"": "diagonal"})


def test_sharding_report(ranks):
    """One line for layers with the same sharding."""
    report = ranks(2).run(cases.compare, config_of("qwen3_moe"), (1, 2, 1), (3,), None)[0].report
    lines = {line.split()[0]: line.split()[1:] for line in report.splitlines()}
    assert report.splitlines()[0] == str(MeshShape(1, 2, 1))
    assert lines["embed_tokens.weight"] == "vocabulary 97 x 64 49 x 64".split()
    assert lines["layers.0-2.attention.q_proj.weight"] == "query 64 x 64 32 x 64".split()
    assert lines["layers.1.feed_forward.down_proj.weight"] == "row 64 x 96 64 x 48".split()
    assert (
        lines["layers.0,2.feed_forward.experts.down_proj"]
        == "experts 8 x 64 x 40 8 x 64 x 20".split()
    )
