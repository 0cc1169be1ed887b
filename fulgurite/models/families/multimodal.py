"""Multimodal checkpoints: the text decoder inside. Images and sound are not read; text runs.

In: the fields of a config.json whose `text_config` describes a decoder. Out: the decoder's own
architecture name, and the fields that such files leave out because transformers has defaults for
them.

Listed are architectures that run their decoder unchanged on text: causal attention, and positions
0, 1, … Others (PaliGemma's prefix sees itself; Mllama has cross-attention layers) are not. Nor are
decoders that scale or cap their logits: some of these models do that, and some don't. What is not
listed runs through transformers, if it can (transformers_backend/).
"""

from __future__ import annotations

from collections.abc import Mapping

from fulgurite.models.config import ConfigFields

TEXT_CONFIG = "text_config"

# architecture -> the model_type of a text_config that names none
TEXT_DECODERS: dict[str, str] = {
    "GotOcr2ForConditionalGeneration": "qwen2",
    "Idefics2ForConditionalGeneration": "mistral",
    "Idefics3ForConditionalGeneration": "llama",
    "InternVLForConditionalGeneration": "qwen2",
    "Lfm2VlForConditionalGeneration": "lfm2",
    "LightOnOcrForConditionalGeneration": "qwen3",
    "LlavaForConditionalGeneration": "llama",
    "LlavaNextForConditionalGeneration": "llama",
    "LlavaNextVideoForConditionalGeneration": "llama",
    "LlavaOnevisionForConditionalGeneration": "qwen2",
    "Mistral3ForConditionalGeneration": "mistral",
    "SmolVLMForConditionalGeneration": "llama",
    "VideoLlavaForConditionalGeneration": "llama",
    "VipLlavaForConditionalGeneration": "llama",
}

# model_types of decoders whose logits are those of the LM head
PLAIN_DECODERS = (
    "llama",
    "mistral",
    "ministral3",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "phi3",
    "smollm3",
    "lfm2",
    "olmo2",
    "olmo3",
)

# Tensors of a renamed multimodal checkpoint that are not the decoder's.
OTHER_TENSORS = r"(?!model\.(layers|embed_tokens|norm|embedding_norm)\.|lm_head\.).*"

# model_type -> the values of transformers' configuration class for fields that files leave out
_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}
TEXT_DEFAULTS: dict[str, Mapping[str, object]] = {
    "llama": _LLAMA,
    "mistral": {
        **_LLAMA,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": {
        **_LLAMA,
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "max_position_embeddings": 32768,
    },
}


def find_text_decoder(fields: ConfigFields) -> str | None:
    """The model_type of the decoder of a listed multimodal checkpoint; None for any other."""
    names = [str(name) for name in fields.get_list("architectures")]
    if not names or names[0] not in TEXT_DECODERS or TEXT_CONFIG not in fields:
        return None
    decoder = fields.get_section(TEXT_CONFIG).get_str("model_type", TEXT_DECODERS[names[0]])
    return decoder if decoder in PLAIN_DECODERS else None


def add_text_defaults(text: ConfigFields, model_type: str) -> ConfigFields:
    """The fields of a decoder, with transformers' defaults for those that are absent."""
    return text.with_defaults(**TEXT_DEFAULTS.get(model_type, {}), model_type=model_type)
