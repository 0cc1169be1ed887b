"""FP8 training: which layers are replaced, where the casts are, and that it trains."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fulgurite
from fulgurite.errors import ArgumentError
from fulgurite.kernels.elementwise.gated_activation import GatedActivation
from fulgurite.kernels.gemm.fp8_linear import FP8_RECIPES, fp8_linear
from fulgurite.kernels.grouped_gemm.ops import grouped_gemm
from fulgurite.models import tiny
from fulgurite.transforms.fp8 import fp8_training


class FeedForward(nn.Module):
    """A network of torch's linears, or of `fp8_linear` called by hand."""

    def __init__(self, by_hand: str | None = None, checkpointed: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64, bias=False)
        self.by_hand = by_hand
        self.checkpointed = checkpointed

    def apply_layer(self, layer, x):
        if self.by_hand:
            return fp8_linear(x, layer.weight, layer.bias, self.by_hand)
        return layer(x)

    def body(self, x):
        return self.apply_layer(self.down, nn.functional.silu(self.apply_layer(self.up, x)))

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)


def compiled_with(model, **options):
    """Compile with torch's ops around the FP8 ones, so that results are bitwise equal."""
    return fulgurite.compile(model, executors="torch", **options)


def gradients(model, x):
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def count(compiled, kind, op):
    return str(compiled.last_trace(kind)).count(f"fulgurite.{op}.default")


@pytest.mark.usefixtures("torch_only")
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_transform_matches_fp8_linear_by_hand(recipe):
    plain, by_hand = FeedForward(), FeedForward(recipe)
    by_hand.load_state_dict(plain.state_dict())
    x = torch.randn(3, 11, 64)
    expected = gradients(by_hand, x)
    compiled = compiled_with(plain, transforms=[fp8_training(recipe)])
    for ours, wanted in zip(gradients(compiled, x), expected, strict=True):
        assert torch.equal(ours, wanted)


def test_every_matmul_is_a_scaled_mm_in_the_traces():
    compiled = compiled_with(FeedForward(), transforms=[fp8_training("rowwise")])
    gradients(compiled, torch.randn(3, 11, 64))
    assert count(compiled, "forward", "scaled_mm") == 2
    assert count(compiled, "backward", "scaled_mm") == 4
    stage = next(t for t in compiled.history if t.stage == "fp8_training('rowwise')")
    assert "fp8 rowwise: 2 matmuls" in str(stage)
    assert str(stage).count("fp8_linear(") == 2


@pytest.mark.parametrize(("remat", "moved"), [("none", 0), ("mincut", 1)])
def test_weight_casts_are_recomputed_or_saved(remat, moved):
    """Mincut also moves one cast of a recomputed activation to backward."""
    casts, saved = {}, {}
    for weights in ("recompute", "keep"):
        compiled = compiled_with(
            FeedForward(), transforms=[fp8_training("rowwise", weights=weights)], remat=remat
        )
        gradients(compiled, torch.randn(3, 11, 64))
        casts[weights] = (
            count(compiled, "forward", "quantize"),
            count(compiled, "backward", "quantize"),
        )
        saved[weights] = compiled.graphs[0].saved_bytes.for_policy(remat)
    assert casts == {"recompute": (6 - moved, 6 + moved), "keep": (8 - moved, 4 + moved)}
    # two weights of 64 * 128 bytes, with a float32 scale per row of their transposes
    assert saved["keep"] - saved["recompute"] == 2 * 64 * 128 + 4 * (64 + 128)


def test_activation_checkpointing():
    plain, checkpointed = FeedForward(), FeedForward(checkpointed=True)
    checkpointed.load_state_dict(plain.state_dict())
    x = torch.randn(3, 11, 64)
    expected = gradients(compiled_with(plain, transforms=[fp8_training()]), x)
    compiled = compiled_with(checkpointed, transforms=[fp8_training()])
    for ours, wanted in zip(gradients(compiled, x), expected, strict=True):
        assert torch.equal(ours, wanted)
    assert compiled.graphs[0].saved_bytes.for_policy("mincut") == 0  # everything is recomputed
    assert count(compiled, "forward", "scaled_mm") == 2


def test_weight_that_is_a_view_of_a_flat_shard():
    class Flat(nn.Module):
        def __init__(self, source: nn.Linear) -> None:
            super().__init__()
            self.flat = nn.Parameter(torch.cat([torch.zeros(7), source.weight.detach().flatten()]))

        def forward(self, x):
            return nn.functional.linear(x, self.flat[7:].view(128, 64))

    layer = nn.Linear(64, 128, bias=False)
    flat = Flat(layer)
    x = torch.randn(9, 64)
    expected = gradients(compiled_with(layer, transforms=[fp8_training()]), x)
    ours = gradients(compiled_with(flat, transforms=[fp8_training()]), x)
    assert torch.equal(ours[0], expected[0]) and torch.equal(ours[1], expected[1])
    assert torch.equal(ours[2][7:].view(128, 64), expected[2]) and not ours[2][:7].any()


