"""Problems for latent attention, shared by the tests of its implementations."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fulgurite.kernels.mla import reference
from fulgurite.kernels.mla.ops import page_shape


@dataclass
class Case:
    """Sequences as (new tokens, tokens with them); sizes of the heads and of the latent."""

    sequences: list[tuple[int, int]]
    heads: int = 4
    rank: int = 32
    plain: int = 16
    rope: int = 8
    value: int = 16
    page: int = 16
    interleaved: bool = True
    spare: int = 0  # tokens that are nobody's
    sharp: float = 1.0  # factor on the scale


def angles(tokens: int, rope: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.randn(tokens, rope // 2) * 3
    return angle.cos() * 1.1, angle.sin() * 1.1  # as long as YaRN makes them


def empty_pages(case: Case, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Pages of nothing but NaN, in whatever they are kept."""
    width, kept = page_shape(case.rank, case.rope, dtype)
    if kept == torch.uint8:
        return torch.full((count, case.page, width), 255, dtype=kept)
    return torch.full((count, case.page, width), float("nan"), dtype=kept)


def build(case: Case, pages: torch.dtype, query: torch.dtype, device: str = "cpu"):
    """The arguments of latent_attention; pages shuffled, what is not used full of NaN."""
    needed = [-(-length // case.page) for _, length in case.sequences]
    count = sum(needed) + 2
    order = (torch.randperm(count - 1) + 1).int()
    tables = torch.zeros(len(needed), max(needed, default=0) + 1, dtype=torch.int32)
    kept, norm = empty_pages(case, count, pages), torch.rand(case.rank) + 0.5
    for row, pages_needed in enumerate(needed):
        tables[row, :pages_needed], order = order[:pages_needed], order[pages_needed:]
        length = case.sequences[row][1]
        where = torch.arange(length)
        slots = tables[row].long()[where // case.page] * case.page + where % case.page
        latent = torch.randn(length, case.rank + case.rope)
        rotation = angles(length, case.rope)
        reference.write_latent(latent, norm, *rotation, kept, slots, 1e-6, case.interleaved)
    tokens = sum(new for new, _ in case.sequences) + case.spare
    q = torch.randn(tokens, case.heads, case.plain + case.rope).to(query)
    up = (torch.randn(case.heads, case.plain + case.value, case.rank) * case.rank**-0.5).to(query)
    starts = torch.tensor([0, *(new for new, _ in case.sequences)]).cumsum(0).int()
    lengths = torch.tensor([length for _, length in case.sequences], dtype=torch.int32)
    cos, sin = angles(tokens, case.rope)
    tensors = [t.to(device) for t in (q, up, cos, sin, kept, tables, starts, lengths)]
    scale = case.sharp * (case.plain + case.rope) ** -0.5
    return tensors, {"scale": scale, "interleaved": case.interleaved}


def exact(tensors, options):
    """The definition in float64 on the kept numbers."""
    q, up, *rest = tensors
    return reference.latent_attention(q.double(), up.double(), *rest, **options)


CASES = {
    "one token": Case([(1, 1)]),
    "decode": Case([(1, 37)]),
    "decode, a full page": Case([(1, 48)]),
    "decode, one past a page": Case([(1, 49)]),
    "decode, many": Case([(1, 5), (1, 211), (1, 64), (1, 17)], heads=9, rank=64),
    "decode, long": Case([(1, 1103)], heads=2),
    "decode, many heads": Case([(1, 90), (1, 3)], heads=40, rank=48),
    "many tiles": Case([(5, 70), (1, 300)], heads=40),
    "some tokens": Case([(3, 70), (2, 2), (5, 64)], heads=7),
    "prompt": Case([(150, 150)], heads=3, rank=64),
    "prompt of a prime": Case([(131, 131)], heads=5),
    "after a prefix": Case([(97, 290)], heads=2),
    "mixed": Case([(1, 80), (131, 131), (7, 90), (1, 1), (0, 5), (64, 265), (0, 0)], heads=6),
    "nobody's tokens": Case([(2, 9), (1, 4)], spare=3),
    "no sequences": Case([], spare=2),
    "odd sizes": Case(
        [(3, 21), (140, 141)], heads=3, rank=19, plain=7, rope=6, value=11, interleaved=False
    ),
    "narrow": Case([(2, 30), (20, 30)], heads=1, rank=1, plain=1, rope=2, value=1),
    "no rotary part": Case([(1, 20), (70, 70)], rope=0),
    "halves": Case([(1, 41), (111, 160)], interleaved=False),
    "pages of 5": Case([(1, 41), (11, 60)], page=5),
    "pages of 1": Case([(1, 41), (80, 90)], page=1),
    "pages of 128": Case([(1, 300), (5, 200)], page=128),
    "sharp": Case([(1, 90), (120, 140)], sharp=30.0),
    "deepseek": Case(
        [(1, 70), (2, 67)], heads=16, rank=512, plain=128, rope=64, value=128, page=64
    ),
}
