"""The sampler's state on the device: running requests in, up-to-date rows of a `LogitsTable` out.

A request's row is its row of the block tables. Counts, bias and mask are written when the request
gets the row, and after that only what changes: each sampled token is counted on the device, the mask
is written again when `min_tokens` is reached, and in every step for a grammar. A grammar's mask is
written apart from the rest, as late as possible: another thread computes it while the model runs.

A row's state on the host names the request that it was written for. It is cleared before a write and
before a step that counts, and set afterwards. So an interrupted step leaves rows that are written
again from the request's tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.kernels.sampling.table import (
    HAS_BIAS,
    HAS_MASK,
    HAS_PENALTIES,
    LogitsTable,
    count_tokens,
    mask_words,
    pack_mask,
)
from fulgurite.serve.engine.request import Request

ALL_ALLOWED = -1  # a word of a mask


class SamplingRows:
    """The rows of up to `num_rows` running requests, and one more for padding.

    The table is allocated with the first request that needs it. `last_tokens_W` has the token that
    the last step sampled for each row.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.num_rows, self.vocab_size, self.device = num_rows, vocab_size, device
        self.last_tokens_W = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self.table: LogitsTable | None = None
        # By row: for which request, and of how many tokens, the counts were written; and so on.
        self.counted: list[tuple[Request, int] | None] = [None] * num_rows
        self.biased: list[Request | None] = [None] * num_rows
        self.masked: list[tuple[Request, bool] | None] = [None] * num_rows
        self.fixed_masks: list[tuple[Request, bool, Tensor] | None] = [None] * num_rows

    @property
    def padding_row(self) -> int:
        return self.num_rows

    def has_counts(self, request: Request) -> bool:
        """Whether the row has the counts of all tokens, with those that are being sampled."""
        return self.counted[request.block_table_row] == (request, request.scheduled_length)

    def write(self, request: Request) -> int:
        """Bring the request's row up to date; returns the flags of what applies."""
        params, row = request.params, request.block_table_row
        assert row >= 0, f"{request.id} is sampled, but has no row"
        if self.table is None:
            self.table = LogitsTable.allocate(self.num_rows + 1, self.vocab_size, self.device)
        flags = 0
        if params.has_penalties:
            flags |= HAS_PENALTIES
            if not self.has_counts(request):
                self._write_counts(request, self.table.counts_WO[row])
        if params.logit_bias:
            flags |= HAS_BIAS
            if self.biased[row] is not request:
                self._write_bias(request, self.table.bias_WO[row])
        if request.constraint is None and self._write_mask(request, self.table.allowed_WM[row]):
            flags |= HAS_MASK
        return flags

    def write_grammar_mask(self, request: Request) -> bool:
        """Write the mask of a request with a constraint; returns whether there is one.

        If the constraint raises, no token is allowed and the request has the error.
        """
        assert self.table is not None, "`write` comes before"
        assert request.constraint is not None, f"{request.id} has no constraint"
        allowed_M = self.table.allowed_WM[request.block_table_row]
        request.constraint_error = None
        try:
            mask = request.constraint.allowed_tokens()
            words_M = None if mask is None else self._pack_grammar_mask(mask, request)
        except Exception as error:  # a grammar may raise anything; it concerns this request only
            request.constraint_error = str(error) or type(error).__name__
            words_M = torch.zeros_like(allowed_M, device="cpu")
        self.masked[request.block_table_row] = None
        fixed_M = self._make_fixed_mask(request)
        if words_M is not None and fixed_M is not None:
            words_M = words_M & fixed_M
        written = fixed_M if words_M is None else words_M
        if written is not None:
            allowed_M.copy_(written)
        return written is not None

    def _write_counts(self, request: Request, counts_O: Tensor) -> None:
        assert not request.num_pending, (
            f"a token of {request.id} is not known, so it can't be counted"
        )
        row = request.block_table_row
        self.counted[row] = None
        tokens = torch.from_numpy(request.tokens[: request.length]).to(self.device)
        count_tokens(counts_O, tokens, request.prompt_length)
        self.counted[row] = request, request.length

    def _write_bias(self, request: Request, bias_O: Tensor) -> None:
        row, bias = request.block_table_row, np.zeros(self.vocab_size, dtype=np.float32)
        bias[list(request.params.logit_bias)] = list(request.params.logit_bias.values())
        self.biased[row] = None
        bias_O.copy_(torch.from_numpy(bias))
        self.biased[row] = request

    def _write_mask(self, request: Request, allowed_M: Tensor) -> bool:
        """Write the mask if it changed; returns whether there is one. For requests without grammar."""
        row, cannot_stop = request.block_table_row, cannot_stop_yet(request)
        if self.masked[row] == (request, cannot_stop):
            return True
        self.masked[row] = None
        words_M = self._make_fixed_mask(request)
        if words_M is None:
            return False
        allowed_M.copy_(words_M)
        self.masked[row] = request, cannot_stop
        return True

    def _make_fixed_mask(self, request: Request) -> Tensor | None:
        """The mask of the request's settings; None: every token. Cached for the row."""
        params, row, cannot_stop = request.params, request.block_table_row, cannot_stop_yet(request)
        hidden = request.hidden_ids
        if not (params.banned_token_ids or cannot_stop or hidden) and (
            params.allowed_token_ids is None
        ):
            return None
        cached = self.fixed_masks[row]
        if cached is None or cached[:2] != (request, cannot_stop):
            banned = {*params.banned_token_ids, *hidden, *(request.stop_ids if cannot_stop else ())}
            words_M = self._make_mask(params.allowed_token_ids, banned)
            cached = self.fixed_masks[row] = request, cannot_stop, words_M
        return cached[2]

    def _make_mask(self, allowed_ids: object, banned: set[int]) -> Tensor:
        allowed = torch.zeros(self.vocab_size, dtype=torch.bool)
        allowed[slice(None) if allowed_ids is None else list(allowed_ids)] = True  # type: ignore[call-overload]
        allowed[list(banned)] = False
        return pack_mask(allowed)

    def _pack_grammar_mask(self, mask: Tensor, request: Request) -> Tensor:
        """A grammar's mask as words; tokens past its end are not allowed."""
        words, size = mask_words(self.vocab_size), len(mask)
        is_packed = mask.dtype == torch.int32
        limit = words if is_packed else self.vocab_size
        if mask.dim() != 1 or mask.dtype not in (torch.bool, torch.int32) or size > limit:
            dtype = str(mask.dtype).removeprefix("torch.")
            raise ArgumentError(
                f"the constraint of {request.id} gave a mask of {dtype} {list(mask.shape)}",
                next=f"give bool [{self.vocab_size}], or int32 [{words}] with a bit a token",
            )
        packed = mask.cpu() if is_packed else pack_mask(mask.cpu())
        return torch.nn.functional.pad(packed, (0, words - len(packed)))

    def begin_counting(self, requests: list[Request]) -> None:
        """A step that counts these requests' tokens is about to run."""
        for request in requests:
            if request.params.has_penalties:
                self.counted[request.block_table_row] = None

    def finish_counting(self, requests: list[Request]) -> None:
        """The step was launched: one more token of each is counted."""
        for request in requests:
            if request.params.has_penalties:
                length = request.scheduled_length + 1
                self.counted[request.block_table_row] = request, length


def cannot_stop_yet(request: Request) -> bool:
    """Whether `min_tokens` bans the stop and end tokens for the next token."""
    reply_length = request.scheduled_length - request.prompt_length
    return reply_length < request.params.min_tokens and bool(request.stop_ids)
