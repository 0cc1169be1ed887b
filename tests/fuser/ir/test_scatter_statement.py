"""The rules of indexed stores in the IR, and their interpretation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fulgurite.fuser.ir.expression import Constant, Load
from fulgurite.fuser.ir.index import Axis, Index, IndirectIndex, from_atom
from fulgurite.fuser.ir.interpreter import interpret_region
from fulgurite.fuser.ir.statement import (
    Output,
    Region,
    Scatter,
    Tensor,
    make_statement,
    verify_region,
)

I0, S0 = Axis("i0", Index(3)), Axis("s0", Index(4))
INDEX = Tensor("index", torch.int64, (Index(4),), (Index(1),))
ROWS = Tensor("rows", torch.float32, (Index(4),), (Index(1),))
OUT = Tensor("out", torch.float32, (Index(3),), (Index(1),))


def make_region(kind: str) -> Region:
    """out[i0] = 1.0; out[index[s0]] kind= rows[s0]"""
    at = (from_atom(S0),)
    position = from_atom(IndirectIndex(Load("index", at, torch.int64), Index(3)))
    scatter = Scatter(kind, (S0,), (position,), Load("rows", at, torch.float32))
    s = make_statement(OUT, (I0,), Constant(1.0, torch.float32), scatter=scatter)
    return Region((INDEX, ROWS), (s,), (Output("out", OUT.sizes, OUT.strides),))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("set", [5.0, 1.0, 4.0]),
        ("sum", [8.0, 1.0, 7.0]),
        ("prod", [10.0, 1.0, 8.0]),
        ("max", [5.0, 1.0, 4.0]),
        ("min", [1.0, 1.0, 1.0]),
    ],
)
def test_values_are_stored_in_order(kind: str, expected: list[float]) -> None:
    region = make_region(kind)
    verify_region(region)
    index, rows = torch.tensor([0, 2, -1, 0]), torch.tensor([2.0, 2.0, 4.0, 5.0])
    (result,) = interpret_region(region, (index, rows))
    assert result.tolist() == expected


def test_text_shows_both_parts() -> None:
    (s,) = make_region("sum").statements
    assert str(s) == "out[i0] = 1.0; out[index[s0]] sum= rows[s0]"
    assert [load.name for load in s.loads] == ["rows", "index"]


def test_axes_of_values_and_initial_values_are_checked() -> None:
    region = make_region("sum")
    (s,) = region.statements
    assert s.scatter is not None
    unbound = replace(s.scatter, value=Load("rows", (from_atom(I0),), torch.float32))
    wrong_rank = replace(s.scatter, index=())
    for scatter in (unbound, wrong_rank):
        broken = replace(region, statements=(replace(s, scatter=scatter),))
        with pytest.raises(AssertionError):
            verify_region(broken)
