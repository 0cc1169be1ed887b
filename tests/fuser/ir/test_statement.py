"""Regions print one line per statement, and the verifier names a broken statement."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fulgurite.fuser.frontend.lower_graph import lower_graph
from fulgurite.fuser.ir.expression import Constant, Load, Operation
from fulgurite.fuser.ir.index import Axis, Index, from_atom
from fulgurite.fuser.ir.statement import verify_region
from tests.fuser.support import check_interpreted, trace

F = torch.nn.functional
UNBOUND = from_atom(Axis("i", Index(6)))


def test_region_prints_one_formula_per_statement() -> None:
    x, w = torch.randn(8, 16), torch.randn(16)
    region = check_interpreted(lambda x, w: F.rms_norm(x, (16,), w, 0.25), x, w)
    assert [str(s) for s in region.statements] == [
        "pow_1[i0,i1] = (arg0_1[i0,i1] * arg0_1[i0,i1])",
        "mean_sum[i0] = sum_r1 pow_1[i0,r1]",
        "mean[i0] = (mean_sum[i0] / 16.0)",
        "add[i0] = (mean[i0] + 0.25)",
        "rsqrt[i0] = rsqrt(add[i0])",
        "mul[i0,i1] = (arg0_1[i0,i1] * rsqrt[i0])",
        "mul_1[i0,i1] = (mul[i0,i1] * arg1_1[i1])",
    ]


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        (lambda s: replace(s, expression=Load("nothing", (), torch.float32)), "read before"),
        (lambda s: replace(s, axes=s.axes[:1]), "axes"),
        (lambda s: replace(s, expression=Operation("nonsense", (), torch.float32)), "primitive"),
        (
            lambda s: replace(s, expression=Load("arg0_1", (UNBOUND,), torch.float32)),
            "not bound|rank",
        ),
        (
            lambda s: replace(
                s, expression=Operation("exp", (Constant(1.0, torch.float32),) * 2, torch.float32)
            ),
            "takes 1",
        ),
    ],
)
def test_verifier_names_the_broken_statement(breakage, message: str) -> None:
    region = lower_graph(trace(lambda x: x.exp() * 2, (torch.randn(3, 4),)))
    verify_region(region)
    first, *rest = region.statements
    with pytest.raises(AssertionError, match=message) as caught:
        verify_region(replace(region, statements=(breakage(first), *rest)))
    assert "exp" in str(caught.value)
