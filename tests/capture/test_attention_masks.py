"""Constant attention masks of captured graphs: folded before torch chooses an attention kernel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fulgurite

T = 24


def bidirectional():
    """The mask that transformers builds for encoders while capturing: broadcast along the keys."""
    return (torch.arange(T)[:, None] >= 0).expand(2, 1, T, T)


def causal():
    position = torch.arange(T)
    return (position[None, :] <= position[:, None])[None, None]


def random():
    return torch.rand(T, T) < 2


def written_by_a_view():
    mask = torch.ones(T, T, dtype=torch.bool)
    mask[0, 1:].fill_(False)  # no input of the mask that attention reads
    return mask


def written_by_assignment():
    mask = torch.ones(T, T, dtype=torch.bool)
    rows = mask[2:]
    rows[:, 5] = False
    return mask


def compile_attention(make, **options):
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=make(), **options)

    torch.manual_seed(0)
    given = [torch.randn(2, 3, T, 8, requires_grad=True) for _ in range(3)]
    compiled = fulgurite.compile(attend)
    ours, theirs = compiled(*given), attend(*given)
    torch.testing.assert_close(ours, theirs)
    grad = torch.randn_like(theirs)
    wanted = torch.autograd.grad(theirs, given, grad)
    torch.testing.assert_close(torch.autograd.grad(ours, given, grad), wanted)
    (attention,) = compiled.graphs[0].captured.graph.find_nodes(
        op="call_function", target=F.scaled_dot_product_attention
    )
    return attention.kwargs, compiled


@pytest.mark.parametrize(("make", "is_causal"), [(bidirectional, False), (causal, True)])
def test_constant_masks_are_folded(make, is_causal):
    kwargs, compiled = compile_attention(make)
    assert kwargs["attn_mask"] is None and kwargs["is_causal"] is is_causal
    assert "arange" not in str(compiled.graphs[0].captured)


@pytest.mark.parametrize("make", [random, written_by_a_view, written_by_assignment])
def test_masks_that_change_are_kept(make):
    kwargs, _ = compile_attention(make)
    assert kwargs["attn_mask"] is not None


def test_a_mask_for_several_calls_and_other_readers():
    def attend(q, k, v):
        mask = causal()
        first = F.scaled_dot_product_attention(q, k, v, mask)
        second = F.scaled_dot_product_attention(first, k, v, mask, is_causal=False, scale=0.5)
        return second, mask.sum()

    torch.manual_seed(0)
    given = [torch.randn(2, 3, T, 8) for _ in range(3)]
    compiled = fulgurite.compile(attend)
    torch.testing.assert_close(compiled(*given), attend(*given))
    calls = compiled.graphs[0].captured.graph.find_nodes(
        op="call_function", target=F.scaled_dot_product_attention
    )
    assert [call.args[3] for call in calls] == [None, None]


def test_a_padding_mask_of_an_input_is_kept():
    def attend(q, k, v, lengths):
        mask = torch.arange(T)[None, None, None, :] < lengths[:, None, None, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    torch.manual_seed(0)
    given = [torch.randn(2, 3, T, 8) for _ in range(3)]
    compiled = fulgurite.compile(attend)
    for lengths in (torch.tensor([5, T]), torch.tensor([1, 7])):
        torch.testing.assert_close(compiled(*given, lengths), attend(*given, lengths))