def test_skipped_layers():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(32, 48)
            self.odd = nn.Linear(48, 20)
            self.head = nn.Linear(48, 16)

        def forward(self, x):
            y = self.body(x)
            return self.odd(y), self.head(y)

    compiled = compiled_with(Model(), transforms=[fp8_training(skip=["*head"])])
    compiled(torch.randn(2, 32))
    note = str(next(t for t in compiled.history if t.stage.startswith("fp8_training")))
    assert "1 matmul, unchanged: self.odd (20×48 is not a multiple of 16)" in note
    assert "self.head (skipped)" in note
    assert count(compiled, "forward", "scaled_mm") == 1


class ManyMatmuls(nn.Module):
    """A weight in every form of a matmul, and matmuls of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(64, 128) / 8)
        self.down = nn.Parameter(torch.randn(128, 64) / 8)
        self.bias = nn.Parameter(torch.randn(64))
        self.experts = nn.Parameter(torch.randn(4, 64, 96, dtype=torch.bfloat16) / 8)
        self.tied = nn.Parameter(torch.randn(32, 96) / 8)

    def forward(self, x, offsets):
        y = torch.addmm(self.bias, nn.functional.silu(x @ self.up), self.down)
        y = nn.functional.grouped_mm(y.bfloat16(), self.experts, offs=offsets).float()
        scores = torch.softmax(y @ y.t() / 1000, -1)  # nearly uniform: rounding changes little
        return torch.matmul(scores, y).mm(self.tied.t())


def relative_error(ours, wanted):
    wanted = wanted.detach().float()
    return float((ours.detach().float() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_every_form_of_a_matmul(recipe):
    torch.manual_seed(0)
    model, x = ManyMatmuls(), torch.randn(48, 64)
    offsets = torch.tensor([10, 10, 30, 48], dtype=torch.int32)
    compiled = fulgurite.compile(model, transforms=[fp8_training(recipe)])
    found = torch.autograd.grad(compiled(x, offsets).square().sum(), list(model.parameters()))
    loss = ManyMatmuls.forward(model, x, offsets).square().sum()
    wanted = torch.autograd.grad(loss, list(model.parameters()))
    assert max(map(relative_error, found, wanted)) < 0.25  # float8 rounds by up to 1/16
    text = str(compiled.explain())
    assert f"fp8 {recipe}: 4 matmuls, unchanged: " in text
    assert text.count("(its right operand is not a weight)") == 2
    forward, backward = (str(compiled.last_trace(kind)) for kind in ("forward", "backward"))
    assert forward.count("fulgurite.scaled_mm.default") == 3
    assert forward.count("fulgurite.scaled_grouped_mm.default") == 1
    assert backward.count("fulgurite.scaled_grouped_mm.default") == 1


class RareForms(nn.Module):
    """Einsums of a weight, and matmuls in forms that are listed only."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(64, 96) / 8)
        self.down = nn.Parameter(torch.randn(64, 96) / 8)

    def forward(self, x):
        y = torch.einsum("bsk,kn->bsn", x, self.up)
        y = torch.einsum("nk, ...k -> ...n", [self.down, y.relu()])
        z = torch.einsum("bsk,btk->bst", y, y) @ y
        z = z + torch.tensordot(y, self.up, 1) @ self.down.t()
        z = z + torch.nn.functional.scaled_dot_product_attention(y, y, y)
        return z + torch.einsum("bsk,kn->bns", y, self.up).mT @ self.up.t()


def test_einsums_of_weights_and_forms_that_are_listed():
    torch.manual_seed(0)
    model, x = RareForms(), torch.randn(2, 16, 64) / 8
    compiled = fulgurite.compile(model, transforms=[fp8_training()])
    found = torch.autograd.grad(compiled(x).square().sum(), list(model.parameters()))
    wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    assert max(map(relative_error, found, wanted)) < 0.25
    text = str(compiled.explain())
    assert "fp8 rowwise: 4 matmuls, unchanged: " in text
    for reason in (
        "the einsum 'bsk,btk->bst' is not x @ weight",
        "the einsum 'bsk,kn->bns' is not x @ weight",
        "tensordot is not replaced; write it as linear or x @ weight",
        "attention scores and values",
        "a batched matmul",
    ):
        assert reason in text, reason
    assert count(compiled, "forward", "scaled_mm") == 4


