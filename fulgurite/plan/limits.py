"""What an engine is built for: user options in, checked `EngineLimits` out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fulgurite.errors import ArgumentError
from fulgurite.plan.kv_cache import KV_CACHE_DTYPES

# Defaults by device type.
BLOCK_SIZES = {"cpu": 16, "cuda": 64}  # tokens of a KV block; on GPUs a tile of keys is one block
MAX_SEQUENCES = {"cpu": 16, "cuda": 64}
MAX_BATCHED_TOKENS = {"cpu": 512, "cuda": 4096}


@dataclass(frozen=True)
class EngineLimits:
    """The sizes that an engine allocates for.

    context              most tokens of one request, prompt and reply together
    max_sequences        most requests that run at once
    max_batched_tokens   most tokens that one step computes
    max_mixed_tokens     the same of a step that computes prompts beside next tokens of replies; None: as
                         above
    block_size           tokens of one KV-cache block
    kv_dtype             dtype of cached keys and values
    cache_tokens         tokens that the KV cache holds; None: `max_sequences` whole contexts if
                         they fit, otherwise as many as fit
    context_parallel     ranks over which the tokens of a block are distributed
    """

    context: int
    max_sequences: int
    max_batched_tokens: int
    block_size: int
    kv_dtype: torch.dtype
    cache_tokens: int | None = None
    max_mixed_tokens: int | None = None
    context_parallel: int = 1

    @property
    def rank_block_size(self) -> int:
        """Tokens of a block that one rank holds."""
        return self.block_size // self.context_parallel


def make_engine_limits(
    max_positions: int,
    dtype: torch.dtype,
    *,
    kv_dtype: str = "auto",
    context: int | None = None,
    max_sequences: int = MAX_SEQUENCES["cpu"],
    max_batched_tokens: int = MAX_BATCHED_TOKENS["cpu"],
    max_mixed_tokens: int | None = None,
    cache_tokens: int | None = None,
    block_size: int = BLOCK_SIZES["cpu"],
) -> EngineLimits:
    """Check the options and resolve their defaults.

    `max_positions` and `dtype` are the model's.
    """
    if kv_dtype != "auto" and kv_dtype not in KV_CACHE_DTYPES:
        raise ArgumentError(
            f"unknown kv_dtype={kv_dtype!r}", next=f"one of auto, {', '.join(KV_CACHE_DTYPES)}"
        )
    if context is not None and not 2 <= context <= max_positions:
        raise ArgumentError(
            f"a context of {context} tokens is not possible",
            next=f"this model takes 2 to {max_positions}",
        )
    for name, value in (
        ("max_sequences", max_sequences),
        ("max_batched_tokens", max_batched_tokens),
        ("max_mixed_tokens", max_mixed_tokens),
    ):
        if value is not None and value < 1:
            raise ArgumentError(f"{name}={value} must be 1 or more")
    if cache_tokens is not None and cache_tokens < block_size:
        raise ArgumentError(f"cache_tokens={cache_tokens} must be {block_size} or more")
    return EngineLimits(
        context=context or max_positions,
        max_sequences=max_sequences,
        max_batched_tokens=max(max_batched_tokens, max_sequences),
        block_size=block_size,
        kv_dtype=dtype if kv_dtype == "auto" else KV_CACHE_DTYPES[kv_dtype],
        cache_tokens=cache_tokens,
        max_mixed_tokens=max_mixed_tokens,
    )
