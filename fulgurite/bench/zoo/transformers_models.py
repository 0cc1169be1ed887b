"""The transformers models of the suite `zoo`: classes by task, built small or with their default sizes.

In: the name of a class. Out: a module with random weights. A small configuration is the class's default with sizes
replaced by one rule, `SMALL_SIZES`; `SPECIAL` holds what the rule can't know. A default one keeps its sizes but for
the number of layers; MoE models get `MOE_SIZES`.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import torch
from torch import nn

from fulgurite.bench.zoo.build import KEEP_ALL
from fulgurite.bench.zoo.sizes import SIZES, Sizes

CAUSAL = """
    LlamaForCausalLM Llama4ForCausalLM MistralForCausalLM MixtralForCausalLM Qwen2ForCausalLM
    Qwen2MoeForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM GemmaForCausalLM
    Gemma2ForCausalLM Gemma3ForCausalLM PhiForCausalLM Phi3ForCausalLM PhimoeForCausalLM
    OlmoForCausalLM Olmo2ForCausalLM OlmoeForCausalLM DeepseekV2ForCausalLM DeepseekV3ForCausalLM
    GptOssForCausalLM GraniteForCausalLM GraniteMoeForCausalLM CohereForCausalLM Cohere2ForCausalLM
    FalconForCausalLM BloomForCausalLM MptForCausalLM GPT2LMHeadModel GPT2ForSequenceClassification
    GPTJForCausalLM GPTNeoForCausalLM GPTNeoForSequenceClassification GPTNeoXForCausalLM
    GPTBigCodeForCausalLM CodeGenForCausalLM OPTForCausalLM XGLMForCausalLM StableLmForCausalLM
    PersimmonForCausalLM NemotronForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM Exaone4ForCausalLM
    SmolLM3ForCausalLM JetMoeForCausalLM Lfm2ForCausalLM ModernBertDecoderForCausalLM
    BartForCausalLM BlenderbotSmallForCausalLM MegatronBertForCausalLM TrOCRForCausalLM
    ElectraForCausalLM XLNetLMHeadModel CTRLLMHeadModel MambaForCausalLM Mamba2ForCausalLM
    FalconMambaForCausalLM JambaForCausalLM RecurrentGemmaForCausalLM RwkvForCausalLM
    MiniMaxForCausalLM BioGptForCausalLM
"""
MASKED = """
    BertForMaskedLM BertForQuestionAnswering AlbertForMaskedLM BigBirdForMaskedLM CamembertForMaskedLM
    ConvBertForMaskedLM DebertaForMaskedLM DebertaV2ForMaskedLM DebertaV2ForQuestionAnswering
    DistilBertForMaskedLM DistilBertForQuestionAnswering ElectraForQuestionAnswering ErnieForMaskedLM
    EsmForMaskedLM EuroBertForMaskedLM FNetForMaskedLM FunnelForMaskedLM IBertForMaskedLM
    LayoutLMForMaskedLM LayoutLMForSequenceClassification LongformerForMaskedLM LukeForMaskedLM
    MegatronBertForQuestionAnswering MobileBertForMaskedLM MobileBertForQuestionAnswering
    ModernBertForMaskedLM MPNetForMaskedLM NystromformerForMaskedLM PerceiverForMaskedLM
    ReformerForMaskedLM RemBertForMaskedLM RobertaForMaskedLM RobertaForQuestionAnswering
    RoFormerForMaskedLM SqueezeBertForMaskedLM XLMWithLMHeadModel XLMRobertaForMaskedLM
    XmodForMaskedLM YosoForMaskedLM
"""
ENCODER_DECODER = """
    BartForConditionalGeneration BigBirdPegasusForConditionalGeneration
    BlenderbotForConditionalGeneration FSMTForConditionalGeneration LEDForConditionalGeneration
    LongT5ForConditionalGeneration M2M100ForConditionalGeneration MarianMTModel
    MBartForConditionalGeneration MT5ForConditionalGeneration NllbMoeForConditionalGeneration
    PegasusForConditionalGeneration PegasusXForConditionalGeneration PLBartForConditionalGeneration
    ProphetNetForConditionalGeneration SwitchTransformersForConditionalGeneration
    T5ForConditionalGeneration T5GemmaForConditionalGeneration UMT5ForConditionalGeneration
"""
VISION = """
    ViTForImageClassification BeitForImageClassification BitForImageClassification
    CLIPForImageClassification ConvNextForImageClassification ConvNextV2ForImageClassification
    CvtForImageClassification DeiTForImageClassification Dinov2ForImageClassification
    Dinov2WithRegistersForImageClassification EfficientNetForImageClassification
    FocalNetForImageClassification HieraForImageClassification ImageGPTForImageClassification
    LevitForImageClassification MobileNetV1ForImageClassification MobileNetV2ForImageClassification
    MobileViTForImageClassification MobileViTV2ForImageClassification PoolFormerForImageClassification
    PvtForImageClassification PvtV2ForImageClassification RegNetForImageClassification
    ResNetForImageClassification SegformerForSemanticSegmentation SiglipForImageClassification
    SwiftFormerForImageClassification SwinForImageClassification Swinv2ForImageClassification
    ViTMSNForImageClassification YolosForObjectDetection DPTForSemanticSegmentation
    GLPNForDepthEstimation
