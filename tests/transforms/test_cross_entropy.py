"""Cross entropy with recomputed log-softmax: against float64; what is written and saved."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.compile import compile
from fulgurite.trace.region import Region
from fulgurite.transforms import cross_entropy

ROWS, WIDTH, CLASSES = 24, 16, 1000


def shifted_cross_entropy(hidden: Tensor, head: Tensor, target: Tensor, **more) -> Tensor:
    """The loss of language models: the logits of each token against the next token."""
    logits = F.linear(hidden, head)[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), **more)


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, ROWS // 2, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(CLASSES, WIDTH, generator=generator).to(dtype).requires_grad_()
    target = torch.randint(0, CLASSES, (2, ROWS // 2), generator=generator)
    target[0, 3] = -100
    return hidden, weight, target


def gradients(function, hidden: Tensor, weight: Tensor, target: Tensor) -> list[Tensor]:
    given = [part.detach().clone().requires_grad_() for part in (hidden, weight)]
    loss = function(*given, target)
    (loss[0] if isinstance(loss, tuple) else loss).backward()
    return [part.grad.double() for part in given]


def count_recomputed(compiled) -> int:
    """Number of log-softmaxes that backward recomputes."""
    (functional,) = [
        t for t in compiled.history if t.name.startswith("backward") and t.stage == "functional"
    ]
    target = cross_entropy.recompute_log_softmax.overload
    return sum(node.target is target for node in functional.graph.nodes)


MORE = [{}, {"label_smoothing": 0.1}, {"reduction": "sum"}, {"weight": True}]


@pytest.mark.parametrize("more", MORE, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients(dtype, more) -> None:
    hidden, weight, target = inputs(dtype)

    def loss(hidden, weight, target):
        classes = torch.linspace(0.5, 2, CLASSES, dtype=hidden.dtype)
        given = {**more, "weight": classes} if "weight" in more else more
        return shifted_cross_entropy(hidden, weight, target, **given)

    exact = gradients(loss, hidden.double(), weight.double(), target)
    eager = gradients(loss, hidden, weight, target)
    compiled = compile(loss)
    for ours, theirs, right in zip(
        gradients(compiled, hidden, weight, target), eager, exact, strict=True
    ):
        allowed = 2 * (theirs - right).abs().max() + 1e-6 * right.abs().max()
        assert (ours - right).abs().max() <= allowed
    assert count_recomputed(compiled) == 1


def test_forward_saves_two_numbers_per_row() -> None:
    """The output of the GEMM is saved, not its slice, nor its log-softmax."""
    compiled = compile(shifted_cross_entropy, autotune=False)
    compiled(*inputs(torch.bfloat16)).backward()
    regions = [
        node for node in compiled.last_trace("forward").ops if isinstance(node.target, Region)
    ]
    sizes = [tensor.numel() for node in regions for tensor in node.meta["val"]]
    assert max(sizes) < ROWS * 4
    read = compiled.last_trace("backward").inputs
    large = [t.meta["val"].shape for t in read if t.meta["val"].numel() >= (ROWS - 2) * CLASSES]
    assert large == [(ROWS, CLASSES)]


def test_gradient_is_one_kernel_without_a_reduction() -> None:
    compiled = compile(shifted_cross_entropy, autotune=False)
    compiled(*inputs(torch.float32)).backward()
    calls = [
        n.target.call for n in compiled.last_trace("backward").ops if isinstance(n.target, Region)
    ]
    kernels = [kernel for call in calls for kernel in call.kernels]
    large = [kernel for kernel in kernels if kernel.bytes_moved >= 4 * ROWS * CLASSES]
    assert len(large) == 1 and large[0].bytes_moved < 2.2 * 4 * ROWS * CLASSES


def test_returned_log_softmax_is_not_recomputed() -> None:
    def loss(hidden, weight, target):
        log_probs = F.log_softmax(F.linear(hidden, weight), -1)
        return F.nll_loss(log_probs.flatten(0, 1), target.flatten()), log_probs

    hidden, weight, target = inputs(torch.float32)
    compiled = compile(loss)
    for ours, theirs in zip(
        gradients(compiled, hidden, weight, target),
        gradients(loss, hidden, weight, target),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert count_recomputed(compiled) == 0


def test_noncontiguous_logits() -> None:
    """log_softmax returns contiguous rows for every input layout."""
    x = torch.randn(50, 6, dtype=torch.float64).t().requires_grad_()
    target = torch.randint(0, 50, (6,))
    compile(lambda x, t: F.cross_entropy(x, t))(x, target).backward()
    ours, x.grad = x.grad, None
    F.cross_entropy(x, target).backward()
    torch.testing.assert_close(ours, x.grad)
