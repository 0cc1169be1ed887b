"""Log-probabilities: raw logits and tokens in, `TokenLogprob`s out.

They are computed on the device for a few rows at a time, and copied to the host with the tokens. The
most likely tokens are ordered by falling log-probability, of equals by the smaller id; so they don't
depend on how many tokens other requests ask for.

Those of a prompt come from the logits of its tokens, which no step computes otherwise. Their hidden
states go through the head a few rows at a time, so that logits of whole prompts never exist.

Shapes: R requests; L rows whose log-probabilities are computed; K most of them; O vocabulary; T tokens of
the step; D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fulgurite.plan.memory import LOGPROB_ROWS
from fulgurite.serve.engine.request import Request, TokenLogprob
from fulgurite.serve.engine.scheduler import ScheduledChunk

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
    return sampled_L, *_find_likeliest(values_LO, _sort_keys(values_LO), most)


def _find_likeliest(values_LO: Tensor, keys_LO: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids of the `count` likeliest tokens of each row, and their log-probabilities."""
    keys_LK = keys_LO.topk(count, dim=-1).values
    ids_LK = _LOW_BITS - (keys_LK & _LOW_BITS)
    return ids_LK, values_LO.gather(1, ids_LK)


def _sort_keys(values_LO: Tensor) -> Tensor:
    """int64 that order by value, of equals the smaller id first; all keys of a row differ."""
    bits = values_LO.contiguous().view(torch.int32)
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(torch.int64)
    ids_O = torch.arange(values_LO.shape[1], device=values_LO.device)
    return (ordered << 32) | (_LOW_BITS - ids_O)


# ---- prompts --------------------------------------------------------------------------------------


class PromptSpan(NamedTuple):
    """Tokens of a prompt, positions `start` to `stop`, whose log-probabilities a step computes.

    `row`: of the step's batch, with the token before the first of them.
    """

    request: Request
    row: int
    start: int
    stop: int


def find_prompt_spans(chunks: Sequence[ScheduledChunk]) -> Iterator[PromptSpan]:
    """The prompt tokens of a step whose log-probabilities are asked for and not known yet."""
    row = 0
    for chunk in chunks:
        request = chunk.request
        if request.params.prompt_logprobs is not None:
            start = max(chunk.start + 1, len(request.prompt_logprobs))
            stop = min(chunk.end + 1, request.prompt_length)
            if start < stop:
                yield PromptSpan(request, row + start - 1 - chunk.start, start, stop)
        row += chunk.num_tokens


class PendingPromptLogprobs:
    """Log-probabilities of a span on their way to the host."""

    def __init__(
        self, span: PromptSpan, own_L: Tensor, ranks_L: Tensor, ids_LK: Tensor, top_LK: Tensor
    ) -> None:
        self.span = span
        self.own_L, self.ranks_L, self.ids_LK, self.top_LK = (
            _start_copy(tensor) for tensor in (own_L, ranks_L, ids_LK, top_LK)
        )
        self.event: torch.cuda.Event | None = None
        if own_L.is_cuda:
            self.event = torch.cuda.Event()
            self.event.record()

    def store(self) -> None:
        """Wait for them, and add them to their request."""
        if self.event is not None:
            self.event.synchronize()
        request, _, start, stop = self.span
        columns = request.tokens[start:stop], self.own_L, self.ranks_L, self.ids_LK, self.top_LK
        rows = zip(*(column.tolist() for column in columns), strict=True)
        logprobs = [
            TokenLogprob(token, own, tuple(zip(ids, top, strict=True)), rank)
            for token, own, rank, ids, top in rows
        ]
        request.add_prompt_logprobs(start, logprobs)


def compute_prompt_logprobs(
    compute_logits: Callable[[Tensor], Tensor],
    hidden_TD: Tensor,
    span: PromptSpan,
    rows_at_once: int,
) -> PendingPromptLogprobs:
    """Log-probabilities of a span, from the hidden states of the step."""
    request, row, start, stop = span
    tokens_L = torch.from_numpy(request.tokens[start:stop]).to(hidden_TD.device)
    hidden_LD = hidden_TD[row : row + stop - start]
    parts = []
    for first in range(0, stop - start, rows_at_once):
        rows = slice(first, first + rows_at_once)
        logits_LO = compute_logits(hidden_LD[rows])
        parts.append(_logprobs_of_prompt(logits_LO, tokens_L[rows], request))
    return PendingPromptLogprobs(span, *(torch.cat(part) for part in zip(*parts, strict=True)))


def _logprobs_of_prompt(
    logits_LO: Tensor, tokens_L: Tensor, request: Request
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of some rows: that of the prompt's own token, its rank, ids of the likeliest, and theirs."""
    own_rows = (row_O.to(torch.float32, copy=True) for row_O in logits_LO)  # as `_logprobs_of_rows`
    values_LO = torch.stack([row_O.log_softmax(dim=-1) for row_O in own_rows])
    keys_LO = _sort_keys(values_LO)
    own_L = values_LO.gather(1, tokens_L[:, None])[:, 0]
    ranks_L = (keys_LO >= keys_LO.gather(1, tokens_L[:, None])).sum(1)
    count = min(request.params.prompt_logprobs or 0, logits_LO.shape[1])
    return own_L, ranks_L, *_find_likeliest(values_LO, keys_LO, count)


def _start_copy(tensor: Tensor) -> Tensor:
    """The tensor on the host, once the device has come so far."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
