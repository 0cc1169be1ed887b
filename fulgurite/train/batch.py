"""`Batch`: what one forward and backward computes on.

Shapes: B sequences; T tokens of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100  # a label without a loss
TOKENS_PER_OFFSET = 128  # `offsets_S` has at least this room, so that it rarely grows


@dataclass(frozen=True)
class Batch:
    """A microbatch: some rows of a step's samples.

    Attributes:
        tokens_BT: token ids, int64.
        labels_BT: the token after each, int64; `IGNORED` where there is no loss (padding, the last
            token of a document, prompts of chats).
        positions_BT: of each token in its own document, int64; negative: padding.
        documents_BT: which document of the row each token belongs to, int64, from 0; -1: padding. None:
            a row is one document.
        first_sample: the global number of the first row.
        offsets_S: where each document of the batch begins, rows end to end, int32, then the number of
            tokens in all places that are left. Flash attention reads it; None: not on a GPU.
    """

    tokens_BT: Tensor
    labels_BT: Tensor
    positions_BT: Tensor
    documents_BT: Tensor | None = None
    first_sample: int = 0
    offsets_S: Tensor | None = None

    def to(self, device: torch.device | str) -> Batch:
        """A copy on a device; from pinned memory it does not wait."""
        offsets = None
        if self.documents_BT is not None and torch.device(device).type == "cuda":
            offsets = find_offsets(self.documents_BT) if self.offsets_S is None else self.offsets_S
        parts = (self.tokens_BT, self.labels_BT, self.positions_BT, self.documents_BT, offsets)
        moved = [None if x is None else x.to(device, non_blocking=True) for x in parts]
        tokens, labels, positions, documents, offsets = moved
        assert tokens is not None and labels is not None and positions is not None
        return Batch(tokens, labels, positions, documents, self.first_sample, offsets)

    @property
    def num_tokens(self) -> Tensor:
        """Tokens with a loss, as a tensor on the batch's device."""
        return (self.labels_BT != IGNORED).sum()


def find_offsets(documents_BT: Tensor) -> Tensor:
    """`Batch.offsets_S` of documents: its size is a power of two, so that few programs are compiled."""
    is_first = torch.ones_like(documents_BT, dtype=torch.bool)
    is_first[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    starts = is_first.flatten().nonzero()[:, 0].to(torch.int32)
    total = documents_BT.numel()
    size = max(len(starts) + 1, total // TOKENS_PER_OFFSET, 2)
    offsets = torch.full((1 << (size - 1).bit_length(),), total, dtype=torch.int32)
    offsets[: len(starts)] = starts.cpu()
    return offsets
