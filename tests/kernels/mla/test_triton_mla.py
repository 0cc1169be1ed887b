"""The Triton kernels of MLA: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_support import DEVICE, INTERPRETED  # isort: skip

from fulgurite.kernels.mla import reference, triton_mla
from fulgurite.kernels.mla.triton_absorb import absorb_queries, query_dtypes
from fulgurite.kernels.mla.triton_store_kv import store_mla_cache
from fulgurite.kernels.tuning.config import LaunchConfig
from fulgurite.kernels.tuning.mla import MlaHeuristics, should_expand
from fulgurite.kernels.tuning.sm_90 import Sm90Heuristics
from tests.kernels.mla.cases import CASES, Case, build, empty_cache, exact, random_rope

# the interpreter truncates bfloat16 where a GPU rounds
HALVES = [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]
LARGE = () if INTERPRETED else ("deepseek",)
QUICK = [name for name in CASES if name not in ("deepseek", "decode, long", "mixed")]


def run(inputs, host_lens=True):
    """The kernel with the operator's maxima; `host_lens`: the host knows the lengths."""
    starts = inputs.metadata.query_start_loc
    query_lens, seq_lens = (starts[1:] - starts[:-1]).tolist(), inputs.metadata.seq_lens_S.tolist()
    inputs = inputs.with_metadata(
        max_query_len=max(query_lens, default=0), max_seq_len=max(seq_lens, default=0)
    )
    if host_lens:
        inputs = inputs.with_metadata(query_lens=query_lens, seq_lens=seq_lens)
    return triton_mla.mla_attention(*inputs)


def assert_close(out, inputs, tolerance):
    """Within a fraction of the largest result, or four times the error of torch in float32."""
    expected = exact(inputs)
    eager = reference.mla_attention(*inputs)
    assert out.shape == expected.shape
    if not expected.numel():
        return
    ours, theirs = ((x.double() - expected).abs().max() for x in (out, eager))
    assert ours <= max(tolerance * expected.abs().max(), 4 * theirs), f"{ours} against {theirs}"


@pytest.mark.parametrize("name", [*QUICK, *LARGE])
def test_float32(name):
    inputs = build(CASES[name], torch.float32, torch.float32, DEVICE)
    assert_close(run(inputs), inputs, 2e-6)


def test_absorbed_where_the_host_knows_no_lengths():
    inputs = build(CASES["prefill of a prime"], torch.float32, torch.float32, DEVICE)
    assert_close(run(inputs, host_lens=False), inputs, 2e-6)


MIXED = Case([(1, 30), (40, 40), (3, 20), (0, 5), (1, 1), (33, 70)], heads=3, padding=2)


@pytest.mark.parametrize("cache", [torch.float32, torch.uint8, *HALVES], ids=str)
def test_mixed(cache):
    """Prompts, a prompt after a prefix, decode steps and padding in one call."""
    expanded = [should_expand(queries, keys, *MIXED.sizes) for queries, keys in MIXED.sequences]
    assert any(expanded) and not all(expanded)
    query = torch.float32 if cache in (torch.float32, torch.uint8) else cache
    inputs = build(MIXED, cache, query, DEVICE)
    # absorbed queries, latent results, weights and results are rounded to 16 bits once each
    tolerance = 2e-6 if query == torch.float32 else 4 * torch.finfo(query).eps
    assert_close(run(inputs), inputs, tolerance)


@pytest.mark.parametrize("cache", [torch.uint8, *HALVES], ids=str)
@pytest.mark.parametrize("name", ["decode, batch", "several tokens", "not interleaved"])
def test_low_precision(name, cache):
    query = torch.float16 if INTERPRETED or cache == torch.float16 else torch.bfloat16
    inputs = build(CASES[name], cache, query, DEVICE)
    assert_close(run(inputs), inputs, 4 * torch.finfo(query).eps)


