"""Latent attention: the C++ kernel against the definition in float64, and that one against plain attention."""

from __future__ import annotations

import pytest
import torch

from fulgurite import native, replay
from fulgurite.errors import ArgumentError
from fulgurite.kernels.attention import reference as attention_reference
from fulgurite.kernels.mla import ops, reference
from fulgurite.kernels.mla.ops import PAGE_DTYPES, latent_attention, write_latent
from tests.kernels.mla_cases import CASES, Case, angles, build, empty_pages, exact

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="needs a C++ compiler")


def close(found, tensors, options):
    """Our error is at most twice that of the same definition in float32 (the float64 rule)."""
    wanted = exact(tensors, options)
    eager = reference.latent_attention(*tensors, **options)
    assert found.shape == wanted.shape
    if not wanted.numel():
        return
    ours, theirs = (found.double() - wanted).abs().max(), (eager.double() - wanted).abs().max()
    floor = 4 * torch.finfo(torch.float32).eps * wanted.abs().max()
    assert ours <= 2 * theirs + floor, f"{ours} against {theirs}"


@pytest.mark.parametrize("name", CASES)
def test_float32(name):
    tensors, options = build(CASES[name], torch.float32, torch.float32)
    close(latent_attention(*tensors, **options), tensors, options)


@pytest.mark.parametrize("pages", [d for d in PAGE_DTYPES if d != torch.float32], ids=str)
@pytest.mark.parametrize("name", ["mixed", "odd sizes", "no rotary part", "pages of 5"])
def test_narrow_pages(name, pages):
    tensors, options = build(CASES[name], pages, torch.float32)
    close(latent_attention(*tensors, **options), tensors, options)


@pytest.mark.parametrize("query", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["mixed", "odd sizes"])
def test_narrow_queries(name, query):
    tensors, options = build(CASES[name], query, query)
    close(latent_attention(*tensors, **options), tensors, options)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", ["decode, long", "mixed", "decode, many heads"])
def test_threads_and_spans(name, threads, monkeypatch):
    monkeypatch.setenv("FULGURITE_THREADS", str(threads))
    tensors, options = build(CASES[name], torch.float32, torch.float32)
    close(latent_attention(*tensors, **options), tensors, options)


def test_absorbed_and_expanded_both_run():
    """The cases above take both ways, and the rule that chooses is the one that is documented."""
    case = CASES["mixed"]
    sizes = (case.rank, case.plain, case.rope, case.value)
    ways = [ops.expands(new, length, *sizes) for new, length in case.sequences]
    assert ways == [False, True, False, False, False, True, False]
    deepseek = (512, 128, 64, 128)
    assert not ops.expands(1, 4096, *deepseek) and not ops.expands(128, 4096, *deepseek)
    assert ops.expands(256, 4096, *deepseek) and ops.expands(512, 512, *deepseek)


def test_strided_queries_and_tables():
    tensors, options = build(CASES["mixed"], torch.float32, torch.float32)
    q, up, cos, sin, pages, tables, starts, lengths = tensors
    wide = torch.randn(q.shape[0], 2 * q.shape[1], q.shape[2])
    wide[:, ::2] = q
    table = torch.zeros(tables.shape[0], tables.shape[1] + 5, dtype=torch.int32)
    table[:, : tables.shape[1]] = tables
    spread = torch.randn(up.shape[0], up.shape[1], 2 * up.shape[2])
    spread[..., : up.shape[2]] = up
    strided = [wide[:, ::2], spread[..., : up.shape[2]], cos, sin, pages]
    found = latent_attention(*strided, table[:, : tables.shape[1]], starts, lengths, **options)
    assert torch.equal(found, latent_attention(*tensors, **options))


@pytest.mark.parametrize("new", [1, 140])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_a_number_stays_one(bad, new):
    tensors, options = build(Case([(new, 150), (1, 5)]), torch.float32, torch.float32)
    tensors[0][0, 0, 0] = bad
    found = latent_attention(*tensors, **options)
    eager = reference.latent_attention(*tensors, **options)
    assert torch.equal(found.isnan(), eager.isnan()) and found[0, 0].isnan().all()
    assert found[1:].isfinite().all()


