"""Every routing with its experts against the transformers module.

Shapes differ from those of the small models: more experts, in groups whose size is not a power of
two.
"""

from __future__ import annotations

import importlib

import pytest
import torch
import transformers
from torch import Tensor, nn

from fulgurite.kernels.moe.router_config import RouterConfig
from fulgurite.models import moe
from fulgurite.models.config import MoEConfig

HIDDEN_SIZE, INTERMEDIATE_SIZE = 36, 20
GROUPED = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}
# name -> class prefix, module, config fields, our routing, our MoEConfig fields
CASES = {
    "mixtral": ("Mixtral", "MixtralSparseMoeBlock", {}, moe.softmax_then_topk, {"renormalize": True}),
    "qwen3_normed": ("Qwen3Moe", "Qwen3MoeSparseMoeBlock", {"norm_topk_prob": True},
                     moe.softmax_then_topk, {"renormalize": True}),
    "qwen3_unnormed": ("Qwen3Moe", "Qwen3MoeSparseMoeBlock", {"norm_topk_prob": False},
                       moe.softmax_then_topk, {}),
    "deepseek_v2_greedy": ("DeepseekV2", "DeepseekV2Moe",
                           {"topk_method": "greedy", "routed_scaling_factor": 1.7},
                           moe.grouped_softmax, {"routed_scaling_factor": 1.7}),
    "deepseek_v2_groups": ("DeepseekV2", "DeepseekV2Moe", {"topk_method": "group_limited_greedy", **GROUPED},
                           moe.grouped_softmax, {"routed_scaling_factor": 1.7, "num_groups": 4, "topk_groups": 2}),
    "deepseek_v3_normed": ("DeepseekV3", "DeepseekV3MoE", {"norm_topk_prob": True, **GROUPED}, moe.grouped_sigmoid,
                           {"renormalize": True, "routed_scaling_factor": 1.7, "num_groups": 4, "topk_groups": 2}),
    "deepseek_v3_unnormed": ("DeepseekV3", "DeepseekV3MoE", {"norm_topk_prob": False, **GROUPED},
                             moe.grouped_sigmoid, {"routed_scaling_factor": 1.7, "num_groups": 4, "topk_groups": 2}),
    "gpt_oss": ("GptOss", "GptOssMLP", {}, moe.topk_then_softmax, {}),
    "llama4": ("Llama4Text", "Llama4TextMoe", {}, moe.topk_then_sigmoid, {}),
    "ernie": ("Ernie4_5_Moe", "Ernie4_5_MoeSparseMoeBlock", {"moe_num_shared_experts": 0},
              moe.corrected_softmax, {}),
    "granite": ("GraniteMoe", "GraniteMoeMoE", {}, moe.topk_then_softmax, {}),
    # Nearby experts: none (1e-6), some, and all of them.
    **{f"phi_{eps}": ("Phimoe", "PhimoeSparseMoeBlock", {"router_jitter_noise": eps},
                      moe.sparsemixer, {"jitter_eps": eps}) for eps in (1e-6, 0.05, 0.4, 100.0)},
}  # fmt: skip


def build_reference_moe(
    prefix: str, name: str, fields: dict[str, object], experts: int, k: int
) -> nn.Module:
    config = getattr(transformers, f"{prefix}Config")(
        hidden_size=HIDDEN_SIZE, intermediate_size=INTERMEDIATE_SIZE, moe_intermediate_size=INTERMEDIATE_SIZE,
        num_experts=experts, num_local_experts=experts, n_routed_experts=experts, n_shared_experts=1,
        moe_num_experts=experts, moe_k=k,
        num_experts_per_tok=k, num_attention_heads=2, num_key_value_heads=2, **fields,
    )  # fmt: skip
    config._experts_implementation = "eager"
    family = {"Qwen3Moe": "qwen3_moe", "DeepseekV2": "deepseek_v2", "DeepseekV3": "deepseek_v3",
              "GptOss": "gpt_oss", "Llama4Text": "llama4", "Mixtral": "mixtral",
              "Ernie4_5_Moe": "ernie4_5_moe", "GraniteMoe": "granitemoe",
              "Phimoe": "phimoe"}[prefix]  # fmt: skip
    code = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    module: nn.Module = getattr(code, name)(config).eval()
    generator = torch.Generator().manual_seed(experts)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    return module


