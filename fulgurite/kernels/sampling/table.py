"""What sampling keeps on the device: a row of `LogitsTable` for each running request.

    counts_WO    int32, 2 * (occurrences in the reply) + (1 if the prompt has the token)
    bias_WO      float32, added to the logits
    allowed_WM   int32, bit i % 32 of word i // 32: whether token i may be sampled

The settings of R sampled rows come in two float64 tensors:

    settings_R5     temperature (0: the likeliest token), min-p, top-k, top-p, random number in [0, 1)
    processing_R5   row of the table, flags of what applies, repetition, frequency, presence penalty

Shapes: W rows of the table; O vocabulary; M words of a mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_SETTINGS = NUM_PROCESSING = 5
HAS_BIAS, HAS_MASK, HAS_PENALTIES = 1, 2, 4  # flags of a row's processing
# What sampling returns instead of a token, if there is none.
NAN_LOGITS, NO_ALLOWED_TOKEN = -1, -2
MASK_BITS = 32


def mask_words(vocab_size: int) -> int:
    """The number of words of an allowed-token mask."""
    return -(-vocab_size // MASK_BITS)


def table_row_bytes(vocab_size: int) -> int:
    """Bytes of one row of a `LogitsTable`."""
    return 8 * vocab_size + 4 * mask_words(vocab_size)


@dataclass(frozen=True)
class LogitsTable:
    """Counts, biases and masks of W requests; rows are rewritten when a request gets them."""

    counts_WO: Tensor
    bias_WO: Tensor
    allowed_WM: Tensor

    @classmethod
    def allocate(cls, rows: int, vocab_size: int, device: torch.device) -> LogitsTable:
        return cls(
            torch.zeros(rows, vocab_size, dtype=torch.int32, device=device),
            torch.zeros(rows, vocab_size, dtype=torch.float32, device=device),
            torch.zeros(rows, mask_words(vocab_size), dtype=torch.int32, device=device),
        )


def count_tokens(counts_O: Tensor, tokens: Tensor, prompt_length: int) -> None:
    """Rewrite one request's row of counts from its tokens, which lie on the row's device."""
    counts_O.zero_()
    counts_O.index_fill_(0, tokens[:prompt_length], 1)
    reply = tokens[prompt_length:]
    counts_O.index_add_(0, reply, torch.full_like(reply, 2, dtype=torch.int32))


def pack_mask(allowed: Tensor) -> Tensor:
    """A bool mask over tokens as int32 words."""
    bits = torch.zeros(mask_words(len(allowed)) * MASK_BITS, dtype=torch.uint8)
    bits[: len(allowed)] = allowed
    shifts = torch.arange(8, dtype=torch.uint8)
    return (bits.view(-1, 8) << shifts).sum(1, dtype=torch.uint8).view(torch.int32)
