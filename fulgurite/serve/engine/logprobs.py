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

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fulgurite.models.layers import CausalLM
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

    def clip(self, first: int, end: int) -> PromptSpan:
        """The part whose rows are `first` to `end` - 1, counted from `first`; it may be empty."""
        skipped = max(first - self.row, 0)
        start = min(self.start + skipped, self.stop)
        stop = max(min(self.stop, self.start + end - self.row), start)
        return PromptSpan(self.request, max(self.row - first, 0), start, stop)

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


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
    """Log-probabilities of a span on their way to the host; None: other ranks compute them."""

    def __init__(self, span: PromptSpan, words_LW: Tensor | None) -> None:
        self.span = span
        self.words_LW = None if words_LW is None else _start_copy(words_LW)
        self.event: torch.cuda.Event | None = None
        if words_LW is not None and words_LW.is_cuda:
            self.event = torch.cuda.Event()
            self.event.record()

    def store(self) -> None:
        """Wait for them, and add them to their request."""
        if self.event is not None:
            self.event.synchronize()
        request, _, start, stop = self.span
        if self.words_LW is None:
            request.add_prompt_logprobs(start, [None] * (stop - start))
        else:
            tokens = request.tokens[start:stop].tolist()
            request.add_prompt_logprobs(start, unpack_logprobs(tokens, self.words_LW.numpy()))


def compute_prompt_logprobs(
    model: CausalLM, hidden_LD: Tensor, span: PromptSpan, rows_at_once: int
) -> Tensor:
    """Log-probabilities of a span as words [L, W], from the hidden states of the tokens before it.

    The words of a token: its log-probability, its rank, the ids of the K likeliest tokens, and theirs.
    Floats are their bits. So they are one message, whoever needs them (`unpack_logprobs`).
    """
    tokens_L = torch.from_numpy(span.request.tokens[span.start : span.stop]).to(hidden_LD.device)
    count = min(span.request.params.prompt_logprobs or 0, model.config.vocab_size)
    parts = [torch.empty(0, 2 + 2 * count, dtype=torch.int64, device=hidden_LD.device)]
    for first in range(0, span.num_tokens, rows_at_once):
        rows = slice(first, first + rows_at_once)
        logits_LO = model.compute_logits(hidden_LD[rows])
        parts.append(_logprobs_of_prompt(logits_LO, tokens_L[rows], count))
    return torch.cat(parts)


def _logprobs_of_prompt(logits_LO: Tensor, tokens_L: Tensor, count: int) -> Tensor:
    """Of some rows, as words."""
    own_rows = (row_O.to(torch.float32, copy=True) for row_O in logits_LO)  # as `_logprobs_of_rows`
    values_LO = torch.stack([row_O.log_softmax(dim=-1) for row_O in own_rows])
    keys_LO = _sort_keys(values_LO)
    own_L1 = values_LO.gather(1, tokens_L[:, None])
    ranks_L1 = (keys_LO >= keys_LO.gather(1, tokens_L[:, None])).sum(1, keepdim=True)
    ids_LK, top_LK = _find_likeliest(values_LO, keys_LO, count)
    return torch.cat((_float_bits(own_L1), ranks_L1, ids_LK, _float_bits(top_LK)), dim=1)


def _float_bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32).to(torch.int64)


def unpack_logprobs(tokens: Sequence[int], words_LW: np.ndarray) -> list[TokenLogprob]:
    """The log-probabilities of these tokens, of the words that `compute_prompt_logprobs` returns."""
    count = words_LW.shape[1] // 2 - 1
    ids_LK = words_LW[:, 2 : 2 + count].tolist()
    own_L, top_LK = (
        bits.astype(np.int32).view(np.float32).tolist()
        for bits in (words_LW[:, 0], np.ascontiguousarray(words_LW[:, 2 + count :]))
    )
    columns = tokens, own_L, words_LW[:, 1].tolist(), ids_LK, top_LK
    return [
        TokenLogprob(token, own, tuple(zip(ids, top, strict=True)), rank)
        for token, own, rank, ids, top in zip(*columns, strict=True)
    ]


def pack_logprobs(logprobs: Sequence[TokenLogprob]) -> np.ndarray:
    """The inverse of `unpack_logprobs`: words [L, W]."""
    own_L1 = np.array([[one.logprob] for one in logprobs], dtype=np.float32)
    ranks_L1 = np.array([[one.rank] for one in logprobs], dtype=np.int64)
    ids_LK = np.array([[id for id, _ in one.top] for one in logprobs], dtype=np.int64)
    top_LK = np.array([[value for _, value in one.top] for one in logprobs], dtype=np.float32)
    bits = (values.view(np.int32).astype(np.int64) for values in (own_L1, top_LK))
    own_bits_L1, top_bits_LK = bits
    return np.concatenate((own_bits_L1, ranks_L1, ids_LK, top_bits_LK), axis=1)


def _start_copy(tensor: Tensor) -> Tensor:
    """The tensor on the host, once the device has come so far."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
