"""Cross entropy of rows: the reference against autograd, the kernel against the reference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.kernels.cross_entropy import reference, triton_cross_entropy
from fulgurite.kernels.cross_entropy.args import IGNORED, CrossEntropyArgs
from tests.kernels.triton_support import DEVICE, INTERPRETED

ARGS = [
    CrossEntropyArgs(),
    CrossEntropyArgs(scale=0.3, z_weight=1e-2),
    CrossEntropyArgs(cap=5.0),
    CrossEntropyArgs(scale=2.0, cap=3.0, z_weight=0.1),
    CrossEntropyArgs(has_gradient=False),
]
SIZES = (1, 2, 127, 1000) if INTERPRETED else (1, 2, 127, 1000, 8192, 8193, 50_304, 128_257)


def make_inputs(count: int, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(count, size, generator=generator)
    labels = torch.randint(0, size, (count,), generator=generator)
    labels[1::3] = IGNORED
    return logits, labels


@pytest.mark.parametrize("args", ARGS[:4])
def test_reference_against_autograd(args: CrossEntropyArgs) -> None:
    logits, labels = make_inputs(7, 50)
    logits = logits.double().requires_grad_()
    x = logits * args.scale
    x = x if args.cap is None else torch.tanh(x / args.cap) * args.cap
    expected = F.cross_entropy(x, labels, ignore_index=IGNORED, reduction="none")
    z = x.logsumexp(-1).square() * (labels != IGNORED)
    (expected + args.z_weight * z).sum().backward()
    loss, actual_z, grad = reference.cross_entropy_rows(logits.detach(), labels, args)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(actual_z, z)
    torch.testing.assert_close(grad, logits.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("args", ARGS)
def test_kernel(args: CrossEntropyArgs, size: int, dtype: torch.dtype) -> None:
    logits, labels = make_inputs(5, size, seed=size)
    logits = logits.to(dtype)
    expected = reference.cross_entropy_rows(logits, labels, args)
    actual = triton_cross_entropy.cross_entropy_rows(logits.to(DEVICE), labels.to(DEVICE), args)
    for result, other in zip(actual[:2], expected[:2], strict=True):
        torch.testing.assert_close(result.cpu(), other, rtol=1e-5, atol=1e-5)
    if not args.has_gradient:
        assert actual[2] is None and expected[2] is None
        return
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(actual[2].cpu(), expected[2], rtol=tolerance, atol=tolerance * 1e-1)


def test_rows_of_a_larger_tensor_and_none() -> None:
    logits, labels = make_inputs(6, 300)
    wide = torch.zeros(6, 400)
    wide[:, :300] = logits
    view = wide.to(DEVICE)[:, :300]
    expected = reference.cross_entropy_rows(logits, labels, ARGS[0])
    actual = triton_cross_entropy.cross_entropy_rows(view, labels.to(DEVICE), ARGS[0])
    torch.testing.assert_close(actual[2].cpu(), expected[2], rtol=1e-5, atol=1e-6)
    empty = triton_cross_entropy.cross_entropy_rows(view[:0], labels[:0].to(DEVICE), ARGS[0])
    assert [len(x) for x in empty] == [0, 0, 0]


def test_impossible_logits() -> None:
    """-inf has no probability and no gradient; NaN and inf make the row's loss not finite."""
    logits, labels = make_inputs(5, 200)
    labels[:] = 3
    logits[0, 10:150] = float("-inf")
    logits[1, 7], logits[2, 7], logits[3, :] = float("nan"), float("inf"), float("-inf")
    loss, _, grad = (
        x.cpu()
        for x in triton_cross_entropy.cross_entropy_rows(
            logits.clone().to(DEVICE), labels.to(DEVICE), ARGS[0]
        )
    )
    expected = reference.cross_entropy_rows(logits, labels, ARGS[0])
    torch.testing.assert_close(loss[[0, 4]], expected[0][[0, 4]], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad[[0, 4]], expected[2][[0, 4]], rtol=1e-5, atol=1e-6)
    assert not loss[1:4].isfinite().any()


def test_what_the_kernel_leaves_to_the_reference() -> None:
    logits, labels = make_inputs(2, 8)
    run = triton_cross_entropy.cross_entropy_rows
    assert run(logits.double(), labels, ARGS[0]) is NotImplemented
    assert run(logits.t().contiguous().t(), labels, ARGS[0]) is NotImplemented
