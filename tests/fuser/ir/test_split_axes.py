"""Reshapes become renamed axes, and axes with one loop id are one loop."""

from __future__ import annotations

import torch

from fulgurite.fuser.frontend.lower_graph import lower_graph
from fulgurite.fuser.ir.loop_ids import assign_loop_ids
from fulgurite.fuser.ir.split_axes import split_axes
from tests.fuser.support import check_interpreted, trace


def test_reshapes_leave_no_div_mod() -> None:
    def heads(x):
        return (x * 2).view(3, 4, 5).transpose(0, 1).reshape(4, 15).exp()

    region = check_interpreted(heads, torch.randn(12, 5))
    text = str(region)
    assert "//" not in text and "%" not in text, text


def test_incompatible_reshapes_keep_div_mod() -> None:
    region = check_interpreted(
        lambda x: (x * 2).view(2, 3).exp() + (x * 2).view(3, 2).exp().view(2, 3), torch.randn(6)
    )
    assert region.statements


def test_axes_of_a_square_are_different_loops() -> None:
    region = split_axes(lower_graph(trace(lambda x: x * 2 + (x * 2).t(), (torch.randn(5, 5),))))
    loop_ids = assign_loop_ids(region)
    for s in region.statements:
        assert len({loop_ids[(s.name, axis)] for axis in s.axes}) == 2
