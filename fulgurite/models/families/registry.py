"""The registry of families: the architecture name of a config.json or GGUF file -> its family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fulgurite.errors import WeightsError
from fulgurite.models.config import ConfigFields, ModelConfig
from fulgurite.models.families.cohere import COHERE, COHERE2
from fulgurite.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from fulgurite.models.families.dots import DOTS1
from fulgurite.models.families.ernie import ERNIE, ERNIE_MOE
from fulgurite.models.families.exaone import EXAONE4, EXAONE_MOE
from fulgurite.models.families.family import ModelFamily
from fulgurite.models.families.gemma import GEMMA, GEMMA2, GEMMA3
from fulgurite.models.families.glm import GLM, GLM4, GLM4_MOE, GLM4_MOE_LITE, SOLAR_OPEN
from fulgurite.models.families.gpt_oss import GPT_OSS
from fulgurite.models.families.granite import (
    GRANITE,
    GRANITE_MOE,
    GRANITE_MOE_HYBRID,
    GRANITE_MOE_SHARED,
)
from fulgurite.models.families.hunyuan import HUNYUAN, HUNYUAN_MOE
from fulgurite.models.families.lfm2 import LFM2
from fulgurite.models.families.llama import LLAMA
from fulgurite.models.families.llama4 import LLAMA4
from fulgurite.models.families.minimax import MINIMAX_M2
from fulgurite.models.families.mistral import CWM, MINISTRAL, MINISTRAL3, MISTRAL
from fulgurite.models.families.mixtral import MIXTRAL
from fulgurite.models.families.multimodal import OTHER_TENSORS, TEXT_DECODERS, find_text_decoder
from fulgurite.models.families.olmo import OLMO2, OLMO3, OLMOE
from fulgurite.models.families.phi import PHI3
from fulgurite.models.families.phi_moe import PHI_MOE
from fulgurite.models.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from fulgurite.models.families.qwen3_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from fulgurite.models.families.qwen_vl import QWEN2_VL, QWEN3_VL, QWEN3_VL_MOE
from fulgurite.models.families.smollm import SEED_OSS, SMOLLM3
from fulgurite.models.families.starcoder import STARCODER2

ARCHITECTURES: dict[str, ModelFamily] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen2MoeForCausalLM": QWEN2_MOE,
    "Qwen3ForCausalLM": QWEN3,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": GEMMA3,
    "Phi3ForCausalLM": PHI3,
    "MixtralForCausalLM": MIXTRAL,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "Qwen3NextForCausalLM": QWEN3_NEXT,
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5ForConditionalGeneration": QWEN3_5,
    "Qwen3_5MoeForCausalLM": QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": QWEN3_5_MOE,
    "Qwen2VLForConditionalGeneration": QWEN2_VL,
    "Qwen2_5_VLForConditionalGeneration": QWEN2_VL,
    "Qwen3VLForConditionalGeneration": QWEN3_VL,
    "Qwen3VLMoeForConditionalGeneration": QWEN3_VL_MOE,
    "Lfm2ForCausalLM": LFM2,
    "DeepseekV2ForCausalLM": DEEPSEEK_V2,
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
    "Llama4ForCausalLM": LLAMA4,
    "Llama4ForConditionalGeneration": LLAMA4,
    "GptOssForCausalLM": GPT_OSS,
    "MinistralForCausalLM": MINISTRAL,
    "Ministral3ForCausalLM": MINISTRAL3,
    "CwmForCausalLM": CWM,
    "GemmaForCausalLM": GEMMA,
    "OlmoeForCausalLM": OLMOE,
    "Olmo2ForCausalLM": OLMO2,
    "Olmo3ForCausalLM": OLMO3,
    "GraniteForCausalLM": GRANITE,
    "GraniteMoeForCausalLM": GRANITE_MOE,
    "GraniteMoeSharedForCausalLM": GRANITE_MOE_SHARED,
    "GraniteMoeHybridForCausalLM": GRANITE_MOE_HYBRID,
    "GlmForCausalLM": GLM,
    "Glm4ForCausalLM": GLM4,
    "Glm4MoeForCausalLM": GLM4_MOE,
    "Glm4MoeLiteForCausalLM": GLM4_MOE_LITE,
    "SolarOpenForCausalLM": SOLAR_OPEN,
    "PhimoeForCausalLM": PHI_MOE,
    "PhiMoEForCausalLM": PHI_MOE,
    "SmolLM3ForCausalLM": SMOLLM3,
    "SeedOssForCausalLM": SEED_OSS,
    "Ernie4_5ForCausalLM": ERNIE,
    "Ernie4_5_MoeForCausalLM": ERNIE_MOE,
    "HunYuanDenseV1ForCausalLM": HUNYUAN,
    "HunYuanMoEV1ForCausalLM": HUNYUAN_MOE,
    "CohereForCausalLM": COHERE,
    "Cohere2ForCausalLM": COHERE2,
    "Starcoder2ForCausalLM": STARCODER2,
    "Exaone4ForCausalLM": EXAONE4,
    "ExaoneMoeForCausalLM": EXAONE_MOE,
    "Dots1ForCausalLM": DOTS1,
    "MiniMaxM2ForCausalLM": MINIMAX_M2,
}

GGUF_ARCHITECTURES: dict[str, ModelFamily] = {
    "llama": LLAMA,  # with experts: Mixtral
    "qwen2": QWEN2,
    "qwen2moe": QWEN2_MOE,
    "qwen3": QWEN3,
    "qwen3moe": QWEN3_MOE,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "phi3": PHI3,
    "gpt-oss": GPT_OSS,
    "deepseek2": DEEPSEEK_V2,  # with sigmoid gates: DeepSeek-V3
    "llama4": LLAMA4,
    "gemma": GEMMA,
    "olmoe": OLMOE,
    "olmo2": OLMO3,  # without windows: OLMo 2
    "granite": GRANITE,
    "granitemoe": GRANITE_MOE_SHARED,  # with or without shared experts
    "glm4": GLM4,
    "glm4moe": GLM4_MOE,
    "smollm3": SMOLLM3,
    "seed_oss": SEED_OSS,
    "ernie4_5": ERNIE,
    "ernie4_5-moe": ERNIE_MOE,
    "hunyuan-dense": HUNYUAN,
    "hunyuan-moe": HUNYUAN_MOE,
    "command-r": COHERE,
    "cohere2": COHERE2,
    "starcoder2": STARCODER2,
    "exaone4": EXAONE4,
    "dots1": DOTS1,
    "minimax-m2": MINIMAX_M2,
}


def has_family(fields: ConfigFields) -> bool:
    """Whether a config.json names an architecture of ours, or none at all."""
    names = read_architectures(fields)
    return not names or any(name in ARCHITECTURES for name in names)


def read_architectures(fields: ConfigFields) -> list[str]:
    """`architectures` of a config.json; if it has none, the causal LM of its `model_type`.

    Of a multimodal checkpoint (multimodal.py), the causal LM of its text decoder, if it is ours.
    """
    names = [str(name) for name in fields.get_list("architectures")]
    decoder = find_text_decoder(fields)
    if decoder is not None:
        return _causal_lm_of(decoder) or names
    if names or "model_type" not in fields:
        return names
    return _causal_lm_of(fields.get_str("model_type"))


def _causal_lm_of(model_type: str) -> list[str]:
    model_type = model_type.replace("_", "").lower()
    return [
        name
        for name in ARCHITECTURES
        if name.removesuffix("ForCausalLM").replace("_", "").lower() == model_type
    ][:1]


def find_family(fields: ConfigFields) -> ModelFamily:
    """The family that a config.json names under `architectures`."""
    names = read_architectures(fields)
    for name in names:
        if name in ARCHITECTURES:
            family = ARCHITECTURES[name]
            if find_text_decoder(fields) is None:
                return family
            return replace(family, ignored=(*family.ignored, OTHER_TENSORS))
    raise WeightsError(
        f"architecture {', '.join(names)} is not supported"
        if names
        else "config.json names no architecture",
        where=fields.where,
        next=f"supported architectures: {', '.join((*ARCHITECTURES, *TEXT_DECODERS))}",
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
