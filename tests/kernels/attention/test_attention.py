"""Paged attention: the C++ kernel against the float64 reference, and that against torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fulgurite import native, replay
from fulgurite.errors import ArgumentError
from fulgurite.kernels.attention import reference
from fulgurite.kernels.attention.metadata import ContextShard
from fulgurite.kernels.attention.ops import (
    CACHE_DTYPES,
    paged_attention,
    paged_attention_shard,
    store_kv_cache,
)
from fulgurite.models.kv_cache import AttentionSpec, NoKVCache
from fulgurite.parallel.context import merge_shards
from tests.kernels.attention.cases import CASES, Case, build, exact, exact_lse, shard_inputs

pytestmark = pytest.mark.skipif(native.find_compiler() is None, reason="needs a C++ compiler")


def assert_close(out, inputs):
    """Our error is at most twice that of the reference in float32 (the float64 rule)."""
    expected = exact(inputs)
    eager = reference.paged_attention(*inputs)
    ours, theirs = (out.double() - expected).abs().max(), (eager.double() - expected).abs().max()
    floor = 2 * torch.finfo(torch.float32).eps * expected.abs().max()
    assert out.shape == expected.shape and ours <= 2 * theirs + floor, f"{ours} against {theirs}"


@pytest.mark.parametrize("name", CASES)
def test_float32(name):
    inputs = build(CASES[name], torch.float32, torch.float32)
    assert_close(paged_attention(*inputs), inputs)


@pytest.mark.covering
@pytest.mark.parametrize("cache", [d for d in CACHE_DTYPES if d != torch.float32], ids=str)
@pytest.mark.parametrize(
    "name", ["mixed", "odd sizes", "values in keys", "decode, batch", "heads first"]
)
def test_low_precision_cache(name, cache):
    inputs = build(CASES[name], cache, torch.float32)
    assert_close(paged_attention(*inputs), inputs)


@pytest.mark.parametrize("query", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["mixed", "sinks"])
def test_low_precision_queries(name, query):
    inputs = build(CASES[name], query, query)
    if inputs.options.sinks_N is not None:
        inputs = inputs.with_options(sinks_N=inputs.options.sinks_N.to(query))
    assert_close(paged_attention(*inputs), inputs)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    "name", ["decode, long", "mixed", "values in keys, 40 heads", "sinks, window"]
)
def test_threads_and_splits(name, threads, monkeypatch):
    monkeypatch.setenv("FULGURITE_NUM_THREADS", str(threads))
    inputs = build(CASES[name], torch.float32, torch.float32)
    assert_close(paged_attention(*inputs), inputs)


def test_strided_queries_and_block_table():
    inputs = build(CASES["mixed"], torch.float32, torch.float32)
    q, block_table = inputs.q, inputs.metadata.block_table_SM
    wide_q = torch.randn(q.shape[0], 2 * q.shape[1], q.shape[2])
    wide_q[:, ::2] = q
    wide_table = torch.zeros(block_table.shape[0], block_table.shape[1] + 5, dtype=torch.int32)
    wide_table[:, : block_table.shape[1]] = block_table
    strided = inputs._replace(q=wide_q[:, ::2])
    strided = strided.with_metadata(block_table_SM=wide_table[:, : block_table.shape[1]])
    assert torch.equal(paged_attention(*strided), paged_attention(*inputs))


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_query_only_affects_its_row(bad, queries):
    inputs = build(Case([(queries, 40), (1, 5)]), torch.float32, torch.float32)
    inputs.q[0, 0, 0] = bad
    out = paged_attention(*inputs)
    eager = reference.paged_attention(*inputs)
    assert torch.equal(out.isnan(), eager.isnan()) and out[0, 0].isnan().all()
    assert out[1:].isfinite().all()


def test_reference_equals_torch_and_unpaged_cache():
    """One sequence is causal attention; with options it equals the models' own cache."""
    inputs = build(Case([(21, 21)], heads=6), torch.float32, torch.float32)
    q, key_cache, value_cache, metadata, options = inputs
    caches = (key_cache, value_cache)
    k, v = (reference.gather_sequence(cache, metadata.block_table_SM[0], 21) for cache in caches)
    q_, k_, v_ = (x.transpose(0, 1)[None] for x in (q, k, v))
    expected = F.scaled_dot_product_attention(q_, k_, v_, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(reference.paged_attention(*inputs), expected[0].transpose(0, 1))
    sinks = torch.randn(6)
    spec = AttentionSpec(
        0, 6, 2, 16, 16, options.scale, sliding_window=7, chunk_size=9, softcap=1.5
    )
    unpaged = NoKVCache().attend(spec, q, k, v, torch.arange(21), sinks)
    inputs = inputs.with_options(window=7, chunk=9, softcap=1.5, sinks_N=sinks)
    torch.testing.assert_close(reference.paged_attention(*inputs), unpaged)


@pytest.mark.parametrize("cache", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("new", [torch.float32, torch.bfloat16], ids=str)
def test_store_kv_cache(cache, new):
    k, v = (torch.randn(7, 6, 19).mul(100).to(new)[:, ::2] for _ in range(2))
    slots = torch.tensor([3, -1, 0, 14, 9, 5, -7])
    stored = []
    for function in (store_kv_cache, reference.store_kv_cache):
        key_cache, value_cache = (torch.zeros(3, 5, 3, 19).to(cache) for _ in range(2))
        function(k, v, key_cache, value_cache, slots, 0.3, 2.0)
        stored.append((key_cache.float(), value_cache.float()))
    assert torch.equal(stored[0][0], stored[1][0]) and torch.equal(stored[0][1], stored[1][1])
    assert stored[0][0][0, 3].abs().sum() > 0 and stored[0][0][0, 4].abs().sum() == 0


def test_replayed_step_follows_its_inputs():
    case = Case([(1, 30), (1, 17)], heads=6, key_heads=3, size=32)
    inputs = build(case, torch.float32, torch.float32)
    k, v = torch.randn(2, 3, 32), torch.randn(2, 3, 32)
    block_table = inputs.metadata.block_table_SM
    slots = torch.tensor([int(block_table[0, 1]) * 16 + 13, int(block_table[1, 1]) * 16 + 0])

    def step():
        store_kv_cache(k, v, inputs.key_cache, inputs.value_cache, slots)
        return paged_attention(*inputs)

    recorded = replay.record(step)
    k.copy_(torch.randn(2, 3, 32))
    slots += 1
    inputs.metadata.seq_lens_S.add_(1)
    out = recorded().clone()
    assert torch.equal(out, step())
    assert_close(out, inputs)


def test_captured():
    inputs = build(CASES["mixed"], torch.float32, torch.float32)

    def run(q, key_cache, value_cache):
        return paged_attention(q, key_cache, value_cache, inputs.metadata, inputs.options) * 2

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*inputs[:3]), run(*inputs[:3]))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda i: i._replace(q=i.q[..., :8]), "don't fit together"),
        (lambda i: i._replace(q=i.q[:, :3]), "not a multiple"),
        (lambda i: i.with_metadata(block_table_SM=i.metadata.block_table_SM.long()), "int32"),
        (lambda i: i.with_metadata(seq_lens_S=i.metadata.seq_lens_S[:1]), r"S \+ 1 offsets"),
        (lambda i: i._replace(value_cache=i.value_cache[:, :4]), "does not fit key cache"),
    ],
)
def test_invalid_shapes_are_rejected(change, message):
    inputs = build(CASES["mixed"], torch.float32, torch.float32)
    with pytest.raises(ArgumentError, match=message):
        paged_attention(*change(inputs))


