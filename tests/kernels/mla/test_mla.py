"""MLA: the C++ kernel against the float64 reference, and that against plain attention."""

from __future__ import annotations

import pytest
import torch

from fulgurite import native, replay
from fulgurite.errors import ArgumentError
from fulgurite.kernels.attention.reference import attend_sequence
from fulgurite.kernels.mla import ops, reference
from fulgurite.kernels.mla.ops import CACHE_DTYPES, store_mla_cache
from fulgurite.kernels.tuning.mla import should_expand
from tests.kernels.mla.cases import CASES, Case, build, empty_cache, exact, random_rope

pytestmark = pytest.mark.skipif(native.find_compiler() is None, reason="needs a C++ compiler")


def mla_attention(inputs):
    *tensors, scale, interleaved = inputs
    return ops.mla_attention(*tensors, scale=scale, interleaved=interleaved)


def assert_close(out, inputs):
    """Our error is at most twice that of the reference in float32 (the float64 rule)."""
    expected = exact(inputs)
    eager = reference.mla_attention(*inputs)
    assert out.shape == expected.shape
    if not expected.numel():
        return
    ours, theirs = (out.double() - expected).abs().max(), (eager.double() - expected).abs().max()
    floor = 4 * torch.finfo(torch.float32).eps * expected.abs().max()
    assert ours <= 2 * theirs + floor, f"{ours} against {theirs}"


@pytest.mark.parametrize("name", CASES)
def test_float32(name):
    inputs = build(CASES[name], torch.float32, torch.float32)
    assert_close(mla_attention(inputs), inputs)


@pytest.mark.covering
@pytest.mark.parametrize("cache", [d for d in CACHE_DTYPES if d != torch.float32], ids=str)
@pytest.mark.parametrize("name", ["mixed", "odd sizes", "no rotary part", "blocks of 5"])
def test_low_precision_cache(name, cache):
    inputs = build(CASES[name], cache, torch.float32)
    assert_close(mla_attention(inputs), inputs)


@pytest.mark.parametrize("query", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["mixed", "odd sizes"])
def test_low_precision_queries(name, query):
    inputs = build(CASES[name], query, query)
    assert_close(mla_attention(inputs), inputs)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", ["decode, long", "mixed", "decode, 40 heads"])
def test_threads_and_splits(name, threads, monkeypatch):
    monkeypatch.setenv("FULGURITE_NUM_THREADS", str(threads))
    inputs = build(CASES[name], torch.float32, torch.float32)
    assert_close(mla_attention(inputs), inputs)


def test_cases_cover_absorbed_and_expanded():
    case = CASES["mixed"]
    expanded = [should_expand(queries, keys, *case.sizes) for queries, keys in case.sequences]
    assert expanded == [False, True, False, False, False, True, False]
    deepseek = (512, 128, 64, 128)
    assert not should_expand(1, 4096, *deepseek) and not should_expand(128, 4096, *deepseek)
    assert should_expand(256, 4096, *deepseek) and should_expand(512, 512, *deepseek)


def test_strided_queries_weights_and_block_table():
    inputs = build(CASES["mixed"], torch.float32, torch.float32)
    q, kv_b, block_table = inputs.q, inputs.kv_b, inputs.metadata.block_table_SM
    wide_q = torch.randn(q.shape[0], 2 * q.shape[1], q.shape[2])
    wide_q[:, ::2] = q
    wide_table = torch.zeros(block_table.shape[0], block_table.shape[1] + 5, dtype=torch.int32)
    wide_table[:, : block_table.shape[1]] = block_table
    wide_kv_b = torch.randn(kv_b.shape[0], kv_b.shape[1], 2 * kv_b.shape[2])
    wide_kv_b[..., : kv_b.shape[2]] = kv_b
    strided = inputs._replace(q=wide_q[:, ::2], kv_b=wide_kv_b[..., : kv_b.shape[2]])
    strided = strided.with_metadata(block_table_SM=wide_table[:, : block_table.shape[1]])
    assert torch.equal(mla_attention(strided), mla_attention(inputs))


@pytest.mark.parametrize("queries", [1, 140])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_query_only_affects_its_row(bad, queries):
    inputs = build(Case([(queries, 150), (1, 5)]), torch.float32, torch.float32)
    inputs.q[0, 0, 0] = bad
    out = mla_attention(inputs)
    eager = reference.mla_attention(*inputs)
    assert torch.equal(out.isnan(), eager.isnan()) and out[0, 0].isnan().all()
    assert out[1:].isfinite().all()


