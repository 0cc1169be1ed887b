"""A compiled grammar of one request: tokens in, masks and forced tokens out (llguidance's LLMatcher).

Two threads use it: the engine's, and one that computes the next mask while the model runs. A mask is
computed once, by whoever comes first.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fulgurite.errors import FulguriteError
from fulgurite.serve.structured.limits import MAX_ERROR_CHARACTERS
from fulgurite.serve.structured.mask_threads import MaskThreads
from fulgurite.serve.structured.special_tokens import MARK

if TYPE_CHECKING:
    from torch import Tensor

MASK_BITS = 32


@dataclass(frozen=True)
class MaskLayout:
    """The masks of a vocabulary.

    num_tokens      tokens of llguidance's masks
    num_words       words of the model's masks, which may be fewer
    eos_token_ids   tokens that a mask allows where the reply may end
    hidden_token    an end token that only llguidance has: the model must not sample it
    """

    num_tokens: int
    num_words: int
    eos_token_ids: tuple[int, ...] = ()
    hidden_token: int | None = None


class GrammarConstraint:
    """A `Grammar` (serve/engine/grammar.py).

    `is_empty`: the grammar matches nothing but the empty text.
    """

    def __init__(
        self, matcher: Any, layout: MaskLayout, threads: MaskThreads, is_empty: bool = False
    ) -> None:
        self.matcher, self.threads, self.is_empty = matcher, threads, is_empty
        self.layout = layout
        self.words = np.zeros(-(-layout.num_tokens // MASK_BITS), dtype=np.uint32)
        self.mask: Tensor | None = None  # the same memory
        self.has_mask = self.is_started = False
        self.num_tokens = 0  # of the reply so far
        self.lock = threading.Lock()  # every call of the matcher needs it

    def start_mask(self) -> None:
        """Start to compute the next mask in another thread, once."""
        if not self.is_started:
            self.is_started = True
            self.threads.submit(partial(self._compute_early, self.num_tokens))

    def _compute_early(self, num_tokens: int) -> None:
        with self.lock:
            if num_tokens == self.num_tokens:  # or else the job came too late
                self._compute()

    def compute_mask(self) -> None:
        """Compute the next mask, unless it was."""
        with self.lock:
            self._compute()

    def _compute(self) -> None:
        if self.has_mask:
            return
        self.matcher.unsafe_compute_mask_ptr(  # without the GIL
            self.words.ctypes.data, self.words.nbytes
        )
        if self.layout.hidden_token is not None:
            word, bit = divmod(self.layout.hidden_token, MASK_BITS)
            self.words[word] &= np.uint32(~(1 << bit) & 0xFFFFFFFF)
        self.has_mask = True

    def allowed_tokens(self) -> Tensor:
        """The packed mask of the next token. It is valid until the next `accept_token`."""
        with self.lock:
            self._compute()
            self._check()
            if self.mask is None:
                from torch import from_numpy  # a server checks grammars without torch

                self.mask = from_numpy(self.words.view(np.int32)[: self.layout.num_words])
            return self.mask

    def accept_token(self, token: int) -> None:
        with self.lock:
            self.has_mask = self.is_started = self.is_empty = False
            self.num_tokens += 1
            is_allowed = self.matcher.consume_token(token)
            self._check()
            if not is_allowed:
                raise FulguriteError(f"the grammar does not allow token {token}")

    def forced_tokens(self) -> list[int]:
        with self.lock:
            tokens: list[int] = self.matcher.compute_ff_tokens()
            self._check()
            return tokens

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.layout.eos_token_ids

    @property
    def is_accepting(self) -> bool:
        with self.lock:
            return bool(self.matcher.is_accepting())

    @property
    def is_complete(self) -> bool:
        with self.lock:
            return self.is_empty or (self.matcher.is_stopped() and not self.matcher.is_error())

    def _check(self) -> None:
        """Raise if the matcher failed: after an error its mask allows the end token, no matter what."""
        if self.matcher.is_error():
            error = clean_message(self.matcher.get_error())
            if "NoExtension" in error:
                error = "no text can follow"
            raise FulguriteError(f"the grammar failed: {error}")


def clean_message(message: str) -> str:
    """llguidance's message without its markers, and not longer than a screen."""
    text = message.replace("<non-verbose/>", "").replace(MARK, "").strip()
    if len(text) > MAX_ERROR_CHARACTERS:
        text = f"{text[:MAX_ERROR_CHARACTERS]}…"
    return text
