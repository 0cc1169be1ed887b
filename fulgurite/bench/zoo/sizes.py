"""How large the models and inputs of the suite `zoo` are.

`small` checks results: every row takes seconds. `default` is for timing: the class's own default configuration and
inputs that fill it. MoE models are cut to 6 layers of width 1024 at that size; their defaults have up to 700 billion
parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

SizeName = Literal["small", "default"]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the inputs. Image sizes are those of the model."""

    name: SizeName
    batch: int
    tokens: int  # of encoders, and of the encoder of encoder-decoder models
    causal_tokens: int
    decoder_tokens: int
    samples: int  # of a waveform, 16 kHz
    frames: int  # of a spectrogram
    layers: int  # at most, of a transformers model: BERT-base, ViT-base and GPT-2 have 12


SIZES: dict[SizeName, Sizes] = {
    "small": Sizes("small", 2, 32, 32, 16, 8000, 64, layers=4),
    "default": Sizes("default", 8, 384, 1024, 128, 80_000, 512, layers=12),
}


def choose_sizes(name: SizeName, batch: int | None, layers: int | None = None) -> Sizes:
    """The sizes of that name, with another batch size or number of layers if given."""
    sizes = SIZES[name]
    return replace(sizes, batch=batch or sizes.batch, layers=layers or sizes.layers)
