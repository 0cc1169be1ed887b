"""The fuser executor in whole programs: aliasing, views, hidden sizes, no compiler."""

from __future__ import annotations

import re
from types import FunctionType

import pytest
import torch

import fulgurite
from fulgurite import native
from fulgurite.fuser import pipeline


def agree(function, *inputs, **options):
    """Compiled equals eager, and results share memory just as eager's do."""
    compiled = fulgurite.compile(function, executors=["fuser", "torch"], **options)
    ours, eager = compiled(*inputs), function(*inputs)
    torch.testing.assert_close(ours, eager, equal_nan=True)
    for first in range(len(eager)):
        for value, other in [
            (x, y) for x, y in zip([*inputs, *ours], [*inputs, *eager], strict=True)
        ]:
            if isinstance(value, torch.Tensor) and value.numel():
                shared = value.data_ptr() == ours[first].data_ptr()
                assert shared == (other.data_ptr() == eager[first].data_ptr()), first
                assert (value is ours[first]) == (other is eager[first]), first
    return compiled


def test_non_view_ops_return_new_memory():
    a, b = torch.randn(()), torch.randn(1, 3)
    agree(
        lambda a, b: (
            a.max(0)[0],
            a.sum(),
            a.amax(),
            b.sum(0),
            b.max(0)[0],
            torch.cat([b]),
            b.flip(0),
        ),
        a,
        b,
    )


def test_views_of_a_result_share_its_memory():
    def views(a):
        b = -a
        return b, b.expand_as(b), b.view(-1), b.t(), a.view_as(a)

    agree(views, torch.randn(3, 3))


def test_expanded_tensors_of_no_elements():
    b = torch.randn(1, 3).expand(0, 3)
    agree(lambda b: (b.sum(0), b.sqrt().flip(0), (b + 1).sum(), b[..., 1:].clone() * 2), b)


def test_sizes_that_no_input_has_reach_the_region():
    def grows(x):
        flat = x.flatten().sort()[0]  # its size is a product; the next line needs both factors
        return flat.view(x.shape) * 2 + torch.arange(x.shape[1] // 2 + 1).sum(), flat + x.shape[0]

    compiled = agree(grows, torch.randn(4, 6), dynamic=True)
    x = torch.randn(5, 9)
    torch.testing.assert_close(compiled(x), grows(x))
    assert len(compiled.graphs) == 1


def test_views_for_library_calls_do_not_split_regions():
    def gated(x, gate, up):
        return torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())

    inputs = torch.randn(4, 8), torch.randn(16, 8), torch.randn(16, 8)
    compiled = fulgurite.compile(gated)
    torch.testing.assert_close(compiled(*inputs), gated(*inputs))
    assert compiled.explain().graphs[0].compiled_graphs[0].calls == {"fuser": 1, "torch": 2}


def test_data_dependent_numbers_stay_with_torch():
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        agree(lambda x, n: (x.narrow(0, n.item(), 2) * 2 + 1,), torch.randn(6, 3), torch.tensor(1))


def test_regions_are_named_by_their_ops_and_listed_with_kernels():
    compiled = fulgurite.compile(lambda x, w: torch.nn.functional.layer_norm(x, (6,), w) @ x.t())
    compiled(torch.randn(5, 6), torch.randn(6))
    assert "layer_norm_0(x, w)" in str(compiled.last_trace())
    explanation = compiled.explain()
    (kernel,) = explanation.graphs[0].compiled_graphs[0].kernels
    assert kernel.call == "layer_norm_0" and kernel.reason.startswith("mm needs")
    assert "fusion boundary" in str(explanation) and "measured" not in str(explanation)
    assert re.search(r"kernel +region +ops", str(explanation))
    assert re.search(r"layer_norm_0 +0 ", str(explanation))
    timed = explanation.with_measured_kernels()
    assert "measured" in str(timed) and timed.graphs[0].compiled_graphs[0].kernels[0].seconds > 0


def test_without_a_compiler_torch_runs_everything(monkeypatch):
    monkeypatch.setenv("FULGURITE_CXX", "no-such-compiler")
    native.find_compiler.cache_clear()
    try:
        with pytest.warns(UserWarning, match="no C\\+\\+ compiler found") as seen:
            compiled = fulgurite.compile(lambda x: (x + 1) * 2)
            x = torch.randn(3)
            assert torch.equal(compiled(x), (x + 1) * 2)
        assert len([w for w in seen if "compiler" in str(w.message)]) == 1
        assert "@fulgurite.region" not in str(compiled.last_trace())
    finally:
        native.find_compiler.cache_clear()


def test_later_calls_use_the_cached_launch():
    compiled = fulgurite.compile(lambda x: (x.exp() + 1).relu(), autotune=False)
    x = torch.randn(5, 7)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), (x.exp() + 1).relu())
    program = compiled.graphs[0].compiled_graphs["inference"].host_program
    names = program.python_form.__globals__
    (region,) = (value for name, value in names.items() if "exp" in name)
    assert isinstance(region, FunctionType), "each call asks the region for its function"


def test_claims_are_cached_for_equal_calls(monkeypatch):
    asked = []

    def find_unsupported_reason(node, use_triton, real=pipeline.find_unsupported_reason):
        asked.append(str(node.target))
        return real(node, use_triton)

    monkeypatch.setattr(pipeline, "_CAN_LOWER_CACHE", {})
    monkeypatch.setattr(pipeline, "find_unsupported_reason", find_unsupported_reason)

    def function(x):
        for _ in range(4):
            x = torch.sin(x * 0.5)
        return x, torch.sin(x.t()), torch.sin(x.double())

    x = torch.randn(3, 5)
    compiled = fulgurite.compile(function, executors=["fuser", "torch"], autotune=False)
    torch.testing.assert_close(compiled(x), function(x))
    assert asked.count("aten.sin.default") == 3, "another layout or dtype is another question"