def build_moe(reference: nn.Module, routing: moe.RoutingFunction, config: MoEConfig) -> moe.MoE:
    """Our modules with the weights of the reference."""
    reference_router = reference.gate if hasattr(reference, "gate") else reference.router
    statics = getattr(reference_router, "moe_statics", reference_router)
    correction = getattr(statics, "e_score_correction_bias", None)
    bias = getattr(reference_router, "bias", None)
    router = moe.Router(HIDDEN_SIZE, config, routing, bias is not None, correction is not None)
    router.weight.data = reference_router.weight.data
    if bias is not None:
        router.bias.data = bias.data
    if correction is not None:
        router.correction_bias.data = correction.data.flatten()
    is_gpt_oss = hasattr(reference.experts, "gate_up_proj_bias")
    is_llama4 = routing is moe.topk_then_sigmoid
    activation = moe.clamped_swiglu(1.702, 7.0) if is_gpt_oss else moe.gated_activation("silu")
    experts = moe.Experts(
        HIDDEN_SIZE, config, activation, bias=is_gpt_oss, apply_router_weight_on_input=is_llama4
    )
    up, down = reference.experts.gate_up_proj.data, reference.experts.down_proj.data
    if is_gpt_oss or is_llama4:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    if is_gpt_oss:  # gate and up rows are interleaved there
        up = torch.cat((up[:, ::2], up[:, 1::2]), dim=1)
        bias_interleaved = reference.experts.gate_up_proj_bias.data
        experts.gate_up_proj_bias.data = torch.cat(
            (bias_interleaved[:, ::2], bias_interleaved[:, 1::2]), dim=1
        )
        experts.down_proj_bias.data = reference.experts.down_proj_bias.data
    experts.gate_up_proj.data, experts.down_proj.data = up.contiguous(), down.contiguous()
    return moe.MoE(router, experts)


def reference_routed_output(reference: nn.Module, x: Tensor) -> Tensor:
    """The output of the reference without the shared expert."""
    out = reference(x)
    out = (out[0] if isinstance(out, tuple) else out).view(x.shape)
    shared = getattr(reference, "shared_experts", getattr(reference, "shared_expert", None))
    return out if shared is None else out - shared(x)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("experts", "k"), [(12, 1), (20, 6), (60, 4)])
@torch.no_grad()
def test_moe_matches_transformers(name: str, experts: int, k: int) -> None:
    prefix, module, fields, routing, moe_fields = CASES[name]
    k = 2 if routing is moe.sparsemixer else k
    reference = build_reference_moe(prefix, module, fields, experts, k)
    layer = build_moe(reference, routing, MoEConfig(experts, k, INTERMEDIATE_SIZE, **moe_fields))
    for tokens in (1, 33):
        x = torch.randn(1, tokens, HIDDEN_SIZE, generator=torch.Generator().manual_seed(tokens))
        expected = reference_routed_output(reference, x)
        torch.testing.assert_close(
            layer(x), expected, rtol=1e-4, atol=2e-5 * float(expected.abs().max())
        )


def test_every_routing_has_a_case() -> None:
    """A routing function without a case fails here."""
    config = MoEConfig(8, 2, INTERMEDIATE_SIZE)
    routings = {value for value in vars(moe).values() if callable(value)
             and getattr(value, "__annotations__", {}).get("return") == "RouterConfig"}  # fmt: skip
    assert routings == {routing for _, _, _, routing, _ in CASES.values()}
    assert all(isinstance(routing(config), RouterConfig) for routing in routings)
