"""The Triton kernels of paged attention: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_support import DEVICE, INTERPRETED  # isort: skip

from fulgurite.kernels.attention import reference, triton_attention, triton_store_kv
from fulgurite.kernels.attention.metadata import (
    AttentionMetadata,
    AttentionOptions,
    ContextShard,
)
from fulgurite.kernels.elementwise import triton_elementwise
from fulgurite.kernels.elementwise.ops import KVCacheSlots, ProjectedQKV, QKNorm
from fulgurite.kernels.tuning.attention import AttentionHeuristics
from fulgurite.kernels.tuning.config import LaunchConfig
from fulgurite.kernels.tuning.sm_90 import Sm90Heuristics
from fulgurite.parallel.context import merge_shards
from tests.kernels.attention.cases import CASES, build, exact, exact_lse, shard_inputs

# the interpreter truncates bfloat16 and float8 where a GPU rounds
CACHES = [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16, torch.float8_e4m3fn]


def run(inputs, shard=None):
    """The kernel with the maxima that the operator sets."""
    starts = inputs.metadata.query_start_loc
    inputs = inputs.with_metadata(
        max_query_len=max((starts[1:] - starts[:-1]).tolist(), default=0),
        max_seq_len=max(inputs.metadata.seq_lens_S.tolist(), default=0),
    )
    return triton_attention.paged_attention(*inputs, shard)


def assert_close(out, inputs, tolerance):
    """Within a fraction of the largest result, or four times the error of torch in float32."""
    expected = exact(inputs)
    eager = reference.paged_attention(*inputs)
    assert out.shape == expected.shape
    ours, theirs = ((x.double() - expected).abs().max() for x in (out, eager))
    assert ours <= max(tolerance * expected.abs().max(), 4 * theirs), f"{ours} against {theirs}"


@pytest.mark.parametrize("name", CASES)
def test_float32(name):
    inputs = build(CASES[name], torch.float32, torch.float32, DEVICE)
    if inputs.q.numel():
        assert_close(run(inputs), inputs, 1e-6)


@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("name", ["mixed", "decode, batch", "values in keys"])
def test_low_precision(name, cache):
    query = torch.float16 if cache == torch.float16 else torch.bfloat16
    inputs = build(CASES[name], cache, query, DEVICE)
    # weights and results are rounded to 16 bits once each
    assert_close(run(inputs), inputs, 2 * torch.finfo(query).eps)


@pytest.fixture(autouse=True)
def empty_launch_cache():
    """Launches are cached, and some tests change the heuristics."""
    triton_attention.build_launch.cache_clear()
    yield
    triton_attention.build_launch.cache_clear()


def set_config(monkeypatch, config):
    monkeypatch.setattr(AttentionHeuristics, "attention_config", lambda *_: config)


@pytest.mark.parametrize("name", ["decode, long", "padding", "sinks, window", "values in keys"])
def test_splits(name, monkeypatch):
    set_config(monkeypatch, LaunchConfig(16, 32, num_warps=4, num_stages=2, split_k=3))
    inputs = build(CASES[name], torch.float32, torch.float32, DEVICE)
    assert_close(run(inputs), inputs, 1e-6)


@pytest.mark.parametrize("cache", [torch.float32, *CACHES], ids=str)
def test_store_kv_cache(cache):
    # the reference on the CPU, which divides: torch on a GPU multiplies by the scale's inverse
    k, v = (torch.randn(7, 6, 19).mul(100)[:, ::2] for _ in range(2))
    slots = torch.tensor([3, -1, 0, 14, 9, 5, -7])
    stored = []
    functions = ((triton_store_kv.store_kv_cache, DEVICE), (reference.store_kv_cache, "cpu"))
    for function, device in functions:
        caches = [torch.zeros(3, 5, 3, 19).to(cache).to(device) for _ in range(2)]
        function(k.to(device), v.to(device), *caches, slots.to(device), 0.3, 2.0)
        stored.append([cache.float().cpu() for cache in caches])
    assert torch.equal(stored[0][0], stored[1][0]) and torch.equal(stored[0][1], stored[1][1])


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    "has_norm, rope, window", [(True, "half", None), (False, "interleaved", 9), (True, "", None)]
)
@pytest.mark.parametrize("cache", [torch.float32, *CACHES], ids=str)
def test_fused_decode_attention_equals_two_kernels(
    has_norm, rope, window, splits, cache, monkeypatch
):
    """Norms, RoPE, cache store and attention in one kernel; the caches are equal bit for bit."""
    monkeypatch.setattr(Sm90Heuristics, "attention_min_split_keys", 16)
    set_config(monkeypatch, LaunchConfig(16, 16, num_warps=4, num_stages=2, split_k=splits))
    seq_lens, heads, key_heads, size, block_size = [1, 33, 50], 6, 2, 32, 16
    dtype = torch.bfloat16 if cache.itemsize == 1 else cache
    q, k, v = (
        torch.randn(4, n, size, device=DEVICE).to(dtype) for n in (heads, key_heads, key_heads)
    )
    norms = None
    if has_norm:
        norms = QKNorm(*(torch.randn(2, size, device=DEVICE).to(dtype)), 1e-5, 1.0)
    cos, sin = torch.randn(2, 4, 1, size // 2, device=DEVICE) if rope else (None, None)
    qkv = ProjectedQKV(q, k, v, norms, cos, sin, rope == "interleaved")
    slots = [16 * (1 + 4 * i + (n - 1) // 16) + (n - 1) % 16 for i, n in enumerate(seq_lens)]
    slot_mapping = torch.tensor([*slots, -1], device=DEVICE)
    metadata = AttentionMetadata(
        torch.arange(1, 13, device=DEVICE).view(3, 4).int(),
        torch.arange(4, device=DEVICE).int(),
        torch.tensor(seq_lens, device=DEVICE).int(),
        max_query_len=1,
        max_seq_len=50,
    )
    options = AttentionOptions(size**-0.5, size, window)
    results = []
    for is_fused in (True, False):
        generator = torch.Generator().manual_seed(3)
        caches = [
            torch.randn(13, block_size, key_heads, size, generator=generator).to(DEVICE).to(cache)
            for _ in range(2)
        ]
        target = KVCacheSlots(*caches, slot_mapping)
        if is_fused:
            out = triton_attention.fused_decode_attention(qkv, target, metadata, options)
        else:
            rotated_q, _, _ = triton_elementwise.qk_norm_rope(*qkv, target)
            out = triton_attention.paged_attention(rotated_q, *caches, metadata, options)
        results.append((out, *caches))
    (out, *stored), (expected, *expected_stored) = results
    for ours, theirs in zip(stored, expected_stored, strict=True):
        assert torch.equal(ours.float(), theirs.float())
    torch.testing.assert_close(out, expected)
    assert not out[3].any()


SHARDED = ("decode", "decode, long", "mixed", "padding", "blocks of 5", "window", "chunk", "sinks")


@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize("name", [*SHARDED, "values in keys"])
def test_shards_of_keys_merge(name, splits, monkeypatch):
    """Context parallelism: outputs and log-sum-exps of all shards make the whole."""
    monkeypatch.setattr(Sm90Heuristics, "attention_min_split_keys", 16)
    set_config(monkeypatch, LaunchConfig(16, 16, num_warps=4, num_stages=2, split_k=splits))
    inputs = build(CASES[name], torch.float32, torch.float32, DEVICE)
    outputs, lses = [], []
    for index in range(3):
        shard = ContextShard(index, 3)
        local = shard_inputs(inputs, shard)
        out, lse = run(local, shard)
        torch.testing.assert_close(lse, exact_lse(local, shard).to(DEVICE), rtol=1e-4, atol=1e-4)
        outputs.append(out)
        lses.append(lse)
    merged = merge_shards(torch.stack(outputs), torch.stack(lses))
    torch.testing.assert_close(merged.double(), exact(inputs), rtol=1e-4, atol=1e-5)
