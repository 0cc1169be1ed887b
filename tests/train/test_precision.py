"""Number formats of training: rounding to NVFP4, which matmuls change, and that runs stay close."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fulgurite
from fulgurite.errors import ArgumentError
from fulgurite.models import ARCHITECTURES, build_random_model
from fulgurite.models.config import ConfigFields
from fulgurite.quant import quantize
from fulgurite.train.config import PrecisionSection
from fulgurite.train.loss import LossModule
from fulgurite.train.nvfp4 import (
    nvfp4_grouped_mm,
    nvfp4_linear,
    rotate_rows,
    round_nvfp4,
)
from fulgurite.train.optim import AdamW
from fulgurite.train.precision import FORMATS, list_unchanged, precision_transforms

DOTS = {
    "architectures": ["Dots1ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}


def make_loss_module():
    family = ARCHITECTURES["Dots1ForCausalLM"]
    config = family.read_config(ConfigFields(DOTS, "config.json"))
    model = build_random_model(config, family, dtype=torch.float32, std=0.05)
    for name, parameter in model.named_parameters():
        if name.endswith("correction_bias"):
            parameter.data.zero_()
    return LossModule(model.train())


def make_batch(step):
    """Text that can be learned: each token follows from the last, with some noise."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 64, (4, 33), generator=generator)
    for t in range(1, 33):
        noise = torch.rand(4, generator=generator) < 0.15
        tokens[:, t] = torch.where(noise, tokens[:, t], (tokens[:, t - 1] * 5 + 7) % 64)
    positions = torch.arange(32).repeat(4, 1)
    return tokens[:, :-1], tokens[:, 1:], positions