@pytest.mark.parametrize("interleaved", [True, False])
def test_reference_equals_plain_attention_over_expanded_keys(interleaved):
    case = Case([(9, 30)], interleaved=interleaved)
    inputs = build(case, torch.float32, torch.float64)
    q, kv_b = inputs.q, inputs.kv_b
    cache = reference.split_latent_cache(inputs.cache, 32, 8)
    blocks = inputs.metadata.block_table_SM[0]
    c, r = reference.gather_latents(cache, blocks, 30, torch.float64)
    keys = torch.cat((c @ kv_b[:, :16].mT, r.expand(4, -1, -1)), -1).transpose(0, 1)
    values = (c @ kv_b[:, 16:].mT).transpose(0, 1)
    pairs = q[..., 16:].unflatten(-1, (4, 2) if interleaved else (2, 4))
    pairs = torch.view_as_complex((pairs if interleaved else pairs.mT).contiguous())
    pairs = torch.view_as_real(pairs * torch.complex(inputs.cos, inputs.sin)[:, None])
    q = torch.cat((q[..., :16], (pairs if interleaved else pairs.mT).flatten(-2)), -1)
    mask = torch.arange(30) <= torch.arange(21, 30)[:, None]
    expected = attend_sequence(q, keys, values, mask, inputs.scale, None, None)
    torch.testing.assert_close(reference.mla_attention(*inputs), expected)


def store(function, kv_a, norm, rope, slots, cache_dtype, interleaved):
    case = Case([], rank=norm.shape[0], rope_dim=kv_a.shape[1] - norm.shape[0], block_size=5)
    cache = empty_cache(case, 3, cache_dtype)
    function(kv_a, norm, *rope, cache, slots, eps=1e-6, interleaved=interleaved)
    return cache, reference.split_latent_cache(cache, case.rank, case.rope_dim)


@pytest.mark.parametrize("cache", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("new", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "rank, rope_dim, interleaved", [(48, 8, True), (19, 6, False), (1, 0, True)]
)
def test_store_mla_cache(cache, new, rank, rope_dim, interleaved):
    kv_a = torch.randn(7, 2 * (rank + rope_dim)).mul(30).to(new)[:, : rank + rope_dim]
    norm = (torch.rand(rank) + 0.5).to(new)
    rope, slots = random_rope(7, rope_dim), torch.tensor([3, -1, 0, 14, 9, 5, -7])
    arguments = (kv_a, norm, rope, slots, cache, interleaved)
    (stored, ours), (expected, theirs) = (
        store(function, *arguments) for function in (store_mla_cache, reference.store_mla_cache)
    )
    is_free = torch.ones(15, dtype=torch.bool)
    is_free[slots[slots >= 0]] = False
    free, expected_free = (x.view(torch.uint8).flatten(0, 1)[is_free] for x in (stored, expected))
    assert torch.equal(free, expected_free), "other slots were written"
    is_stored = ~is_free.view(3, 5)
    for a, b in zip(ours, theirs, strict=True):
        if a is None or b is None:
            assert a is b
            continue
        # sums in another order: a number may be rounded the other way
        a, b, step = a[is_stored].float(), b[is_stored].float(), torch.finfo(a.dtype).eps
        assert ((a - b).abs() <= 2 * max(step, 2e-7) * b.abs() + 1e-5).all()


def test_fp8_rows_keep_three_bits():
    """A stored latent is within half a step of e4m3, its rotary key within bfloat16's."""
    kv_a, norm = torch.randn(6, 40) * torch.logspace(-3, 3, 6)[:, None], torch.ones(32)
    cos, sin = torch.ones(6, 4), torch.zeros(6, 4)
    slots = torch.arange(6)
    _, cache = store(store_mla_cache, kv_a, norm, (cos, sin), slots, torch.uint8, True)
    c = cache.latents_PBC.float().flatten(0, 1)[:6] * cache.scales_PB.flatten()[:6, None]
    exact_c = torch.nn.functional.rms_norm(kv_a[:, :32], (32,), eps=1e-6)
    scale = exact_c.abs().amax(-1, keepdim=True) / 448
    assert ((c - exact_c).abs() <= exact_c.abs() / 15.9 + scale * 2.0**-9).all()
    r = cache.ropes_PBR.float().flatten(0, 1)[:6]
    assert ((r - kv_a[:, 32:]).abs() <= kv_a[:, 32:].abs() * 2.0**-8).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_latent_is_stored_as_nan(bad):
    kv_a = torch.randn(2, 40)
    kv_a[0, 3] = bad
    kv_a[1, :32] = 0
    arguments = (kv_a, torch.ones(32), random_rope(2, 8), torch.tensor([0, 1]), torch.uint8, True)
    for function in (store_mla_cache, reference.store_mla_cache):
        _, cache = store(function, *arguments)
        c = cache.latents_PBC.float() * cache.scales_PB[..., None]
        assert c[0, 0].isnan().all()
        assert (c[0, 1] == 0).all() and cache.scales_PB[0, 1] == 1


def test_replayed_step_follows_its_inputs():
    inputs = build(Case([(1, 30), (1, 17)], heads=6), torch.float32, torch.float32)
    kv_a, norm, block_table = torch.randn(2, 40), torch.ones(32), inputs.metadata.block_table_SM
    slots = torch.tensor([int(block_table[0, 1]) * 16 + 13, int(block_table[1, 1]) * 16 + 0])
    rope = (inputs.cos, inputs.sin)

    def step():
        store_mla_cache(kv_a, norm, *rope, inputs.cache, slots, eps=1e-6, interleaved=True)
        return mla_attention(inputs)

    recorded = replay.record(step)
    kv_a.copy_(torch.randn(2, 40))
    slots += 1
    inputs.metadata.seq_lens_S.add_(1)
    out = recorded().clone()
    assert torch.equal(out, step())
    assert_close(out, inputs)


def test_captured():
    inputs = build(CASES["mixed"], torch.float32, torch.float32)
    kv_a, rope, slots = torch.randn(2, 40), random_rope(2, 8), torch.tensor([0, 3])

    def run(cache, kv_a, q):
        store_mla_cache(kv_a, torch.ones(32), *rope, cache, slots, eps=1e-6, interleaved=True)
        return mla_attention(inputs._replace(q=q, cache=cache)) * 2

    copy = inputs.cache.clone()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(copy, kv_a, inputs.q), run(inputs.cache, kv_a, inputs.q))
    assert torch.equal(copy.view(torch.int32), inputs.cache.view(torch.int32))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda i: i._replace(q=i.q[:, :3]), "don't fit together"),
        (lambda i: i._replace(q=i.q[..., :4]), "don't fit together"),
        (lambda i: i._replace(kv_b=i.kv_b[..., :8]), "MLA cache"),
        (lambda i: i._replace(cos=i.cos[:5]), "for 204 tokens"),
        (lambda i: i._replace(cache=i.cache.double()), "MLA cache of torch.float64"),
        (lambda i: i.with_metadata(block_table_SM=i.metadata.block_table_SM.long()), "int32"),
        (lambda i: i.with_metadata(seq_lens_S=i.metadata.seq_lens_S[:1]), r"S \+ 1 offsets"),
    ],
)
def test_invalid_shapes_are_rejected(change, message):
    inputs = build(CASES["mixed"], torch.float32, torch.float32)
    with pytest.raises(ArgumentError, match=message):
        mla_attention(change(inputs))