def test_strided_metadata_and_sinks():
    """Every second number of larger tensors, with invalid numbers in between."""
    inputs = build(CASES["mixed"], torch.float32, torch.float32)
    inputs = inputs.with_options(sinks_N=torch.randn(inputs.q.shape[1]))
    expected = paged_attention(*inputs)

    def strided(tensor):
        return torch.stack((tensor, torch.full_like(tensor, 1 << 20)), dim=-1).flatten(-2)[..., ::2]

    metadata = inputs.metadata._replace(
        block_table_SM=strided(inputs.metadata.block_table_SM),
        query_start_loc=strided(inputs.metadata.query_start_loc),
        seq_lens_S=strided(inputs.metadata.seq_lens_S),
    )
    inputs = inputs._replace(metadata=metadata).with_options(
        sinks_N=strided(inputs.options.sinks_N)
    )
    assert torch.equal(paged_attention(*inputs), expected)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("block_table_SM", lambda t: t.fill_(10**6), "a cache block that does not exist"),
        ("block_table_SM", lambda t: t.fill_(-1), "a cache block that does not exist"),
        ("query_start_loc", lambda t: t.add_(1), "query_start_loc must rise"),
        ("query_start_loc", lambda t: t.neg_(), "query_start_loc must rise"),
        ("seq_lens_S", lambda t: t.fill_(10**6), "more tokens than its row"),
        ("seq_lens_S", lambda t: t.fill_(0), "fewer than query tokens"),
    ],
)
def test_invalid_metadata_is_rejected(name, change, message):
    inputs = build(CASES["mixed"], torch.float32, torch.float32)
    change(getattr(inputs.metadata, name))
    with pytest.raises(ArgumentError, match=message):
        paged_attention(*inputs)