def train(matmul, steps=60):
    module = make_loss_module()
    transforms = precision_transforms(PrecisionSection(matmul))
    compiled = fulgurite.compile(module, transforms=transforms, executors="torch")
    parameters = [p for n, p in module.named_parameters() if not n.endswith("correction_bias")]
    optimizer = AdamW(parameters, lr=3e-3, weight_decay=0.0)
    losses = []
    for step in range(steps):
        sums = compiled(*make_batch(step))
        (sums.total / sums.tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((sums.loss / sums.tokens).item())
    return losses, compiled


@pytest.fixture(scope="module")
def baseline():
    losses, _ = train("none")
    assert losses[-1] < 0.6 * losses[0], "the run learns something"
    return losses


# The mean loss of the last 10 of 60 steps, relative to that of float32.
BANDS = {
    "fp8_tensorwise": 0.02,
    "fp8_rowwise": 0.02,
    "fp8_blockwise": 0.02,
    "mxfp8": 0.02,
    "nvfp4": 0.03,
}


SAMPLE = ("fp8_blockwise", "nvfp4")  # the others with -m slow


@pytest.mark.parametrize(
    "matmul", [pytest.param(n, marks=() if n in SAMPLE else pytest.mark.slow) for n in BANDS]
)
def test_a_run_of_60_steps_stays_in_its_band(matmul, baseline):
    losses, compiled = train(matmul)
    end, expected = sum(losses[-10:]) / 10, sum(baseline[-10:]) / 10
    assert abs(end / expected - 1) < BANDS[matmul], (end, expected)
    assert losses != baseline, "the format changed nothing"
    unchanged = " ".join(list_unchanged(compiled))
    assert "router" in unchanged and "LM head" in unchanged
    assert "experts" not in unchanged and "q_proj" not in unchanged


def test_no_format_is_no_transform_and_unknown_ones_are_named():
    assert precision_transforms(PrecisionSection()) == []
    assert set(BANDS) | {"none"} == set(FORMATS)
    with pytest.raises(ArgumentError, match="matmul='fp6'"):
        precision_transforms(PrecisionSection("fp6"))


# ---- NVFP4 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 64), (1, 16), (48, 32)])
def test_rounding_equals_the_codec(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3
    x[0, :16] = 0
    expected = quantize(x, "nvfp4").dequantize()
    torch.testing.assert_close(round_nvfp4(x), expected.float(), rtol=1e-6, atol=0.0)


def test_odd_sizes_and_empty_tensors():
    x = torch.randn(7, 21, generator=torch.Generator().manual_seed(0))
    for square in (False, True):
        rounded = round_nvfp4(x, square=square)
        assert rounded.shape == x.shape
        assert ((rounded - x).abs() <= 0.35 * x.abs().max()).all()
        assert round_nvfp4(x[:0], square=square).shape == (0, 21)
    assert torch.equal(round_nvfp4(torch.zeros(3, 16)), torch.zeros(3, 16))


def test_square_blocks_round_a_weight_and_its_transpose_alike():
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(round_nvfp4(x, square=True).t(), round_nvfp4(x.t(), square=True))


def test_infinity_and_nan_are_not_hidden():
    x = torch.ones(2, 16)
    x[0, 0], x[1, 0] = float("nan"), float("inf")
    for stochastic in (False, True):
        assert not round_nvfp4(x, stochastic=stochastic).isfinite().all()


def test_stochastic_rounding_is_unbiased_and_repeatable():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 64, generator=generator).expand(4000, 64).contiguous()
    rounded = round_nvfp4(x, stochastic=True)
    assert torch.equal(rounded, round_nvfp4(x, stochastic=True))
    error = (rounded.mean(0) - x[0]).abs()
    # four standard errors of a uniform error over the widest step, 2/6 of the block's largest
    bound = 4 * (x[0].abs().max() / 3) / 12**0.5 / 4000**0.5
    assert error.max() < bound
    assert (round_nvfp4(x).mean(0) - x[0]).abs().max() > 5 * error.max()


def test_rotation_is_orthogonal():
    x = torch.randn(35, 8, generator=torch.Generator().manual_seed(0))
    rotated = rotate_rows(x)
    assert rotated.shape == (48, 8)
    torch.testing.assert_close(rotated.t() @ rotated, x.t() @ x, rtol=1e-4, atol=1e-4)
    spike = torch.zeros(16, 1)
    spike[3] = 4.0
    assert torch.equal(rotate_rows(spike).abs(), torch.ones(16, 1))


@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_is_near_the_exact_one(has_bias):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 40, 64, generator=generator).requires_grad_()
    layer = nn.Linear(64, 48, bias=has_bias)
    exact = layer(x)
    grad_y = torch.randn(exact.shape, generator=generator)
    inputs = [x, *layer.parameters()]
    expected = torch.autograd.grad(exact, inputs, grad_y)
    y = nvfp4_linear(x, layer.weight, layer.bias)
    found = torch.autograd.grad(y, inputs, grad_y)
    for ours, wanted in zip((y, *found), (exact, *expected), strict=True):
        assert ours.shape == wanted.shape and ours.dtype == wanted.dtype
        error = (ours - wanted).norm() / wanted.norm()
        assert error < 0.25  # e2m1 has one bit of mantissa: 9 to 12 % an operand
    if has_bias:
        torch.testing.assert_close(found[2], expected[2])


def test_grouped_experts_equal_linears():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 32, generator=generator).requires_grad_()
    weight = torch.randn(3, 16, 32, generator=generator).requires_grad_()
    offsets = torch.tensor([8, 8, 20], dtype=torch.int32)  # the second expert has no rows
    y = nvfp4_grouped_mm(x, weight, offsets)
    rounded = round_nvfp4(x)
    weights = round_nvfp4(weight, square=True)
    expected = torch.cat((rounded[:8] @ weights[0].t(), rounded[8:] @ weights[2].t()))
    torch.testing.assert_close(y, expected)
    grad_x, grad_weight = torch.autograd.grad(y, (x, weight), torch.ones_like(y))
    assert grad_weight[1].abs().max() == 0
    torch.testing.assert_close(grad_weight[0], torch.ones(8, 16).t() @ x[:8])
    assert (grad_x[:8] - weights[0].sum(0)).norm() < 0.2 * weights[0].sum(0).norm() * 8**0.5
