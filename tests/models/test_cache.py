"""Attention by its definition, in float64 and one query at a time, against both caches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fulgurite.models import AttentionSpec, ContiguousCache, WholeSequence

PLAIN = AttentionSpec(layer=0, heads=6, kv_heads=2, key_dim=5, value_dim=7, scale=0.4)
SPECS = {
    "plain": PLAIN,
    "window": replace(PLAIN, window=4),
    "chunk": replace(PLAIN, chunk=3),
    "softcap": replace(PLAIN, softcap=0.7),
    "single_head": replace(PLAIN, heads=1, kv_heads=1),
    "latent": replace(PLAIN, kv_heads=1, key_dim=9, value_dim=6, latent=True),
}


def by_definition(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor | None, sinks: Tensor | None
) -> Tensor:
    """[T, N, V] of one sequence from position 0."""
    length = q.shape[0]
    out = torch.zeros(length, spec.heads, spec.value_dim, dtype=torch.float64)
    for i in range(length):
        for n in range(spec.heads):
            kv = n // (spec.heads // spec.kv_heads)
            seen = [
                j
                for j in range(i + 1)
                if (spec.window is None or i - j < spec.window)
                and (spec.chunk is None or i // spec.chunk == j // spec.chunk)
            ]
            scores = (q[i, n].double() @ k[seen, kv].double().T) * spec.scale
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            total = scores.exp().sum()
            if sinks is not None:
                total = total + sinks[n].double().exp()
            values = k[seen, kv, : spec.value_dim] if v is None else v[seen, kv]
            out[i, n] = (scores.exp() / total) @ values.double()
    return out


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_attention_is_its_definition(name: str, with_sinks: bool) -> None:
    spec = SPECS[name]
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    length, pad = 11, 3
    q, k = draw(2, length, spec.heads, spec.key_dim), draw(2, length, spec.kv_heads, spec.key_dim)
    v = None if spec.latent else draw(2, length, spec.kv_heads, spec.value_dim)
    sinks = draw(spec.heads) if with_sinks else None
    positions = torch.arange(length).repeat(2, 1)
    positions[1, length - pad :] = -1
    wanted = [
        by_definition(spec, q[0], k[0], None if v is None else v[0], sinks),
        by_definition(spec, q[1], k[1], None if v is None else v[1], sinks)[: length - pad],
    ]
    cache = ContiguousCache([spec], batch=2, capacity=length)
    for context in (WholeSequence(), cache):
        out = context.attend(spec, q, k, v, positions, sinks)
        assert out.isfinite().all()
        torch.testing.assert_close(out[0].double(), wanted[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(out[1, : length - pad].double(), wanted[1], atol=1e-5, rtol=1e-5)


def test_a_row_of_nothing_but_padding_stays_finite() -> None:
    q, k = torch.randn(2, 3, 6, 5), torch.randn(2, 3, 2, 5)
    v, positions = torch.randn(2, 3, 2, 7), torch.full((2, 3), -1)
    for context in (WholeSequence(), ContiguousCache([PLAIN], 2, 4)):
        assert context.attend(PLAIN, q, k, v, positions, None).isfinite().all()


def test_a_token_past_the_capacity_is_an_error() -> None:
    cache = ContiguousCache([PLAIN], 1, 4)
    q, k, v = torch.randn(1, 1, 6, 5), torch.randn(1, 1, 2, 5), torch.randn(1, 1, 2, 7)
    cache.attend(PLAIN, q, k, v, torch.tensor([[3]]), None)
    with pytest.raises(IndexError):
        cache.attend(PLAIN, q, k, v, torch.tensor([[4]]), None)


def test_a_cache_may_be_narrower_than_the_model() -> None:
    cache = ContiguousCache([PLAIN], 1, 4, dtype=torch.bfloat16)
    q, k, v = torch.randn(1, 3, 6, 5), torch.randn(1, 3, 2, 5), torch.randn(1, 3, 2, 7)
    positions = torch.arange(3)[None]
    out = cache.attend(PLAIN, q, k, v, positions, None)
    exact = WholeSequence().attend(PLAIN, q, k, v, positions, None)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, exact, atol=0.03, rtol=0.03)


def test_extents_ignore_padding_and_neighbours() -> None:
    positions = torch.tensor([[0, 1, 2, -1], [5, 6, -1, -1]])
    cache = ContiguousCache([PLAIN], 2, 8)
    for context in (WholeSequence(), cache):
        assert context.extent(positions).expand(2, 4).tolist() == [[3] * 4, [7] * 4]
    packed = WholeSequence(torch.tensor([0, 0, 1, 1, 1]))
    assert packed.extent(torch.tensor([0, 1, 0, 1, 2])).tolist() == [2, 2, 3, 3, 3]