@pytest.mark.parametrize("interleaved", [True, False])
def test_the_definition_is_plain_attention_over_expanded_keys(interleaved):
    case = Case([(9, 30)], interleaved=interleaved)
    tensors, options = build(case, torch.float32, torch.float64)
    q, up, cos, sin, pages, tables, *_ = tensors
    c, r = reference.read_latent(reference.parts(pages, 32, 8), tables[0], 30, torch.float64)
    keys = torch.cat((c @ up[:, :16].mT, r.expand(4, -1, -1)), -1).transpose(0, 1)
    values = (c @ up[:, 16:].mT).transpose(0, 1)
    pairs = q[..., 16:].unflatten(-1, (4, 2) if interleaved else (2, 4))
    pairs = torch.view_as_complex((pairs if interleaved else pairs.mT).contiguous())
    pairs = torch.view_as_real(pairs * torch.complex(cos, sin)[:, None])
    q = torch.cat((q[..., :16], (pairs if interleaved else pairs.mT).flatten(-2)), -1)
    seen = torch.arange(30) <= torch.arange(21, 30)[:, None]
    wanted = attention_reference.attend(q, keys, values, seen, options["scale"], None, None)
    torch.testing.assert_close(reference.latent_attention(*tensors, **options), wanted)


def written(function, latent, norm, rotation, slots, pages, interleaved):
    case = Case([], rank=norm.shape[0], rope=latent.shape[1] - norm.shape[0], page=5)
    kept = empty_pages(case, 3, pages)
    options = {"eps": 1e-6, "interleaved": interleaved}
    function(latent, norm, *rotation, kept, slots, **options)
    return kept, reference.parts(kept, case.rank, case.rope)


@pytest.mark.parametrize("pages", PAGE_DTYPES, ids=str)
@pytest.mark.parametrize("new", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank, rope, interleaved", [(48, 8, True), (19, 6, False), (1, 0, True)])
def test_write(pages, new, rank, rope, interleaved):
    latent = torch.randn(7, 2 * (rank + rope)).mul(30).to(new)[:, : rank + rope]
    norm = (torch.rand(rank) + 0.5).to(new)
    rotation, slots = angles(7, rope), torch.tensor([3, -1, 0, 14, 9, 5, -7])
    arguments = (latent, norm, rotation, slots, pages, interleaved)
    (kept, ours), (expected, theirs) = (
        written(function, *arguments) for function in (write_latent, reference.write_latent)
    )
    empty = torch.ones(15, dtype=torch.bool)
    empty[slots[slots >= 0]] = False
    assert torch.equal(  # nothing else is touched
        kept.view(torch.uint8).flatten(0, 1)[empty], expected.view(torch.uint8).flatten(0, 1)[empty]
    )
    full = ~empty.view(3, 5)
    for a, b in zip(ours, theirs, strict=True):
        if a is None or b is None:
            assert a is b
            continue
        # sums in another order: a number may fall on the other side of a rounding
        a, b, step = a[full].float(), b[full].float(), torch.finfo(a.dtype).eps
        assert ((a - b).abs() <= 2 * max(step, 2e-7) * b.abs() + 1e-5).all()


def test_fp8_rows_keep_three_bits():
    """A packed row gives the latent back to within half a step of e4m3, its rotary key to bfloat16's."""
    latent, norm = torch.randn(6, 40) * torch.logspace(-3, 3, 6)[:, None], torch.ones(32)
    cos, sin = torch.ones(6, 4), torch.zeros(6, 4)
    slots = torch.arange(6)
    kept = written(write_latent, latent, norm, (cos, sin), slots, torch.uint8, True)[1]
    c = kept.latents_PBC.float().flatten(0, 1)[:6] * kept.scales_PB.flatten()[:6, None]
    exact_c = torch.nn.functional.rms_norm(latent[:, :32], (32,), eps=1e-6)
    scale = exact_c.abs().amax(-1, keepdim=True) / 448
    assert ((c - exact_c).abs() <= exact_c.abs() / 15.9 + scale * 2.0**-9).all()
    r = kept.ropes_PBR.float().flatten(0, 1)[:6]
    assert ((r - latent[:, 32:]).abs() <= latent[:, 32:].abs() * 2.0**-8).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_latent_that_is_no_number_is_kept_as_nan(bad):
    latent = torch.randn(2, 40)
    latent[0, 3] = bad
    latent[1, :32] = 0
    arguments = (latent, torch.ones(32), angles(2, 8), torch.tensor([0, 1]), torch.uint8, True)
    for function in (write_latent, reference.write_latent):
        _, kept = written(function, *arguments)
        c = kept.latents_PBC.float() * kept.scales_PB[..., None]
        assert c[0, 0].isnan().all()
        assert (c[0, 1] == 0).all() and kept.scales_PB[0, 1] == 1


def test_a_replayed_step_follows_its_inputs():
    tensors, options = build(Case([(1, 30), (1, 17)], heads=6), torch.float32, torch.float32)
    q, up, cos, sin, pages, tables, starts, lengths = tensors
    latent, norm = torch.randn(2, 40), torch.ones(32)
    slots = torch.tensor([int(tables[0, 1]) * 16 + 13, int(tables[1, 1]) * 16 + 0])

    def step():
        write_latent(latent, norm, cos, sin, pages, slots, eps=1e-6, interleaved=True)
        return latent_attention(*tensors, **options)

    recorded = replay.record(step)
    latent.copy_(torch.randn(2, 40))
    slots += 1
    lengths += 1
    found = recorded().clone()
    assert torch.equal(found, step())
    close(found, tensors, options)


def test_captured():
    tensors, options = build(CASES["mixed"], torch.float32, torch.float32)
    pages, latent = tensors[4], torch.randn(2, 40)
    rotation, slots = angles(2, 8), torch.tensor([0, 3])

    def run(pages, latent, tensors):
        write_latent(latent, torch.ones(32), *rotation, pages, slots, eps=1e-6, interleaved=True)
        return latent_attention(*tensors[:4], pages, *tensors[5:], **options) * 2

    copied = pages.clone()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(copied, latent, tensors), run(pages, latent, tensors))
    assert torch.equal(copied.view(torch.int32), pages.view(torch.int32))


