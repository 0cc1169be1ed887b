"""Which linears a GPU runs as one fused kernel, tested on the CPU with a fake kernel."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fulgurite.kernels.elementwise import ops
from fulgurite.kernels.gemm import fused_projections
from fulgurite.kernels.tuning.sm_90 import Sm90Heuristics
from fulgurite.models.norms import RMSNorm

calls: list[dict] = []


def fake_fused_linear(x, weight, *, bias=None, up=None, up_bias=None, activation="", norm=None, eps=0.0,
             offset=0.0, residual=None):  # fmt: skip
    """The formula; records its arguments."""
    calls.append({"rows": weight.shape[0], "norm": norm is not None, "up": up is not None})
    if len(x) > 16:
        return NotImplemented
    if norm is not None:
        x = ops.rms_norm_reference(x, norm, eps, offset)
    y = nn.functional.linear(x, weight, bias)
    if up is not None:
        y = ops.ACTIVATIONS[activation](y) * nn.functional.linear(x, up, up_bias)
    return y if residual is None else y + residual


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    monkeypatch.setitem(fused_projections.FUSED_LINEAR_KERNELS, "cpu", fake_fused_linear)
    calls.clear()
    with torch.no_grad():
        yield


def build_linears(bias=False):
    return [nn.Linear(8, out, bias=bias) for out in (12, 4, 4)]


def build_norm():
    norm = RMSNorm(8, 1e-5, 1.0)
    nn.init.normal_(norm.weight)
    return norm


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8), (1, 8)])
def test_adjacent_weights_are_one_kernel(shape, bias):
    modules, norm, x = build_linears(bias), build_norm(), torch.randn(shape)
    expected = [module(norm(x)) for module in modules]
    before = [module.weight.clone() for module in modules]
    fused_projections.merge_weight_storage(modules)
    assert all(torch.equal(m.weight, w) for m, w in zip(modules, before, strict=True))
    out = fused_projections.fused_linears(x, modules, norm)
    assert calls == [{"rows": 20, "norm": True, "up": False}]
    for ours, theirs in zip(out, expected, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs)


def test_merging_storage_twice_moves_nothing():
    modules = build_linears()
    fused_projections.merge_weight_storage(modules)
    addresses = [module.weight.data_ptr() for module in modules]
    fused_projections.merge_weight_storage(modules)
    assert addresses == [module.weight.data_ptr() for module in modules]


def test_weights_that_are_not_adjacent_are_called_one_by_one():
    modules, x = build_linears(), torch.randn(3, 8)
    out = fused_projections.fused_linears(x, modules)
    assert calls == []
    assert all(torch.equal(a, m(x)) for a, m in zip(out, modules, strict=True))


def test_gate_up_with_norm_and_residual():
    gate, up, _ = (nn.Linear(8, 6, bias=False) for _ in range(3))
    down, norm, x = nn.Linear(6, 8, bias=False), build_norm(), torch.randn(3, 8)
    inner = fused_projections.fused_gate_up(x, gate, up, "gelu", norm)
    torch.testing.assert_close(inner, nn.functional.gelu(gate(norm(x))) * up(norm(x)))
    out = fused_projections.fused_linear_add(x, inner, down)
    torch.testing.assert_close(out, x + down(inner))
    assert [call["up"] for call in calls] == [True, False]


def test_large_batches_use_the_library_with_one_weight():
    modules, norm, x = build_linears(), build_norm(), torch.randn(20, 8)
    fused_projections.merge_weight_storage(modules)
    for ours, module in zip(
        fused_projections.fused_linears(x, modules, norm), modules, strict=True
    ):
        torch.testing.assert_close(ours, module(norm(x)))
    torch.testing.assert_close(
        fused_projections.fused_linear_add(torch.ones(20, 12), x, modules[0]), 1 + modules[0](x)
    )


def test_linear_with_a_hook_is_called():
    is_cached = []
    modules, x = build_linears(), torch.randn(3, 8)
    fused_projections.merge_weight_storage(modules)
    modules[1].register_forward_hook(lambda *_: is_cached.append(1))
    fused_projections.fused_linears(x, modules)
    assert is_cached == [1] and calls == []
    fused_projections.fused_linear_add(torch.zeros(3, 4), x, modules[1])
    assert is_cached == [1, 1]


def test_gradients_and_partial_biases_are_not_fused():
    modules, x = build_linears(), torch.randn(3, 8)
    fused_projections.merge_weight_storage(modules)
    with torch.enable_grad():
        fused_projections.fused_linears(x, modules)[0].sum().backward()
    assert calls == [] and modules[0].weight.grad is not None
    modules[0].bias = nn.Parameter(torch.ones(12))
    out = fused_projections.fused_linears(x, modules)
    assert calls == []
    torch.testing.assert_close(out[0], modules[0](x))


def test_cached_weight_is_validated():
    """Weights that are written to, moved, replaced or hooked."""
    modules, x = build_linears(bias=True), torch.randn(3, 8)
    fused_projections.merge_weight_storage(modules)

    def assert_equal(num_kernels):
        calls.clear()
        out = fused_projections.fused_linears(x, modules)
        assert len(calls) == num_kernels
        for ours, module in zip(out, modules, strict=True):
            torch.testing.assert_close(ours, module(x))

    assert_equal(1)
    assert_equal(1)
    modules[1].weight.mul_(2)
    assert_equal(1)
    modules[1].weight.data = torch.randn(4, 8)
    assert_equal(0)
    fused_projections.merge_weight_storage(modules)
    assert_equal(1)
    modules[2].bias = nn.Parameter(torch.randn(4))
    assert_equal(0)
    fused_projections.merge_weight_storage(modules)
    assert_equal(1)
    modules[0].weight = nn.Parameter(torch.randn(12, 8))
    assert_equal(0)
    fused_projections.merge_weight_storage(modules)
    handle = modules[1].register_forward_hook(lambda module, given, out: out + 1)
    assert_equal(0)
    handle.remove()
    assert_equal(1)
    modules[2] = nn.Linear(8, 4)
    assert_equal(0)


class Doubled(nn.Linear):
    """An adapter that shares the weight of the linear it replaces."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("index", [0, 1])
