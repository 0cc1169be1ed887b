"""Fused elementwise Triton kernels, on a GPU or in the interpreter, against torch in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.kernels.triton_support import DEVICE, INTERPRETED  # isort: skip

from fulgurite.kernels.attention.reference import store_kv_cache
from fulgurite.kernels.elementwise import ops, triton_elementwise
from fulgurite.kernels.tuning.sm_90 import Sm90Heuristics

DTYPES = (
    [torch.float32, torch.float16] if INTERPRETED else list(triton_elementwise.SUPPORTED_DTYPES)
)


def assert_close(out, expected):
    assert out.shape == expected.shape
    eps = torch.finfo(out.dtype).eps
    scale = expected.abs().max() if expected.numel() else 1.0
    assert torch.allclose(out.double(), expected, rtol=2 * eps, atol=4e-7 * float(scale))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 5, 64), (0, 8), (4, 1000), (2, 3, 2, 33)])
def test_rms_norm(shape, dtype):
    x = torch.randn(shape).to(dtype).to(DEVICE)
    weight = torch.randn(shape[-1]).to(dtype).to(DEVICE)
    for offset in (0.0, 1.0):
        expected = ops.rms_norm_reference(x.double(), weight.double(), 1e-5, offset)
        assert_close(triton_elementwise.rms_norm(x, weight, 1e-5, offset), expected)


def test_rms_norm_of_strided_heads():
    x = torch.randn(5, 40, device=DEVICE)[:, 8:32].unflatten(-1, (3, 8))
    weight = torch.randn(8, device=DEVICE)
    expected = ops.rms_norm_reference(x.double(), weight.double(), 1e-6, 0.0)
    assert_close(triton_elementwise.rms_norm(x, weight, 1e-6, 0.0), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operation", ["add", *ops.ACTIVATIONS])
def test_binary(operation, dtype):
    pairs = torch.randn(5, 2 * 1030).to(dtype).to(DEVICE)
    x, y = pairs.chunk(2, dim=-1)  # strided rows
    assert_close(
        triton_elementwise.elementwise_binary(x, y, operation),
        ops.elementwise_binary_reference(x.double(), y.double(), operation),
    )
    if operation == "add":
        assert_close(
            triton_elementwise.elementwise_binary(x, y, operation, 0.22),
            ops.elementwise_binary_reference(x.double(), y.double(), operation, 0.22),
        )
    assert triton_elementwise.elementwise_binary(x[:0], y[:0], operation).shape == (0, 1030)
    assert triton_elementwise.elementwise_binary(x, y.double(), operation) is NotImplemented


def test_one_factor_a_row():
    x, y = torch.randn(5, 3, device=DEVICE)[:, :1], torch.randn(5, 1030, device=DEVICE)
    assert_close(
        triton_elementwise.elementwise_binary(x, y, "sigmoid"),
        ops.elementwise_binary_reference(x.double(), y.double(), "sigmoid"),
    )


CASES = list(itertools.product((False, True), (None, "half", "interleaved"), (False, True)))


@pytest.mark.parametrize("small_batch", [0, 256])
@pytest.mark.parametrize("has_norm, rope, is_stored", CASES)
def test_qk_norm_rope(has_norm, rope, is_stored, small_batch, monkeypatch):
    monkeypatch.setattr(
        Sm90Heuristics, "rope_small_batch", small_batch
    )  # one head a program, or several
    triton_elementwise.build_qk_norm_rope_launch.cache_clear()
    tokens, n, k, size, pairs = 5, 3, 2, 19, 7
    rows = torch.randn(tokens, (n + 2 * k) * size, device=DEVICE)
    q, key, v = (
        part.unflatten(-1, (-1, size))
        for part in rows.split((n * size, k * size, k * size), dim=-1)
    )
    norms = None
    expected_q, expected_k = q.double(), key.double()
    if has_norm:
        weights = [torch.randn(size, device=DEVICE) for _ in range(2)]
        norms = (*weights, 1e-5, 1.0)
        expected_q = ops.rms_norm_reference(expected_q, weights[0].double(), 1e-5, 1.0)
        expected_k = ops.rms_norm_reference(expected_k, weights[1].double(), 1e-5, 1.0)
    cos = sin = None
    if rope:
        angles = torch.rand(tokens, 1, pairs, device=DEVICE) * 6
        cos, sin = angles.cos(), angles.sin()
        rope_args = (cos.double(), sin.double(), rope == "interleaved")
        expected_q, expected_k = (exact_rope(x, *rope_args) for x in (expected_q, expected_k))
    cache = None
    if is_stored:
        slots = torch.tensor([3, -1, 0, 11, 6], device=DEVICE)
        cache = (*(torch.zeros(3, 4, k, size, device=DEVICE) for _ in range(2)), slots)
    out = triton_elementwise.qk_norm_rope(q, key, v, norms, cos, sin, rope == "interleaved", cache)
    assert_close(out[0], expected_q)
    if not is_stored:
        assert_close(out[1], expected_k)
        assert out[2] is v
        return
    assert out[1:] == (None, None)
    expected_keys, expected_values = (
        torch.zeros(3, 4, k, size, device=DEVICE).double() for _ in range(2)
    )
    store_kv_cache(expected_k, v.double(), expected_keys, expected_values, slots)
    assert_close(cache[0], expected_keys)
    assert_close(cache[1], expected_values)


def exact_rope(x, cos, sin, interleaved):
    """RoPE written out, pair by pair."""
    out = x.clone()
    for i in range(cos.shape[-1]):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + cos.shape[-1])
        c, s = cos[..., i], sin[..., i]
        out[..., a] = x[..., a] * c - x[..., b] * s
        out[..., b] = x[..., b] * c + x[..., a] * s
    return out


def test_apply_rope():
    x = torch.randn(4, 6, 16, device=DEVICE)[:, ::2]
    angles = torch.rand(4, 1, 8, device=DEVICE)
    out = triton_elementwise.apply_rope(x, angles.cos(), angles.sin(), False)
    assert_close(out, exact_rope(x.double(), angles.cos().double(), angles.sin().double(), False))
    assert triton_elementwise.apply_rope(x[0], angles.cos(), angles.sin(), False) is NotImplemented


@pytest.mark.skipif(INTERPRETED, reason="the interpreter truncates float8 where a GPU rounds")
def test_float8_cache_saturates():
    q, key, v = (torch.randn(3, 2, 16, device=DEVICE) * 1000 for _ in range(3))
    expected_keys, expected_values = (
        torch.zeros(2, 4, 2, 16, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2)
    )
    slots = torch.tensor([0, 5, 2], device=DEVICE)
    triton_elementwise.qk_norm_rope(
        q, key, v, None, None, None, False, (expected_keys, expected_values, slots)
    )
    expected = [torch.zeros_like(expected_keys), torch.zeros_like(expected_values)]
    store_kv_cache(key, v, *expected, slots)
    assert torch.equal(expected_keys.float(), expected[0].float())
    assert torch.equal(expected_values.float(), expected[1].float())


@pytest.mark.parametrize("rope", [None, "half", "interleaved"])
def test_norm_rope_has_the_bits_of_both(rope):
    """Heads of queries or keys by themselves, in any token layout, are rounded as with each other."""
    tokens, n, k, size, pairs = 6, 3, 2, 19, 7
    q, key, v = (torch.randn(tokens, heads, size, device=DEVICE).bfloat16() for heads in (n, k, k))
    weights = [torch.randn(size, device=DEVICE) for _ in range(2)]
    cos = sin = None
    if rope:
        angles = torch.rand(tokens, 1, pairs, device=DEVICE) * 6
        cos, sin = angles.cos(), angles.sin()
    how = (cos, sin, rope == "interleaved")
    together = triton_elementwise.qk_norm_rope(q, key, v, (*weights, 1e-5, 1.0), *how, None)
    alone = [
        triton_elementwise.norm_rope(x, weight, 1e-5, 1.0, *how)
        for x, weight in zip((q, key), weights, strict=True)
    ]
    assert all(torch.equal(*pair) for pair in zip(alone, together[:2], strict=True))
