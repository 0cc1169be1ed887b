"""Attention of packed rows equals that of each document by itself, in values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fulgurite
from fulgurite.kernels.linear_attention.metadata import DeltaRuleInputs
from fulgurite.models.attention_spec import AttentionSpec
from fulgurite.models.kv_cache import ConvWeights, NoKVCache
from fulgurite.models.state_spec import StateSpec
from fulgurite.train.attention import TrainingAttention, number_segments
from fulgurite.train.batch import find_offsets

LENGTHS = [[5, 1, 9, 4], [19], [2, 17]]  # documents of each row
TOKENS = 19
KINDS = {
    "causal": {},
    "window": {"sliding_window": 4},
    "wide window": {"sliding_window": 64},
    "chunk": {"chunk_size": 3},
    "softcap": {"softcap": 2.0},
}


def make_documents() -> tuple[Tensor, Tensor]:
    """Documents and positions of each row."""
    documents = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in LENGTHS]
    positions = [torch.cat([torch.arange(length) for length in row]) for row in LENGTHS]
    return torch.stack(documents), torch.stack(positions)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()


def make_qkv(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shape = (len(LENGTHS), TOKENS)
    return [
        random(*shape, heads, 8, seed=heads + i, dtype=dtype) for i, heads in enumerate((4, 2, 2))
    ]


def attend_alone(spec: AttentionSpec, qkv: list[Tensor], sinks: Tensor | None) -> Tensor:
    """Each document in a call of its own, without a mask of documents."""
    rows = []
    for row, lengths in enumerate(LENGTHS):
        parts = [x[row].split(lengths) for x in qkv]
        outputs = [
            NoKVCache().attend(spec, q, k, v, torch.arange(len(q)), sinks)
            for q, k, v in zip(*parts, strict=True)
        ]
        rows.append(torch.cat(outputs))
    return torch.stack(rows)


def gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return list(torch.autograd.grad((out * weights).sum(), inputs))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_equal_documents_alone(kind, sinks):
    documents, positions = make_documents()
    spec = AttentionSpec(0, 4, 2, 8, 8, 0.3, **KINDS[kind])
    sinks_N = random(4) if sinks else None
    qkv = make_qkv()
    inputs = [*qkv] if sinks_N is None else [*qkv, sinks_N]
    out = TrainingAttention(documents).attend(spec, *qkv, positions, sinks_N)
    expected = attend_alone(spec, qkv, sinks_N)
    tolerance = {"rtol": 1e-5, "atol": 1e-6}  # scores with sinks or a cap are float32
    torch.testing.assert_close(out, expected, **tolerance)
    for actual, wanted in zip(gradients(out, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(actual, wanted, **tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_one_document(kind):
    spec = AttentionSpec(0, 4, 2, 8, 8, 0.3, **KINDS[kind])
    qkv = make_qkv()
    positions = torch.arange(TOKENS).expand(len(LENGTHS), TOKENS)
    out = TrainingAttention().attend(spec, *qkv, positions, None)
    torch.testing.assert_close(out, NoKVCache().attend(spec, *qkv, positions, None))


@pytest.mark.parametrize("kind", KINDS)
def test_deterministic_rows_have_the_bits_of_documents_alone(kind):
    documents, positions = make_documents()
    spec = AttentionSpec(0, 4, 2, 8, 8, 0.3, **KINDS[kind])
    qkv = make_qkv(torch.float32)
    with fulgurite.deterministic():
        out = TrainingAttention(documents).attend(spec, *qkv, positions, None)
        assert torch.equal(out, attend_alone(spec, qkv, None))
    plain = TrainingAttention(documents).attend(spec, *qkv, positions, None)
    for actual, wanted in zip(gradients(out, qkv), gradients(plain, qkv), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


def test_padding_is_a_document_of_its_own():
    documents, positions = make_documents()
    padded = documents.clone()
    padded[:, 14:], positions[:, 14:] = -1, -1
    spec = AttentionSpec(0, 4, 2, 8, 8, 0.3)
    qkv = make_qkv(torch.float32)
    whole = TrainingAttention(documents).attend(spec, *qkv, positions, None)
    out = TrainingAttention(padded).attend(spec, *qkv, positions, None)
    assert out.isfinite().all()
    torch.testing.assert_close(out[:, :14], whole[:, :14])
    with fulgurite.deterministic():
        out = TrainingAttention(padded).attend(spec, *qkv, positions, None)
    torch.testing.assert_close(out[:, :14], whole[:, :14])


def test_segments_are_numbered_through_all_rows():
    documents, positions = make_documents()
    segments, places = number_segments(documents)
    assert places.tolist() == positions.flatten().tolist()
    assert segments.unique().numel() == sum(map(len, LENGTHS))


@pytest.mark.parametrize("bias", [False, True])
def test_convolutions_start_anew_at_each_document(bias):
    documents, positions = make_documents()
    x, weight = random(len(LENGTHS), TOKENS, 6), random(3, 6)
    conv = ConvWeights(weight, random(6) if bias else None, "silu")
    spec = StateSpec(0, (2, 6))
    out = TrainingAttention(documents).causal_conv(spec, x, conv, positions)
    rows = []
    for row, lengths in enumerate(LENGTHS):
        parts = [
            NoKVCache().causal_conv(spec, part, conv, torch.arange(len(part)))
            for part in x[row].split(lengths)
        ]
        rows.append(torch.cat(parts))
    expected = torch.stack(rows)
    tolerance = {"rtol": 1e-4, "atol": 1e-5}  # float32 inside
    torch.testing.assert_close(out, expected, **tolerance)
    inputs = [x, weight]
    for actual, wanted in zip(gradients(out, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(actual, wanted, **tolerance)


def test_linear_attention_starts_anew_at_each_document():
    documents, positions = make_documents()
    shape = (len(LENGTHS), TOKENS)
    inputs = DeltaRuleInputs(
        random(*shape, 2, 6),
        random(*shape, 2, 6, seed=1),
        random(*shape, 4, 5),
        random(*shape, 4),
        random(*shape, 4, seed=1),
        (random(4).detach() * 0.3).requires_grad_(),
        random(4, seed=1),
    )
    spec = StateSpec(0, (2, 6), (4, 6, 5))
    out = TrainingAttention(documents).gated_delta_rule(spec, inputs, positions)
    rows = []
    for row, lengths in enumerate(LENGTHS):
        tokens = [x[row].split(lengths) for x in inputs[:5]]
        parts = [
            NoKVCache().gated_delta_rule(
                spec, DeltaRuleInputs(*part, *inputs[5:]), torch.arange(len(part[0]))
            )
            for part in zip(*tokens, strict=True)
        ]
        rows.append(torch.cat(parts))
    expected = torch.stack(rows)
    tolerance = {"rtol": 1e-4, "atol": 1e-5}  # float32 inside
    torch.testing.assert_close(out, expected, **tolerance)
    leaves = list(inputs)
    for actual, wanted in zip(gradients(out, leaves), gradients(expected, leaves), strict=True):
        assert actual.isfinite().all()
        torch.testing.assert_close(actual, wanted, **tolerance)


def test_offsets_of_documents() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 2, 2, -1]])
    offsets = find_offsets(documents)
    assert offsets.tolist() == [0, 2, 5, 6, 7, 9, 10, 10]
    assert len(find_offsets(torch.zeros(4, 1024, dtype=torch.int64))) == 32
    every = find_offsets(torch.arange(64)[None])
    assert every.tolist() == [*range(64), *[64] * 64]


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 7, 1])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_flash_attention_of_documents(heads: tuple[int, int], window: int | None) -> None:
    """Against the mask in float32, forward and backward, with padding and documents of one token."""
    num_heads, num_kv_heads = heads
    spec = AttentionSpec(0, num_heads, num_kv_heads, 64, 64, 0.125, sliding_window=window)
    documents = torch.tensor([[0] * 20 + [1] + [2] * 30 + [-1] * 13, list(range(64))])
    positions = number_segments(documents)[1].view(2, 64).cuda()
    generator = torch.Generator().manual_seed(0)
    qkv = [
        torch.randn(2, 64, count, 64, generator=generator).bfloat16().cuda().requires_grad_()
        for count in (num_heads, num_kv_heads, num_kv_heads)
    ]
    attention = TrainingAttention(documents.cuda(), find_offsets(documents).cuda())
    out = attention.attend(spec, *qkv, positions, None)
    wide = [x.detach().float().requires_grad_() for x in qkv]
    expected = TrainingAttention(documents.cuda()).attend(spec, *wide, positions, None)
    grad = torch.randn(out.shape, generator=generator).cuda()
    out.backward(grad.bfloat16())
    expected.backward(grad)
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
    for actual, other in zip(qkv, wide, strict=True):
        torch.testing.assert_close(actual.grad.float(), other.grad, rtol=4e-2, atol=4e-2)
