"""Padded GEMMs: the same results and strides as eager, and which GEMMs are left alone."""

from __future__ import annotations

import pytest
import torch

import fulgurite
from fulgurite.kernels.gemm import padded_mm as padded_mm_module
from fulgurite.transforms import align_gemm


@pytest.fixture
def any_device(monkeypatch):
    """Pad small float32 GEMMs on the CPU, too."""
    monkeypatch.setattr(align_gemm, "is_slow_if_misaligned", lambda a, b: True)
    monkeypatch.setattr(align_gemm, "MIN_FLOPS_PER_BYTE", 0)


def count_pads(compiled, kind: str) -> int:
    return sum(
        node.target is torch.ops.aten.constant_pad_nd.default
        for trace in compiled.history
        if trace.stage == "align_gemms" and trace.kind == kind
        for node in trace.graph.nodes
    )


def check(function, *given: torch.Tensor):
    compiled = fulgurite.compile(function)
    given = [x.detach().requires_grad_() for x in given]
    theirs, ours = function(*given), compiled(*given)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert ours.stride() == theirs.stride()
    grad = torch.randn_like(theirs)
    wanted = torch.autograd.grad(theirs, given, grad)
    found = torch.autograd.grad(ours, given, grad)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert [x.stride() for x in found] == [x.stride() for x in wanted]
    return compiled


@pytest.mark.parametrize("shape", [(16, 8, 13), (5, 9, 8), (3, 7, 11), (8, 24, 1), (1, 3, 9)])
def test_products_of_odd_sizes(any_device, shape):
    torch.manual_seed(0)
    m, k, n = shape
    compiled = check(lambda x, w: x @ w, torch.randn(m, k), torch.randn(k, n))
    assert count_pads(compiled, "forward")
    check(lambda x, w: torch.tanh(x @ w.t()) * 2, torch.randn(m, k), torch.randn(n, k))
    check(lambda x, w: (x.t() @ w).softmax(-1), torch.randn(k, m), torch.randn(k, n))


@pytest.mark.parametrize("bias_shape", [(13,), (1,), (5, 13), (5, 1), (1, 13)])
def test_bias_is_padded_where_it_does_not_broadcast(any_device, bias_shape):
    torch.manual_seed(0)
    x, w, b = torch.randn(5, 9), torch.randn(13, 9), torch.randn(bias_shape)
    check(lambda b, x, w: torch.addmm(b, x, w.t(), beta=0.5, alpha=2.0), b, x, w)


def test_a_vocabulary_of_odd_size_and_its_loss(any_device):
    torch.manual_seed(0)
    labels = torch.randint(0, 13, (2, 6))

    def loss(x, w):
        logits = (x @ w.t()).view(2, 6, 13)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    compiled = check(loss, torch.randn(12, 8), torch.randn(13, 8))
    assert count_pads(compiled, "forward") == 1
    assert count_pads(compiled, "backward") >= 2


def test_aligned_sizes_and_dynamic_sizes_are_left_alone(any_device):
    torch.manual_seed(0)
    compiled = check(lambda x, w: x @ w, torch.randn(3, 16), torch.randn(16, 8))
    assert not count_pads(compiled, "forward")
    dynamic = fulgurite.compile(lambda x, w: (x @ w).relu(), dynamic=True)
    for rows in (3, 5, 9):
        x, w = torch.randn(rows, 7), torch.randn(7, 10)
        torch.testing.assert_close(dynamic(x, w), (x @ w).relu())


def test_gemms_on_a_cpu_are_left_alone():
    compiled = fulgurite.compile(lambda x, w: x @ w)
    compiled(torch.randn(512, 64), torch.randn(64, 999))
    assert not any(trace.stage == "align_gemms" for trace in compiled.history)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [4097, 1030])
def test_vocabulary_of_odd_size_on_a_gpu(n):
    torch.manual_seed(0)
    x, w = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((512, 768), (n, 768)))
    labels = torch.randint(0, n, (512,), device="cuda")

    def loss(x, w):
        return torch.nn.functional.cross_entropy(
            (x @ w.t()).to(torch.promote_types(x.dtype, torch.float32)), labels
        )

    given = [t.requires_grad_() for t in (x, w)]
    compiled = fulgurite.compile(loss)
    ours = torch.autograd.grad(compiled(*given), given)
    eager = torch.autograd.grad(loss(*given), given)
    wide = [t.detach().double().requires_grad_() for t in given]
    exact = torch.autograd.grad(loss(*wide), wide)
    assert count_pads(compiled, "forward") and count_pads(compiled, "backward")
    for one, other, right in zip(ours, eager, exact, strict=True):
        assert (one - right).norm() < 2 * (other - right).norm()


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_returned_result_is_made_without_a_padded_copy_of_it(any_device, has_bias, monkeypatch):
    monkeypatch.setattr(padded_mm_module, "MIN_BLOCK_ROWS", 4)
    monkeypatch.setattr(padded_mm_module, "ROW_MULTIPLE", 2)
    torch.manual_seed(0)
    x, w, b = torch.randn(3, 7, 8), torch.randn(13, 8), torch.randn(13) if has_bias else None
    compiled = fulgurite.compile(torch.nn.functional.linear)
    for _ in range(3):
        result, expected = compiled(x, w, b), torch.nn.functional.linear(x, w, b)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
        assert result.stride() == expected.stride()
    assert "fulgurite.padded_mm" in str(compiled.last_trace())


def test_a_result_that_is_read_stays_padded_for_its_reader(any_device):
    x, w = torch.randn(6, 8), torch.randn(13, 8)
    compiled = fulgurite.compile(lambda x, w: (x @ w.t()).relu())
    torch.testing.assert_close(compiled(x, w), (x @ w.t()).relu())
    assert "padded_mm" not in str(compiled.last_trace())
