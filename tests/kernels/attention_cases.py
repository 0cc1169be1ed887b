"""Problems for paged attention, shared by the tests of its implementations."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fulgurite.kernels.attention import reference


@dataclass
class Case:
    """Sequences as (new tokens, keys); the rest is what an attention layer can ask for."""

    sequences: list[tuple[int, int]]
    heads: int = 4
    key_heads: int = 2
    size: int = 16
    value_size: int | None = None  # None: as the key
    latent: bool = False
    page: int = 16
    options: dict = field(default_factory=dict)
    sinks: bool = False
    spare: int = 0  # tokens that are nobody's
    by_heads: bool = False  # pages laid out head by head


def build(case: Case, pages: torch.dtype, query: torch.dtype, device: str = "cpu"):
    """The arguments of paged_attention; pages shuffled, unused slots full of NaN where there is one."""
    value_size = case.size if case.value_size is None else case.value_size
    needed = [-(-length // case.page) for _, length in case.sequences]
    count = sum(needed) + 2
    order = (torch.randperm(count - 1) + 1).int()
    tables = torch.zeros(len(needed), max(needed, default=0) + 1, dtype=torch.int32)

    def filled(size):
        shape = (count, case.page, case.key_heads, size)
        if case.by_heads:
            shape = (count, case.key_heads, case.page, size)
        made = torch.full(shape, float("nan")).to(pages)
        return made.transpose(1, 2) if case.by_heads else made

    keys, values = filled(case.size), None if case.latent else filled(value_size)
    for row, pages_needed in enumerate(needed):
        tables[row, :pages_needed], order = order[:pages_needed], order[pages_needed:]
        length = case.sequences[row][1]
        where = torch.arange(length)
        slots = tables[row].long()[where // case.page] * case.page + where % case.page
        reference.store_pages(
            torch.randn(length, case.key_heads, case.size),
            None if case.latent else torch.randn(length, case.key_heads, value_size),
            keys,
            values,
            slots,
        )
    tokens = sum(new for new, _ in case.sequences) + case.spare
    q = torch.randn(tokens, case.heads, case.size).to(query)
    starts = torch.tensor([0, *(new for new, _ in case.sequences)]).cumsum(0).int()
    lengths = torch.tensor([length for _, length in case.sequences], dtype=torch.int32)
    tensors = [
        None if t is None else t.to(device) for t in (q, keys, values, tables, starts, lengths)
    ]
    options = {"scale": case.size**-0.5, "value_dim": value_size, **case.options}
    if case.sinks:
        options["sinks_N"] = torch.randn(case.heads).to(device)
    return tensors, options


def exact(tensors, options):
    """The definition in float64 on the kept numbers."""
    q, keys, values, *rest = tensors
    wide = [None if t is None else t.double() for t in (q, keys, values)]
    return reference.paged_attention(*wide, *rest, **options)


CASES = {
    "one token": Case([(1, 1)]),
    "decode": Case([(1, 37)]),
    "decode, a full page": Case([(1, 48)]),
    "decode, one past a page": Case([(1, 49)]),
    "decode, many": Case([(1, 5), (1, 200), (1, 64), (1, 17)], heads=9, key_heads=3, size=64),
    "decode, long": Case([(1, 1100)], heads=2, key_heads=1, size=32),
    "prefill": Case([(33, 33)]),
    "prefill, long": Case([(150, 150)], heads=3, key_heads=1, size=64),
    "prefill after a prefix": Case([(19, 100)]),
    "mixed": Case([(1, 80), (31, 31), (7, 90), (1, 1), (0, 5), (64, 65)], heads=6, key_heads=2),
    "nobody's tokens": Case([(2, 9), (1, 4)], spare=3),
    "no sequences": Case([], spare=2),
    "odd sizes": Case([(3, 21), (40, 41)], size=19, value_size=23),
    "narrow": Case([(2, 30), (20, 30)], size=1, value_size=1),
    "pages of 8": Case([(1, 41), (11, 60)], page=8),
    "pages of 5": Case([(1, 41), (11, 60)], page=5),
    "pages of 128": Case([(1, 300), (5, 200)], page=128),
    "by heads": Case([(1, 41), (21, 60)], by_heads=True),
    "one head each": Case([(1, 41), (21, 60)], heads=3, key_heads=3),
    "window": Case([(1, 100), (50, 90), (3, 5)], options={"window": 17}),
    "window of 1": Case([(1, 100), (20, 40)], options={"window": 1}),
    "chunk": Case([(1, 100), (50, 90), (3, 5)], options={"chunk": 24}),
    "window and chunk": Case([(1, 100), (50, 90)], options={"chunk": 24, "window": 9}),
    "softcap": Case([(1, 100), (50, 90)], options={"softcap": 2.0}),
    "large softcap": Case([(1, 100), (50, 90)], options={"softcap": 50.0}),
    "sinks": Case([(1, 100), (50, 90)], sinks=True),
    "sinks, window": Case([(1, 300), (50, 90)], sinks=True, options={"window": 20}),
    "latent": Case([(1, 90), (20, 40)], heads=16, key_heads=1, size=72, value_size=64, latent=True),
    "latent, many heads": Case(
        [(1, 300)], heads=40, key_heads=1, size=40, value_size=32, latent=True
    ),
    "scales": Case([(1, 90), (20, 40)], options={"key_scale": 0.5, "value_scale": 3.0}),
    "sharp": Case([(1, 90), (20, 40)], options={"scale": 30.0}),
}