def test_convolutions_of_single_elements_are_listed():
    """They are matmuls; those with larger windows are not."""
    model = nn.Sequential(
        nn.Conv2d(16, 32, 1), nn.Conv2d(32, 16, 3), nn.Flatten(2), nn.Conv1d(16, 16, 1)
    )
    compiled = fulgurite.compile(model, transforms=[fp8_training()])
    compiled(torch.randn(2, 16, 5, 5)).sum().backward()
    (note,) = [line for line in str(compiled.explain()).splitlines() if "fp8 rowwise" in line]
    assert "0 matmuls" in note and note.count("convolution") == 2
    assert "a 1×1 convolution; write it as linear over the channels" in note


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_every_form_of_a_matmul_on_a_gpu(recipe):
    torch.manual_seed(0)
    model, x = ManyMatmuls().cuda(), torch.randn(48, 64).cuda()
    offsets = torch.tensor([10, 10, 30, 48], dtype=torch.int32).cuda()
    compiled = fulgurite.compile(model, transforms=[fp8_training(recipe)])
    found = torch.autograd.grad(compiled(x, offsets).square().sum(), list(model.parameters()))
    loss = ManyMatmuls.forward(model, x, offsets).square().sum()
    wanted = torch.autograd.grad(loss, list(model.parameters()))
    assert max(map(relative_error, found, wanted)) < 0.25  # float8 rounds by up to 1/16


def test_experts_of_our_operator():
    """`fulgurite::grouped_gemm` with gathered rows, a gate, row weights and a bias."""
    torch.manual_seed(0)
    weight = torch.randn(3, 64, 32, requires_grad=True)
    bias = torch.randn(3, 64, requires_grad=True)
    x = torch.randn(5, 32, requires_grad=True)
    row_weights = torch.rand(10, requires_grad=True)
    order = torch.randperm(10)
    row_indices = (order // 2).int()
    positions = torch.argsort(order).view(5, 2).int()
    offsets = torch.tensor([4, 4, 9], dtype=torch.int32)  # the last row has no expert

    def experts(x, weight, bias, row_weights):
        return grouped_gemm(
            x, offsets, weight, bias, GatedActivation("silu"), row_indices_S=row_indices,
            positions=positions, row_weights_S=row_weights,
        )  # fmt: skip

    leaves = (x, weight, bias, row_weights)
    expected = experts(*leaves)
    wanted = torch.autograd.grad(expected.square().sum(), leaves)
    compiled = fulgurite.compile(experts, transforms=[fp8_training()])
    actual = compiled(*leaves)
    assert "fulgurite.scaled_grouped_mm.default" in str(compiled.last_trace("forward"))
    assert not actual[9].any() and relative_error(actual, expected) < 0.1
    for ours, theirs in zip(
        torch.autograd.grad(actual.square().sum(), leaves), wanted, strict=True
    ):
        assert relative_error(ours, theirs) < 0.15


def test_inference_has_no_casts_for_backward():
    compiled = compiled_with(FeedForward(), transforms=[fp8_training()])
    with torch.no_grad():
        compiled(torch.randn(3, 64))
    assert count(compiled, "inference", "quantize") == 4


@pytest.mark.usefixtures("torch_only")
def test_dynamic_batches_and_round_trips():
    compiled = compiled_with(FeedForward(), transforms=[fp8_training("blockwise")], dynamic=True)
    by_hand = FeedForward("blockwise")
    by_hand.load_state_dict(compiled.state_dict())
    for rows in (3, 8, 130):
        x = torch.randn(rows, 64)
        for ours, wanted in zip(gradients(compiled, x), gradients(by_hand, x), strict=True):
            assert torch.equal(ours, wanted)
    assert len(compiled.graphs) <= 2


def test_invalid_arguments_raise_at_once():
    with pytest.raises(ArgumentError, match="tensorwise, rowwise, blockwise"):
        fp8_training("row")
    with pytest.raises(ArgumentError, match="list of patterns"):
        fp8_training(skip="head")


def losses(steps: int, transform: list, layers: int = 2, seed: int = 0) -> list[float]:
    """The losses of a small bfloat16 transformer on arithmetic sequences with noise."""
    torch.manual_seed(seed)
    model = tiny.Transformer(
        num_layers=layers, hidden_size=64, num_heads=4, intermediate_size=128, vocab_size=64
    )
    compiled = compiled_with(model, transforms=transform)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(seed + 1)
    found = []
    for _ in range(steps):
        start = torch.randint(0, 64, (8, 1), generator=generator)
        step = torch.randint(1, 5, (8, 1), generator=generator)
        tokens = (start + step * torch.arange(24)) % 64
        noise = torch.rand(tokens.shape, generator=generator) < 0.1
        tokens = torch.where(noise, torch.randint(0, 64, tokens.shape, generator=generator), tokens)
        with torch.autocast("cpu", torch.bfloat16):
            loss = compiled(tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    assert all(map(math.isfinite, found))
    return found


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_losses_match_bfloat16():
    plain = losses(8, [], layers=1)
    ours = losses(8, [fp8_training("rowwise")], layers=1)
    assert ours[-1] < ours[0]
    assert ours == pytest.approx(plain, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_loss_over_300_steps_within_a_percent_of_bfloat16(recipe):
    plain = losses(300, [])
    ours = losses(300, [fp8_training(recipe)])
    assert mean(ours[-50:]) == pytest.approx(mean(plain[-50:]), rel=0.01)
    assert mean(ours) == pytest.approx(mean(plain), rel=0.01)
