"""Paged attention: every implementation against the definition in float64, and that one against torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fulgurite import native, replay
from fulgurite.errors import ArgumentError
from fulgurite.kernels.attention import reference
from fulgurite.kernels.attention.ops import PAGE_DTYPES, paged_attention, store_pages
from fulgurite.models.cache import AttentionSpec, WholeSequence
from tests.kernels.attention_cases import CASES, Case, build, exact

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="needs a C++ compiler")


def close(found, tensors, options):
    """Our error is at most twice that of the same definition in float32 (the float64 rule)."""
    wanted = exact(tensors, options)
    eager = reference.paged_attention(*tensors, **options)
    ours, theirs = (found.double() - wanted).abs().max(), (eager.double() - wanted).abs().max()
    floor = 2 * torch.finfo(torch.float32).eps * wanted.abs().max()
    assert found.shape == wanted.shape and ours <= 2 * theirs + floor, f"{ours} against {theirs}"


@pytest.mark.parametrize("name", CASES)
def test_float32(name):
    tensors, options = build(CASES[name], torch.float32, torch.float32)
    close(paged_attention(*tensors, **options), tensors, options)


@pytest.mark.parametrize("pages", [d for d in PAGE_DTYPES if d != torch.float32], ids=str)
@pytest.mark.parametrize("name", ["mixed", "odd sizes", "latent", "decode, many", "by heads"])
def test_narrow_pages(name, pages):
    tensors, options = build(CASES[name], pages, torch.float32)
    close(paged_attention(*tensors, **options), tensors, options)


@pytest.mark.parametrize("query", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["mixed", "sinks"])
def test_narrow_queries(name, query):
    tensors, options = build(CASES[name], query, query)
    if "sinks_N" in options:
        options["sinks_N"] = options["sinks_N"].to(query)
    close(paged_attention(*tensors, **options), tensors, options)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", ["decode, long", "mixed", "latent, many heads", "sinks, window"])
def test_threads_and_spans(name, threads, monkeypatch):
    monkeypatch.setenv("FULGURITE_THREADS", str(threads))
    tensors, options = build(CASES[name], torch.float32, torch.float32)
    close(paged_attention(*tensors, **options), tensors, options)


def test_strided_queries_and_tables():
    tensors, options = build(CASES["mixed"], torch.float32, torch.float32)
    q, keys, values, tables, starts, lengths = tensors
    wide = torch.randn(q.shape[0], 2 * q.shape[1], q.shape[2])
    wide[:, ::2] = q
    table = torch.zeros(tables.shape[0], tables.shape[1] + 5, dtype=torch.int32)
    table[:, : tables.shape[1]] = tables
    strided = [wide[:, ::2], keys, values, table[:, : tables.shape[1]], starts, lengths]
    found = paged_attention(*strided, **options)
    assert torch.equal(found, paged_attention(*tensors, **options))


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_a_number_stays_one(bad, rows):
    tensors, options = build(Case([(rows, 40), (1, 5)]), torch.float32, torch.float32)
    tensors[0][0, 0, 0] = bad
    found = paged_attention(*tensors, **options)
    eager = reference.paged_attention(*tensors, **options)
    assert torch.equal(found.isnan(), eager.isnan()) and found[0, 0].isnan().all()
    assert found[1:].isfinite().all()


def test_the_definition_is_torchs():
    """One sequence from its start is causal attention; the rest is that of the models' own."""
    tensors, options = build(Case([(21, 21)], heads=6), torch.float32, torch.float32)
    q, keys, values, tables, *_ = tensors
    k, v = (reference.gather(pages, tables[0], 21) for pages in (keys, values))
    q_, k_, v_ = (x.transpose(0, 1)[None] for x in (q, k, v))
    wanted = F.scaled_dot_product_attention(q_, k_, v_, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(
        reference.paged_attention(*tensors, **options), wanted[0].transpose(0, 1)
    )
    rules = {"window": 7, "chunk": 9, "softcap": 1.5}
    spec = AttentionSpec(0, 6, 2, 16, 16, options["scale"], **rules)
    sinks = torch.randn(6)
    plain = WholeSequence().attend(spec, q, k, v, torch.arange(21), sinks)
    found = reference.paged_attention(*tensors, **options, **rules, sinks_N=sinks)
    torch.testing.assert_close(found, plain)


@pytest.mark.parametrize("pages", PAGE_DTYPES, ids=str)
@pytest.mark.parametrize("new", [torch.float32, torch.bfloat16], ids=str)
def test_store(pages, new):
    k, v = (torch.randn(7, 6, 19).mul(100).to(new)[:, ::2] for _ in range(2))
    slots = torch.tensor([3, -1, 0, 14, 9, 5, -7])
    stored = []
    for function in (store_pages, reference.store_pages):
        keys, values = (torch.zeros(3, 5, 3, 19).to(pages) for _ in range(2))
        function(k, v, keys, values, slots, 0.3, 2.0)
        stored.append((keys.float(), values.float()))
    assert torch.equal(stored[0][0], stored[1][0]) and torch.equal(stored[0][1], stored[1][1])
    assert stored[0][0][0, 3].abs().sum() > 0 and stored[0][0][0, 4].abs().sum() == 0


def test_a_replayed_step_follows_its_inputs():
    case = Case([(1, 30), (1, 17)], heads=6, key_heads=3, size=32)
    (q, keys, values, tables, starts, lengths), options = build(case, torch.float32, torch.float32)
    k, v = torch.randn(2, 3, 32), torch.randn(2, 3, 32)
    slots = torch.tensor([int(tables[0, 1]) * 16 + 13, int(tables[1, 1]) * 16 + 0])

    def step():
        store_pages(k, v, keys, values, slots)
        return paged_attention(q, keys, values, tables, starts, lengths, **options)

    recorded = replay.record(step)
    k.copy_(torch.randn(2, 3, 32))
    slots += 1
    lengths += 1
    found = recorded().clone()
    assert torch.equal(found, step())
    close(found, (q, keys, values, tables, starts, lengths), options)


def test_captured():
    tensors, options = build(CASES["mixed"], torch.float32, torch.float32)

    def run(*tensors):
        return paged_attention(*tensors, **options) * 2

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*tensors), run(*tensors))


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda t: t.__setitem__(0, t[0][..., :8]), "don't fit together"),
        (lambda t: t.__setitem__(0, t[0][:, :3]), "can't share"),
        (lambda t: t.__setitem__(3, t[3].long()), "int32"),
        (lambda t: t.__setitem__(5, t[5][:1]), "belong together"),
        (lambda t: t.__setitem__(2, t[2][:, :4]), "don't fit those"),
    ],
)
def test_arguments_that_dont_fit_are_named(change, says):
    tensors, options = build(CASES["mixed"], torch.float32, torch.float32)
    change(tensors)
    with pytest.raises(ArgumentError, match=says):
        paged_attention(*tensors, **options)


