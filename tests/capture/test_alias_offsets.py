"""Outputs that are views of mutated inputs, with symbolic sizes and inputs that start inside a storage."""

from __future__ import annotations

import pytest
import torch

import fulgurite
from fulgurite.capture.alias_offsets import _offset_in_root


def write_all(a, w):
    a.mul_(2)
    return a[a.size(0) // 2], (w * a).sum()


def write_a_slice(a, w):
    """The new value is a `slice_scatter`, which keeps the input's offset."""
    a[1:].mul_(2)
    return a[a.size(0) // 2 :].T, a.flatten()[a.numel() // 2 :], (w * a).sum()


def write_an_element(a, w):
    last = a[-1 - 2 % a.size(0)]
    last.add_(1)
    return last, (w * a).sum()


def return_one_of_several_views(a, w):
    a.neg_()
    return a[1:].T.chunk(2, -1)[0], a.unbind(0)[-1], a.split(2)[1].T, (w * a).sum()


@pytest.mark.parametrize(
    ("start", "is_training"),
    [(0, False), (3, False), (3, True), pytest.param(0, True, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    "f", [return_one_of_several_views, write_all, write_a_slice, write_an_element]
)
def test_views_at_symbolic_positions_of_mutated_inputs(f, start, is_training):
    compiled = fulgurite.compile(f, dynamic=True)
    for rows in (3, 4, 7):
        ours, eager = (torch.arange(40.0)[start : start + 2 * rows].view(rows, 2) for _ in range(2))
        w = torch.ones(rows, 2, requires_grad=is_training)
        for result, expected in zip(compiled(ours, w)[:-1], f(eager, w)[:-1], strict=True):
            assert torch.equal(result, expected)
            assert result.storage_offset() == expected.storage_offset()
            assert result.data_ptr() - ours.data_ptr() == expected.data_ptr() - eager.data_ptr()
        assert torch.equal(ours, eager)


@pytest.mark.parametrize("start", [0, 3])
def test_real_views_of_mutated_complex_inputs(start):
    def f(a):
        a.mul_(2)
        return torch.view_as_real(a)[a.size(0) // 2]

    compiled = fulgurite.compile(f, dynamic=True)
    ours, eager = (torch.arange(12.0).to(torch.complex64)[start : start + 5] for _ in range(2))
    assert torch.equal(compiled(ours), f(eager))


def test_offset_is_counted_from_the_tensor_that_is_viewed():
    traced = torch.fx.experimental.proxy_tensor.make_fx(
        lambda x: (x + 1)[2:][1], tracing_mode="fake"
    )(torch.zeros(10)[4:])
    assert _offset_in_root(traced.graph.output_node().args[0]) == 3
