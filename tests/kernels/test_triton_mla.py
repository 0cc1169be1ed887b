"""The Triton kernels of latent attention: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_support import DEVICE, INTERPRETED  # isort: skip

from fulgurite.kernels.mla import reference, triton_decode, triton_mla
from fulgurite.kernels.mla.ops import expands
from fulgurite.kernels.mla.triton_absorb import kinds, project_queries
from fulgurite.kernels.mla.triton_prefill import gather
from fulgurite.kernels.mla.triton_store_kv import write_latent
from tests.kernels.mla_cases import CASES, Case, angles, build, empty_pages, exact

# the interpreter cuts bfloat16 off where a GPU rounds
NARROW = [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]
LARGE = () if INTERPRETED else ("deepseek",)
QUICK = [name for name in CASES if name not in ("deepseek", "decode, long", "mixed")]


def run(tensors, options, counted=True):
    """The kernel with every argument in place; `counted`: the host knows the counts."""
    starts, lengths = tensors[6], tensors[7]
    counts = (starts[1:] - starts[:-1]).tolist()
    keys = lengths.tolist()
    return triton_mla.latent_attention(
        *tensors, options["scale"], options["interleaved"],
        max(counts, default=0), max(keys, default=0),
        counts if counted else None, keys if counted else None,
    )  # fmt: skip


def close(found, tensors, options, tolerance):
    """Within a share of the largest result, or four times the error of plain torch in float32."""
    wanted = exact(tensors, options)
    eager = reference.latent_attention(*tensors, **options)
    assert found.shape == wanted.shape
    if not wanted.numel():
        return
    ours, theirs = ((x.double() - wanted).abs().max() for x in (found, eager))
    assert ours <= max(tolerance * wanted.abs().max(), 4 * theirs), f"{ours} against {theirs}"


@pytest.mark.parametrize("name", [*QUICK, *LARGE])
def test_float32(name):
    tensors, options = build(CASES[name], torch.float32, torch.float32, DEVICE)
    close(run(tensors, options), tensors, options, 2e-6)


def test_absorbed_where_counts_are_not_known():
    tensors, options = build(CASES["prompt of a prime"], torch.float32, torch.float32, DEVICE)
    close(run(tensors, options, counted=False), tensors, options, 2e-6)


MIXED = Case([(1, 30), (40, 40), (3, 20), (0, 5), (1, 1), (33, 70)], heads=3, spare=2)


@pytest.mark.parametrize("pages", [torch.float32, torch.uint8, *NARROW], ids=str)
def test_mixed(pages):
    """Prompts, a prompt after a prefix, decode steps and nobody's tokens in one call."""
    sizes = (MIXED.rank, MIXED.plain, MIXED.rope, MIXED.value)
    ways = [expands(new, length, *sizes) for new, length in MIXED.sequences]
    assert any(ways) and not all(ways)
    query = torch.float32 if pages in (torch.float32, torch.uint8) else pages
    tensors, options = build(MIXED, pages, query, DEVICE)
    # queries in latent space, gathered latents, weights and results are rounded to 16 bits once each
    tolerance = 2e-6 if query == torch.float32 else 4 * torch.finfo(query).eps
    close(run(tensors, options), tensors, options, tolerance)


@pytest.mark.parametrize("pages", [torch.uint8, *NARROW], ids=str)
@pytest.mark.parametrize("name", ["decode, many", "some tokens", "halves"])
def test_narrow(name, pages):
    query = torch.float16 if INTERPRETED or pages == torch.float16 else torch.bfloat16
    tensors, options = build(CASES[name], pages, query, DEVICE)
    close(run(tensors, options), tensors, options, 4 * torch.finfo(query).eps)


@pytest.mark.parametrize("splits", [3])
@pytest.mark.parametrize("name", ["decode", "nobody's tokens", "some tokens"])
def test_splits(name, splits, monkeypatch):
    monkeypatch.setattr(triton_decode, "plan", lambda *_: triton_decode.Plan(16, 16, 4, 1, splits))
    tensors, options = build(CASES[name], torch.float32, torch.float32, DEVICE)
    close(run(tensors, options), tensors, options, 2e-6)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not run Gluon")
