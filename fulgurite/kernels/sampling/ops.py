"""Sampling: logits, settings and random numbers in, one token per row out.

    1. p = softmax(logits / temperature)
    2. min-p   keep p_i >= min_p * max(p)
    3. top-k   keep the k largest of those
    4. top-p   keep the largest of those until they sum to top_p of what is left
    5. sample  the first token, in order of ids, at which the sum of kept p exceeds u * (their sum)

Steps 2 to 4 each keep a prefix of the tokens sorted by falling p. Of equal p the smaller id comes
first, so ties at the boundary are cut, not all kept. The token that crosses top_p is kept. At least
one token is kept. Temperature 0 is argmax; of equal logits the smallest id.

The random number of a row is Philox4x32-10 of the request's seed at the token's position. It
depends on nothing else, so the batch's other rows and preemptions of the request never change it.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fulgurite.kernels import registry
from fulgurite.kernels.sampling import cudagraph, triton_sampling

SAMPLE_KERNELS: dict[str, registry.Kernel] = {"cuda": cudagraph.sample_rows}
GREEDY_KERNELS: dict[str, registry.Kernel] = {"cuda": triton_sampling.greedy_sample}
# p relative to the largest, above which tokens are sorted first
PROBABILITY_FLOORS = (1e-3, 1e-6)

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox(key: np.ndarray, counter: np.ndarray) -> np.ndarray:
    """Philox4x32-10: keys [R, 2] and counters [R, 4] of 32-bit numbers -> [R, 4] random ones."""
    k0, k1 = (key[:, index].astype(np.uint64) for index in range(2))
    c0, c1, c2, c3 = (counter[:, index].astype(np.uint64) for index in range(4))
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (second >> _HALF) ^ c1 ^ k0,
            second & _LOW,
            (first >> _HALF) ^ c3 ^ k1,
            first & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack((c0, c1, c2, c3), axis=1)


def philox_uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """A number in [0, 1) of 53 random bits for each seed (64 bit) and position."""
    seeds, positions = seeds.astype(np.uint64), positions.astype(np.uint64)
    key = np.stack((seeds & _LOW, seeds >> _HALF), axis=1)
    zero = np.zeros_like(positions)
    bits = philox(key, np.stack((positions & _LOW, positions >> _HALF, zero, zero), axis=1))
    high, low = bits[:, 0] >> np.uint64(5), bits[:, 1] >> np.uint64(6)
    return (high * np.uint64(2**26) + low).astype(np.float64) * 2.0**-53


def greedy_sample(logits_RO: Tensor) -> Tensor:
    """The likeliest token of each row, the smallest id of equals; NaN counts as the largest."""
    tokens: Tensor = registry.dispatch(GREEDY_KERNELS, logits_RO.device, _argmax, logits_RO)
    return tokens


def _argmax(logits_RO: Tensor) -> Tensor:
    return logits_RO.argmax(dim=-1)


def sample_rows(logits_RO: Tensor, settings_R5: Tensor) -> Tensor:
    """A token for each row, on the logits' device, without a device sync.

    settings_R5   float64: temperature, min-p, top-k, top-p and the random number of each row; on
                  the CPU, or on the logits' device (then a CUDA graph may capture the call)
    """
    tokens: Tensor = registry.dispatch(
        SAMPLE_KERNELS, logits_RO.device, sample_rows_reference, logits_RO, settings_R5
    )
    return tokens


def sample_rows_reference(logits_RO: Tensor, settings_R5: Tensor) -> Tensor:
    """`sample_row` for each row."""
    return torch.tensor(
        [
            sample_row(logits_O, temperature, min_p, int(top_k), top_p, random)
            for logits_O, (temperature, min_p, top_k, top_p, random) in zip(
                logits_RO, settings_R5.tolist(), strict=True
            )
        ]
    )


def sample_row(
    logits_O: Tensor, temperature: float, min_p: float, top_k: int, top_p: float, random: float
) -> int:
    """The token of one row for the random number `random` in [0, 1).

    Logits with a NaN or +inf have no distribution: the likeliest token is returned.
    """
    max_logit = float(logits_O.max())
    if not math.isfinite(max_logit):
        return int(logits_O.argmax())
    p_O = ((logits_O - max_logit).float() / temperature).exp_()  # relative to the largest
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
