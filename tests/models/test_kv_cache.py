"""Both caches against attention by its definition, in float64 and one query at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fulgurite.models import AttentionSpec, ContiguousKVCache, NoKVCache

BASE_SPEC = AttentionSpec(
    layer_index=0, num_heads=6, num_kv_heads=2, key_dim=5, value_dim=7, scale=0.4
)
SPECS = {
    "plain": BASE_SPEC,
    "window": replace(BASE_SPEC, sliding_window=4),
    "chunk": replace(BASE_SPEC, chunk_size=3),
    "softcap": replace(BASE_SPEC, softcap=0.7),
    "single_head": replace(BASE_SPEC, num_heads=1, num_kv_heads=1),
    "latent": replace(BASE_SPEC, num_kv_heads=1, key_dim=9, value_dim=6, is_mla=True),
}


def reference_attention(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor | None, sinks: Tensor | None
) -> Tensor:
    """[T, N, V] of one sequence from position 0."""
    length = q.shape[0]
    out = torch.zeros(length, spec.num_heads, spec.value_dim, dtype=torch.float64)
    for i in range(length):
        for n in range(spec.num_heads):
            kv = n // (spec.num_heads // spec.num_kv_heads)
            visible = [
                j
                for j in range(i + 1)
                if (spec.sliding_window is None or i - j < spec.sliding_window)
                and (spec.chunk_size is None or i // spec.chunk_size == j // spec.chunk_size)
            ]
            scores = (q[i, n].double() @ k[visible, kv].double().T) * spec.scale
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            total = scores.exp().sum()
            if sinks is not None:
                total = total + sinks[n].double().exp()
            values = k[visible, kv, : spec.value_dim] if v is None else v[visible, kv]
            out[i, n] = (scores.exp() / total) @ values.double()
    return out


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_attention_matches_its_definition(name: str, with_sinks: bool) -> None:
    spec = SPECS[name]
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    length, pad = 11, 3
    q, k = (
        randn(2, length, spec.num_heads, spec.key_dim),
        randn(2, length, spec.num_kv_heads, spec.key_dim),
    )
    v = None if spec.is_mla else randn(2, length, spec.num_kv_heads, spec.value_dim)
    sinks = randn(spec.num_heads) if with_sinks else None
    positions = torch.arange(length).repeat(2, 1)
    positions[1, length - pad :] = -1
    expected = [
        reference_attention(spec, q[0], k[0], None if v is None else v[0], sinks),
        reference_attention(spec, q[1], k[1], None if v is None else v[1], sinks)[: length - pad],
    ]
    cache = ContiguousKVCache([spec], batch=2, capacity=length)
    for kv_cache in (NoKVCache(), cache):
        out = kv_cache.attend(spec, q, k, v, positions, sinks)
        assert out.isfinite().all()
        torch.testing.assert_close(out[0].double(), expected[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(
            out[1, : length - pad].double(), expected[1], atol=1e-5, rtol=1e-5
        )


def test_rows_of_only_padding_stay_finite() -> None:
    q, k = torch.randn(2, 3, 6, 5), torch.randn(2, 3, 2, 5)
    v, positions = torch.randn(2, 3, 2, 7), torch.full((2, 3), -1)
    for kv_cache in (NoKVCache(), ContiguousKVCache([BASE_SPEC], 2, 4)):
        assert kv_cache.attend(BASE_SPEC, q, k, v, positions, None).isfinite().all()


def test_token_beyond_the_capacity_is_an_error() -> None:
    cache = ContiguousKVCache([BASE_SPEC], 1, 4)
    q, k, v = torch.randn(1, 1, 6, 5), torch.randn(1, 1, 2, 5), torch.randn(1, 1, 2, 7)
    cache.attend(BASE_SPEC, q, k, v, torch.tensor([[3]]), None)
    with pytest.raises(IndexError):
        cache.attend(BASE_SPEC, q, k, v, torch.tensor([[4]]), None)


def test_cache_dtype_may_differ_from_the_model() -> None:
    cache = ContiguousKVCache([BASE_SPEC], 1, 4, dtype=torch.bfloat16)
    q, k, v = torch.randn(1, 3, 6, 5), torch.randn(1, 3, 2, 5), torch.randn(1, 3, 2, 7)
    positions = torch.arange(3)[None]
    out = cache.attend(BASE_SPEC, q, k, v, positions, None)
    exact = NoKVCache().attend(BASE_SPEC, q, k, v, positions, None)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, exact, atol=0.03, rtol=0.03)


def test_extents_ignore_padding_and_neighbours() -> None:
    positions = torch.tensor([[0, 1, 2, -1], [5, 6, -1, -1]])
    cache = ContiguousKVCache([BASE_SPEC], 2, 8)
    for kv_cache in (NoKVCache(), cache):
        assert kv_cache.sequence_lengths(positions).expand(2, 4).tolist() == [[3] * 4, [7] * 4]
    packed = NoKVCache(torch.tensor([0, 0, 1, 1, 1]))
    assert packed.sequence_lengths(torch.tensor([0, 1, 0, 1, 2])).tolist() == [2, 2, 3, 3, 3]