@pytest.mark.parametrize("pages", [torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize(
    "lengths", [[(1, 1), (1, 700), (1, 64)], [(3, 130), (1, 65)] * 17], ids=len
)
def test_many_heads(lengths, pages):
    """64 rows and more of DeepSeek's sizes, which Hopper has a kernel of its own for; split and whole."""
    sizes = {"rank": 512, "plain": 128, "rope": 64, "value": 128, "page": 64}
    case = Case(lengths, heads=128, spare=2, **sizes)
    tensors, options = build(case, pages, torch.bfloat16, DEVICE)
    close(run(tensors, options), tensors, options, 4 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("programs, splits", [(1, 32), (16, 8), (64, 2), (128, 1), (132, 1)])
def test_contexts_are_split_into_whole_waves(programs, splits):
    assert triton_decode.splits_for(programs, 132, 4096) == splits


@pytest.mark.parametrize("longest", [0, 1, 63, 130])
def test_short_contexts_are_hardly_split(longest):
    assert triton_decode.splits_for(1, 132, longest) <= max(longest // triton_decode.LEAST_SPAN, 1)


def test_fp8_latents_far_from_one():
    """Scales that would leave few bits of a weight in float16."""
    tensors, options = build(Case([(1, 90), (3, 41)], heads=5), torch.uint8, torch.float16, DEVICE)
    tensors[0][..., :16].mul_(300)
    scales = reference.parts(tensors[4], 32, 8).scales_PB
    scales.mul_(torch.linspace(1e-3, 3e-3, scales.shape[1], device=DEVICE))
    tensors[1][:, 16:].mul_(100)
    found = run(tensors, options)
    assert found.abs().max() > 0
    close(found, tensors, options, 4 * torch.finfo(torch.float16).eps)


@pytest.mark.parametrize("pages", [torch.float32, torch.float8_e4m3fn, *NARROW], ids=str)
@pytest.mark.parametrize(
    "tokens, plain, rope, rank", [(1, 16, 8, 48), (19, 7, 6, 19), (33, 1, 0, 1)]
)
def test_queries(tokens, plain, rope, rank, pages):
    query = NARROW[0] if pages.itemsize < 4 else pages
    q = torch.randn(tokens, 3, 2 * (plain + rope), device=DEVICE)[..., : plain + rope].to(query)
    up = torch.randn(3, plain + 5, rank, device=DEVICE).to(query)[:, :plain]
    cos, sin = (x.to(DEVICE) for x in angles(tokens, rope))
    found = project_queries(q, up, cos, sin, True, pages)
    assert (found.latent_TNC.dtype, found.rope_TNR.dtype) == kinds(query, pages)
    power = 1.0 if found.powers_TN is None else found.powers_TN[..., None].double()
    wanted = torch.einsum("tnd,ndc->tnc", q[..., :plain].double(), up.double())
    turned = reference.turned(q[..., plain:].double(), cos[:, None], sin[:, None], True)
    most = torch.cat((wanted, turned), dim=-1).abs().amax(-1, keepdim=True)
    rounded = torch.finfo(query).eps  # the library's product is as wide as the queries
    for ours, right, least in ((found.latent_TNC, wanted, rounded), (found.rope_TNR, turned, 1e-6)):
        error = (ours.double() * power - right).abs()
        assert (error <= 2 * max(torch.finfo(ours.dtype).eps, least) * most).all()
    if found.powers_TN is not None:
        largest = torch.cat((found.latent_TNC.float(), found.rope_TNR.float()), -1).abs().amax(-1)
        assert (largest <= 1).all() and (largest > 0.49).all()


@pytest.mark.parametrize("pages", [torch.float32, torch.uint8, *NARROW], ids=str)
@pytest.mark.parametrize("length", [1, 16, 41])
def test_gather(length, pages):
    tensors, _ = build(Case([(1, 41)], page=5, rank=19, rope=6), pages, torch.float32, DEVICE)
    kept = reference.parts(tensors[4], 19, 6)
    found = gather(kept, tensors[5][0], length, torch.float32)
    wanted = reference.read_latent(kept, tensors[5][0], length, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("each", [1, 16, 32])
def test_a_long_context_is_expanded_in_pieces(each, monkeypatch):
    monkeypatch.setattr(triton_mla, "EXPANDED_KEYS", each)
    case = Case([(37, 75)], heads=2, rank=64)
    tensors, options = build(case, torch.float32, torch.float32, DEVICE)
    assert expands(37, 75, case.rank, case.plain, case.rope, case.value)
    close(run(tensors, options), tensors, options, 2e-6)


@pytest.mark.parametrize("pages", [torch.float32, torch.uint8, *NARROW], ids=str)
@pytest.mark.parametrize("rank, rope, interleaved", [(48, 8, True), (19, 6, False), (1, 0, True)])
def test_write(pages, rank, rope, interleaved):
    latent = torch.randn(7, 2 * (rank + rope), device=DEVICE).mul(30)[:, : rank + rope]
    norm = torch.rand(rank, device=DEVICE) + 0.5
    cos, sin = (x.to(DEVICE) for x in angles(7, rope))
    slots = torch.tensor([3, -1, 0, 14, 9, 5, -7], device=DEVICE)
    stored = []
    for function in (write_latent, reference.write_latent):
        kept = empty_pages(Case([], rank=rank, rope=rope, page=5), 3, pages).to(DEVICE)
        function(latent, norm, cos, sin, kept, slots, 1e-6, interleaved)
        stored.append((kept, reference.parts(kept, rank, rope)))
    full = torch.zeros(15, dtype=torch.bool, device=DEVICE)
    full[slots[slots >= 0]] = True
    bytes = [kept.view(torch.uint8).flatten(0, 1)[~full] for kept, _ in stored]
    assert torch.equal(*bytes)  # nothing else is touched
    full = full.view(3, 5)
    for a, b in zip(stored[0][1], stored[1][1], strict=True):
        if a is None or b is None:
            assert a is b
            continue
        # sums in another order: a number may fall on the other side of a rounding
        a, b, step = a[full].float(), b[full].float(), torch.finfo(a.dtype).eps
        assert ((a - b).abs() <= 2 * max(step, 2e-7) * b.abs() + 1e-5).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_latent_that_is_no_number_is_kept_as_nan(bad):
    latent = torch.randn(2, 40, device=DEVICE)
    latent[0, 3] = bad
    latent[1, :32] = 0
    kept = empty_pages(Case([]), 1, torch.uint8).to(DEVICE)
    cos, sin = (x.to(DEVICE) for x in angles(2, 8))
    slots = torch.tensor([0, 1], device=DEVICE)
    write_latent(latent, torch.ones(32, device=DEVICE), cos, sin, kept, slots, 1e-6, True)
    found = reference.parts(kept, 32, 8)
    c = found.latents_PBC.float() * found.scales_PB[..., None]
    assert c[0, 0].isnan().all() and (c[0, 1] == 0).all() and found.scales_PB[0, 1] == 1
