"""Masks that are known before anything runs: recognised, and attention the same without them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fulgurite
from fulgurite.transforms.attention import _given, _hides

T = 24


def earlier(length: int = T) -> Tensor:
    place = torch.arange(length)
    return place[None, :] <= place[:, None]


def written_for_padding(length: int = T) -> Tensor:
    """As models make it that know padding (position -1) and windows."""
    place = torch.arange(length).expand(2, length)
    query, key = place[:, :, None], place[:, None, :]
    seen = (key >= 0) & (key <= query) & (query - key < 1000)
    return (seen | torch.eye(length, dtype=torch.bool))[:, None]


def added(length: int = T) -> Tensor:
    """Numbers that are added: the least one where a key is hidden."""
    least = torch.finfo(torch.float32).min
    return torch.full((length, length), least).triu(1)[None, None].expand(2, 1, -1, -1)


def written_into(length: int = T) -> Tensor:
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
    """What the attentions of a simplified trace are told."""
    (final,) = [t for t in compiled.history if t.stage == "dead_code" and t.kind == kind]
    found = []
    for node in final.graph.nodes:
        if "_scaled_dot_product" in str(node.target):
            has_mask = node.kwargs.get("attn_mask") is not None
            causal = _given(node, "is_causal")
            found.append("mask" if has_mask else "causal" if causal else "all")
    return found


def check(function, given: list[Tensor]) -> list[str]:
    """Values and gradients against eager; what forward's and backward's attention is told."""
    compiled = fulgurite.compile(function)
    ours, theirs = compiled(*given), function(*given)
    torch.testing.assert_close(ours, theirs)
    grad = torch.randn_like(theirs)
    wanted = torch.autograd.grad(theirs, given, grad)
    torch.testing.assert_close(torch.autograd.grad(ours, given, grad), wanted)
    return masks(compiled, "forward") + masks(compiled, "backward")


@pytest.mark.parametrize("make", [earlier, written_for_padding, added, written_into])
def test_causal_masks(make):
    assert check(with_mask(make), inputs()) == ["causal", "causal"]


@pytest.mark.parametrize("make", [earlier, written_for_padding, added])
def test_inference(make):
    given = inputs(grad=False)
    compiled = fulgurite.compile(with_mask(make))
    torch.testing.assert_close(compiled(*given), with_mask(make)(*given))
    (final,) = [t for t in compiled.history if t.stage == "dead_code"]
    assert masks(compiled, "inference") == ["causal"]
    calls = [node for node in final.graph.nodes if node.op == "call_function"]
    assert len(calls) == 2  # attention, and the first of its results


def test_a_mask_that_hides_nothing():
    nothing = with_mask(lambda: torch.ones(T, T, dtype=torch.bool))
    assert check(nothing, inputs()) == ["all", "all"]


OTHERS = {
    "window": lambda: earlier() & (torch.arange(T)[:, None] - torch.arange(T)[None, :] < 5),
    "later ones seen": lambda: earlier().T,
    "one more is seen": lambda: torch.ones(T, T, dtype=torch.bool).tril(1),
    "scores are shifted": lambda: torch.zeros(T, T).masked_fill(~earlier(), -10.0),
    "seen ones are shifted": lambda: torch.full((T, T), 0.5).masked_fill(~earlier(), -torch.inf),
    "one of two": lambda: torch.stack([earlier(), torch.ones(T, T, dtype=torch.bool)])[:, None],
    "one row for all": lambda: (torch.arange(T) < 5)[None],
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_stay(name):
    assert check(with_mask(OTHERS[name]), inputs()) == ["mask", "mask"]


def test_a_mask_that_depends_on_an_input_stays():
    def attend(q, k, v, length):
        seen = earlier() & (torch.arange(T) < length)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    given = inputs(grad=False)
    compiled = fulgurite.compile(attend)
    for length in (T, 7):
        torch.testing.assert_close(
            compiled(*given, torch.tensor(length)), attend(*given, torch.tensor(length))
        )
    assert masks(compiled, "inference") == ["mask"]


def test_a_mask_of_draws_stays():
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=earlier() | (torch.rand(T, T) < 2))

    given = inputs(grad=False)
    compiled = fulgurite.compile(attend)
    torch.testing.assert_close(compiled(*given), attend(*given))
    assert masks(compiled, "inference") == ["mask"]


def test_lengths_that_change():
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=earlier(q.shape[-2]))

    compiled = fulgurite.compile(attend)
    for length in (1, 2, 9, 24, 31):
        given = inputs(length, grad=False)
        torch.testing.assert_close(compiled(*given), attend(*given))


def test_other_lengths_of_keys_stay():
    q, k, v = inputs(grad=False)
    q = q[:, :, :5]

    def attend(q, k, v):
        place = torch.arange(5)[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.arange(T)[None] <= place)

    compiled = fulgurite.compile(attend)
    torch.testing.assert_close(compiled(q, k, v), attend(q, k, v))
    assert masks(compiled, "inference") == ["mask"]


def test_what_a_mask_hides():
    bools = earlier()
    numbers = torch.zeros(T, T).masked_fill(~bools, -torch.inf)
    assert _hides(bools) == _hides(numbers) == _hides(numbers.bfloat16()) == "later"
    for least in (-65504.0, -1e9, torch.finfo(torch.bfloat16).min):  # of cuDNN, and of models
        assert _hides(torch.zeros(T, T).masked_fill(~bools, least).bfloat16()) == "later"
    assert _hides(torch.zeros(T, T).masked_fill(~bools, -10000.0)) is None
    assert _hides(bools[None, None].expand(2, 5, T, T)) == "later"
    assert _hides(torch.ones(1, 1, 1, T, dtype=torch.bool)) == "nothing"
    assert _hides(torch.zeros(0, 1, T, T)) == "nothing"
    assert _hides(numbers.masked_fill(~bools, torch.nan)) is None
    assert _hides(numbers + torch.full((T, T), torch.nan).tril(-20)) is None
    assert _hides(torch.ones(T, dtype=torch.bool)) is None
    assert _hides(3) is None


@pytest.mark.gpu
@pytest.mark.parametrize("width, value_width", [(64, 64), (192, 128)])
def test_causal_masks_on_a_gpu(width: int, value_width: int):
    """Whichever of torch's attentions is chosen there: values and gradients are those of float64."""
    torch.manual_seed(0)
    sizes = [(2, 4, 128, n) for n in (width, width, value_width)]
    given = [torch.randn(n, device="cuda", dtype=torch.bfloat16) for n in sizes]
    given = [x.requires_grad_() for x in given]

    def attend(q, k, v):
        place = torch.arange(q.shape[-2], device=q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=place[None] <= place[:, None])

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
    (trace,) = [t for t in compiled.history if t.stage == "dead_code" and t.kind == "forward"]
    assert "arange" not in str([node.target for node in trace.graph.nodes])
