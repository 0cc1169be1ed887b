"""Inputs of a transformers model, by one rule from its class, its configuration and its main input.

In: a model. Out: keyword arguments of its forward, random and seeded by the caller; with labels the model returns a
loss. Sizes are small: two sequences of 32 tokens, two images, two clips of half a second.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

BATCH = 2
TOKENS = 32
DECODER_TOKENS = 16
SAMPLES = 8000  # of a waveform, 16 kHz
FRAMES = 64  # of a spectrogram
LABELS = 10


def make_inputs(model: nn.Module) -> dict[str, Any]:
    """Keyword arguments of `model.forward`, without labels."""
    main = model.main_input_name
    inputs = {main: MAIN_INPUTS[main](model.config)}
    if model.config.is_encoder_decoder and "decoder_input_ids" in _arguments(model):
        inputs["decoder_input_ids"] = _tokens(model.config, DECODER_TOKENS)
    return inputs


def make_labels(model: nn.Module) -> dict[str, Any]:
    """The keyword arguments that make the forward return a loss; empty if the class has none."""
    arguments, name = _arguments(model), type(model).__name__
    if "start_positions" in arguments:
        return {key: _class_ids(TOKENS) for key in ("start_positions", "end_positions")}
    if "labels" not in arguments:
        return {}
    for part, make in LABELS_BY_TASK.items():
        if part in name:
            return {"labels": make(model.config)}
    length = DECODER_TOKENS if model.config.is_encoder_decoder else TOKENS
    return {"labels": _tokens(model.config, length)}


def _arguments(model: nn.Module) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def _tokens(config: Any, length: int = TOKENS) -> Tensor:
    """Token ids above the special tokens: padding would be masked, and an end token is looked for."""
    vocabulary = getattr(config.get_text_config(), "vocab_size", 256)
    return torch.randint(min(10, vocabulary - 1), vocabulary, (BATCH, length))


def _image_size(config: Any) -> int:
    size = getattr(getattr(config, "vision_config", config), "image_size", 64)
    return size if isinstance(size, int) else size[0]


def _image(config: Any) -> Tensor:
    config = getattr(config, "vision_config", config)
    size = _image_size(config)
    return torch.randn(BATCH, getattr(config, "num_channels", 3), size, size)


def _waveform_or_spectrogram(config: Any) -> Tensor:
    """`input_values`: a waveform, or for models with mel bins and no convolutions a spectrogram."""
    if hasattr(config, "max_length") and hasattr(config, "frequency_stride"):
        return torch.randn(BATCH, config.max_length, config.num_mel_bins)
    return torch.randn(BATCH, SAMPLES)


def _features(config: Any) -> Tensor:
    """`input_features`: a spectrogram, channels first for Whisper and last for the others."""
    if hasattr(config, "input_feat_per_channel"):
        return torch.randn(BATCH, FRAMES, config.input_feat_per_channel)
    if hasattr(config, "feature_projection_input_dim"):
        return torch.randn(BATCH, FRAMES, config.feature_projection_input_dim)
    return torch.randn(BATCH, config.num_mel_bins, 2 * config.max_source_positions)


MAIN_INPUTS: dict[str, Any] = {
    "input_ids": _tokens,
    "inputs": _tokens,
    "pixel_values": _image,
    "input_values": _waveform_or_spectrogram,
    "input_features": _features,
}


def _class_ids(classes: int = LABELS) -> Tensor:
    return torch.randint(0, classes, (BATCH,))


def _boxes(config: Any) -> list[dict[str, Tensor]]:
    """Two objects an image; boxes as centre and size, inside the image."""
    return [
        {"class_labels": torch.randint(0, 2, (2,)), "boxes": 0.25 + 0.5 * torch.rand(2, 4)}
        for _ in range(BATCH)
    ]


# the first part of a class name that matches decides
LABELS_BY_TASK: dict[str, Any] = {
    "Classification": lambda config: _class_ids(min(2, config.num_labels)),
    "CTC": lambda config: _tokens(config, 4),
    "SemanticSegmentation": lambda config: torch.randint(
        0, 2, (BATCH, _image_size(config), _image_size(config))
    ),
    "DepthEstimation": lambda config: (
        0.5 + torch.rand(BATCH, _image_size(config), _image_size(config))
    ),
    "ObjectDetection": _boxes,
}
