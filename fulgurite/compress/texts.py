"""Texts for calibration and perplexity: a file in, sequences of token ids out.

Without a file, perplexity is measured on the text of Python's `help()`, which every installation
of Python contains.
"""

from __future__ import annotations

import pydoc_data.topics
import re
import sys
from pathlib import Path

import torch
from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.models.tokenizer import Tokenizer

HELP_TEXT = "Python's help()"
MIN_TOKENS = 16


def read_text(name: str, option: str) -> str:
    """The text of a file, or of stdin for `-`."""
    if name == "-":
        return sys.stdin.read()
    path = Path(name).expanduser()
    if not path.is_file():
        raise ArgumentError(
            f"{option} {name}: no such file", next="pass a text file, or - for stdin"
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ArgumentError(
            f"{option} {name} is not UTF-8 text: {error.reason} at byte {error.start}",
            next="convert it to UTF-8",
        ) from error


def python_help_text() -> str:
    """The topics of Python's `help()`, as running text."""
    topics: dict[str, str] = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return re.sub(r"[*=\-~\"]{4,}", "", text)  # underlines of headings


def tokenize_text(
    text: str, tokenizer: Tokenizer, *, max_tokens: int, length: int, option: str
) -> Tensor:
    """Token ids [B, T]: the first `max_tokens` tokens in sequences of `length`.

    Every sequence starts with the tokens that the tokenizer puts before a text (BOS). A text that
    is shorter than one sequence is one shorter sequence.
    """
    prefix = tokenizer.encode("")
    ids = tokenizer.encode(text, add_special_tokens=False)[:max_tokens]
    if len(ids) < MIN_TOKENS:
        raise ArgumentError(
            f"{option} has {len(ids)} tokens of text; at least {MIN_TOKENS} are needed",
            next="pass a longer text",
        )
    body = min(length - len(prefix), len(ids))
    count = len(ids) // body
    sequences = [prefix + ids[index * body : (index + 1) * body] for index in range(count)]
    return torch.tensor(sequences, dtype=torch.int64)