def test_tables_lengths_and_sinks_with_gaps_between_their_numbers():
    """Every second number of larger tensors, with numbers between that would read anywhere."""
    (*rest, tables, starts, lengths), options = build(CASES["mixed"], torch.float32, torch.float32)
    sinks = torch.randn(rest[0].shape[1])
    want = paged_attention(*rest, tables, starts, lengths, **options, sinks_N=sinks)

    def apart(tensor):
        return torch.stack((tensor, torch.full_like(tensor, 1 << 20)), dim=-1).flatten(-2)[..., ::2]

    found = [*rest, apart(tables), apart(starts), apart(lengths)]
    assert torch.equal(paged_attention(*found, **options, sinks_N=apart(sinks)), want)


@pytest.mark.parametrize(
    "place, change, says",
    [
        (3, lambda t: t.fill_(10**6), "a page that does not exist"),
        (3, lambda t: t.fill_(-1), "a page that does not exist"),
        (4, lambda t: t.add_(1), "query_starts rise"),
        (4, lambda t: t.neg_(), "query_starts rise"),
        (5, lambda t: t.fill_(10**6), "more keys than its row"),
        (5, lambda t: t.fill_(0), "fewer than new tokens"),
    ],
)
def test_pages_that_are_not_there_are_not_read(place, change, says):
    tensors, options = build(CASES["mixed"], torch.float32, torch.float32)
    change(tensors[place])
    with pytest.raises(ArgumentError, match=says):
        paged_attention(*tensors, **options)


def test_pages_behind_the_window_may_be_gone():
    case = Case([(1, 40), (3, 33)], options={"window": 5})
    tensors, options = build(case, torch.float32, torch.float32)
    want = paged_attention(*tensors, **options)
    tensors[3][:, 0] = -1
    assert torch.equal(paged_attention(*tensors, **options), want)


@pytest.mark.parametrize(
    "tokens, slots, says",
    [
        ((4, 4), torch.arange(2), "one a new token"),
        ((4, 4), torch.arange(4.0), "one a new token"),
        ((4, 2), torch.arange(4), "4 new keys and 2 new values"),
        ((2, 2), torch.tensor([0, 15]), "behind the last page"),
    ],
)
def test_new_keys_without_a_place_are_not_stored(tokens, slots, says):
    k, v = (torch.randn(count, 2, 16) for count in tokens)
    with pytest.raises(ArgumentError, match=says):
        store_pages(k, v, torch.zeros(3, 5, 2, 16), torch.zeros(3, 5, 2, 16), slots)


@pytest.mark.parametrize("rule", ["window", "chunk", "softcap"])
def test_rules_of_zero_are_refused(rule):
    tensors, options = build(CASES["mixed"], torch.float32, torch.float32)
    with pytest.raises(ArgumentError, match=f"{rule}=0 must be more"):
        paged_attention(*tensors, **options | {rule: 0})
