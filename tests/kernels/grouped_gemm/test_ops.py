"""Gradients that read saved sums, and arguments that `grouped_gemm` refuses."""

from __future__ import annotations

import pytest
import torch

import fulgurite
from fulgurite.determinism import deterministic
from fulgurite.errors import ArgumentError
from fulgurite.kernels.elementwise.gated_activation import GatedActivation
from fulgurite.kernels.grouped_gemm import ops
from fulgurite.kernels.grouped_gemm.ops import grouped_gemm
from fulgurite.quant import quantize


@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("offsets", [torch.tensor([4]), torch.tensor([4, 4, 4])])
def test_offsets_of_another_dtype_or_length(offsets, is_quantized):
    weight = torch.randn(3, 8, 64)
    weight = quantize(weight, "q8_0") if is_quantized else weight
    with pytest.raises(ArgumentError, match=r"offsets must be int32\[3\].*int64"):
        grouped_gemm(torch.randn(4, 64), offsets, weight)


def test_rows_of_another_k():
    offsets = torch.tensor([4, 4, 4], dtype=torch.int32)
    with pytest.raises(ArgumentError, match="can't be multiplied by experts"):
        grouped_gemm(torch.randn(4, 32), offsets, torch.randn(3, 8, 64))


@pytest.mark.covering
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["silu", "gelu", "clamped"])
def test_saved_sums_have_the_gradients_of_recomputed_ones(kind, compiled, monkeypatch):
    """What training on a GPU does; on CPUs sums are recomputed."""
    torch.manual_seed(0)
    x, weight = torch.randn(5, 16), torch.randn(3, 24, 16)
    bias, indices = torch.randn(3, 24), torch.tensor([0, 3, 4, 1, 1, 2, 0], dtype=torch.int32)
    positions = torch.tensor([[0, 6], [3, 4], [5, 5], [1, 1], [2, 2]], dtype=torch.int32)
    offsets = torch.tensor([2, 2, 6], dtype=torch.int32)

    def run(x, weight, bias):
        return grouped_gemm(
            x, offsets, weight, bias, GatedActivation(kind), row_indices_S=indices,
            positions=positions,
        )  # fmt: skip

    def gradients():
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
        function = fulgurite.compile(run) if compiled else run
        out = function(*leaves)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    recomputed = gradients()
    monkeypatch.setattr(ops, "_saves_sums", lambda x, weight: True)
    torch.testing.assert_close(gradients(), recomputed, rtol=1e-4, atol=1e-3)


def test_sums_are_saved_in_training_on_a_gpu_alone():
    x = torch.empty(2, 4, device="meta")
    weight = torch.empty(2, 4, 4, device="meta", requires_grad=True)
    assert not ops._saves_sums(x, weight)

    class OnGpu:
        requires_grad, is_cuda = False, True

    assert ops._saves_sums(OnGpu(), weight)
    with torch.no_grad():
        assert not ops._saves_sums(OnGpu(), weight)
    with deterministic(True):
        assert not ops._saves_sums(OnGpu(), weight)
    assert not ops._saves_sums(OnGpu(), quantize(torch.randn(3, 8, 64), "q8_0"))
