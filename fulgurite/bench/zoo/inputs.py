"""Inputs of a transformers model, by one rule from its class, its configuration and its main input.

In: a model and `Sizes`. Out: keyword arguments of its forward, random and seeded by the caller; with labels the model
returns a loss.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
from torch import Tensor, nn

from fulgurite.bench.zoo.sizes import Sizes


def make_inputs(model: nn.Module, sizes: Sizes) -> dict[str, Any]:
    """Keyword arguments of `model.forward`, without labels."""
    main = model.main_input_name
    inputs = {main: MAIN_INPUTS[main](model, sizes)}
    if model.config.is_encoder_decoder and "decoder_input_ids" in _arguments(model):
        inputs["decoder_input_ids"] = _tokens(model.config, sizes.batch, sizes.decoder_tokens)
    return inputs


def make_labels(model: nn.Module, sizes: Sizes) -> dict[str, Any]:
    """The keyword arguments that make the forward return a loss; empty if the class has none."""
    arguments, name = _arguments(model), type(model).__name__
    if "start_positions" in arguments:
        classes = _sequence_length(model, sizes)
        return {
            key: _class_ids(sizes.batch, classes) for key in ("start_positions", "end_positions")
        }
    if "labels" not in arguments:
        return {}
    for part, make in LABELS_BY_TASK.items():
        if part in name:
            return {"labels": make(model.config, sizes.batch)}
    is_decoder = model.config.is_encoder_decoder
    length = sizes.decoder_tokens if is_decoder else _sequence_length(model, sizes)
    return {"labels": _tokens(model.config, sizes.batch, length)}


def _sequence_length(model: nn.Module, sizes: Sizes) -> int:
    """Tokens of a text model's input, at most as many as it has positions for."""
    is_causal = re.search(r"CausalLM|LMHeadModel", type(model).__name__) is not None
    length = sizes.causal_tokens if is_causal else sizes.tokens
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(length, positions) if positions else length


def _arguments(model: nn.Module) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def _tokens(config: Any, batch: int, length: int) -> Tensor:
    """Token ids above the special tokens: padding would be masked, and an end token is looked for."""
    vocabulary = getattr(config.get_text_config(), "vocab_size", 256)
    return torch.randint(min(10, vocabulary - 1), vocabulary, (batch, length))


def _text(model: nn.Module, sizes: Sizes) -> Tensor:
    return _tokens(model.config, sizes.batch, _sequence_length(model, sizes))


def _image_size(config: Any) -> int:
    size = getattr(getattr(config, "vision_config", config), "image_size", 64)
    return size if isinstance(size, int) else size[0]


def _image(model: nn.Module, sizes: Sizes) -> Tensor:
    config = getattr(model.config, "vision_config", model.config)
    size = _image_size(config)
    return torch.randn(sizes.batch, getattr(config, "num_channels", 3), size, size)


def _waveform_or_spectrogram(model: nn.Module, sizes: Sizes) -> Tensor:
    """`input_values`: a waveform, or for models with mel bins and no convolutions a spectrogram."""
    config = model.config
    if hasattr(config, "max_length") and hasattr(config, "frequency_stride"):
        return torch.randn(sizes.batch, config.max_length, config.num_mel_bins)
    return torch.randn(sizes.batch, sizes.samples)


def _features(model: nn.Module, sizes: Sizes) -> Tensor:
    """`input_features`: a spectrogram, channels first for Whisper and last for the others."""
    config, batch, frames = model.config, sizes.batch, sizes.frames
    if hasattr(config, "input_feat_per_channel"):
        return torch.randn(batch, frames, config.input_feat_per_channel)
    if hasattr(config, "feature_projection_input_dim"):
        return torch.randn(batch, frames, config.feature_projection_input_dim)
    return torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions)


MAIN_INPUTS: dict[str, Any] = {
    "input_ids": _text,
    "inputs": _text,
    "pixel_values": _image,
    "input_values": _waveform_or_spectrogram,
    "input_features": _features,
}


def _class_ids(batch: int, classes: int) -> Tensor:
    return torch.randint(0, classes, (batch,))


def _pixel_labels(config: Any, batch: int) -> tuple[int, int, int]:
    return batch, _image_size(config), _image_size(config)


def _boxes(config: Any, batch: int) -> list[dict[str, Tensor]]:
    """Two objects an image; boxes as centre and size, inside the image."""
    return [
        {"class_labels": torch.randint(0, 2, (2,)), "boxes": 0.25 + 0.5 * torch.rand(2, 4)}
        for _ in range(batch)
    ]


# the first part of a class name that matches decides
LABELS_BY_TASK: dict[str, Any] = {
    "Classification": lambda config, batch: _class_ids(batch, min(2, config.num_labels)),
    "CTC": lambda config, batch: _tokens(config, batch, 4),
    "SemanticSegmentation": lambda config, batch: torch.randint(0, 2, _pixel_labels(config, batch)),
    "DepthEstimation": lambda config, batch: 0.5 + torch.rand(_pixel_labels(config, batch)),
    "ObjectDetection": _boxes,
}
