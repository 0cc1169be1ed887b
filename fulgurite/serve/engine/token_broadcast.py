"""Sampled tokens on all ranks of a replica: those of its first rank in, `last_tokens_W` of every rank out.

One rank of a replica samples. With asynchronous scheduling the next step starts before the host knows the
tokens, so the ranks that embed them get them on the device, as part of the step:

    first rank      sample ─▶ broadcast over the tensor and the context axis ─▶ embedding of the next step
    other ranks               broadcast ─▶ last_tokens_W ──────────────────────▶ embedding of the next step

Only the first pipeline stage embeds tokens. Steps that wait for each other need none of this: their tokens
come with the next message of rank 0.

Shapes: R sampled tokens; W rows of the sampler.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.parallel.collectives import all_gather
from fulgurite.parallel.mesh import Axis, Mesh


class TokenBroadcast:
    """The broadcast of one rank; all ranks of its replica's first stage call it in each step."""

    def __init__(self, axes: tuple[Axis, ...], last_tokens_W: Tensor) -> None:
        self.axes, self.last_tokens_W = axes, last_tokens_W

    def share(self, tokens_R: Tensor | None, rows_R: Tensor) -> None:
        """Write the tokens of the first rank into these rows; other ranks have no tokens."""
        count = rows_R.shape[0]
        if tokens_R is None:
            tokens_R = torch.zeros(count, dtype=torch.int64, device=rows_R.device)
        for axis in self.axes:
            tokens_R = all_gather(tokens_R, axis, "broadcast of sampled tokens")[:count]
        self.last_tokens_W.index_copy_(0, rows_R, tokens_R)


def make_token_broadcast(mesh: Mesh, last_tokens_W: Tensor) -> TokenBroadcast | None:
    """The broadcast of this rank; None if it embeds no tokens, or samples all that it embeds."""
    axes = tuple(axis for axis in (mesh.tensor, mesh.context) if axis.size > 1)
    if not axes or mesh.pipeline.index > 0:
        return None
    return TokenBroadcast(axes, last_tokens_W)
