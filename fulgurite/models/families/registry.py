"""The registry of families: the architecture name of a config.json or GGUF file -> its family."""

from __future__ import annotations

from collections.abc import Mapping

from fulgurite.errors import WeightsError
from fulgurite.models.config import ConfigFields, ModelConfig
from fulgurite.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from fulgurite.models.families.family import ModelFamily
from fulgurite.models.families.gemma import GEMMA2, GEMMA3
from fulgurite.models.families.gpt_oss import GPT_OSS
from fulgurite.models.families.llama import LLAMA, MISTRAL
from fulgurite.models.families.llama4 import LLAMA4
from fulgurite.models.families.mixtral import MIXTRAL
from fulgurite.models.families.phi import PHI3
from fulgurite.models.families.qwen import QWEN2, QWEN3, QWEN3_MOE

ARCHITECTURES: dict[str, ModelFamily] = {
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

GGUF_ARCHITECTURES: dict[str, ModelFamily] = {
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


def find_family(fields: ConfigFields) -> ModelFamily:
    """The family that a config.json names under `architectures`."""
    names = [str(name) for name in fields.get_list("architectures")]
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    raise WeightsError(
        f"architecture {', '.join(names)} is not supported"
        if names
        else "config.json names no architecture",
        where=fields.where,
        next=f"supported architectures: {', '.join(ARCHITECTURES)}",
    )


def get_sharding_rules(config: ModelConfig) -> Mapping[str, str]:
    """The sharding rules of a model's family, for `fulgurite.parallel.parallelize`."""
    rules = {family.name: family.sharding_rules for family in ARCHITECTURES.values()}
    return rules[config.family]


def find_gguf_family(
    architecture: str, has_experts: bool, gating_function: str, where: str
) -> ModelFamily:
    """The family of a GGUF file. `gating_function` is the router's: "softmax" or "sigmoid"."""
    if architecture == "llama" and has_experts:
        return MIXTRAL
    if architecture == "deepseek2" and gating_function == "sigmoid":
        return DEEPSEEK_V3
    if architecture in GGUF_ARCHITECTURES:
        return GGUF_ARCHITECTURES[architecture]
    raise WeightsError(
        f"GGUF architecture {architecture!r} is not supported",
        where=where,
        next=f"supported: {', '.join(GGUF_ARCHITECTURES)}; other models may load from safetensors",
    )