@pytest.mark.parametrize("name", ["decode", "padding", "several tokens"])
def test_splits(name, monkeypatch):
    config = LaunchConfig(16, 16, num_warps=4, num_stages=1, split_k=3)
    monkeypatch.setattr(MlaHeuristics, "mla_decode_config", lambda *_: config)
    inputs = build(CASES[name], torch.float32, torch.float32, DEVICE)
    assert_close(run(inputs), inputs, 2e-6)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not run Gluon")
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize(
    "sequences", [[(1, 1), (1, 700), (1, 64)], [(3, 130), (1, 65)] * 17], ids=len
)
def test_128_heads(sequences, cache):
    """DeepSeek's sizes, for which Hopper has its own kernel; split and not split."""
    sizes = {"rank": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128, "block_size": 64}
    case = Case(sequences, heads=128, padding=2, **sizes)
    inputs = build(case, cache, torch.bfloat16, DEVICE)
    assert_close(run(inputs), inputs, 4 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("programs, splits", [(1, 32), (16, 8), (64, 2), (128, 1), (132, 1)])
def test_contexts_are_split_into_whole_waves(programs, splits):
    assert Sm90Heuristics().mla_num_splits(programs, 132, 4096) == splits


@pytest.mark.parametrize("max_keys", [0, 1, 63, 130])
def test_short_contexts_are_hardly_split(max_keys):
    heuristics = Sm90Heuristics()
    most = max(max_keys // heuristics.mla_min_split_keys, 1)
    assert heuristics.mla_num_splits(1, 132, max_keys) <= most


def test_fp8_latents_with_small_scales():
    """Scales that would leave few bits of a softmax weight in float16."""
    inputs = build(Case([(1, 90), (3, 41)], heads=5), torch.uint8, torch.float16, DEVICE)
    inputs.q[..., :16].mul_(300)
    scales = reference.split_latent_cache(inputs.cache, 32, 8).scales_PB
    scales.mul_(torch.linspace(1e-3, 3e-3, scales.shape[1], device=DEVICE))
    inputs.kv_b[:, 16:].mul_(100)
    out = run(inputs)
    assert out.abs().max() > 0
    assert_close(out, inputs, 4 * torch.finfo(torch.float16).eps)


@pytest.mark.parametrize("cache", [torch.float32, torch.float8_e4m3fn, *HALVES], ids=str)
@pytest.mark.parametrize(
    "tokens, nope_dim, rope_dim, rank", [(1, 16, 8, 48), (19, 7, 6, 19), (33, 1, 0, 1)]
)
def test_absorb_queries(tokens, nope_dim, rope_dim, rank, cache):
    query, size = HALVES[0] if cache.itemsize < 4 else cache, nope_dim + rope_dim
    q = torch.randn(tokens, 3, 2 * size, device=DEVICE)[..., :size].to(query)
    w_uk = torch.randn(3, nope_dim + 5, rank, device=DEVICE).to(query)[:, :nope_dim]
    cos, sin = (x.to(DEVICE) for x in random_rope(tokens, rope_dim))
    absorbed = absorb_queries(q, w_uk, cos, sin, True, cache)
    assert (absorbed.latent_TNC.dtype, absorbed.rope_TNR.dtype) == query_dtypes(query, cache)
    power = 1.0 if absorbed.powers_TN is None else absorbed.powers_TN[..., None].double()
    latent = torch.einsum("tnd,ndc->tnc", q[..., :nope_dim].double(), w_uk.double())
    rope = reference.apply_rope(q[..., nope_dim:].double(), cos[:, None], sin[:, None], True)
    amax = torch.cat((latent, rope), dim=-1).abs().amax(-1, keepdim=True)
    rounding = torch.finfo(query).eps  # the library's result has the queries' dtype
    pairs = ((absorbed.latent_TNC, latent, rounding), (absorbed.rope_TNR, rope, 1e-6))
    for ours, expected, eps in pairs:
        error = (ours.double() * power - expected).abs()
        assert (error <= 2 * max(torch.finfo(ours.dtype).eps, eps) * amax).all()
    if absorbed.powers_TN is not None:
        both = torch.cat((absorbed.latent_TNC.float(), absorbed.rope_TNR.float()), -1)
        largest = both.abs().amax(-1)
        assert (largest <= 1).all() and (largest > 0.49).all()


@pytest.mark.parametrize("cache", [torch.float32, torch.uint8, *HALVES], ids=str)
@pytest.mark.parametrize(
    "rank, rope_dim, interleaved", [(48, 8, True), (19, 6, False), (1, 0, True)]
)
def test_store_mla_cache(cache, rank, rope_dim, interleaved):
    kv_a = torch.randn(7, 2 * (rank + rope_dim), device=DEVICE).mul(30)[:, : rank + rope_dim]
    norm = torch.rand(rank, device=DEVICE) + 0.5
    cos, sin = (x.to(DEVICE) for x in random_rope(7, rope_dim))
    slots = torch.tensor([3, -1, 0, 14, 9, 5, -7], device=DEVICE)
    stored = []
    for function in (store_mla_cache, reference.store_mla_cache):
        case = Case([], rank=rank, rope_dim=rope_dim, block_size=5)
        target = empty_cache(case, 3, cache).to(DEVICE)
        function(kv_a, norm, cos, sin, target, slots, 1e-6, interleaved)
        stored.append((target, reference.split_latent_cache(target, rank, rope_dim)))
    is_stored = torch.zeros(15, dtype=torch.bool, device=DEVICE)
    is_stored[slots[slots >= 0]] = True
    free = [target.view(torch.uint8).flatten(0, 1)[~is_stored] for target, _ in stored]
    assert torch.equal(*free), "other slots were written"
    is_stored = is_stored.view(3, 5)
    for a, b in zip(stored[0][1], stored[1][1], strict=True):
        if a is None or b is None:
            assert a is b
            continue
        # sums in another order: a number may be rounded the other way
        a, b, step = a[is_stored].float(), b[is_stored].float(), torch.finfo(a.dtype).eps
        assert ((a - b).abs() <= 2 * max(step, 2e-7) * b.abs() + 1e-5).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_latent_is_stored_as_nan(bad):
    kv_a = torch.randn(2, 40, device=DEVICE)
    kv_a[0, 3] = bad
    kv_a[1, :32] = 0
    cache = empty_cache(Case([]), 1, torch.uint8).to(DEVICE)
    cos, sin = (x.to(DEVICE) for x in random_rope(2, 8))
    slots = torch.tensor([0, 1], device=DEVICE)
    store_mla_cache(kv_a, torch.ones(32, device=DEVICE), cos, sin, cache, slots, 1e-6, True)
    views = reference.split_latent_cache(cache, 32, 8)
    c = views.latents_PBC.float() * views.scales_PB[..., None]
    assert c[0, 0].isnan().all() and (c[0, 1] == 0).all() and views.scales_PB[0, 1] == 1