def test_blocks_before_the_window_may_be_freed():
    case = Case([(1, 40), (3, 33)], options={"window": 5})
    inputs = build(case, torch.float32, torch.float32)
    expected = paged_attention(*inputs)
    inputs.metadata.block_table_SM[:, 0] = -1
    assert torch.equal(paged_attention(*inputs), expected)


@pytest.mark.parametrize(
    "tokens, slots, message",
    [
        ((4, 4), torch.arange(2), "one slot per token"),
        ((4, 4), torch.arange(4.0), "one slot per token"),
        ((4, 2), torch.arange(4), "4 new keys and 2 new values"),
        ((2, 2), torch.tensor([0, 15]), "past the last cache block"),
    ],
)
def test_invalid_slot_mapping_is_rejected(tokens, slots, message):
    k, v = (torch.randn(count, 2, 16) for count in tokens)
    with pytest.raises(ArgumentError, match=message):
        store_kv_cache(k, v, torch.zeros(3, 5, 2, 16), torch.zeros(3, 5, 2, 16), slots)


@pytest.mark.parametrize("option", ["window", "chunk", "softcap"])
def test_options_of_zero_are_rejected(option):
    inputs = build(CASES["mixed"], torch.float32, torch.float32)
    with pytest.raises(ArgumentError, match=f"{option}=0 must be positive"):
        paged_attention(*inputs.with_options(**{option: 0}))


@pytest.mark.covering
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("implementation", ["kernel", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_shards_of_keys_merge(name, implementation, count):
    """Context parallelism: outputs and log-sum-exps of all shards make the whole; NaN slots stay out."""
    inputs = build(CASES[name], torch.float32, torch.float32)
    outputs, lses = [], []
    for index in range(count):
        shard = ContextShard(index, count)
        local = shard_inputs(inputs, shard)
        if implementation == "kernel":
            out, lse = paged_attention_shard(*local, shard)
        else:
            out, lse = reference.paged_attention(*local, shard)
        torch.testing.assert_close(lse, exact_lse(local, shard), rtol=1e-5, atol=1e-5)
        assert lse.dtype == torch.float32 and not out.isnan().any()
        outputs.append(out)
        lses.append(lse)
    merged = merge_shards(torch.stack(outputs), torch.stack(lses))
    torch.testing.assert_close(merged.double(), exact(inputs), rtol=1e-4, atol=1e-5)


def test_one_shard_has_the_bits_of_the_whole():
    inputs = build(CASES["mixed"], torch.float32, torch.float32)
    out, _ = paged_attention_shard(*inputs, ContextShard(0, 1))
    assert torch.equal(out, paged_attention(*inputs))


def test_a_shard_that_is_not_there():
    inputs = build(CASES["decode"], torch.float32, torch.float32)
    with pytest.raises(ArgumentError, match="shard 2 of 2"):
        paged_attention_shard(*inputs, ContextShard(2, 2))
