"""Every routing rule and its experts against transformers' own module, weights drawn wide.

Shapes are unlike those of the small models: more experts, in groups whose size is no power of two.
"""

from __future__ import annotations

import importlib

import pytest
import torch
import transformers
from torch import Tensor, nn

from fulgurite.kernels.moe.ops import Rule
from fulgurite.models import moe
from fulgurite.models.config import ExpertsConfig

HIDDEN, INNER = 36, 20
GROUPED = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}
# name -> class prefix, the module, fields of its configuration, our rule, our configuration
CASES = {
    "mixtral": ("Mixtral", "MixtralSparseMoeBlock", {}, moe.softmax_then_top_k, {"renormalise": True}),
    "qwen3_normed": ("Qwen3Moe", "Qwen3MoeSparseMoeBlock", {"norm_topk_prob": True},
                     moe.softmax_then_top_k, {"renormalise": True}),
    "qwen3_unnormed": ("Qwen3Moe", "Qwen3MoeSparseMoeBlock", {"norm_topk_prob": False},
                       moe.softmax_then_top_k, {}),
    "deepseek_v2_greedy": ("DeepseekV2", "DeepseekV2Moe",
                           {"topk_method": "greedy", "routed_scaling_factor": 1.7},
                           moe.grouped_softmax, {"scaling": 1.7}),
    "deepseek_v2_groups": ("DeepseekV2", "DeepseekV2Moe", {"topk_method": "group_limited_greedy", **GROUPED},
                           moe.grouped_softmax, {"scaling": 1.7, "groups": 4, "groups_kept": 2}),
    "deepseek_v3_normed": ("DeepseekV3", "DeepseekV3MoE", {"norm_topk_prob": True, **GROUPED}, moe.grouped_sigmoid,
                           {"renormalise": True, "scaling": 1.7, "groups": 4, "groups_kept": 2}),
    "deepseek_v3_unnormed": ("DeepseekV3", "DeepseekV3MoE", {"norm_topk_prob": False, **GROUPED},
                             moe.grouped_sigmoid, {"scaling": 1.7, "groups": 4, "groups_kept": 2}),
    "gpt_oss": ("GptOss", "GptOssMLP", {}, moe.top_k_then_softmax, {}),
    "llama4": ("Llama4Text", "Llama4TextMoe", {}, moe.top_k_then_sigmoid, {}),
}  # fmt: skip


def theirs_of(prefix: str, name: str, fields: dict[str, object], experts: int, k: int) -> nn.Module:
    config = getattr(transformers, f"{prefix}Config")(
        hidden_size=HIDDEN, intermediate_size=INNER, moe_intermediate_size=INNER,
        num_experts=experts, num_local_experts=experts, n_routed_experts=experts, n_shared_experts=1,
        num_experts_per_tok=k, num_attention_heads=2, num_key_value_heads=2, **fields,
    )  # fmt: skip
    config._experts_implementation = "eager"
    family = {"Qwen3Moe": "qwen3_moe", "DeepseekV2": "deepseek_v2", "DeepseekV3": "deepseek_v3",
              "GptOss": "gpt_oss", "Llama4Text": "llama4", "Mixtral": "mixtral"}[prefix]  # fmt: skip
    code = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    module: nn.Module = getattr(code, name)(config)
    generator = torch.Generator().manual_seed(experts)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    return module


def ours_of(
    theirs: nn.Module, rule: moe.RoutingRule, config: ExpertsConfig
) -> moe.MixtureOfExperts:
    """The same weights in our modules."""
    their_router = theirs.gate if hasattr(theirs, "gate") else theirs.router
    correction = getattr(their_router, "e_score_correction_bias", None)
    bias = getattr(their_router, "bias", None)
    router = moe.Router(HIDDEN, config, rule, bias is not None, correction is not None)
    router.weight.data = their_router.weight.data
    if bias is not None:
        router.bias.data = bias.data
    if correction is not None:
        router.choice_bias.data = correction.data
    oss, llama = rule is moe.top_k_then_softmax, rule is moe.top_k_then_sigmoid
    gate = moe.clamped_gate(1.702, 7.0) if oss else moe.gated("silu")
    experts = moe.Experts(HIDDEN, config, gate, bias=oss, weigh_input=llama)
    up, down = theirs.experts.gate_up_proj.data, theirs.experts.down_proj.data
    if oss or llama:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    if oss:  # gate and up take turns there
        up = torch.cat((up[:, ::2], up[:, 1::2]), dim=1)
        between = theirs.experts.gate_up_proj_bias.data
        experts.gate_up_bias.data = torch.cat((between[:, ::2], between[:, 1::2]), dim=1)
        experts.down_bias.data = theirs.experts.down_proj_bias.data
    experts.gate_up.data, experts.down.data = up.contiguous(), down.contiguous()
    return moe.MixtureOfExperts(router, experts)


def routed_part(theirs: nn.Module, x: Tensor) -> Tensor:
    """Their result without the shared expert."""
    out = theirs(x)
    out = (out[0] if isinstance(out, tuple) else out).view(x.shape)
    shared = getattr(theirs, "shared_experts", getattr(theirs, "shared_expert", None))
    return out if shared is None else out - shared(x)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("experts", "k"), [(12, 1), (20, 6), (60, 4)])
@torch.no_grad()
def test_experts_equal_transformers(name: str, experts: int, k: int) -> None:
    prefix, module, fields, rule, numbers = CASES[name]
    theirs = theirs_of(prefix, module, fields, experts, k)
    ours = ours_of(theirs, rule, ExpertsConfig(experts, k, INNER, **numbers))
    for tokens in (1, 33):
        x = torch.randn(1, tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens))
        wanted = routed_part(theirs, x)
        torch.testing.assert_close(
            ours(x), wanted, rtol=1e-4, atol=2e-5 * float(wanted.abs().max())
        )


def test_every_rule_is_pinned() -> None:
    """One that is not would show as a rule without a case."""
    config = ExpertsConfig(8, 2, INNER)
    rules = {value for value in vars(moe).values() if callable(value)
             and getattr(value, "__annotations__", {}).get("return") == "Rule"}  # fmt: skip
    assert rules == {rule for _, _, _, rule, _ in CASES.values()}
    assert all(isinstance(rule(config), Rule) for rule in rules)
