"""Context parallelism of an engine: one sequence over several ranks, its tokens and its KV cache.

**Tokens.** The tokens of a step are sharded over the axis: rank r computes projections, experts and
everything else of its part only (`shard_range`). So the work of a long prompt is divided.

**Keys.** The KV cache is sharded by blocks of B tokens in turn: rank r has blocks r, r + C, r + 2C, ..
of every sequence. However long sequences are, each rank has 1/C of their keys, and attends to them.

**Attention.** Queries, keys and values of the step are all-gathered, and each rank stores the keys of
its blocks. Then all queries attend to the keys of this rank. Outputs and log-sum-exps are exchanged
(all-to-all), and each rank merges those of its own tokens:

    out = sum_c exp(lse_c - m) out_c / sum_c exp(lse_c - m),   m = max_c lse_c

in the order of the ranks. Keys keep their true positions, so causal masks, sliding windows and attention
chunks are those of one rank. A sink counts on the first rank only.

Shapes: C ranks of the axis; T tokens of the step; L tokens of this rank; R sampled tokens; N heads;
V size of a value; D anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fulgurite.parallel.collectives import (
    all_gather,
    all_gather_tokens,
    all_to_all_rows,
    shard_range,
)
from fulgurite.parallel.mesh import Axis


class ContextParallel:
    """The exchange of tokens and attention outputs over a context axis."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.index, self.count = axis.index, axis.size

    def local_range(self, tokens: int) -> tuple[int, int]:
        """Which tokens of a step this rank has."""
        return shard_range(tokens, self.index, self.count)

    def gather_tokens(self, x_LD: Tensor, tokens: int) -> Tensor:
        """The rows of all tokens, [T, D]."""
        return all_gather_tokens(x_LD, self.axis, tokens)

    def gather_inputs(self, inputs: Sequence[Tensor], tokens: int) -> list[Tensor]:
        """The rows of all tokens of queries, keys and values [L, N, H], as one message."""
        packed_TD = self.gather_tokens(torch.cat([x.flatten(1) for x in inputs], dim=-1), tokens)
        columns = packed_TD.split([x.shape[1] * x.shape[2] for x in inputs], dim=-1)
        return [c.unflatten(-1, x.shape[1:]) for c, x in zip(columns, inputs, strict=True)]

    def all_ranges(self, tokens: int) -> list[tuple[int, int]]:
        """Which tokens of a step each rank has."""
        return [shard_range(tokens, rank, self.count) for rank in range(self.count)]

    def gather_rows(self, x_LD: Tensor, rows: Sequence[int], tokens: int) -> Tensor:
        """These rows of all T tokens, in ascending order, on every rank, [R, D]."""
        bounds = self.all_ranges(tokens)
        counts = [sum(start <= row < stop for row in rows) for start, stop in bounds]
        start, stop = bounds[self.index]
        local = torch.tensor([row - start for row in rows if start <= row < stop], dtype=torch.long)
        return self.gather_counted(x_LD[local.to(x_LD.device)], counts, "sampled tokens' states")

    def gather_counted(self, x_LD: Tensor, counts: Sequence[int], label: str) -> Tensor:
        """The rows of all ranks, `counts` of each, in the order of the ranks."""
        width = max(counts)
        padded_RD = x_LD.new_zeros(width, *x_LD.shape[1:])
        padded_RD[: len(x_LD)] = x_LD
        all_RD = all_gather(padded_RD, self.axis, f"all-gather of {label}")
        kept = [rank * width + n for rank, count in enumerate(counts) for n in range(count)]
        return all_RD[torch.tensor(kept, dtype=torch.long, device=x_LD.device)]

    def merge_outputs(self, out_TNV: Tensor, lse_TN: Tensor) -> Tensor:
        """The attention outputs of this rank's tokens, from those of all ranks' keys, [L, N, V]."""
        tokens, heads, size = out_TNV.shape
        width = -(-tokens // self.count)
        # One message: a log-sum-exp is one float32 column, or two columns of 16 bits.
        lse = lse_TN[..., None].contiguous().view(out_TNV.dtype)
        packed = out_TNV.new_zeros(self.count * width, heads, size + lse.shape[-1])
        packed[:tokens, :, :size], packed[:tokens, :, size:] = out_TNV, lse
        splits = (width,) * self.count
        received = all_to_all_rows(
            packed, self.axis, splits, splits, "exchange of attention outputs"
        )
        start, stop = self.local_range(tokens)
        parts = received.view(self.count, width, *packed.shape[1:])[:, : stop - start]
        # A copy: a slice with a single row counts as contiguous, but may start at an odd address.
        lse = parts[..., size:].clone(memory_format=torch.contiguous_format)
        lse_CLN = lse.view(torch.float32)[..., 0]
        return merge_shards(parts[..., :size], lse_CLN)


def merge_shards(out_CLNV: Tensor, lse_CLN: Tensor) -> Tensor:
    """Attention over all keys from attention over shards of them; zeros where no shard has a key."""
    largest_LN = lse_CLN.amax(dim=0)
    base_LN = largest_LN.where(largest_LN != float("-inf"), 0.0)
    weights_CLN = torch.exp(lse_CLN - base_LN)
    total_LNV = out_CLNV[0].float() * weights_CLN[0, ..., None]
    total_LN = weights_CLN[0]
    for out_LNV, weights_LN in zip(out_CLNV[1:], weights_CLN[1:], strict=True):  # in rank order
        total_LNV = total_LNV + out_LNV.float() * weights_LN[..., None]
        total_LN = total_LN + weights_LN
    merged_LNV = total_LNV / total_LN.where(total_LN != 0.0, 1.0)[..., None]
    return merged_LNV.to(out_CLNV.dtype)
