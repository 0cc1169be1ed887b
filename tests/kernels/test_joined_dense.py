"""Which linears a GPU runs as one fused kernel, seen on the CPU with a stand-in for that kernel."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fulgurite.kernels.elementwise import ops
from fulgurite.kernels.gemm import fused_projections
from fulgurite.models.layers import RMSNorm

calls: list[dict] = []


def stand_in(x, weight, *, bias=None, up=None, up_bias=None, activation="", norm=None, eps=0.0,
             offset=0.0, residual=None):  # fmt: skip
    """The formula, and what it was called with."""
    calls.append({"rows": weight.shape[0], "norm": norm is not None, "up": up is not None})
    if len(x) > 16:
        return NotImplemented
    if norm is not None:
        x = ops.plain_rms_norm(x, norm, eps, offset)
    y = nn.functional.linear(x, weight, bias)
    if up is not None:
        y = ops.ACTIVATIONS[activation](y) * nn.functional.linear(x, up, up_bias)
    return y if residual is None else y + residual


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    monkeypatch.setitem(fused_projections.FUSED, "cpu", f"{__name__}:stand_in")
    calls.clear()
    with torch.no_grad():
        yield


def some_linears(bias=False):
    return [nn.Linear(8, out, bias=bias) for out in (12, 4, 4)]


def some_norm():
    norm = RMSNorm(8, 1e-5, 1.0)
    nn.init.normal_(norm.weight)
    return norm


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8), (1, 8)])
def test_weights_that_lie_together_are_one_kernel(shape, bias):
    modules, norm, x = some_linears(bias), some_norm(), torch.randn(shape)
    wanted = [module(norm(x)) for module in modules]
    before = [module.weight.clone() for module in modules]
    fused_projections.lay_together(modules)
    assert all(torch.equal(m.weight, w) for m, w in zip(modules, before, strict=True))
    found = fused_projections.linears(x, modules, norm)
    assert calls == [{"rows": 20, "norm": True, "up": False}]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs)


def test_laying_together_twice_moves_nothing():
    modules = some_linears()
    fused_projections.lay_together(modules)
    places = [module.weight.data_ptr() for module in modules]
    fused_projections.lay_together(modules)
    assert places == [module.weight.data_ptr() for module in modules]


def test_weights_apart_are_called_one_by_one():
    modules, x = some_linears(), torch.randn(3, 8)
    found = fused_projections.linears(x, modules)
    assert calls == []
    assert all(torch.equal(a, m(x)) for a, m in zip(found, modules, strict=True))


def test_a_gate_with_norm_and_a_sum():
    gate, up, _ = (nn.Linear(8, 6, bias=False) for _ in range(3))
    down, norm, x = nn.Linear(6, 8, bias=False), some_norm(), torch.randn(3, 8)
    inner = fused_projections.gated(x, gate, up, "gelu", norm)
    torch.testing.assert_close(inner, nn.functional.gelu(gate(norm(x))) * up(norm(x)))
    out = fused_projections.add_linear(x, inner, down)
    torch.testing.assert_close(out, x + down(inner))
    assert [call["up"] for call in calls] == [True, False]


def test_many_rows_go_to_the_library_as_one_weight():
    modules, norm, x = some_linears(), some_norm(), torch.randn(20, 8)
    fused_projections.lay_together(modules)
    for ours, module in zip(fused_projections.linears(x, modules, norm), modules, strict=True):
        torch.testing.assert_close(ours, module(norm(x)))
    torch.testing.assert_close(
        fused_projections.add_linear(torch.ones(20, 12), x, modules[0]), 1 + modules[0](x)
    )


def test_a_linear_that_somebody_listens_to_is_called():
    seen = []
    modules, x = some_linears(), torch.randn(3, 8)
    fused_projections.lay_together(modules)
    modules[1].register_forward_hook(lambda *_: seen.append(1))
    fused_projections.linears(x, modules)
    assert seen == [1] and calls == []
    fused_projections.add_linear(torch.zeros(3, 4), x, modules[1])
    assert seen == [1, 1]


def test_gradients_and_biases_of_some_are_left_alone():
    modules, x = some_linears(), torch.randn(3, 8)
    fused_projections.lay_together(modules)
    with torch.enable_grad():
        fused_projections.linears(x, modules)[0].sum().backward()
    assert calls == [] and modules[0].weight.grad is not None
    modules[0].bias = nn.Parameter(torch.ones(12))
    found = fused_projections.linears(x, modules)
    assert calls == []
    torch.testing.assert_close(found[0], modules[0](x))


def test_what_was_seen_is_looked_at_again():
    """Weights that are written to, moved, exchanged or listened to."""
    modules, x = some_linears(bias=True), torch.randn(3, 8)
    fused_projections.lay_together(modules)

    def agrees(kernels):
        calls.clear()
        found = fused_projections.linears(x, modules)
        assert len(calls) == kernels
        for ours, module in zip(found, modules, strict=True):
            torch.testing.assert_close(ours, module(x))

    agrees(1)
    agrees(1)
    modules[1].weight.mul_(2)
    agrees(1)
    modules[1].weight.data = torch.randn(4, 8)
    agrees(0)
    fused_projections.lay_together(modules)
    agrees(1)
    modules[2].bias = nn.Parameter(torch.randn(4))
    agrees(0)
    fused_projections.lay_together(modules)
    agrees(1)
    modules[0].weight = nn.Parameter(torch.randn(12, 8))
    agrees(0)
    fused_projections.lay_together(modules)
    handle = modules[1].register_forward_hook(lambda module, given, out: out + 1)
    agrees(0)
    handle.remove()
    agrees(1)
    modules[2] = nn.Linear(8, 4)
    agrees(0)


class Doubled(nn.Linear):
    """An adapter that shares the weight of what it stands in for."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("place", [0, 1])
def test_a_linear_that_computes_something_else_is_called(place, seen):
    """Of another class with the same parameters, or with a forward of its own."""
    modules, x = some_linears(bias=True), torch.randn(3, 8)
    fused_projections.lay_together(modules)
    if seen:
        fused_projections.linears(x, modules)
    plain = modules[place]
    adapter = Doubled(8, plain.out_features)
    adapter.weight, adapter.bias = plain.weight, plain.bias
    wanted = 2 * plain(x)
    modules[place] = adapter
    torch.testing.assert_close(fused_projections.linears(x, modules)[place], wanted)
    modules[place] = plain
    plain.forward = lambda x: wanted
    assert fused_projections.linears(x, modules)[place] is wanted
    torch.testing.assert_close(
        fused_projections.add_linear(torch.ones_like(wanted), x, plain), 1 + wanted
    )


@pytest.mark.parametrize("rows", [8, 5])
def test_a_weight_that_is_another_where_it_lies(rows):
    """The same parameter at the same address is turned, or has fewer rows."""
    modules, x = [nn.Linear(8, 8, bias=False) for _ in range(2)], torch.randn(3, 8)
    fused_projections.lay_together(modules)
    fused_projections.linears(x, modules)
    weight = modules[1].weight
    weight.data = weight.data.t() if rows == 8 else weight.data[:rows]
    modules[1].out_features = rows
    torch.testing.assert_close(fused_projections.linears(x, modules)[1], modules[1](x))


def test_many_rows_go_to_the_library():
    gate, up = (nn.Linear(8, 6) for _ in range(2))
    x = torch.randn(fused_projections.MOST_FUSED + 1, 8)
    fused_projections.lay_together((gate, up))
    found = fused_projections.gated(x, gate, up, "silu")
    assert calls == []
    torch.testing.assert_close(found, nn.functional.silu(gate(x)) * up(x))