@pytest.mark.parametrize(
    "place, change, says",
    [
        (0, lambda t: t[:, :3], "don't fit together"),
        (0, lambda t: t[..., :4], "don't fit together"),
        (1, lambda t: t[..., :8], "pages"),
        (2, lambda t: t[:5], "for 204 tokens"),
        (4, lambda t: t.to(torch.float64), "pages of torch.float64"),
        (5, lambda t: t.long(), "int32"),
        (7, lambda t: t[:1], "belong together"),
    ],
)
def test_arguments_that_dont_fit_are_named(place, change, says):
    tensors, options = build(CASES["mixed"], torch.float32, torch.float32)
    tensors[place] = change(tensors[place])
    with pytest.raises(ArgumentError, match=says):
        latent_attention(*tensors, **options)


def test_new_latents_that_dont_fit_are_named():
    pages = empty_pages(Case([]), 2, torch.float32)
    with pytest.raises(ArgumentError, match=r"\[T, 40\]"):
        write_latent(
            torch.randn(3, 39), torch.ones(32), *angles(3, 8), pages, torch.arange(3),
            eps=1e-6, interleaved=True,
        )  # fmt: skip


@pytest.mark.parametrize(
    "place, change, says",
    [
        (5, lambda t: t.fill_(10**6), "a page that does not exist"),
        (6, lambda t: t.add_(1), "query_starts rise"),
        (7, lambda t: t.fill_(10**6), "more keys than its row"),
    ],
)
def test_pages_that_are_not_there_are_not_read(place, change, says):
    tensors, options = build(CASES["mixed"], torch.float32, torch.float32)
    change(tensors[place])
    with pytest.raises(ArgumentError, match=says):
        latent_attention(*tensors, **options)


def test_tables_and_lengths_with_gaps_between_their_numbers():
    tensors, options = build(CASES["mixed"], torch.float32, torch.float32)
    want = latent_attention(*tensors, **options)
    for place in (5, 6, 7):
        gaps = torch.full_like(tensors[place], 1 << 20)
        tensors[place] = torch.stack((tensors[place], gaps), dim=-1).flatten(-2)[..., ::2]
    assert torch.equal(latent_attention(*tensors, **options), want)


@pytest.mark.parametrize(
    "slots, says", [([0, 1], "one a new token"), ([0, 1, 99], "the last page")]
)
def test_new_latents_without_a_place_are_not_kept(slots, says):
    pages = empty_pages(Case([]), 2, torch.float32)
    rope = pages.shape[2] - 32
    with pytest.raises(ArgumentError, match=says):
        write_latent(
            torch.randn(3, pages.shape[2]), torch.ones(32), *angles(3, rope), pages,
            torch.tensor(slots), eps=1e-6, interleaved=True,
        )  # fmt: skip