def store_in_empty_cache(kv_a, slots):
    cache = empty_cache(Case([]), 2, torch.float32)
    rope = random_rope(len(kv_a), 8)
    store_mla_cache(kv_a, torch.ones(32), *rope, cache, slots, eps=1e-6, interleaved=True)


def test_new_latents_of_another_size_are_rejected():
    with pytest.raises(ArgumentError, match=r"\[T, 40\]"):
        store_in_empty_cache(torch.randn(3, 39), torch.arange(3))


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("block_table_SM", lambda t: t.fill_(10**6), "a cache block that does not exist"),
        ("query_start_loc", lambda t: t.add_(1), "query_start_loc must rise"),
        ("seq_lens_S", lambda t: t.fill_(10**6), "more tokens than its row"),
    ],
)
def test_invalid_metadata_is_rejected(name, change, message):
    inputs = build(CASES["mixed"], torch.float32, torch.float32)
    change(getattr(inputs.metadata, name))
    with pytest.raises(ArgumentError, match=message):
        mla_attention(inputs)


def test_strided_metadata():
    inputs = build(CASES["mixed"], torch.float32, torch.float32)
    expected = mla_attention(inputs)

    def strided(tensor):
        gaps = torch.full_like(tensor, 1 << 20)
        return torch.stack((tensor, gaps), dim=-1).flatten(-2)[..., ::2]

    names = ("block_table_SM", "query_start_loc", "seq_lens_S")
    fields = {name: strided(getattr(inputs.metadata, name)) for name in names}
    assert torch.equal(mla_attention(inputs.with_metadata(**fields)), expected)


@pytest.mark.parametrize(
    "slots, message", [([0, 1], "one slot per token"), ([0, 1, 99], "past the last cache block")]
)
def test_invalid_slot_mapping_is_rejected(slots, message):
    with pytest.raises(ArgumentError, match=message):
        store_in_empty_cache(torch.randn(3, 40), torch.tensor(slots))
