"""Direct functions: the most direct torch function, only if it is exactly the op."""

from __future__ import annotations

import pytest
import torch

import fulgurite
from fulgurite.trace.node_meta import aten_op

pytestmark = pytest.mark.usefixtures("torch_only")


def targets(function, *inputs):
    compiled = fulgurite.compile(function)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), function(*inputs), equal_nan=True)
    return {str(aten_op(n)): n.target for n in compiled.last_trace().ops}


def test_direct_functions_replace_equal_ops():
    x = torch.randn(3, 4)
    found = targets(
        lambda x: (torch.add(x, 1).exp().view(12), x @ x.t(), torch.where(x > 0, x, 0.0)), x
    )
    assert found["aten.add.Tensor"] is torch.add and found["aten.exp.default"] is torch.exp
    assert found["aten.view.default"] is torch.Tensor.view and found["aten.mm.default"] is torch.mm


def test_ops_without_a_direct_function_stay():
    x = torch.randn(3, 4, requires_grad=True)
    compiled = fulgurite.compile(lambda x: torch.nn.functional.silu(x))
    compiled(x).sum().backward()
    (node,) = [n for n in compiled.last_trace("backward").ops if "silu" in str(n.target)]
    assert node.target is torch.ops.aten.silu_backward.default


def test_overloads_are_distinguished():
    x = torch.tensor([1, 2, 3])
    found = targets(
        lambda x: (x.sum(), x.float().sum(0, dtype=torch.float64), torch.max(x), x.float().max(0)),
        x,
    )
    assert set(found) >= {
        "aten.sum.default",
        "aten.sum.dim_IntList",
        "aten.max.default",
        "aten.max.dim",
    }
