"""The Triton kernels of paged attention: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from .triton_support import DEVICE, INTERPRETED  # isort: skip

from fulgurite.kernels import attention_reference as reference
from fulgurite.kernels.triton import attention as triton_attention

from .attention_cases import CASES, build, exact

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
    k, v = (torch.randn(7, 6, 19, device=DEVICE).mul(100)[:, ::2] for _ in range(2))
    slots = torch.tensor([3, -1, 0, 14, 9, 5, -7], device=DEVICE)
    stored = []
    for function in (triton_attention.store_pages, reference.store_pages):
        keys, values = (torch.zeros(3, 5, 3, 19, device=DEVICE).to(pages) for _ in range(2))
        function(k, v, keys, values, slots, 0.3, 2.0)
        stored.append((keys.float(), values.float()))
    assert torch.equal(stored[0][0], stored[1][0]) and torch.equal(stored[0][1], stored[1][1])
