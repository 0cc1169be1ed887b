"""Text decoders of multimodal checkpoints, against transformers' whole models on text."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from fulgurite.errors import WeightsError
from fulgurite.models.families.multimodal import TEXT_DECODERS, TEXT_DEFAULTS
from fulgurite.models.loading.loader import load_model
from tests.models.families.test_families import TOLERANCE, relative_error
from tests.models.reference_models import COMMON, make_prompt, randomize

# fields of a small vision tower, under all the names that classes have for them
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "image_size": 28,
    "patch_size": 14,
}
SAM = {"output_channels": 16, "mlp_dim": 32, "global_attn_indexes": [1], "window_size": 2}
CLIP = {**VISION, "model_type": "clip_vision_model"}
SIGLIP = {**VISION, "model_type": "siglip_vision_model"}
# architecture -> fields in addition to the decoder's; those with towers of timm need that package
TOWERS: dict[str, dict[str, object]] = {
    "GotOcr2ForConditionalGeneration": {"vision_config": {**VISION, **SAM}},
    "Idefics2ForConditionalGeneration": {
        "vision_config": {**VISION, "model_type": "idefics2_vision"},
        "perceiver_config": {
            "hidden_size": 64,
            "num_key_value_heads": 2,
            "resampler_n_heads": 2,
            "resampler_head_dim": 16,
            "resampler_depth": 1,
            "resampler_n_latents": 4,
        },
    },
    "Idefics3ForConditionalGeneration": {"vision_config": VISION},
    "InternVLForConditionalGeneration": {
        "vision_config": {**VISION, "image_size": [28, 28], "patch_size": [14, 14]}
    },
    "Lfm2VlForConditionalGeneration": {"vision_config": {**VISION, "num_patches": 4}},
    "LightOnOcrForConditionalGeneration": {"vision_config": {**VISION, "model_type": "pixtral"}},
    "LlavaForConditionalGeneration": {"vision_config": CLIP},
    "LlavaNextForConditionalGeneration": {"vision_config": CLIP},
    "LlavaNextVideoForConditionalGeneration": {"vision_config": CLIP},
    "LlavaOnevisionForConditionalGeneration": {"vision_config": SIGLIP},
    "Mistral3ForConditionalGeneration": {"vision_config": {**VISION, "model_type": "pixtral"}},
    "SmolVLMForConditionalGeneration": {"vision_config": VISION},
    "VideoLlavaForConditionalGeneration": {"vision_config": CLIP},
    "VipLlavaForConditionalGeneration": {
        "vision_config": CLIP,
        "vision_feature_layers": [-2, -1],
    },
}
LFM2 = {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "conv_L_cache": 3}


def build(architecture: str, text: dict[str, object] | None = None):
    """A small random model; its text decoder is of the architecture's default type."""
    model_type = TEXT_DECODERS[architecture]
    extra = LFM2 if model_type == "lfm2" else {}
    decoder = {**COMMON, **extra, "model_type": model_type, **(text or {})}
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(
        text_config=decoder, tie_word_embeddings=False, **TOWERS[architecture]
    )
    torch.manual_seed(0)
    model = model_class(config).eval()
    randomize(model, torch.Generator().manual_seed(1))
    return model


def check_text(reference, folder) -> None:
    """The logits of text are those of transformers' whole model."""
    reference.save_pretrained(folder)
    ids = make_prompt(40)
    with torch.no_grad():
        expected = reference(input_ids=ids[None]).logits[0]
        actual = load_model(folder)(ids, torch.arange(40))
    assert relative_error(actual, expected) < TOLERANCE


@pytest.mark.parametrize("architecture", TOWERS)
def test_the_decoder_gives_the_whole_model_s_logits(architecture: str, tmp_path) -> None:
    check_text(build(architecture), tmp_path)


@pytest.mark.parametrize("model_type", ["qwen3", "mixtral", "phi3", "olmo2"])
def test_decoders_of_other_types(model_type: str, tmp_path) -> None:
    """`text_config` says which decoder it is."""
    check_text(build("LlavaForConditionalGeneration", {"model_type": model_type}), tmp_path)


def test_fields_that_files_leave_out_have_the_defaults_of_transformers() -> None:
    for model_type in ("llama", "mistral", "qwen2"):
        config = transformers.AutoConfig.for_model(model_type).to_dict()
        for field, value in TEXT_DEFAULTS[model_type].items():
            assert config[field] == value, (model_type, field)


def test_a_missing_weight_of_the_decoder_is_named(tmp_path) -> None:
    """Only tensors of other parts are ignored."""
    reference = build("LlavaForConditionalGeneration")
    reference.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] += 1
    config["text_config"].pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match="missing"):
        load_model(tmp_path)
