"""Experts in FP8 on a GPU: the kernel against the definition, and its own quantization against two kernels."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fulgurite.kernels.grouped_gemm import ops as plain
from fulgurite.kernels.moe import ops as plain_moe
from fulgurite.kernels.quantize.reference import reference as quantize_reference
from fulgurite.quant import quantize
from tests.kernels.moe_cases import make_routes
from tests.kernels.triton_support import DEVICE, INTERPRETED

from fulgurite.kernels.grouped_gemm import triton_fp8, triton_tile_scheduler  # isort: skip  (needs triton)
from fulgurite.kernels.grouped_gemm import triton_grouped_gemm as kernels  # isort: skip
from fulgurite.kernels.tuning.config import LaunchConfig  # isort: skip

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
ROWS, TILES = "fp8_e4m3_1x128", "fp8_e4m3_128x128"
TILE = {
    gated: LaunchConfig(64, 128 if gated else 256, 128, num_warps=8, num_stages=4)
    for gated in (False, True)
}


class Problem:
    """Tokens, routes (one of them nobody's) and weights in FP8; `run` is the kernel's result."""

    def __init__(
        self,
        tokens: int,
        experts: int,
        per_token: int,
        size: int,
        columns: int,
        gate: str,
        more: bool,
    ) -> None:
        generator = torch.Generator().manual_seed(tokens + columns)
        chosen = make_routes(tokens, experts, per_token).experts_Tk
        chosen[tokens // 2, 0] = -1
        self.order = plain_moe.ExpertOrder(*plain_moe.sort_by_expert_reference(chosen, experts))
        self.x = torch.randn(tokens, size, generator=generator).to(torch.bfloat16)
        weight = torch.randn(experts, columns, size, generator=generator) / math.sqrt(size)
        self.weight, self.gate = quantize(weight, TILES), gate
        pairs = tokens * per_token
        self.factors = torch.rand(pairs, generator=generator) if more else None
        self.bias = torch.randn(experts, columns, generator=generator) if more else None

    def run(self, result: str | None = None, tile: LaunchConfig | None = None) -> list[Tensor]:
        order, scales = self.order, list(self.weight.scales.values())
        parts = [part.to(DEVICE) for part in quantize_reference(self.x, ROWS)]
        given = [order.token_S, self.factors, order.offsets_E,
                 self.weight.packed, scales[0], self.bias]  # fmt: skip
        there = [None if t is None else t.to(DEVICE) for t in given]
        after = (self.gate, 1.7, 0.9, torch.bfloat16, tile or TILE[self.gate != "none"], result)
        return [part.cpu() for part in triton_fp8.grouped_gemm_fp8(parts, *there, *after)]

    def wanted(self) -> Tensor:
        exact = self.weight.dequantize(torch.float32).double()
        x = plain.fake_quantize_activations(self.x, ROWS).double()
        factors, bias = (None if t is None else t.double() for t in (self.factors, self.bias))
        return plain.reference(
            x, self.order.token_S, None, factors, self.order.offsets_E, exact, [], "dense", bias,
            "none", self.gate, 1.7, 0.9,
        )  # fmt: skip


SHAPES = [  # tokens, experts, experts a token, K, columns of the weight, gate
    (1, 1, 1, 128, 256, "silu"),
    (9, 3, 2, 384, 512, "silu"),
    (9, 3, 2, 144, 256, "clamped"),
    (5, 4, 1, 256, 130, "none"),
    (7, 2, 2, 256, 272, "none"),
]


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gathered_scaled_and_gated(shape: tuple[int, int, int, int, int, str], more: bool) -> None:
    problem = Problem(*shape, more)
    (found,), wanted = problem.run(), problem.wanted()
    limit = 6 * torch.finfo(torch.bfloat16).eps * max(1.0, wanted.abs().max().item())
    assert found.shape == wanted.shape and (found.double() - wanted).abs().max().item() <= limit
    assert not found[problem.order.offsets_E[-1] :].any()  # rows of no expert


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("gate", ["silu", "none"])
def test_every_tile(rows: int, gate: str) -> None:
    columns = 128 if gate == "silu" else 256
    problem = Problem(170, 2, 1, 128, 512, gate, more=False)
    (found,), wanted = (
        problem.run(tile=LaunchConfig(rows, columns, 128, num_warps=8, num_stages=4)),
        problem.wanted(),
    )
    limit = 6 * torch.finfo(torch.bfloat16).eps * max(1.0, wanted.abs().max().item())
    assert (found.double() - wanted).abs().max().item() <= limit


def test_quantized_in_the_same_kernel_as_by_the_next() -> None:
    problem = Problem(11, 3, 2, 256, 768, "silu", more=True)
    problem.x[3, 7] = math.inf
    problem.x[4] = 0.0
    problem.x[5, 0] = math.nan
    codes, scales = problem.run(ROWS)
    wanted_codes, wanted_scales = quantize_reference(problem.run()[0], ROWS)
    assert torch.equal(codes.view(torch.uint8), wanted_codes.view(torch.uint8))
    assert torch.equal(scales, wanted_scales)


def test_a_layer_is_its_two_matmuls() -> None:
    problem = Problem(70, 2, 1, 128, 256, "silu", more=True)
    down = quantize(torch.randn(2, 144, 128) / 12, TILES).to(DEVICE)
    weight, order = problem.weight.to(DEVICE), problem.order
    given = [problem.x, order.token_S, problem.factors, order.offsets_E, problem.bias]
    x, rows, factors, ends, bias = (tensor.to(DEVICE) for tensor in given)
    gate, both = plain.GatedActivation("clamped", 1.7, 0.9), (ROWS, ROWS)
    found = triton_fp8.run_experts_fp8(
        x, rows, factors, ends, weight, down, (bias, None), gate, both
    )
    first, second = ([w.packed, list(w.scales.values()), TILES] for w in (weight, down))
    how = ("clamped", 1.7, 0.9)
    inner = kernels.grouped_gemm(x, rows, None, factors, ends, *first, bias, ROWS, *how)
    wanted = kernels.grouped_gemm(
        inner, None, None, None, ends, *second, None, ROWS, "none", 0.0, 0.0
    )
    assert torch.equal(found, wanted) and found.any()


@pytest.mark.parametrize(
    ("format", "activations", "tokens", "columns"),
    [("fp8_e4m3_row", ROWS, 64, 256), (TILES, "fp8_e4m3_row", 64, 256), (TILES, ROWS, 2, 256),
     (TILES, ROWS, 64, 192)],
)  # fmt: skip
def test_other_formats_and_few_rows_have_no_plan(
    format: str, activations: str, tokens: int, columns: int
) -> None:
    weight = quantize(torch.ones(2, columns, 128), format)
    found = triton_fp8.select_fp8_config(
        tokens, weight.packed, weight.format, activations, "silu", True
    )
    assert found is None
    fits = quantize(torch.ones(2, 256, 128), TILES)
    assert (
        triton_fp8.select_fp8_config(64, fits.packed, fits.format, ROWS, "silu", True) is not None
    )


def test_no_tokens() -> None:
    weight = quantize(torch.ones(2, 256, 128), TILES)
    x = [part.to(DEVICE) for part in quantize_reference(torch.ones(1, 128), ROWS)]
    rows = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    ends = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    parts = [weight.packed.to(DEVICE), next(iter(weight.scales.values())).to(DEVICE)]
    how = ("silu", 0.0, 0.0, torch.bfloat16, TILE[True], ROWS)
    found = triton_fp8.grouped_gemm_fp8(x, rows, None, ends, *parts, None, *how)
    assert found[0].shape == (0, 128) and found[1].shape == (0, 1)


@pytest.mark.parametrize("most, unit", [(32, 0), (48, 16), (32, 16)])
@pytest.mark.parametrize("ends", [[0, 0], [3, 40], [33, 33], [0, 100], [49, 98]])
def test_the_map_holds_each_row_once(ends: list[int], most: int, unit: int) -> None:
    """Tiles of the most rows, or also of a unit less: then an expert has as few as there can be."""
    given = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    made, tiles = triton_tile_scheduler.build_tile_map(given, 100, most, unit)
    owners: dict[int, int] = {}
    used, worked = [0, 0, 0], [0, 0, 0]
    for expert, start, end, *_ in made.cpu().tolist():
        for row in range(start, end):
            assert row not in owners and end - start <= most
            owners[row] = expert
        used[expert] += end > start
        worked[expert] += (end > start) * (most if end - start > most - unit else most - unit)
    counts = [ends[0], ends[1] - ends[0], 100 - ends[1]]
    assert owners == {row: sum(row >= end for end in ends) for row in range(100)}
    assert len(made) == tiles and used == [-(-count // most) for count in counts]
    if unit:
        least = most - unit
        spare = [work - count for work, count in zip(worked, counts, strict=True) if count > least]
        assert all(0 <= rows < unit for rows in spare)


def test_programs_take_one_expert_after_the_other() -> None:
    """Each tile of rows by each tile of columns, once; an expert's rows before its next columns."""
    ends = torch.tensor([40, 45, 45, 141], dtype=torch.int32, device=DEVICE)
    made, tiles = triton_tile_scheduler.build_tile_map(ends, 150, 32)
    columns, order = 3, []
    for program in range(tiles * columns):
        line = made[program // columns].tolist()
        within = program - line[3] * columns
        order.append((line[3] + within % line[4], within // line[4]))
    assert sorted(order) == [(tile, column) for tile in range(tiles) for column in range(columns)]
    assert order[:6] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]  # 40 rows: two tiles
    assert [made[tile, 0].item() for tile, _ in order] == sorted(made[:, 0].repeat(3).tolist())
