"""float32 products of 16-bit operands: forward and gradients against float64, on CPUs and GPUs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fulgurite
from fulgurite.determinism import deterministic
from fulgurite.kernels.gemm import float32_linear as module
from fulgurite.kernels.gemm.float32_linear import float32_linear

SIZES = [(1, 1, 1), (7, 8, 32), (64, 3, 40), (0, 4, 8), (129, 16, 257)]


def make(size: tuple[int, int, int], dtype: torch.dtype, device: str) -> list[Tensor]:
    """x, weight, bias and the gradient of the output."""
    tokens, outputs, inputs = size
    generator = torch.Generator().manual_seed(sum(size))
    shapes = [(tokens, inputs), (outputs, inputs), (outputs,), (tokens, outputs)]
    made = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
    leaves = [x.to(dtype).requires_grad_() for x in made[:3]]
    return [*leaves, made[3]]


def check(size: tuple[int, int, int], dtype: torch.dtype, device: str, linear=float32_linear):
    *leaves, grad = make(size, dtype, device)
    out = linear(*leaves)
    assert out.dtype == torch.float32
    found = torch.autograd.grad(out, leaves, grad)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wanted_out = F.linear(*exact)
    wanted = torch.autograd.grad(wanted_out, exact, grad.double())
    torch.testing.assert_close(out.double(), wanted_out, rtol=1e-5, atol=2e-5 * size[2] ** 0.5)
    for one, other, leaf in zip(found, wanted, leaves, strict=True):
        assert one.dtype == leaf.dtype
        rounding = 2**-8 if dtype == torch.bfloat16 else 1e-5
        atol = 1e-4 * (1 + size[0] ** 0.5)  # g has 16 bits in two terms
        torch.testing.assert_close(one.double(), other, rtol=rounding, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_float32(dtype: torch.dtype) -> None:
    for size in SIZES:
        check(size, dtype, "cpu")


@pytest.mark.parametrize("size", SIZES)
def test_the_split_of_gradients(
    size: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU runs, with products of float32 copies."""
    monkeypatch.setattr(module, "can_use_tensor_cores", lambda *operands: True)
    monkeypatch.setattr(module, "multiply", lambda a, b: a.float() @ b.float())
    check(size, torch.bfloat16, "cpu")


def test_deterministic_mode_uses_the_row_invariant_kernel() -> None:
    x, weight, _, _ = make((33, 8, 64), torch.bfloat16, "cpu")
    with deterministic(), torch.no_grad():
        whole = float32_linear(x, weight)
        parts = torch.cat([float32_linear(row[None], weight) for row in x])
    assert torch.equal(whole, parts)


@pytest.mark.gpu
@pytest.mark.parametrize("is_compiled", [False, True])
def test_on_a_gpu(is_compiled: bool) -> None:
    for size in [*SIZES, (4096, 64, 2048)]:
        linear = float32_linear
        if is_compiled:
            torch._dynamo.reset()
            linear = fulgurite.compile(float32_linear)
        check(size, torch.bfloat16, "cuda", linear)
