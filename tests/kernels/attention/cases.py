"""Inputs of paged attention, shared by the tests of its implementations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fulgurite.kernels.attention import reference
from fulgurite.kernels.attention.metadata import (
    AttentionMetadata,
    AttentionOptions,
    ContextShard,
)


@dataclass
class Case:
    """Sequences as (query tokens, keys); the other fields are options of an attention layer."""

    sequences: list[tuple[int, int]]
    heads: int = 4
    key_heads: int = 2
    size: int = 16
    value_size: int | None = None  # None: the size of a key
    values_in_keys: bool = False
    block_size: int = 16
    options: dict = field(default_factory=dict)
    sinks: bool = False
    padding: int = 0  # tokens of no sequence
    heads_first: bool = False  # cache blocks stored head by head


class Inputs(NamedTuple):
    """The arguments of paged_attention."""

    q: Tensor
    key_cache: Tensor
    value_cache: Tensor | None
    metadata: AttentionMetadata
    options: AttentionOptions

    def with_metadata(self, **fields) -> Inputs:
        return self._replace(metadata=self.metadata._replace(**fields))

    def with_options(self, **fields) -> Inputs:
        return self._replace(options=self.options._replace(**fields))


def build(
    case: Case, cache_dtype: torch.dtype, query_dtype: torch.dtype, device: str = "cpu"
) -> Inputs:
    """Cache blocks in random order; unused slots hold NaN where the dtype has one."""
    value_size = case.size if case.value_size is None else case.value_size
    needed = [-(-length // case.block_size) for _, length in case.sequences]
    count = sum(needed) + 2
    order = (torch.randperm(count - 1) + 1).int()
    block_table = torch.zeros(len(needed), max(needed, default=0) + 1, dtype=torch.int32)

    def allocate(size):
        shape = (count, case.block_size, case.key_heads, size)
        if case.heads_first:
            shape = (count, case.key_heads, case.block_size, size)
        cache = torch.full(shape, float("nan")).to(cache_dtype)
        return cache.transpose(1, 2) if case.heads_first else cache

    key_cache = allocate(case.size)
    value_cache = None if case.values_in_keys else allocate(value_size)
    for row, blocks in enumerate(needed):
        block_table[row, :blocks], order = order[:blocks], order[blocks:]
        length = case.sequences[row][1]
        position = torch.arange(length)
        block = block_table[row].long()[position // case.block_size]
        slots = block * case.block_size + position % case.block_size
        keys = torch.randn(length, case.key_heads, case.size)
        values = None if case.values_in_keys else torch.randn(length, case.key_heads, value_size)
        reference.store_kv_cache(keys, values, key_cache, value_cache, slots)
    tokens = sum(queries for queries, _ in case.sequences) + case.padding
    q = torch.randn(tokens, case.heads, case.size).to(query_dtype)
    query_start_loc = torch.tensor([0, *(queries for queries, _ in case.sequences)]).cumsum(0)
    seq_lens = torch.tensor([length for _, length in case.sequences], dtype=torch.int32)
    metadata = AttentionMetadata(
        block_table.to(device), query_start_loc.int().to(device), seq_lens.to(device)
    )
    options = {"scale": case.size**-0.5, "value_dim": value_size, **case.options}
    if case.sinks:
        options["sinks_N"] = torch.randn(case.heads).to(device)
    caches = (None if cache is None else cache.to(device) for cache in (key_cache, value_cache))
    return Inputs(q.to(device), *caches, metadata, AttentionOptions(**options))


def exact(inputs: Inputs) -> Tensor:
    """The reference in float64 on the cached numbers."""
    q, key_cache, value_cache, metadata, options = inputs
    tensors = [None if t is None else t.double() for t in (q, key_cache, value_cache)]
    return reference.paged_attention(*tensors, metadata, options)


CASES = {
    "one token": Case([(1, 1)]),
    "decode": Case([(1, 37)]),
    "decode, a full block": Case([(1, 48)]),
    "decode, one past a block": Case([(1, 49)]),
    "decode, batch": Case([(1, 5), (1, 200), (1, 64), (1, 17)], heads=9, key_heads=3, size=64),
    "decode, long": Case([(1, 1100)], heads=2, key_heads=1, size=32),
    "prefill": Case([(33, 33)]),
    "prefill, long": Case([(150, 150)], heads=3, key_heads=1, size=64),
    "prefill after a prefix": Case([(19, 100)]),
    "mixed": Case([(1, 80), (31, 31), (7, 90), (1, 1), (0, 5), (64, 65)], heads=6, key_heads=2),
    "padding": Case([(2, 9), (1, 4)], padding=3),
    "no sequences": Case([], padding=2),
    "odd sizes": Case([(3, 21), (40, 41)], size=19, value_size=23),
    "narrow": Case([(2, 30), (20, 30)], size=1, value_size=1),
    "blocks of 8": Case([(1, 41), (11, 60)], block_size=8),
    "blocks of 5": Case([(1, 41), (11, 60)], block_size=5),
    "blocks of 128": Case([(1, 300), (5, 200)], block_size=128),
    "heads first": Case([(1, 41), (21, 60)], heads_first=True),
    "no grouped queries": Case([(1, 41), (21, 60)], heads=3, key_heads=3),
    "window": Case([(1, 100), (50, 90), (3, 5)], options={"window": 17}),
    "window of 1": Case([(1, 100), (20, 40)], options={"window": 1}),
    "chunk": Case([(1, 100), (50, 90), (3, 5)], options={"chunk": 24}),
    "window and chunk": Case([(1, 100), (50, 90)], options={"chunk": 24, "window": 9}),
    "softcap": Case([(1, 100), (50, 90)], options={"softcap": 2.0}),
    "large softcap": Case([(1, 100), (50, 90)], options={"softcap": 50.0}),
    "sinks": Case([(1, 100), (50, 90)], sinks=True),
    "sinks, window": Case([(1, 300), (50, 90)], sinks=True, options={"window": 20}),
    "values in keys": Case(
        [(1, 90), (20, 40)], heads=16, key_heads=1, size=72, value_size=64, values_in_keys=True
    ),
    "values in keys, 40 heads": Case(
        [(1, 300)], heads=40, key_heads=1, size=40, value_size=32, values_in_keys=True
    ),
    "scales": Case([(1, 90), (20, 40)], options={"key_scale": 0.5, "value_scale": 3.0}),
    "large scale": Case([(1, 90), (20, 40)], options={"scale": 30.0}),
}


def shard_inputs(inputs: Inputs, shard: ContextShard) -> Inputs:
    """The same with the block table of a context-parallel rank: every `ranks`-th block."""
    table = inputs.metadata.block_table_SM
    missing = -table.shape[1] % shard.ranks
    padded = torch.nn.functional.pad(table, (0, missing))
    options = inputs.options
    if shard.rank:  # a sink counts once
        options = options._replace(sinks_N=None)
    local = padded[:, shard.rank :: shard.ranks].contiguous()
    return inputs.with_metadata(block_table_SM=local)._replace(options=options)


def exact_lse(inputs: Inputs, shard: ContextShard) -> Tensor:
    """The log-sum-exp of a shard's scores in float64, in the precision that the reference returns."""
    q, key_cache, value_cache, metadata, options = inputs
    tensors = [None if t is None else t.double() for t in (q, key_cache, value_cache)]
    return reference.paged_attention(*tensors, metadata, options, shard)[1]
