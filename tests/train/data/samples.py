"""A small tokenizer and small texts for the tests of train/data."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

from fulgurite.models.tokenizer import Tokenizer
from fulgurite.train.config import DataSection, TrainConfig
from fulgurite.train.data.tokenizer import CHAT_TEMPLATE, EOS, PAD, train_tokenizer

WORDS = ["alpha", "beta", "gamma", "delta", "naïve", "東京", "x = 1", "(y)", "42", "\n\n", "…"]


@cache
def small_tokenizer() -> Tokenizer:
    """300 tokens, trained on a few words."""
    backend = train_tokenizer([" ".join(WORDS) * 20], 300)
    return Tokenizer(backend, None, (0,), CHAT_TEMPLATE, {"eos_token": EOS, "pad_token": PAD})


def random_texts(count: int, seed: int = 0, longest: int = 40) -> list[str]:
    """Texts of 1 to `longest` words, all different."""
    source = random.Random(seed)
    return [
        f"{number} " + " ".join(source.choices(WORDS, k=source.randint(1, longest)))
        for number in range(count)
    ]


def data_config(*train: str | Path, **fields: Any) -> TrainConfig:
    """A config that reads these files."""
    values: dict[str, Any] = {"sequence_length": 16, "vocab_size": 300, **fields}
    return TrainConfig(data=DataSection(train=tuple(map(str, train)), **values))
