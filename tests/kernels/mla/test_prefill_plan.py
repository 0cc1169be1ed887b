"""The plan of a step with prompts: every key and every token in its place, once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fulgurite.kernels.attention.metadata import AttentionMetadata
from fulgurite.kernels.mla import prefill_plan
from fulgurite.kernels.mla.ops import make_prefill_plan, mla_attention_meta
from fulgurite.kernels.mla.prefill_plan import (
    IS_FIRST,
    IS_LAST,
    MLASizes,
    max_absorbed_tokens,
    pack_keys,
    pack_queries,
    plan_prefill,
)
from fulgurite.kernels.tuning.mla import should_expand
from fulgurite.kernels.tuning.sm_90 import Sm90Heuristics
from fulgurite.plan.activations import track_allocations

DEEPSEEK = MLASizes(512, 128, 64, 128)
CPU = torch.device("cpu")


def make_metadata(lens: list[tuple[int, int]]) -> AttentionMetadata:
    query_lens, seq_lens = ([pair[i] for pair in lens] for i in range(2))
    blocks = max((-(-keys // 16) for keys in seq_lens), default=0) + 1
    return AttentionMetadata(
        torch.arange(len(lens) * blocks, dtype=torch.int32).view(len(lens), blocks),
        torch.tensor([0, *query_lens]).cumsum(0).int(),
        torch.tensor(seq_lens, dtype=torch.int32),
        max(query_lens, default=0),
        max(seq_lens, default=0),
        query_lens,
        seq_lens,
    )


def random_lens(seed: int) -> list[tuple[int, int]]:
    """Decode steps, prompts, prompts after a prefix, and sequences without new tokens."""
    rng = np.random.default_rng(seed)
    lens = []
    for kind in rng.integers(0, 5, size=rng.integers(1, 12)):
        queries = int(
            (0, 1, rng.integers(1, 33), rng.integers(32, 700), rng.integers(32, 90))[kind]
        )
        cached = int(rng.choice([0, rng.integers(1, 200), rng.integers(200, 1500)]))
        lens.append((queries, max(queries + cached, 1)))
    return lens


@pytest.mark.parametrize("max_keys", [1, 7, 100])
@pytest.mark.parametrize("lengths", [[], [1], [100], [101], [40, 60, 1], [33, 250, 33, 99, 2, 100]])
def test_keys_are_packed_in_order(lengths, max_keys):
    chunks = pack_keys(range(len(lengths)), lengths, max_keys)
    covered = [0] * len(lengths)
    for chunk in chunks:
        row = 0
        for segment in chunk:
            assert (segment.row, segment.first_key) == (row, covered[segment.sequence])
            row += segment.num_keys
            covered[segment.sequence] += segment.num_keys
            is_whole = segment.num_keys == lengths[segment.sequence]
            assert is_whole or lengths[segment.sequence] > max_keys, "cut without need"
        assert 0 < row <= max_keys
    assert covered == lengths


def test_queries_are_packed_between_tokens():
    groups = pack_queries([0, 1, 3], [5, 3, 9, 4], [5, 10, 9, 30], [0, 5, 8, 17, 21], 6)
    assert groups == [[(0, 0, 5, 5), (1, 5, 1, 8)], [(1, 6, 2, 10), (3, 17, 4, 30)]]


@pytest.mark.parametrize("seed", range(20))
def test_every_token_sees_each_of_its_keys_once(seed, monkeypatch):
    max_keys = (64, 500, 4096)[seed % 3]
    monkeypatch.setattr(Sm90Heuristics, "mla_max_expanded_keys", max_keys)
    lens = random_lens(seed)
    metadata = make_metadata(lens)
    plan = plan_prefill(metadata, DEEPSEEK, CPU)
    expanded = {s for s, pair in enumerate(lens) if should_expand(*pair, *DEEPSEEK)}
    num_tokens = sum(queries for queries, _ in lens)
    assert plan is not None
    if plan.is_one_call:
        assert not expanded and num_tokens <= max_absorbed_tokens(DEEPSEEK, max_keys)
        return
    starts = metadata.query_start_loc.tolist()
    seen: dict[int, list[tuple[int, int]]] = {token: [] for token in range(num_tokens)}
    owner, position = {}, {}
    for s, (queries, keys) in enumerate(lens):
        for i in range(queries):
            owner[starts[s] + i], position[starts[s] + i] = s, keys - queries + i
    state: dict[int, int] = {}
    for chunk in plan.chunks:
        rows: dict[int, tuple[int, int]] = {}
        for sequence, first, count, row in chunk.gather_tiles.tolist():
            assert 0 < count <= Sm90Heuristics.mla_gather.block_m
            rows |= {row + i: (sequence, first + i) for i in range(count)}
        assert sorted(rows) == list(range(chunk.num_keys)) and chunk.num_keys <= max_keys
        costs = []
        for (
            token,
            count,
            first_position,
            row,
            first,
            keys,
            flags,
            state_row,
        ) in chunk.attention_tiles.tolist():
            assert 0 < count <= plan.block_m
            sequence = owner[token]
            assert position[token] == first_position
            assert [rows[row + i] for i in range(keys)] == [
                (sequence, first + i) for i in range(keys)
            ]
            end = first_position + count
            costs.append(min(end - first, keys))
            assert bool(flags & IS_FIRST) == (first == 0)
            assert bool(flags & IS_LAST) == (first + keys >= end)
            for i in range(count):
                assert owner[token + i] == sequence
                seen[token + i].append((first, min(first + keys, position[token + i] + 1)))
            if flags != IS_FIRST | IS_LAST:
                assert chunk.has_state and state_row + count <= plan.num_state_tokens
                assert state.setdefault(token, state_row) == state_row
        assert costs == sorted(costs, reverse=True) and min(costs) > 0
    absorbed = set()
    for group in plan.absorbed:
        tokens = group.tokens
        indices = list(range(tokens.start, tokens.stop)) if isinstance(tokens, slice) else tokens
        subset = group.metadata
        loc, keys = subset.query_start_loc.tolist(), subset.seq_lens_S.tolist()
        assert loc[-1] == len(indices) <= max_absorbed_tokens(DEEPSEEK, max_keys)
        for s, row in enumerate(subset.block_table_SM):
            for i in range(loc[s], loc[s + 1]):
                token = int(indices[i])
                assert torch.equal(row, metadata.block_table_SM[owner[token]])
                assert keys[s] - (loc[s + 1] - loc[s]) + i - loc[s] == position[token]
                absorbed.add(token)
    for token, spans in seen.items():
        if owner[token] not in expanded:
            assert token in absorbed and not spans
            continue
        assert token not in absorbed
        visible = [span for span in spans if span[1] > span[0]]
        ends = [0, *(end for _, end in visible)]
        assert [first for first, _ in visible] == ends[:-1] and ends[-1] == position[token] + 1
    rows = [row + i for token, row in state.items() for i in range(min(plan.block_m, 1))]
    assert len(set(rows)) == len(rows)


def test_tables_start_at_16_bytes():
    plan = plan_prefill(make_metadata([(33, 33), (3, 5), (1, 9), (40, 41)]), DEEPSEEK, CPU)
    assert plan is not None and len(plan.absorbed) == 1 and plan.absorbed[0].tokens == slice(33, 37)
    tables = [plan.chunks[0].gather_tiles, plan.chunks[0].attention_tiles]
    tables += [plan.absorbed[0].metadata.query_start_loc, plan.absorbed[0].metadata.seq_lens_S]
    assert all(table.storage_offset() % prefill_plan.ALIGNMENT == 0 for table in tables)


def test_nothing_is_planned_for_decode_steps_unknown_lengths_and_cpus():
    for lens in ([(1, 4096)] * 64, [], [(0, 5)]):
        plan = plan_prefill(make_metadata(lens), DEEPSEEK, CPU)
        assert plan is not None and plan.is_one_call
    metadata = make_metadata([(512, 512)])
    assert plan_prefill(metadata._replace(query_lens=None), DEEPSEEK, CPU) is None
    assert plan_prefill(metadata, DEEPSEEK, CPU) is not None
    assert make_prefill_plan(metadata, DEEPSEEK, CPU) is None


@pytest.mark.parametrize(
    "query_lens, block_m", [([256] * 32, 128), ([64] * 9, 64), ([130, 130], 64), ([4000, 50], 128)]
)
def test_tiles_are_small_where_large_ones_would_be_padding(query_lens, block_m):
    assert Sm90Heuristics().mla_prefill_block_m(query_lens) == block_m


def test_planned_memory_holds_a_chunk_and_the_state():
    q = torch.empty(300, 16, 192, dtype=torch.bfloat16, device="meta")
    kv_b = torch.empty(16, 256, 512, dtype=torch.bfloat16, device="meta")
    with track_allocations() as tracker:
        mla_attention_meta(q, kv_b, 128)
    keys = Sm90Heuristics.mla_max_expanded_keys
    expanded = 2 * keys * (16 * 256 + 512 + 64)
    state = 4 * 300 * 16 * (128 + 2)
    assert tracker.peak == expanded + state + 2 * 300 * 16 * 128
    absorbed = 2 * max_absorbed_tokens(DEEPSEEK, keys) * 16 * (2 * 512 + 64)
    assert absorbed <= expanded
