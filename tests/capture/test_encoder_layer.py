"""`nn.TransformerEncoderLayer` in inference: the fused op of torch is decomposed on CPUs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fulgurite

PADDING = torch.tensor([[False] * 5, [False, False, False, True, True]])
ALL_HIDDEN = torch.tensor([[True] * 5, [False] * 5])  # of the first item: eager returns NaN
CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)
MASKS = {
    "none": {},
    "padding": {"src_key_padding_mask": PADDING},
    "all hidden": {"src_key_padding_mask": ALL_HIDDEN},
    "causal": {"src_mask": CAUSAL},
    "both": {"src_mask": CAUSAL, "src_key_padding_mask": PADDING.float() * -1e4},
}


def make_layer(activation: str, norm_first: bool) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        32, 4, 64, activation=activation, batch_first=True, norm_first=norm_first
    )
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer.eval()


@pytest.mark.covering
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("activation", "norm_first"), [("relu", False), ("gelu", True)])
def test_encoder_layer_equals_eager(activation: str, norm_first: bool, mask: str) -> None:
    layer = make_layer(activation, norm_first)
    compiled = fulgurite.compile(layer)
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        expected = layer(x, **MASKS[mask])
        actual = compiled(x, **MASKS[mask])
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5, equal_nan=True)
    assert expected.isnan().any() == (mask == "all hidden")


def test_encoder_layer_runs_with_packed_weights() -> None:
    compiled = fulgurite.compile(make_layer("relu", False))
    with torch.no_grad():
        compiled(torch.randn(2, 5, 32))
    ops = str(compiled.last_trace())
    assert "torch._transformer_encoder_layer_fwd" not in ops
    assert "_scaled_dot_product_flash_attention_for_cpu" in ops


def test_encoder_layer_of_bfloat16_numbers() -> None:
    layer = make_layer("gelu", False).bfloat16()
    x = torch.randn(2, 5, 32).bfloat16()
    with torch.no_grad():
        actual = fulgurite.compile(layer)(x)
        exact = layer.double()(x.double())
        eager = layer.bfloat16()(x)
    error = (actual.double() - exact).abs().max()
    assert error <= 2 * (eager.double() - exact).abs().max()
