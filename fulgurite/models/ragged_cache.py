"""`RaggedCache`: attention of whole sequences, end to end in one flat batch; nothing is stored."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fulgurite.models.attention_spec import AttentionSpec
from fulgurite.models.kv_cache import NoKVCache


class RaggedCache(NoKVCache):
    """The cache of a step that computes whole sequences of these lengths, without padding.

    Each sequence attends by itself, so its result does not depend on the others.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = list(lengths)
        lengths_S = torch.tensor(self.lengths, device=device)
        super().__init__(
            torch.arange(len(self.lengths), device=device).repeat_interleave(lengths_S)
        )
        self.lengths_T = lengths_S.repeat_interleave(lengths_S)
        self.alone = NoKVCache()

    def attend(
        self,
        spec: AttentionSpec,
        q_XNH: Tensor,
        k_XKH: Tensor | None,
        v_XKV: Tensor | None,
        positions_X: Tensor,
        sinks_N: Tensor | None,
    ) -> Tensor:
        assert k_XKH is not None, "this cache has no slots that a kernel could have written to"
        values = [None] * len(self.lengths) if v_XKV is None else v_XKV.split(self.lengths)
        inputs = (x.split(self.lengths) for x in (q_XNH, k_XKH, positions_X))
        outputs = [
            self.alone.attend(spec, q, k, v, positions, sinks_N)
            for q, k, positions, v in zip(*inputs, values, strict=True)
        ]
        return torch.cat(outputs)

    def sequence_lengths(self, positions_X: Tensor) -> Tensor:
        return self.lengths_T
