"""Constant attention masks: which are folded, and that attention gives the same results."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fulgurite
from fulgurite.transforms.attention_masks import _classify_mask, _get_argument

T = 24


def causal(length: int = T) -> Tensor:
    place = torch.arange(length)
    return place[None, :] <= place[:, None]


def with_padding_support(length: int = T) -> Tensor:
    """The mask of models that support padding (position -1) and sliding windows."""
    position = torch.arange(length).expand(2, length)
    query, key = position[:, :, None], position[:, None, :]
    visible = (key >= 0) & (key <= query) & (query - key < 1000)
    return (visible | torch.eye(length, dtype=torch.bool))[:, None]


def additive(length: int = T) -> Tensor:
    """An additive mask: the lowest float hides a key."""
    lowest = torch.finfo(torch.float32).min
    return torch.full((length, length), lowest).triu(1)[None, None].expand(2, 1, -1, -1)


def in_place(length: int = T) -> Tensor:
    mask = torch.ones(length, length, dtype=torch.bool)
    mask.tril_()
    return mask


def with_mask(make):
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=make())

    return attend


def inputs(length: int = T, grad: bool = True) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 3, length, 8, requires_grad=grad) for _ in range(3)]


def masks(compiled, kind: str) -> list[str]:
    """The kind of mask of each attention op of a simplified trace."""
    (final,) = [t for t in compiled.history if t.stage == "eliminate_dead_code" and t.kind == kind]
    found = []
    for node in final.graph.nodes:
        if "_scaled_dot_product" in str(node.target):
            has_mask = node.kwargs.get("attn_mask") is not None
            is_causal = _get_argument(node, "is_causal")
            found.append("mask" if has_mask else "causal" if is_causal else "all")
    return found


def check(function, given: list[Tensor]) -> list[str]:
    """Compare values and gradients with eager. Returns the masks of forward and backward."""
    compiled = fulgurite.compile(function)
    ours, theirs = compiled(*given), function(*given)
    torch.testing.assert_close(ours, theirs)
    grad = torch.randn_like(theirs)
    wanted = torch.autograd.grad(theirs, given, grad)
    torch.testing.assert_close(torch.autograd.grad(ours, given, grad), wanted)
    return masks(compiled, "forward") + masks(compiled, "backward")


@pytest.mark.parametrize("make", [causal, with_padding_support, additive, in_place])
def test_causal_masks_are_folded(make):
    assert check(with_mask(make), inputs()) == ["causal", "causal"]


@pytest.mark.parametrize("make", [causal, with_padding_support, additive])
def test_causal_masks_are_folded_in_inference(make):
    given = inputs(grad=False)
    compiled = fulgurite.compile(with_mask(make))
    torch.testing.assert_close(compiled(*given), with_mask(make)(*given))
    (final,) = [t for t in compiled.history if t.stage == "eliminate_dead_code"]
    assert masks(compiled, "inference") == ["causal"]
    calls = [node for node in final.graph.nodes if node.op == "call_function"]
    assert len(calls) == 2  # attention, and the first of its results


def test_all_visible_mask_is_dropped():
    all_visible = with_mask(lambda: torch.ones(T, T, dtype=torch.bool))
    assert check(all_visible, inputs()) == ["all", "all"]


OTHER_MASKS = {
    "window": lambda: causal() & (torch.arange(T)[:, None] - torch.arange(T)[None, :] < 5),
    "later keys visible": lambda: causal().T,
    "one more key visible": lambda: torch.ones(T, T, dtype=torch.bool).tril(1),
    "hidden scores shifted": lambda: torch.zeros(T, T).masked_fill(~causal(), -10.0),
    "visible scores shifted": lambda: torch.full((T, T), 0.5).masked_fill(~causal(), -torch.inf),
    "causal in one of two batches": lambda: torch.stack(
        [causal(), torch.ones(T, T, dtype=torch.bool)]
    )[:, None],
    "one row for all queries": lambda: (torch.arange(T) < 5)[None],
}


@pytest.mark.parametrize("name", OTHER_MASKS)
def test_other_masks_are_not_folded(name):
    assert check(with_mask(OTHER_MASKS[name]), inputs()) == ["mask", "mask"]


def test_input_dependent_mask_is_not_folded():
    def attend(q, k, v, length):
        visible = causal() & (torch.arange(T) < length)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)

    given = inputs(grad=False)
    compiled = fulgurite.compile(attend)
    for length in (T, 7):
        torch.testing.assert_close(
            compiled(*given, torch.tensor(length)), attend(*given, torch.tensor(length))
        )
    assert masks(compiled, "inference") == ["mask"]


def test_random_mask_is_not_folded():
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=causal() | (torch.rand(T, T) < 2))

    given = inputs(grad=False)
    compiled = fulgurite.compile(attend)
    torch.testing.assert_close(compiled(*given), attend(*given))
    assert masks(compiled, "inference") == ["mask"]


def test_dynamic_lengths():
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=causal(q.shape[-2]))

    compiled = fulgurite.compile(attend)
    for length in (1, 2, 9, 24, 31):
        given = inputs(length, grad=False)
        torch.testing.assert_close(compiled(*given), attend(*given))


def test_rectangular_mask_is_not_folded():
    q, k, v = inputs(grad=False)
    q = q[:, :, :5]

    def attend(q, k, v):
        position = torch.arange(5)[:, None]
        mask = torch.arange(T)[None] <= position
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    compiled = fulgurite.compile(attend)
    torch.testing.assert_close(compiled(q, k, v), attend(q, k, v))
    assert masks(compiled, "inference") == ["mask"]


def test_classify_mask():
    bools = causal()
    numbers = torch.zeros(T, T).masked_fill(~bools, -torch.inf)
    assert (
        _classify_mask(bools)
        == _classify_mask(numbers)
        == _classify_mask(numbers.bfloat16())
        == "causal"
    )
    for lowest in (-65504.0, -1e9, torch.finfo(torch.bfloat16).min):  # cuDNN's, and those of models
        assert _classify_mask(torch.zeros(T, T).masked_fill(~bools, lowest).bfloat16()) == "causal"
    assert _classify_mask(torch.zeros(T, T).masked_fill(~bools, -10000.0)) is None
    assert _classify_mask(bools[None, None].expand(2, 5, T, T)) == "causal"
    assert _classify_mask(torch.ones(1, 1, 1, T, dtype=torch.bool)) == "all_visible"
    assert _classify_mask(torch.zeros(0, 1, T, T)) == "all_visible"
    assert _classify_mask(numbers.masked_fill(~bools, torch.nan)) is None
    assert _classify_mask(numbers + torch.full((T, T), torch.nan).tril(-20)) is None
    assert _classify_mask(torch.ones(T, dtype=torch.bool)) is None
    assert _classify_mask(3) is None


@pytest.mark.gpu
@pytest.mark.parametrize("width, value_width", [(64, 64), (192, 128)])
def test_causal_masks_on_a_gpu(width: int, value_width: int):
    """Values and gradients against float64, for whichever attention kernel torch selects."""
    torch.manual_seed(0)
    sizes = [(2, 4, 128, n) for n in (width, width, value_width)]
    given = [torch.randn(n, device="cuda", dtype=torch.bfloat16) for n in sizes]
    given = [x.requires_grad_() for x in given]

    def attend(q, k, v):
        position = torch.arange(q.shape[-2], device=q.device)
        mask = position[None] <= position[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    compiled = fulgurite.compile(attend)
    wide = [x.detach().double().requires_grad_() for x in given]
    ours, exact = compiled(*given), attend(*wide)
    torch.testing.assert_close(ours.double(), exact, rtol=2e-2, atol=2e-2)
    grad = torch.randn_like(exact)
    for a, b in zip(
        torch.autograd.grad(ours, given, grad.to(ours.dtype)),
        torch.autograd.grad(exact, wide, grad),
        strict=True,
    ):
        torch.testing.assert_close(a.double(), b, rtol=5e-2, atol=5e-2)
    (trace,) = [
        t for t in compiled.history if t.stage == "eliminate_dead_code" and t.kind == "forward"
    ]
    assert "arange" not in str([node.target for node in trace.graph.nodes])