def test_linear_with_another_forward_is_called(index, is_cached):
    """Of another class with the same parameters, or with its own forward."""
    modules, x = build_linears(bias=True), torch.randn(3, 8)
    fused_projections.merge_weight_storage(modules)
    if is_cached:
        fused_projections.fused_linears(x, modules)
    original = modules[index]
    adapter = Doubled(8, original.out_features)
    adapter.weight, adapter.bias = original.weight, original.bias
    expected = 2 * original(x)
    modules[index] = adapter
    torch.testing.assert_close(fused_projections.fused_linears(x, modules)[index], expected)
    modules[index] = original
    original.forward = lambda x: expected
    assert fused_projections.fused_linears(x, modules)[index] is expected
    torch.testing.assert_close(
        fused_projections.fused_linear_add(torch.ones_like(expected), x, original), 1 + expected
    )


@pytest.mark.parametrize("rows", [8, 5])
def test_changed_weight_at_the_same_address(rows):
    """The same parameter at the same address is transposed, or has fewer rows."""
    modules, x = [nn.Linear(8, 8, bias=False) for _ in range(2)], torch.randn(3, 8)
    fused_projections.merge_weight_storage(modules)
    fused_projections.fused_linears(x, modules)
    weight = modules[1].weight
    weight.data = weight.data.t() if rows == 8 else weight.data[:rows]
    modules[1].out_features = rows
    torch.testing.assert_close(fused_projections.fused_linears(x, modules)[1], modules[1](x))


def test_large_batches_use_the_library():
    gate, up = (nn.Linear(8, 6) for _ in range(2))
    x = torch.randn(Sm90Heuristics.fused_linear_max_rows + 1, 8)
    fused_projections.merge_weight_storage((gate, up))
    out = fused_projections.fused_gate_up(x, gate, up, "silu")
    assert calls == []
    torch.testing.assert_close(out, nn.functional.silu(gate(x)) * up(x))


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (0, 3, 8)])
def test_no_rows(shape):
    """A rank without requests runs its layers with no rows."""
    modules, norm, x = build_linears(), build_norm(), torch.randn(shape)
    fused_projections.merge_weight_storage(modules)
    shapes = [tuple(out.shape) for out in fused_projections.fused_linears(x, modules, norm)]
    assert shapes == [(*shape[:-1], size) for size in (12, 4, 4)]
    gated = fused_projections.fused_gate_up(x, modules[1], modules[2], "silu", norm)
    assert tuple(gated.shape) == (*shape[:-1], 4)
    residual = torch.randn(*shape[:-1], 4)
    assert fused_projections.fused_linear_add(residual, x, modules[1]).shape == residual.shape
