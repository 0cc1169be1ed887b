"""Inputs of MLA, shared by the tests of its implementations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fulgurite.kernels.attention.metadata import AttentionMetadata
from fulgurite.kernels.mla import reference
from fulgurite.kernels.mla.ops import mla_slot_shape


@dataclass
class Case:
    """Sequences as (query tokens, tokens with them); sizes of the heads and of the latent."""

    sequences: list[tuple[int, int]]
    heads: int = 4
    rank: int = 32
    nope_dim: int = 16
    rope_dim: int = 8
    value_dim: int = 16
    block_size: int = 16
    interleaved: bool = True
    padding: int = 0  # tokens of no sequence
    scale_factor: float = 1.0

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Arguments of `should_expand`."""
        return self.rank, self.nope_dim, self.rope_dim, self.value_dim


class Inputs(NamedTuple):
    """The arguments of mla_attention."""

    q: Tensor
    kv_b: Tensor
    cos: Tensor
    sin: Tensor
    cache: Tensor
    metadata: AttentionMetadata
    scale: float
    interleaved: bool

    def with_metadata(self, **fields) -> Inputs:
        return self._replace(metadata=self.metadata._replace(**fields))


def random_rope(tokens: int, rope_dim: int) -> tuple[Tensor, Tensor]:
    angle = torch.randn(tokens, rope_dim // 2) * 3
    return angle.cos() * 1.1, angle.sin() * 1.1  # scaled, as YaRN does


def empty_cache(case: Case, blocks: int, dtype: torch.dtype) -> Tensor:
    """A cache filled with NaN, or with bytes that are NaN in FP8."""
    width, cache_dtype = mla_slot_shape(case.rank, case.rope_dim, dtype)
    fill = 255 if cache_dtype == torch.uint8 else float("nan")
    return torch.full((blocks, case.block_size, width), fill, dtype=cache_dtype)


def build(
    case: Case, cache_dtype: torch.dtype, query_dtype: torch.dtype, device: str = "cpu"
) -> Inputs:
    """Cache blocks in random order; unused slots hold NaN."""
    needed = [-(-length // case.block_size) for _, length in case.sequences]
    count = sum(needed) + 2
    order = (torch.randperm(count - 1) + 1).int()
    block_table = torch.zeros(len(needed), max(needed, default=0) + 1, dtype=torch.int32)
    cache, norm = empty_cache(case, count, cache_dtype), torch.rand(case.rank) + 0.5
    for row, blocks in enumerate(needed):
        block_table[row, :blocks], order = order[:blocks], order[blocks:]
        length = case.sequences[row][1]
        position = torch.arange(length)
        block = block_table[row].long()[position // case.block_size]
        slots = block * case.block_size + position % case.block_size
        kv_a = torch.randn(length, case.rank + case.rope_dim)
        rope = random_rope(length, case.rope_dim)
        reference.store_mla_cache(kv_a, norm, *rope, cache, slots, 1e-6, case.interleaved)
    tokens = sum(queries for queries, _ in case.sequences) + case.padding
    q = torch.randn(tokens, case.heads, case.nope_dim + case.rope_dim).to(query_dtype)
    kv_b = torch.randn(case.heads, case.nope_dim + case.value_dim, case.rank) * case.rank**-0.5
    query_start_loc = torch.tensor([0, *(queries for queries, _ in case.sequences)]).cumsum(0)
    seq_lens = torch.tensor([length for _, length in case.sequences], dtype=torch.int32)
    cos, sin = random_rope(tokens, case.rope_dim)
    tensors = [t.to(device) for t in (q, kv_b.to(query_dtype), cos, sin, cache)]
    metadata = AttentionMetadata(
        block_table.to(device), query_start_loc.int().to(device), seq_lens.to(device)
    )
    scale = case.scale_factor * (case.nope_dim + case.rope_dim) ** -0.5
    return Inputs(*tensors, metadata, scale, case.interleaved)


def exact(inputs: Inputs) -> Tensor:
    """The reference in float64 on the cached numbers."""
    q, kv_b, *rest = inputs
    return reference.mla_attention(q.double(), kv_b.double(), *rest)


CASES = {
    "one token": Case([(1, 1)]),
    "decode": Case([(1, 37)]),
    "decode, a full block": Case([(1, 48)]),
    "decode, one past a block": Case([(1, 49)]),
    "decode, batch": Case([(1, 5), (1, 211), (1, 64), (1, 17)], heads=9, rank=64),
    "decode, long": Case([(1, 1103)], heads=2),
    "decode, 40 heads": Case([(1, 90), (1, 3)], heads=40, rank=48),
    "several tiles": Case([(5, 70), (1, 300)], heads=40),
    "several tokens": Case([(3, 70), (2, 2), (5, 64)], heads=7),
    "prefill": Case([(150, 150)], heads=3, rank=64),
    "prefill of a prime": Case([(131, 131)], heads=5),
    "prefill after a prefix": Case([(97, 290)], heads=2),
    "mixed": Case([(1, 80), (131, 131), (7, 90), (1, 1), (0, 5), (64, 265), (0, 0)], heads=6),
    "padding": Case([(2, 9), (1, 4)], padding=3),
    "no sequences": Case([], padding=2),
    "odd sizes": Case(
        [(3, 21), (140, 141)], heads=3, rank=19, nope_dim=7, rope_dim=6, value_dim=11,
        interleaved=False,
    ),
    "narrow": Case([(2, 30), (20, 30)], heads=1, rank=1, nope_dim=1, rope_dim=2, value_dim=1),
    "no rotary part": Case([(1, 20), (70, 70)], rope_dim=0),
    "not interleaved": Case([(1, 41), (111, 160)], interleaved=False),
    "blocks of 5": Case([(1, 41), (11, 60)], block_size=5),
    "blocks of 1": Case([(1, 41), (80, 90)], block_size=1),
    "blocks of 128": Case([(1, 300), (5, 200)], block_size=128),
    "large scale": Case([(1, 90), (120, 140)], scale_factor=30.0),
    "deepseek": Case(
        [(1, 70), (2, 67)], heads=16, rank=512, nope_dim=128, rope_dim=64, value_dim=128,
        block_size=64,
    ),
}  # fmt: skip
