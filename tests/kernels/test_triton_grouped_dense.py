"""Grouped matmul with many rows on a GPU: gathered, gated and biased, against the definition in float64."""

from __future__ import annotations

import math

import pytest
import torch

from fulgurite.kernels.grouped_gemm import ops as plain
from fulgurite.kernels.moe import ops as plain_moe
from tests.kernels.moe_cases import make_routes
from tests.kernels.triton_support import DEVICE, INTERPRETED

from fulgurite.kernels.grouped_gemm import triton_dense  # isort: skip  (needs triton)
from fulgurite.kernels.tuning.config import LaunchConfig  # isort: skip

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
TILE = LaunchConfig(64, 32, 32, num_warps=4, num_stages=3)
SHAPES = [  # tokens, experts, experts a token, K, columns of the weight, gate
    (1, 1, 1, 8, 2, "silu"),
    (70, 1, 1, 40, 64, "none"),
    (75, 3, 2, 72, 70, "silu"),
    (9, 5, 2, 64, 33, "none"),
    (40, 2, 1, 96, 128, "clamped"),
    (131, 2, 2, 32, 66, "gelu"),
]


def check(
    shape: tuple[int, int, int, int, int, str], dtype: torch.dtype, more: bool, tile: LaunchConfig = TILE
) -> None:
    tokens, experts, per_token, size, columns, gate = shape
    generator = torch.Generator().manual_seed(tokens + columns)
    chosen = make_routes(tokens, experts, per_token).experts_Tk
    chosen[tokens // 2, 0] = -1  # nobody's
    order = plain_moe.ExpertOrder(*plain_moe.sort_by_expert_reference(chosen, experts))
    x = torch.randn(tokens, size, generator=generator).to(dtype)
    weight = torch.randn(experts, columns, size, generator=generator) / math.sqrt(size)
    weight, pairs = weight.to(dtype), tokens * per_token
    factors = torch.rand(pairs, generator=generator) if more else None
    bias = torch.randn(experts, columns, generator=generator).to(dtype) if more else None
    given = (x, order.token_S, factors, order.offsets_E, weight, bias)
    there = [None if t is None else t.to(DEVICE) for t in given]
    assert triton_dense.supports_tma(there[0], there[4])
    found = triton_dense.grouped_gemm_dense(*there, gate, 1.7, 0.9, tile).cpu()
    wide = [None if t is None else t.double() for t in (x, factors, weight, bias)]
    wanted = plain.reference(
        wide[0], order.token_S, None, wide[1], order.offsets_E, wide[2], [], "dense", wide[3],
        "none", gate, 1.7, 0.9,
    )  # fmt: skip
    assert found.dtype == dtype and found.shape == wanted.shape
    error = (found.double() - wanted).abs().max().item()
    assert error <= 6 * torch.finfo(dtype).eps * max(1.0, wanted.abs().max().item())
    assert not found[order.offsets_E[-1] :].any()


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gathered_and_gated(shape: tuple[int, int, int, int, int, str], more: bool) -> None:
    check(shape, torch.bfloat16, more)


def test_half_precision() -> None:
    check(SHAPES[2], torch.float16, more=True)


@pytest.mark.parametrize("gate", ["silu", "none"])
def test_the_tile_of_large_layers(gate: str) -> None:
    tile = LaunchConfig(128, 128 if gate == "silu" else 256, 64, num_warps=8, num_stages=3)
    check((150, 1, 1, 128, 300, gate), torch.bfloat16, False, tile)


def test_rows_in_order_already() -> None:
    x, weight = torch.randn(5, 16).bfloat16(), torch.randn(2, 24, 16).bfloat16()
    ends = torch.tensor([2, 5], dtype=torch.int32)
    found = triton_dense.grouped_gemm_dense(
        x.to(DEVICE), None, None, ends.to(DEVICE), weight.to(DEVICE), None, "none", 0.0, 0.0, TILE
    )
    wanted = torch.cat((x[:2].float() @ weight[0].float().T, x[2:].float() @ weight[1].float().T))
    torch.testing.assert_close(found.cpu(), wanted.bfloat16(), rtol=1e-2, atol=1e-2)


def test_what_a_descriptor_does_not_take() -> None:
    x = torch.ones(2, 16, dtype=torch.bfloat16)
    weight = torch.ones(3, 24, 16, dtype=torch.bfloat16)
    assert triton_dense.supports_tma(x, weight)
    assert not triton_dense.supports_tma(x, weight.float())
    assert not triton_dense.supports_tma(x.float(), weight.float())
    assert not triton_dense.supports_tma(x, weight.transpose(1, 2))
    assert not triton_dense.supports_tma(x[:, :12], weight[:, :, :12].contiguous())
