"""The Triton kernels of paged attention: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_support import DEVICE, INTERPRETED  # isort: skip

from fulgurite.kernels.attention import reference, triton_attention
from fulgurite.kernels.attention import triton_store_kv as triton_store
from fulgurite.kernels.elementwise import triton_elementwise
from fulgurite.kernels.elementwise.ops import HeadNorms, Heads, Pages
from tests.kernels.attention_cases import CASES, build, exact

# the interpreter cuts bfloat16 and float8 off where a GPU rounds
PAGES = [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16, torch.float8_e4m3fn]


def run(tensors, options):
    """The kernel with every argument in place."""
    defaults = {"window": None, "chunk": None, "softcap": None, "sinks_N": None}
    given = {**defaults, "key_scale": 1.0, "value_scale": 1.0, **options}
    q, keys, _, tables, starts, lengths = tensors
    counts = (starts[1:] - starts[:-1]).tolist()
    return triton_attention.paged_attention(
        *tensors,
        *(given[name] for name in (
            "scale", "value_dim", "window", "chunk", "softcap", "sinks_N", "key_scale", "value_scale"
        )),
        max(counts, default=0),
        max(lengths.tolist(), default=0),
    )  # fmt: skip


def close(found, tensors, options, tolerance):
    """Within a share of the largest result, or four times the error of plain torch in float32."""
    wanted = exact(tensors, options)
    eager = reference.paged_attention(*tensors, **options)
    assert found.shape == wanted.shape
    ours, theirs = ((x.double() - wanted).abs().max() for x in (found, eager))
    assert ours <= max(tolerance * wanted.abs().max(), 4 * theirs), f"{ours} against {theirs}"


@pytest.mark.parametrize("name", CASES)
def test_float32(name):
    tensors, options = build(CASES[name], torch.float32, torch.float32, DEVICE)
    if tensors[0].numel():
        close(run(tensors, options), tensors, options, 1e-6)


@pytest.mark.parametrize("pages", PAGES, ids=str)
@pytest.mark.parametrize("name", ["mixed", "decode, many", "latent"])
def test_narrow(name, pages):
    query = torch.float16 if pages == torch.float16 else torch.bfloat16
    tensors, options = build(CASES[name], pages, query, DEVICE)
    # weights and results are rounded to 16 bits once each
    close(run(tensors, options), tensors, options, 2 * torch.finfo(query).eps)


@pytest.fixture(autouse=True)
def planned_anew():
    """Layouts are kept, and some tests plan them in other ways."""
    triton_attention.layout.cache_clear()
    yield
    triton_attention.layout.cache_clear()


@pytest.mark.parametrize("splits", [3])
@pytest.mark.parametrize("name", ["decode, long", "nobody's tokens", "sinks, window", "latent"])
def test_splits(name, splits, monkeypatch):
    made = triton_attention.plan

    def split(*args):
        return made(*args).__class__(16, 32, 4, 2, splits)

    monkeypatch.setattr(triton_attention, "plan", split)
    tensors, options = build(CASES[name], torch.float32, torch.float32, DEVICE)
    close(run(tensors, options), tensors, options, 1e-6)


@pytest.mark.parametrize("pages", [torch.float32, *PAGES], ids=str)
def test_store(pages):
    # the reference on the CPU, which divides: torch on a GPU multiplies by the scale's inverse
    k, v = (torch.randn(7, 6, 19).mul(100)[:, ::2] for _ in range(2))
    slots = torch.tensor([3, -1, 0, 14, 9, 5, -7])
    stored = []
    for function, place in ((triton_store.store_pages, DEVICE), (reference.store_pages, "cpu")):
        keys, values = (torch.zeros(3, 5, 3, 19).to(pages).to(place) for _ in range(2))
        function(k.to(place), v.to(place), keys, values, slots.to(place), 0.3, 2.0)
        stored.append((keys.float().cpu(), values.float().cpu()))
    assert torch.equal(stored[0][0], stored[1][0]) and torch.equal(stored[0][1], stored[1][1])


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    "normed, turned, window", [(True, "half", None), (False, "interleaved", 9), (True, "", None)]
)
@pytest.mark.parametrize("pages", [torch.float32, *PAGES], ids=str)
def test_fresh_heads(normed, turned, window, splits, pages, monkeypatch):
    """Norms, rotation, stores and attention in one kernel: what the two kernels give, bit for bit
    in the pages; a token of nobody is zero."""
    made = triton_attention.plan
    monkeypatch.setattr(triton_attention, "LEAST_SPAN", 16)
    monkeypatch.setattr(
        triton_attention, "plan", lambda *args: made(*args).__class__(16, 16, 4, 2, splits)
    )
    lengths, heads, key_heads, size, page = [1, 33, 50], 6, 2, 32, 16
    narrow = torch.bfloat16 if pages.itemsize == 1 else pages
    q, k, v = (
        torch.randn(4, n, size, device=DEVICE).to(narrow) for n in (heads, key_heads, key_heads)
    )
    norms = None
    if normed:
        norms = HeadNorms(*(torch.randn(2, size, device=DEVICE).to(narrow)), 1e-5, 1.0)
    cos, sin = torch.randn(2, 4, 1, size // 2, device=DEVICE) if turned else (None, None)
    given = Heads(q, k, v, norms, cos, sin, turned == "interleaved")
    tables = torch.arange(1, 13, device=DEVICE).view(3, 4).int()
    starts = torch.arange(4, device=DEVICE).int()
    places = [16 * (1 + 4 * i + (n - 1) // 16) + (n - 1) % 16 for i, n in enumerate(lengths)]
    slots = torch.tensor([*places, -1], device=DEVICE)
    where = (tables, starts, torch.tensor(lengths, device=DEVICE).int())
    rules = (size**-0.5, size, window, None, None, None, 1.0, 1.0, 1, 50)
    found = []
    for fresh in (True, False):
        generator = torch.Generator().manual_seed(3)
        keys, values = (
            torch.randn(13, page, key_heads, size, generator=generator).to(DEVICE).to(pages)
            for _ in range(2)
        )
        if fresh:
            out = triton_attention.fresh_attention(
                given, Pages(keys, values, slots), *where, *rules
            )
        else:
            turned_q, _, _ = triton_elementwise.heads(*given, (keys, values, slots))
            out = triton_attention.paged_attention(turned_q, keys, values, *where, *rules)
        found.append((out, keys, values))
    (out, *kept), (wanted, *wanted_kept) = found
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(kept, wanted_kept, strict=True))
    torch.testing.assert_close(out, wanted)
    assert not out[3].any()
