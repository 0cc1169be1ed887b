"""Sampling: logits, settings and random numbers in, one token per row out.

    1. logits + bias, -inf where the mask allows no token, penalties       (`process_logits`)
    2. p = softmax(logits / temperature)
    3. min-p   keep p_i >= min_p * max(p)
    4. top-k   keep the k largest of those
    5. top-p   keep the largest of those until they sum to top_p of what is left
    6. sample  the first token, in order of ids, at which the sum of kept p exceeds u * (their sum)

Steps 3 to 5 each keep a prefix of the tokens sorted by falling p. Of equal p the smaller id comes
first, so ties at the boundary are cut, not all kept. The token that crosses top_p is kept. At least
one token is kept. Temperature 0 is argmax; of equal logits the smallest id. A row with a NaN gives
`NAN_LOGITS`, one in which every token is -inf gives `NO_ALLOWED_TOKEN`; both are negative.

The random number of a row is Philox4x32-10 of the request's seed at the token's position. It
depends on nothing else, so the batch's other rows and preemptions of the request never change it.
The settings of rows, and the state on the device that step 1 reads, are in `table.py`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fulgurite.kernels import registry
from fulgurite.kernels.sampling import cpu, triton_logits, triton_sampling
from fulgurite.kernels.sampling.reference import (
    argmax_reference,
    process_logits_reference,
    sample_rows_reference,
)
from fulgurite.kernels.sampling.table import HAS_PENALTIES, LogitsTable

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
    """The likeliest token of each row, the smallest id of equals."""
    tokens: Tensor = registry.dispatch(
        GREEDY_KERNELS, logits_RO.device, argmax_reference, logits_RO
    )
    return tokens


def sample_rows(
    logits_RO: Tensor, settings_R5: Tensor, uses_threshold: bool | None = None
) -> Tensor:
    """A token for each row, on the logits' device, without a device sync.

    settings_R5      float64, on the CPU, or on the logits' device (then a CUDA graph may capture the
                     call)
    uses_threshold   whether some row has top-k or top-p; None: found out from the settings
    """
    tokens: Tensor = registry.dispatch(
        SAMPLE_KERNELS, logits_RO.device, _sample_rows, logits_RO, settings_R5, uses_threshold
    )
    return tokens


def process_logits(logits_RO: Tensor, processing_R5: Tensor, table: LogitsTable) -> Tensor:
    """Logits with bias, mask and penalties in float32; `logits_RO` stays as it is."""
    processed: Tensor = registry.dispatch(
        PROCESS_KERNELS, logits_RO.device, process_logits_reference, logits_RO, processing_R5, table
    )
    return processed


def sample_tokens(
    logits_RO: Tensor,
    settings_R5: Tensor | None,
    processing_R5: Tensor | None = None,
    table: LogitsTable | None = None,
    uses_threshold: bool | None = None,
) -> Tensor:
    """All steps: a token for each row. No settings: every row is greedy. No table: no step 1.

    Settings and processing lie on the logits' device. There is no device sync, so a CUDA graph may
    capture the call.
    """
    arguments = (logits_RO, settings_R5, processing_R5, table, uses_threshold)
    tokens: Tensor = registry.dispatch(
        SAMPLE_TOKENS_KERNELS, logits_RO.device, _sample_in_steps, *arguments
    )
    return tokens


def record_tokens(
    tokens_R: Tensor, processing_R5: Tensor, last_tokens_W: Tensor, counts_WO: Tensor | None
) -> None:
    """Store the sampled token of each row of the table, 0 for a failed row; count it there, if the
    row has penalties. Several rows of the batch may share a row of the table that is only padding.
    """
    registry.dispatch(
        RECORD_KERNELS, tokens_R.device, _record_tokens, tokens_R, processing_R5, last_tokens_W,
        counts_WO,
    )  # fmt: skip


def fill_pending_tokens(token_ids_T: Tensor, rows_T: Tensor, last_tokens_W: Tensor) -> None:
    """Replace negative token ids by the last sampled token of their row, in place."""
    registry.dispatch(
        PENDING_KERNELS, token_ids_T.device, _fill_pending_tokens, token_ids_T, rows_T,
        last_tokens_W,
    )  # fmt: skip


# ---- in torch ------------------------------------------------------------------------------------


def _sample_rows(logits_RO: Tensor, settings_R5: Tensor, uses_threshold: bool | None) -> Tensor:
    return sample_rows_reference(logits_RO, settings_R5)


def _sample_in_steps(
    logits_RO: Tensor,
    settings_R5: Tensor | None,
    processing_R5: Tensor | None,
    table: LogitsTable | None,
    uses_threshold: bool | None,
) -> Tensor:
    if table is not None and processing_R5 is not None:
        logits_RO = process_logits(logits_RO, processing_R5, table)
    if settings_R5 is None:
        return greedy_sample(logits_RO)
    return sample_rows(logits_RO, settings_R5, uses_threshold)


def _record_tokens(
    tokens_R: Tensor, processing_R5: Tensor, last_tokens_W: Tensor, counts_WO: Tensor | None
) -> None:
    tokens_R = tokens_R.clamp(min=0)
    rows_R, flags_R = processing_R5[:, :2].to(torch.int64).unbind(1)
    last_tokens_W[rows_R] = tokens_R
    if counts_WO is not None:
        added_R = ((flags_R & HAS_PENALTIES) > 0).to(torch.int32) * 2
        cells_R = rows_R * counts_WO.shape[1] + tokens_R
        counts_WO.view(-1).index_add_(0, cells_R, added_R)


def _fill_pending_tokens(token_ids_T: Tensor, rows_T: Tensor, last_tokens_W: Tensor) -> None:
    token_ids_T.copy_(torch.where(token_ids_T < 0, last_tokens_W[rows_T], token_ids_T))


SAMPLE_KERNELS: dict[str, registry.Kernel] = {
    "cpu": cpu.sample_rows,
    "cuda": triton_sampling.sample_rows,
}
GREEDY_KERNELS: dict[str, registry.Kernel] = {
    "cpu": cpu.greedy_sample,
    "cuda": triton_sampling.greedy_sample,
}
PROCESS_KERNELS: dict[str, registry.Kernel] = {"cuda": triton_logits.process_logits}
SAMPLE_TOKENS_KERNELS: dict[str, registry.Kernel] = {
    "cpu": cpu.sample_tokens,
    "cuda": _sample_in_steps,
}
RECORD_KERNELS: dict[str, registry.Kernel] = {
    "cpu": cpu.record_tokens,
    "cuda": triton_logits.record_tokens,
}
PENDING_KERNELS: dict[str, registry.Kernel] = {
    "cpu": _fill_pending_tokens,
    "cuda": triton_logits.fill_pending_tokens,
}
