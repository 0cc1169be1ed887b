"""Log-probabilities: raw logits and sampled tokens in, `TokenLogprob`s out.

They are computed on the device for a few rows at a time, and copied to the host with the tokens. The
most likely tokens are ordered by falling log-probability, of equals by the smaller id; so they don't
depend on how many tokens other requests ask for.

Shapes: R requests; L requests that ask for log-probabilities; K most of them; O vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fulgurite.plan.memory import LOGPROB_ROWS
from fulgurite.serve.engine.request import Request, TokenLogprob

ROWS_AT_ONCE = LOGPROB_ROWS  # bounds the memory
_LOW_BITS = 0xFFFFFFFF


class PendingLogprobs:
    """Log-probabilities on their way to the host; `read` once the step's tokens are there."""

    def __init__(
        self, rows: list[int], counts: list[int], sampled_L: Tensor, ids_LK: Tensor, top_LK: Tensor
    ) -> None:
        self.rows, self.counts = rows, counts
        self.sampled_L, self.ids_LK, self.top_LK = (
            _start_copy(tensor) for tensor in (sampled_L, ids_LK, top_LK)
        )

    def read(self, tokens: Sequence[int]) -> list[TokenLogprob | None]:
        """For each token of the step; None for requests that did not ask."""
        results: list[TokenLogprob | None] = [None] * len(tokens)
        values = self.sampled_L.tolist(), self.ids_LK.tolist(), self.top_LK.tolist()
        for row, count, logprob, ids, top in zip(self.rows, self.counts, *values, strict=True):
            pairs = tuple(zip(ids[:count], top[:count], strict=True))
            results[row] = TokenLogprob(tokens[row], logprob, pairs)
        return results


def compute_logprobs(
    logits_RO: Tensor, tokens_R: Tensor, requests: Sequence[Request]
) -> PendingLogprobs | None:
    """Log-probabilities of the sampled token and of the most likely ones; None if nobody asks."""
    vocab_size = logits_RO.shape[1]
    wanted = {
        row: min(request.params.logprobs, vocab_size)
        for row, request in enumerate(requests)
        if request.params.logprobs is not None
    }
    if not wanted:
        return None
    rows, counts, most = list(wanted), list(wanted.values()), max(wanted.values())
    parts = [
        _logprobs_of_rows(logits_RO, tokens_R, rows[start : start + ROWS_AT_ONCE], most)
        for start in range(0, len(rows), ROWS_AT_ONCE)
    ]
    return PendingLogprobs(rows, counts, *(torch.cat(part) for part in zip(*parts, strict=True)))


def _logprobs_of_rows(
    logits_RO: Tensor, tokens_R: Tensor, rows: list[int], most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of some rows: that of the sampled token, ids of the `most` likely ones, and theirs."""
    # Row by row, each at an address of its own: the sum of a GPU's kernel depends on the alignment.
    own_rows = (logits_RO[row].to(torch.float32, copy=True) for row in rows)
    values_LO = torch.stack([row_O.log_softmax(dim=-1) for row_O in own_rows])
    tokens_L = torch.stack([tokens_R[row] for row in rows]).clamp(min=0)
    sampled_L = values_LO.gather(1, tokens_L[:, None])[:, 0]
    if not most:
        empty = values_LO[:, :0]
        return sampled_L, empty.to(torch.int64), empty
    keys_LK = _sort_keys(values_LO).topk(most, dim=-1).values
    ids_LK = _LOW_BITS - (keys_LK & _LOW_BITS)
    return sampled_L, ids_LK, values_LO.gather(1, ids_LK)


def _sort_keys(values_LO: Tensor) -> Tensor:
    """int64 that order by value, of equals the smaller id first; all keys of a row differ."""
    bits = values_LO.contiguous().view(torch.int32)
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(torch.int64)
    ids_O = torch.arange(values_LO.shape[1], device=values_LO.device)
    return (ordered << 32) | (_LOW_BITS - ids_O)


def _start_copy(tensor: Tensor) -> Tensor:
    """The tensor on the host, once the device has come so far."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