"""
SPEECH = """
    WhisperForConditionalGeneration WhisperForAudioClassification Wav2Vec2ForCTC
    Wav2Vec2ForSequenceClassification HubertForCTC SEWForCTC SEWDForCTC UniSpeechForCTC
    UniSpeechSatForCTC WavLMForCTC Wav2Vec2BertForCTC Wav2Vec2ConformerForCTC Data2VecAudioForCTC
    ASTForAudioClassification Speech2TextForConditionalGeneration SpeechT5ForSpeechToText
    MoonshineForConditionalGeneration
"""
TASKS: dict[str, tuple[str, ...]] = {
    "causal": tuple(CAUSAL.split()),
    "masked": tuple(MASKED.split()),
    "encoder-decoder": tuple(ENCODER_DECODER.split()),
    "vision": tuple(VISION.split()),
    "speech": tuple(SPEECH.split()),
}

VOCABULARY = 256
SMALL_HEADS = 4
HEADS = ("num_attention_heads", "n_head", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads")
SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# A field of a configuration whose whole name matches gets the value. The first match counts.
SizeRules = tuple[tuple[str, int], ...]
LAYERS = r"(num_|n_|encoder_|decoder_|num_encoder_|num_decoder_)?(hidden_)?layers?|depth"
SMALL_SIZES: SizeRules = (
    (r"(src_|tgt_|entity_)?vocab_size", VOCABULARY),
    (LAYERS, 4),  # 4 equal layers are compiled once
    (
        r"(num_|n_|encoder_|decoder_)?(attention_)?heads?|num_(encoder|decoder)_attention_heads",
        SMALL_HEADS,
    ),
    (r"num_key_value_heads|n_head_kv|num_kv_heads", 2),
    (r"num_(self|cross)_attention_heads", SMALL_HEADS),
    (r"linear_num_(key|value)_heads", 2),
    (r"linear_(key|value)_head_dim", 16),
    (r"hidden_size|d_model|n_embd|emb_dim|dim|embedding_size|d_embed|attention_hidden_size", 64),
    (
        r"(moe_)?intermediate_size\w*|shared_expert_intermediate_size|(encoder_|decoder_)?ffn_dim",
        128,
    ),
    (r"d_ff|d_inner|n_inner|dense_ffn_hidden_size|expert_ffn_size|mlp_dim", 128),
    (r"head_dim|d_kv|d_head|attention_head_size", 16),
    (r"rotary_dim", 8),
    (r"num_latents|d_latents", 64),
    (r"num_self_attends_per_block", 2),
    (r"q_lora_rank|kv_lora_rank", 32),
    (r"qk_nope_head_dim|qk_rope_head_dim|v_head_dim", 16),
    (r"num_(local_)?experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok|moe_top_k|top_k_experts", 2),
    (r"n_group|topk_group", 1),
    (r"state_size|ssm_state_size|mamba_d_state", 16),
    (r"sliding_window|attention_window_size", 8),
    (r"attention_window", 16),
    (r"max_position_embeddings|n_positions|max_source_positions|max_target_positions", 512),
    (r"image_size|input_size", 64),
    (r"num_labels", 10),
)

# MoE classes at the default size: 6 layers of width 1024 with 16 experts
MOE = (
    "OlmoeForCausalLM",
    "GraniteMoeForCausalLM",
    "Glm4MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "MixtralForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "GptOssForCausalLM",
)
MOE_LAYERS = 6
MOE_SIZES: SizeRules = (
    (r"vocab_size", 32000),
    (r"hidden_size", 1024),
    (r"intermediate_size", 1024),
    (r"moe_intermediate_size", 512),
    (r"num_attention_heads", 16),
    (r"num_key_value_heads", 16),
    (r"num_(local_)?experts|n_routed_experts", 16),
    (r"q_lora_rank", 512),
    (r"kv_lora_rank", 256),
    (r"first_k_dense_replace", 1),
)
MAX_PARAMETERS = 2_000_000_000

# Fields that get a value wherever they exist. Random masks and noise would differ between two random number generators.
# Small models: weights of the usual 0.02 would hide most of the layers behind the residual stream.
FIXED_FIELDS: dict[str, Any] = {
    "apply_spec_augment": False,
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
}
SMALL_FIXED_FIELDS = {**FIXED_FIELDS, "initializer_range": 0.1}
# What the rule can't know, by class.
_GPT_NEO = {"attention_types": [[["global", "local"], 2]], "pad_token_id": 0}
DEFAULT_SPECIAL: dict[str, dict[str, Any]] = {
    "GPT2ForSequenceClassification": {"pad_token_id": 0},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 6]]},
    "GPTNeoForSequenceClassification": {
        "attention_types": [[["global", "local"], 6]],
        "pad_token_id": 0,
    },
    "EsmForMaskedLM": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "XmodForMaskedLM": {"default_language": "en_XX"},
}
SPECIAL: dict[str, dict[str, Any]] = {
    "JambaForCausalLM": {"attn_layer_offset": 1, "attn_layer_period": 2, "mamba_dt_rank": 8},
    "Mamba2ForCausalLM": {"num_heads": 8, "n_groups": 2, "chunk_size": 8},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2},
    "NemotronForCausalLM": {"num_key_value_heads": 2},
    "GPT2ForSequenceClassification": {"pad_token_id": 0},
    "GPTNeoForCausalLM": _GPT_NEO,
    "GPTNeoForSequenceClassification": _GPT_NEO,
    "GPTJForCausalLM": {"rotary_dim": 8},
    "PerceiverForMaskedLM": {"max_position_embeddings": 32},  # it predicts all positions
    "ReformerForMaskedLM": {
        "attn_layers": ["local", "lsh", "local", "lsh"],
        "axial_pos_shape": [4, 8],
        "axial_pos_embds_dim": [32, 32],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "EsmForMaskedLM": {"pad_token_id": 1, "mask_token_id": 4},
    "XmodForMaskedLM": {"default_language": "en_XX"},
    "EfficientNetForImageClassification": {"width_coefficient": 0.5, "hidden_dim": 640},
    "SwinForImageClassification": {"window_size": 2},
    "DPTForSemanticSegmentation": {"backbone_out_indices": [0, 1, 2, 3]},
}


def build(class_name: str, sizes: Sizes = SIZES["small"]) -> nn.Module:
    """A model of the class: small, or of its default sizes."""
    transformers = importlib.import_module("transformers")
    model_class = getattr(transformers, class_name, None)
    if model_class is None:
        raise ImportError(f"transformers {transformers.__version__} has no {class_name}")
    if sizes.name == "small":
        config = small_config(model_class.config_class, SPECIAL.get(class_name, {}))
    elif class_name in MOE:
        layers = min(MOE_LAYERS, sizes.layers)
        config = make_config(model_class.config_class, MOE_SIZES, layers)
    else:
        config = default_config(model_class, sizes.layers)
    return model_class(config)


def default_config(model_class: Any, max_layers: int) -> Any:
    """The class's default configuration with so many layers, or fewer if it has over 2 billion parameters."""
    special = DEFAULT_SPECIAL.get(model_class.__name__, {})
    config = make_config(model_class.config_class, (), max_layers, special)
    with torch.device("meta"):
        parameters = sum(one.numel() for one in model_class(config).parameters())
    if parameters <= MAX_PARAMETERS:
        return config
    layers = max(2, max_layers * MAX_PARAMETERS // parameters)
    return make_config(model_class.config_class, (), layers, special)


def make_config(
    config_class: Any, rules: SizeRules, max_layers: int, special: dict[str, Any] | None = None
) -> Any:
    """The default configuration with at most so many layers, and sizes by the rules."""
    default = config_class()
    fields = {name: value for name, value in default.to_dict().items() if type(value) is int}
    changed = {name: _match_rule(name, value, rules) for name, value in fields.items()}
    changed = {name: size for name, size in changed.items() if size is not None}
    for name, value in default.to_dict().items():
        if type(value) is int and re.fullmatch(LAYERS, name):
            changed[name] = min(max_layers, value)
        elif isinstance(value, float) and value > 0 and "drop" in name:
            changed[name] = KEEP_ALL
    for name, sub_class in getattr(config_class, "sub_configs", {}).items():
        if isinstance(getattr(default, name, None), sub_class):
            changed[name] = make_config(sub_class, rules, max_layers).to_dict()
    fixed = {name: value for name, value in FIXED_FIELDS.items() if name in default.to_dict()}
    return config_class(**{**changed, **fixed, **(special or {})})


def _match_rule(name: str, value: int, rules: SizeRules) -> Any:
    for pattern, size in rules:
        if re.fullmatch(pattern, name):
            return min(size, value)
    return None


def small_config(config_class: Any, special: dict[str, Any]) -> Any:
    """A configuration of the class: `special` first, then the rule, then the class's defaults."""
    default = config_class()
    fields = default.to_dict()
    changed = {name: small_size(name, value, fields) for name, value in fields.items()}
    changed = {name: size for name, size in changed.items() if size is not None}
    for name, sub_class in getattr(config_class, "sub_configs", {}).items():
        if isinstance(getattr(default, name, None), sub_class):
            changed[name] = small_config(sub_class, special.get(name, {})).to_dict()
    fixed = {name: value for name, value in SMALL_FIXED_FIELDS.items() if name in fields}
    return config_class(**{**changed, **fixed, **special})


def small_size(name: str, value: Any, fields: dict[str, Any]) -> Any:
    """The small value of a field; None: keep the default."""
    if name == "vocab_size":
        return VOCABULARY
    if name in KV_HEADS and value in (None, *(fields.get(heads) for heads in HEADS)):
        return None if value is None else SMALL_HEADS  # no grouped-query attention
    if isinstance(value, float) and value > 0 and "drop" in name:
        return KEEP_ALL
    if type(value) is not int:
        return None
    if name.endswith("_token_id"):
        return value if value < VOCABULARY else SPECIAL_TOKENS.get(name, 4)
    return _match_rule(name, value, SMALL_SIZES)
