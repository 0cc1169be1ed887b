"""Sampling by its definition, in plain torch: what the kernels are compared with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fulgurite.kernels.sampling.table import (
    HAS_BIAS,
    HAS_MASK,
    HAS_PENALTIES,
    MASK_BITS,
    NAN_LOGITS,
    NO_ALLOWED_TOKEN,
    LogitsTable,
)

# p relative to the largest, above which tokens are sorted first
PROBABILITY_FLOORS = (1e-3, 1e-6)


def argmax_reference(logits_RO: Tensor) -> Tensor:
    """`sampling.ops.greedy_sample`."""
    tokens = logits_RO.argmax(dim=-1)
    largest = logits_RO.gather(1, tokens[:, None])[:, 0]  # NaN counts as the largest
    tokens = tokens.masked_fill(largest == -torch.inf, NO_ALLOWED_TOKEN)
    return tokens.masked_fill(largest.isnan(), NAN_LOGITS)


def sample_rows_reference(logits_RO: Tensor, settings_R5: Tensor) -> Tensor:
    """`sampling.ops.sample_rows`: `sample_row` for each row."""
    tokens = [
        sample_row(logits_O, temperature, min_p, int(top_k), top_p, random)
        for logits_O, (temperature, min_p, top_k, top_p, random) in zip(
            logits_RO, settings_R5.tolist(), strict=True
        )
    ]
    return torch.tensor(tokens, dtype=torch.int64, device=logits_RO.device)


def sample_row(
    logits_O: Tensor, temperature: float, min_p: float, top_k: int, top_p: float, random: float
) -> int:
    """The token of one row for the random number `random` in [0, 1).

    Logits with a +inf have no distribution: the likeliest token is returned.
    """
    token = int(argmax_reference(logits_O[None]))
    if token < 0 or temperature == 0 or logits_O[token] == torch.inf:
        return token
    # relative to the largest
    p_O = ((logits_O - logits_O[token]).float() / temperature).exp_()
    if top_k or top_p < 1:
        ids = _filter_tokens(p_O, min_p, top_k, top_p).sort().values
    elif min_p > 0:
        ids = (p_O >= min_p).nonzero().flatten()
    else:
        return sample_from_cdf(p_O, random)
    return int(ids[sample_from_cdf(p_O[ids], random)])


def _filter_tokens(p_O: Tensor, min_p: float, top_k: int, top_p: float) -> Tensor:
    """The ids that min-p, top-k and top-p keep, sorted by falling p.

    Few tokens are likely, so only those above a floor are sorted; more only if these don't decide.
    """
    for floor in (*(floor for floor in PROBABILITY_FLOORS if floor > min_p), min_p):
        ids = (p_O >= floor).nonzero().flatten()
        ids = ids[p_O[ids].sort(descending=True, stable=True).indices]
        is_decided = floor == min_p or 0 < top_k <= len(ids)  # no token below the floor is kept
        if top_k:
            ids = ids[:top_k]
        if top_p < 1 and (is_decided or not top_k):
            p_C = p_O[ids].double()
            left = p_C if is_decided else p_O[p_O >= min_p] if min_p else p_O
            target = top_p * float(left.sum(dtype=torch.float64))
            count = max(1, int((p_C.cumsum(0) - p_C < target).sum()))
            is_decided = is_decided or count < len(ids)
            ids = ids[:count]
        if is_decided:
            break
    return ids


def sample_from_cdf(p_C: Tensor, random: float) -> int:
    """The first index at which the cumulative sum exceeds `random` times the total."""
    cdf_C = p_C.double().cumsum(0)
    total = float(cdf_C[-1])
    target = min(random * total, math.nextafter(total, 0))  # never a token with p = 0
    return int(torch.searchsorted(cdf_C, target, right=True))


def process_logits_reference(
    logits_RO: Tensor, processing_R5: Tensor, table: LogitsTable
) -> Tensor:
    """`sampling.ops.process_logits`."""
    processed_RO = logits_RO.float().clone()
    for x_O, (row, flags, *penalties) in zip(processed_RO, processing_R5.tolist(), strict=True):
        if int(flags) & HAS_BIAS:
            x_O += table.bias_WO[int(row)]
        if int(flags) & HAS_MASK:
            x_O.masked_fill_(~unpack_mask(table.allowed_WM[int(row)], len(x_O)), -torch.inf)
        if int(flags) & HAS_PENALTIES:
            _apply_penalties(x_O, table.counts_WO[int(row)], *penalties)
    return processed_RO


def _apply_penalties(
    x_O: Tensor, counts_O: Tensor, repetition: float, frequency: float, presence: float
) -> None:
    is_seen, replies_O = counts_O > 0, counts_O >> 1
    x_O.copy_(torch.where(is_seen, torch.where(x_O < 0, x_O * repetition, x_O / repetition), x_O))
    penalty_O = replies_O.double() * frequency + presence
    x_O -= torch.where(replies_O > 0, penalty_O, 0.0).float()


def unpack_mask(words_M: Tensor, vocab_size: int) -> Tensor:
    """The bool mask of packed words."""
    shifts = torch.arange(MASK_BITS, dtype=torch.int32, device=words_M.device)
    return (words_M[:, None] >> shifts & 1).bool().flatten()[:vocab_size]
