"""Direct functions: the most direct torch function, only if it is exactly the op."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import fulgurite
from fulgurite.executors.torch import _find_direct_function
from fulgurite.trace.node_meta import aten_op, fake_value, set_fake_value

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


def test_functions_that_return_integers_as_tensors_are_not_used():
    """Python's bindings of attention return the lengths as tensors, the op returns integers."""
    op = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    graph = fx.Graph()
    with FakeTensorMode() as mode:
        q = torch.empty(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16)
        x = graph.placeholder("q")
        set_fake_value(x, q)
        arguments = (None, True, 0.0, True)
        node = graph.call_function(op, (x, x, x, *arguments))
        set_fake_value(node, op(q, q, q, *arguments))
    assert isinstance(fake_value(node)[4], int)
    assert _find_direct_function(node, mode) is None


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
