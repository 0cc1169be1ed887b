"""Weights of 4 bits and more than a few rows of each expert on a GPU, against the definition in float64."""

from __future__ import annotations

import math

import pytest
import torch

from fulgurite.kernels.grouped_gemm import ops as plain
from fulgurite.kernels.moe import ops as plain_moe
from fulgurite.quant import quantize
from tests.kernels.moe_cases import make_routes
from tests.kernels.triton_support import DEVICE, INTERPRETED

from fulgurite.kernels.grouped_gemm import triton_grouped_gemm as kernels  # isort: skip  (needs triton)
from fulgurite.kernels.grouped_gemm import triton_4bit  # isort: skip
from fulgurite.kernels.tuning.config import LaunchConfig  # isort: skip
from fulgurite.kernels.tuning.sm_90 import Sm90Heuristics  # isort: skip

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
SHAPES = [  # tokens, experts, experts a token, K, columns of the weight, gate
    (1, 1, 1, 128, 16, "silu"),
    (37, 3, 2, 256, 48, "silu"),
    (20, 1, 1, 128, 200, "none"),
    (50, 5, 2, 384, 272, "clamped"),
]
FORMATS = ["nvfp4", "mxfp4", "int4_g128", "int4_g64", "int4_g128_asym", "int4_g32", "int4_g32_asym",
           "int4_g32_min"]  # fmt: skip


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What `try_grouped_gemm_4bit` said, call after call; few rows are none here."""
    said: list[bool] = []
    function = triton_4bit.try_grouped_gemm_4bit
    monkeypatch.setattr(kernels, "try_small_m_grouped_gemm", lambda *_: False)
    monkeypatch.setattr(
        kernels, "try_grouped_gemm_4bit", lambda *a: said.append(function(*a)) or said[-1]
    )
    return said


def check(
    shape: tuple[int, int, int, int, int, str], format: str, more: bool, gathered: bool = True
) -> None:
    tokens, experts, per_token, size, columns, gate = shape
    generator = torch.Generator().manual_seed(tokens + columns)
    chosen = make_routes(tokens, experts, per_token).experts_Tk
    chosen[tokens // 2, 0] = -1  # nobody's
    order = plain_moe.ExpertOrder(*plain_moe.sort_by_expert_reference(chosen, experts))
    pairs = tokens * per_token
    x = torch.randn(tokens if gathered else pairs, size, generator=generator).bfloat16()
    weight = torch.randn(experts, columns, size, generator=generator) / math.sqrt(size)
    packed = quantize(weight, format)
    rows = order.token_S if gathered else None
    factors = torch.rand(pairs, generator=generator) if more else None
    bias = torch.randn(experts, columns, generator=generator).bfloat16() if more else None
    there = [None if t is None else t.to(DEVICE) for t in (x, rows, factors, order.offsets_E, bias)]
    data, scales = packed.packed.to(DEVICE), [s.to(DEVICE) for s in packed.scales.values()]
    found = kernels.grouped_gemm(
        there[0], there[1], None, there[2], there[3], data, scales, format, there[4], "none", gate,
        1.7, 0.9,
    ).cpu()  # fmt: skip
    exact = packed.dequantize(torch.float32).double()
    wide = [None if t is None else t.double() for t in (x, factors, bias)]
    wanted = plain.reference(
        wide[0], rows, None, wide[1], order.offsets_E, exact, [], "dense", wide[2], "none", gate,
        1.7, 0.9,
    )  # fmt: skip
    assert found.shape == wanted.shape
    error = (found.double() - wanted).abs().max().item()
    assert error <= 6 * torch.finfo(torch.bfloat16).eps * max(1.0, wanted.abs().max().item())
    assert not found[order.offsets_E[-1] :].any()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_gathered_and_gated(
    shape: tuple[int, int, int, int, int, str], format: str, used: list[bool]
) -> None:
    check(shape, format, more=shape[0] % 2 == 1)
    assert used == [True]


@pytest.mark.parametrize("rows, depth", [(16, 256), (32, 128), (64, 128), (128, 128)])
def test_other_tiles(
    rows: int, depth: int, used: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    many = (
        rows > 64
    )  # as `grouped_4bit_config` has them: Triton 3.6 gets many rows wrong with 4 warps
    tile = LaunchConfig(rows, 128 if many else 64, depth, num_warps=8 if many else 4, num_stages=3)
    monkeypatch.setattr(Sm90Heuristics, "grouped_4bit_config", lambda *_: tile)
    check((70, 2, 1, 256, 80, "silu"), "nvfp4", more=True)
    check((70, 2, 1, 256, 72, "none"), "mxfp4", more=False, gathered=False)
    assert used == [True, True]


@pytest.mark.parametrize("power", [-100, 0, 100])
def test_scales_of_all_sizes(power: int, used: list[bool]) -> None:
    """e8m0 has scales that are no bfloat16 when lifted: of numbers up to 2^100, and down to 2^-100."""
    packed = quantize(torch.randn(2, 64, 128) * 2.0**power, "mxfp4")
    x, ends = torch.randn(40, 128).bfloat16(), torch.tensor([25, 40], dtype=torch.int32)
    found = kernels.grouped_gemm(
        x.to(DEVICE), None, None, None, ends.to(DEVICE), packed.packed.to(DEVICE),
        [s.to(DEVICE) for s in packed.scales.values()], "mxfp4", None, "none", "none", 0.0, 0.0,
    ).cpu()  # fmt: skip
    exact = packed.dequantize(torch.float32).double()
    wanted = torch.cat((x[:25].double() @ exact[0].mT, x[25:].double() @ exact[1].mT))
    assert (found.double() - wanted).abs().max() <= 2**-7 * wanted.abs().max()
    assert used == [True]


def test_what_the_copy_unit_does_not_take(used: list[bool]) -> None:
    """K that steps don't divide, and rows of the weight that are not whole octets."""
    check((20, 2, 1, 96, 32, "silu"), "mxfp4", more=False)
    check((20, 2, 1, 128, 20, "none"), "nvfp4", more=False)
    assert used == [False, False]
