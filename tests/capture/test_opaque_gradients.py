"""Custom operators whose gradient formula reads values: one graph, and eager's gradients."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fulgurite
from fulgurite.capture.opaque_gradients import discard_fresh_symbols

LIBRARY = torch.library.Library("opaque_gradients_test", "DEF")
torch.library.define(
    "opaque_gradients_test::grouped_scale", "(Tensor x, Tensor ends, float by=2.0) -> Tensor"
)
torch.library.define("opaque_gradients_test::split", "(Tensor x, Tensor ends) -> (Tensor, Tensor)")


def grouped_scale(x, ends, by=2.0):
    out, start = torch.empty_like(x), 0
    for group, end in enumerate(ends.tolist()):
        out[start:end] = x[start:end] * (by + group)
        start = end
    return out


@torch.library.register_fake("opaque_gradients_test::grouped_scale")
def _(x, ends, by=2.0):
    return torch.empty_like(x)


ANY_DEVICE = "CompositeExplicitAutograd"
torch.library.impl("opaque_gradients_test::grouped_scale", ANY_DEVICE)(grouped_scale)


def save(ctx, inputs, output):
    ctx.save_for_backward(inputs[1])
    ctx.by = inputs[2]


def scale_gradient(ctx, grad):
    return grouped_scale(grad, ctx.saved_tensors[0], ctx.by), None, None


torch.library.register_autograd(
    "opaque_gradients_test::grouped_scale", scale_gradient, setup_context=save
)


def split(x, ends):
    return x * 2, torch.full_like(ends, int(ends[-1]))


@torch.library.register_fake("opaque_gradients_test::split")
def _(x, ends):
    return torch.empty_like(x), torch.empty_like(ends)


torch.library.impl("opaque_gradients_test::split", ANY_DEVICE)(split)


def split_gradient(ctx, grad, _):
    return 2 * grad * float(ctx.saved_tensors[0][-1]) / float(ctx.saved_tensors[0][-1]), None


torch.library.register_autograd(
    "opaque_gradients_test::split",
    split_gradient,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)
OPS = torch.ops.opaque_gradients_test


def use_scale(x, w, ends):
    return OPS.grouped_scale((x @ w).relu(), ends, by=3.0).tanh()


def use_split(x, w, ends):
    scaled, count = OPS.split(torch.sin(x) @ w, ends)
    return scaled * count.sum()


@pytest.mark.parametrize("function", [use_scale, use_split])
@pytest.mark.parametrize("needs", [(True, True), (False, True)])
def test_gradients_of_an_op_that_reads_values(function, needs):
    torch.manual_seed(0)
    ends = torch.tensor([2, 2, 5, 7])
    x, w = torch.randn(7, 5), torch.randn(5, 3)
    compiled = fulgurite.compile(function)
    found = []
    for run in (function, compiled, compiled):
        inputs = [t.clone().requires_grad_(n) for t, n in zip((x, w), needs, strict=True)]
        result = run(*inputs, ends)
        result.square().sum().backward()
        found.append((result, *(t.grad for t in inputs if t.requires_grad)))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])
    assert len(compiled.graphs) == 1 and compiled.breaks == []
    assert "custom_op_gradient" in str(compiled.last_trace("backward"))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, w, ends), function(x, w, ends))


def test_an_op_with_a_traceable_gradient_is_traced():
    @fulgurite.op("opaque_gradients_test::double")
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @double.fake
    def _(x):
        return torch.empty_like(x)

    @double.backward
    def _(inputs, output, grad):
        return 2 * grad

    x = torch.randn(4, requires_grad=True)
    compiled = fulgurite.compile(lambda x: double(x).sin())
    compiled(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * torch.cos(2 * x))
    assert "custom_op_gradient" not in str(compiled.last_trace("backward"))


def test_symbols_of_another_thread_are_discarded():
    """Autograd runs formulas of CUDA tensors on its own thread: they left symbols in the graph's environment."""
    environment = ShapeEnv()
    environment.create_unbacked_symint()
    before = list(environment.pending_fresh_unbacked_symbols)
    with discard_fresh_symbols(environment):
        thread = threading.Thread(target=environment.create_unbacked_symint)
        thread.start()
        thread.join()
        assert environment.pending_fresh_unbacked_symbols != before
    assert environment.pending_fresh_unbacked_symbols == before
    with discard_fresh_symbols(None):
        pass
