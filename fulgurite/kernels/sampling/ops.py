"""Choosing tokens: logits, settings and random numbers in, one token a row out.

    1. p = softmax(logits / temperature)
    2. min-p   keep p_i >= min_p * max(p)
    3. top-k   keep the k largest of those
    4. top-p   keep the largest of those until they sum to top_p of what is left
    5. draw    the first token, in order of ids, at which the sum of kept p exceeds u * (all kept)

Each of 2 to 4 keeps the front of the list sorted by falling p; of equal p the smaller id stands in
front, so ties at a boundary are cut, never all kept. The token that crosses top_p is kept. So is
always at least one. Temperature 0 is argmax, the smallest id of equals.

The random number of a row is Philox4x32-10 of the request's seed at the token's position: it depends
on nothing else, so neighbours in a batch, and how often a request was interrupted, never matter.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fulgurite.kernels import registry

IMPLEMENTATIONS = {"cuda": "fulgurite.kernels.sampling.cudagraph:sample_rows"}
GREEDY = {"cuda": "fulgurite.kernels.sampling.triton_sampling:greedy"}
FLOORS = (1e-3, 1e-6)  # p relative to the largest: how far down tokens are sorted at first

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


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """A number in [0, 1) for each seed (64 bit) and position, of 53 random bits."""
    seeds, positions = seeds.astype(np.uint64), positions.astype(np.uint64)
    key = np.stack((seeds & _LOW, seeds >> _HALF), axis=1)
    zero = np.zeros_like(positions)
    bits = philox(key, np.stack((positions & _LOW, positions >> _HALF, zero, zero), axis=1))
    high, low = bits[:, 0] >> np.uint64(5), bits[:, 1] >> np.uint64(6)
    return (high * np.uint64(2**26) + low).astype(np.float64) * 2.0**-53


def greedy(logits_RO: Tensor) -> Tensor:
    """The likeliest token of each row, the smallest id of equals; NaN before all numbers."""
    tokens: Tensor = registry.run(GREEDY, logits_RO.device, _argmax, logits_RO)
    return tokens


def _argmax(logits_RO: Tensor) -> Tensor:
    return logits_RO.argmax(dim=-1)


def sample_rows(logits_RO: Tensor, settings_R5: Tensor) -> Tensor:
    """A token for each row, on the logits' device, without waiting for it.

    settings_R5: temperature, min-p, top-k, top-p and the random number of each row, in float64, on
    the CPU or on the logits' device (then nothing is copied, and a CUDA graph may record the call).
    """
    tokens: Tensor = registry.run(
        IMPLEMENTATIONS, logits_RO.device, one_by_one, logits_RO, settings_R5
    )
    return tokens


def one_by_one(logits_RO: Tensor, settings_R5: Tensor) -> Tensor:
    """The definition: `sample` for each row."""
    return torch.tensor(
        [
            sample(logits_O, temperature, min_p, int(top_k), top_p, random)
            for logits_O, (temperature, min_p, top_k, top_p, random) in zip(
                logits_RO, settings_R5.tolist(), strict=True
            )
        ]
    )


def sample(
    logits_O: Tensor, temperature: float, min_p: float, top_k: int, top_p: float, random: float
) -> int:
    """One row: the token drawn with the random number `random` in [0, 1).

    Logits with a NaN or +inf have no distribution: the likeliest token then.
    """
    most = float(logits_O.max())
    if not math.isfinite(most):
        return int(logits_O.argmax())
    p_O = ((logits_O - most).float() / temperature).exp_()  # relative to the largest
    if top_k or top_p < 1:
        ids = _front(p_O, min_p, top_k, top_p).sort().values
    elif min_p > 0:
        ids = (p_O >= min_p).nonzero().flatten()
    else:
        return draw(p_O, random)
    return int(ids[draw(p_O[ids], random)])


def _front(p_O: Tensor, min_p: float, top_k: int, top_p: float) -> Tensor:
    """The ids that min-p, top-k and top-p keep, sorted by falling p.

    Few tokens are likely: those above a floor are sorted, and only if they don't decide, more.
    """
    for floor in (*(floor for floor in FLOORS if floor > min_p), min_p):
        ids = (p_O >= floor).nonzero().flatten()
        ids = ids[p_O[ids].sort(descending=True, stable=True).indices]
        decided = floor == min_p or 0 < top_k <= len(ids)  # nothing below the floor could be kept
        if top_k:
            ids = ids[:top_k]
        if top_p < 1 and (decided or not top_k):
            p_C = p_O[ids].double()
            left = p_C if decided else p_O[p_O >= min_p] if min_p else p_O
            wanted = top_p * float(left.sum(dtype=torch.float64))
            count = max(1, int((p_C.cumsum(0) - p_C < wanted).sum()))
            decided = decided or count < len(ids)
            ids = ids[:count]
        if decided:
            break
    return ids


def draw(p_C: Tensor, random: float) -> int:
    """The first index at which the running sum exceeds `random` times the whole sum."""
    sums_C = p_C.double().cumsum(0)
    whole = float(sums_C[-1])
    reached = min(random * whole, math.nextafter(whole, 0))  # so that a token with p = 0 never is
    return int(torch.searchsorted(sums_C, reached, right=True))
