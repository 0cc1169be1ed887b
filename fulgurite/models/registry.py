"""The families: an architecture's name, as config.json or a GGUF file spells it, to its family."""

from __future__ import annotations

from collections.abc import Mapping

from fulgurite.errors import WeightsError
from fulgurite.models.config import Fields, ModelConfig
from fulgurite.models.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from fulgurite.models.family import Family
from fulgurite.models.gemma import GEMMA2, GEMMA3
from fulgurite.models.gpt_oss import GPT_OSS
from fulgurite.models.llama import LLAMA, MISTRAL
from fulgurite.models.llama4 import LLAMA4
from fulgurite.models.mixtral import MIXTRAL
from fulgurite.models.phi import PHI3
from fulgurite.models.qwen import QWEN2, QWEN3, QWEN3_MOE

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": GEMMA3,
    "Phi3ForCausalLM": PHI3,
    "MixtralForCausalLM": MIXTRAL,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "DeepseekV2ForCausalLM": DEEPSEEK_V2,
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
    "Llama4ForCausalLM": LLAMA4,
    "Llama4ForConditionalGeneration": LLAMA4,
    "GptOssForCausalLM": GPT_OSS,
}

GGUF_ARCHITECTURES: dict[str, Family] = {
    "llama": LLAMA,  # with experts: Mixtral
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3moe": QWEN3_MOE,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "phi3": PHI3,
    "gpt-oss": GPT_OSS,
    "deepseek2": DEEPSEEK_V2,  # with sigmoid gates: DeepSeek-V3
    "llama4": LLAMA4,
}


def family_of(fields: Fields) -> Family:
    """The family of a config.json."""
    names = [str(name) for name in fields.sequence("architectures")]
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    raise WeightsError(
        f"the architecture {', '.join(names) or '(none named)'} is not one we know",
        where=fields.where,
        next=f"known architectures: {', '.join(ARCHITECTURES)}",
    )


def plan_of(config: ModelConfig) -> Mapping[str, str]:
    """How the modules of a model are divided over ranks, for `fulgurite.parallel.parallelize`."""
    plans = {family.name: family.plan for family in ARCHITECTURES.values()}
    return plans[config.family]


def family_of_gguf(architecture: str, has_experts: bool, gate: str, where: str) -> Family:
    """The family of a GGUF file; `gate`: "softmax" or "sigmoid" of the router's logits."""
    if architecture == "llama" and has_experts:
        return MIXTRAL
    if architecture == "deepseek2" and gate == "sigmoid":
        return DEEPSEEK_V3
    if architecture in GGUF_ARCHITECTURES:
        return GGUF_ARCHITECTURES[architecture]
    raise WeightsError(
        f"GGUF architecture {architecture!r} is not one we read",
        where=where,
        next=f"known here: {', '.join(GGUF_ARCHITECTURES)}; others may load from safetensors",
    )
