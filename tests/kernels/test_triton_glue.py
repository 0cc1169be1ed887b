"""Norms, gates and heads on a GPU, or in Triton's interpreter, against plain torch in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.kernels.triton_support import DEVICE, INTERPRETED  # isort: skip

from fulgurite.kernels.attention import reference
from fulgurite.kernels.elementwise import ops
from fulgurite.kernels.elementwise import triton_elementwise as kernels

DTYPES = [torch.float32, torch.float16] if INTERPRETED else list(kernels.DTYPES)


def close(got, wanted):
    assert got.shape == wanted.shape
    eps = torch.finfo(got.dtype).eps
    scale = wanted.abs().max() if wanted.numel() else 1.0
    assert torch.allclose(got.double(), wanted, rtol=2 * eps, atol=4e-7 * float(scale))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 5, 64), (0, 8), (4, 1000), (2, 3, 2, 33)])
def test_rms_norm(shape, dtype):
    x = torch.randn(shape).to(dtype).to(DEVICE)
    weight = torch.randn(shape[-1]).to(dtype).to(DEVICE)
    for offset in (0.0, 1.0):
        wanted = ops.plain_rms_norm(x.double(), weight.double(), 1e-5, offset)
        close(kernels.rms_norm(x, weight, 1e-5, offset), wanted)


def test_rms_norm_of_heads_inside_wider_rows():
    x = torch.randn(5, 40, device=DEVICE)[:, 8:32].unflatten(-1, (3, 8))
    weight = torch.randn(8, device=DEVICE)
    wanted = ops.plain_rms_norm(x.double(), weight.double(), 1e-6, 0.0)
    close(kernels.rms_norm(x, weight, 1e-6, 0.0), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", ["add", *ops.ACTIVATIONS])
def test_combine(how, dtype):
    pairs = torch.randn(5, 2 * 1030).to(dtype).to(DEVICE)
    x, y = pairs.chunk(2, dim=-1)  # rows apart
    close(kernels.combine(x, y, how), ops.plain_combine(x.double(), y.double(), how))
    assert kernels.combine(x[:0], y[:0], how).shape == (0, 1030)
    assert kernels.combine(x, y.double(), how) is NotImplemented


CASES = list(itertools.product((False, True), (None, "half", "interleaved"), (False, True)))


@pytest.mark.parametrize("few", [0, 256])
@pytest.mark.parametrize("normed, turned, stored", CASES)
def test_heads(normed, turned, stored, few, monkeypatch):
    monkeypatch.setattr(kernels, "FEW_TOKENS", few)  # a head in a program, or several
    tokens, n, k, size, pairs = 5, 3, 2, 19, 7
    rows = torch.randn(tokens, (n + 2 * k) * size, device=DEVICE)
    q, key, v = (
        part.unflatten(-1, (-1, size))
        for part in rows.split((n * size, k * size, k * size), dim=-1)
    )
    norms = None
    wanted_q, wanted_k = q.double(), key.double()
    if normed:
        weights = [torch.randn(size, device=DEVICE) for _ in range(2)]
        norms = (*weights, 1e-5, 1.0)
        wanted_q = ops.plain_rms_norm(wanted_q, weights[0].double(), 1e-5, 1.0)
        wanted_k = ops.plain_rms_norm(wanted_k, weights[1].double(), 1e-5, 1.0)
    cos = sin = None
    if turned:
        angles = torch.rand(tokens, 1, pairs, device=DEVICE) * 6
        cos, sin = angles.cos(), angles.sin()
        wide = (cos.double(), sin.double(), turned == "interleaved")
        wanted_q, wanted_k = (double_rotate(x, *wide) for x in (wanted_q, wanted_k))
    pages = None
    if stored:
        slots = torch.tensor([3, -1, 0, 11, 6], device=DEVICE)
        pages = (*(torch.zeros(3, 4, k, size, device=DEVICE) for _ in range(2)), slots)
    got = kernels.heads(q, key, v, norms, cos, sin, turned == "interleaved", pages)
    close(got[0], wanted_q)
    if not stored:
        close(got[1], wanted_k)
        assert got[2] is v
        return
    assert got[1:] == (None, None)
    keys, values = (torch.zeros(3, 4, k, size, device=DEVICE).double() for _ in range(2))
    reference.store_pages(wanted_k, v.double(), keys, values, slots)
    close(pages[0], keys)
    close(pages[1], values)


def double_rotate(x, cos, sin, interleaved):
    """The rotation written out, pair by pair."""
    out = x.clone()
    for i in range(cos.shape[-1]):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + cos.shape[-1])
        c, s = cos[..., i], sin[..., i]
        out[..., a] = x[..., a] * c - x[..., b] * s
        out[..., b] = x[..., b] * c + x[..., a] * s
    return out


def test_rotate_alone():
    x = torch.randn(4, 6, 16, device=DEVICE)[:, ::2]
    angles = torch.rand(4, 1, 8, device=DEVICE)
    got = kernels.rotate(x, angles.cos(), angles.sin(), False)
    close(got, double_rotate(x.double(), angles.cos().double(), angles.sin().double(), False))
    assert kernels.rotate(x[0], angles.cos(), angles.sin(), False) is NotImplemented


@pytest.mark.skipif(INTERPRETED, reason="the interpreter cuts float8 off where a GPU rounds")
def test_float8_pages_saturate():
    q, key, v = (torch.randn(3, 2, 16, device=DEVICE) * 1000 for _ in range(3))
    keys, values = (
        torch.zeros(2, 4, 2, 16, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2)
    )
    slots = torch.tensor([0, 5, 2], device=DEVICE)
    kernels.heads(q, key, v, None, None, None, False, (keys, values, slots))
    wanted = [torch.zeros_like(keys), torch.zeros_like(values)]
    reference.store_pages(key, v, *wanted, slots)
    assert torch.equal(keys.float(), wanted[0].float())
    assert torch.equal(values.float(), wanted[1].float())
