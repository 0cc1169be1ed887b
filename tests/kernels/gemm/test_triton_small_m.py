"""The small-M GEMM with quantized weights, of one weight or of experts, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fulgurite.kernels.common.triton_operands import dequant_scheme
from fulgurite.kernels.elementwise.gated_activation import GatedActivation
from fulgurite.kernels.gemm import fused_projections
from fulgurite.kernels.gemm.merged_linear import merge_quant_storage
from fulgurite.kernels.gemm.modules import QuantLinear
from fulgurite.kernels.gemm.triton_quant_linear import (
    fused_quant_linear,
    grouped_quant_linear,
    quant_linear,
)
from fulgurite.kernels.gemm.triton_small_m import SmallMInputs, launch_small_m_gemm
from fulgurite.kernels.grouped_gemm import reference
from fulgurite.kernels.grouped_gemm.args import GroupedGemmArgs
from fulgurite.kernels.moe.router_config import Routes
from fulgurite.kernels.moe.small_batch import SmallBatchArgs
from fulgurite.kernels.moe.triton_small_batch_quantized import run_quantized_experts
from fulgurite.kernels.tuning import LaunchConfig, heuristics_for
from fulgurite.quant import QuantTensor, quantize, repack_gguf, resolve_format
from tests.kernels.gemm.cases import exact, operand_of, tensors_of
from tests.kernels.triton_support import DEVICE, INTERPRETED, on_device

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
NIBBLES = ["nvfp4", "mxfp4", "int4_g128", "int4_g64_asym"]
EIGHT_BITS = ["int8", "fp8_e4m3_row", "fp8_e4m3_128x128", "fp8_e5m2_row", "mxfp8_e4m3"]
GROUPS = ["int4_g32", "int4_g32_asym", "int4_g32_min", "int8_g16", "int8_g32"]
HEURISTICS = heuristics_for(torch.device(DEVICE))


def make_config(
    block_n: int, block_k: int, num_warps: int, num_stages: int, block_m: int
) -> LaunchConfig:
    return LaunchConfig(block_m, block_n, block_k, num_warps, num_stages, small_m=True)


CONFIG = make_config(16, 128, 2, 2, 4)


def run(x: Tensor, weight: QuantTensor, config: LaunchConfig, **options) -> Tensor:
    operand, scheme = operand_of(weight)
    indices = options.get("row_indices")
    rows = (x if indices is None else indices).shape[0]
    columns = options.pop("columns", weight.shape[-2])
    out = torch.full((rows, columns), 7.0).to(x.dtype).to(DEVICE)
    launch_small_m_gemm(SmallMInputs(x.to(DEVICE), operand, scheme, out, **options), config)
    return out


def is_near(actual: Tensor, expected: Tensor, terms: int, rounds_weights: bool = False) -> bool:
    rounding = torch.finfo(actual.dtype).eps * (1 if INTERPRETED else 0.5)  # it truncates
    rounding *= 2 if rounds_weights else 1
    error = (actual.cpu().double() - expected).norm()
    return bool(error <= (rounding + terms**0.5 * 2.0**-22) * expected.norm())


def block_k_of(format: str) -> int:
    scheme = dequant_scheme(resolve_format(format))
    assert scheme is not None
    return HEURISTICS.preferred_block_k(scheme) if "int4" in format else 128


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # of the first pass of MXFP4
@pytest.mark.parametrize("format", [*NIBBLES, *EIGHT_BITS, *GROUPS])
@pytest.mark.parametrize("block_m, m", [(1, 1), (4, 3), (16, 15), (8, 9)])
def test_rows_of_x(format: str, block_m: int, m: int) -> None:
    weight = quantize(torch.randn(37, 384) * torch.randn(37, 1).exp(), format)
    x = torch.randn(m, 384).bfloat16()
    actual = run(x, weight, make_config(16, block_k_of(format), 2, 2, block_m))
    assert is_near(actual, x.double() @ exact(weight).t(), 384)


@pytest.mark.parametrize("format", GROUPS)
@pytest.mark.parametrize("k", [32, 160, 416])
def test_groups_of_integers(format: str, k: int) -> None:
    """float16 rows, too; a K that blocks don't divide; one weight stands out, so its position is
    right."""
    dense = torch.zeros(21, k)
    dense[3, k - 1], dense[20, 0] = 5.0, -3.0
    weight = quantize(dense + torch.randn(21, k) / 64, format)
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.randn(2, k).to(dtype)
        actual = quant_linear(x.to(DEVICE), *tensors_of(weight), format)
        assert actual.dtype == dtype and is_near(actual, x.double() @ exact(weight).t(), k)


def test_repacked_gguf_weights() -> None:
    """The blocks of a file, repacked for GPUs, by the small-M kernel and by the tiled one."""
    for name in ("q4_0", "q4_1", "q8_0", "q4_k", "q6_k"):
        weight = quantize(torch.randn(20, 512), name)
        repacked = repack_gguf(weight)
        for m in (1, 17):
            x = torch.randn(m, 512).bfloat16()
            actual = quant_linear(x.to(DEVICE), *tensors_of(repacked), repacked.format.name)
            rounds_weights = m > HEURISTICS.max_small_m
            assert is_near(actual, x.double() @ exact(weight).t(), 512, rounds_weights), (name, m)


@pytest.mark.parametrize("blocks", [(16, 64, 1), (32, 256, 2), (16, 128, 4), (64, 128, 2)], ids=str)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "int8", "int4_g32_asym", "int4_g32_min"])
def test_configs(format: str, blocks: tuple[int, int, int]) -> None:
    weight, x = quantize(torch.randn(65, 416), format), torch.randn(2, 416).bfloat16()
    actual = run(x, weight, make_config(*blocks, 3, 4))
    assert is_near(actual, x.double() @ exact(weight).t(), 416)


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered")  # of the first pass
@pytest.mark.parametrize("code", [0, 1, 128, 129, 191, 251])
def test_every_magnitude_of_an_mxfp4_scale(code: int) -> None:
    """Scales above 2 take the second pass; zero blocks, with the smallest scale, don't need it."""
    weight = quantize(torch.randn(20, 256), "mxfp4")
    weight.scale.view(torch.uint8)[::3, 2] = code
    weight.scale.view(torch.uint8)[:, 5] = 0
    x = (torch.randn(3, 256) * 2.0**-40).bfloat16()
    assert is_near(run(x, weight, CONFIG), x.double() @ exact(weight).t(), 256)


def test_nan_scales_make_their_rows_nan() -> None:
    weight = quantize(torch.randn(20, 256), "mxfp4")
    weight.scale.view(torch.uint8)[3, 2] = 255
    is_nan = run(torch.randn(2, 256).bfloat16(), weight, CONFIG).isnan().cpu()
    assert is_nan[:, 3].all() and is_nan.sum() == 2


@pytest.mark.parametrize("format", ["nvfp4", "int4_g32"])
def test_nan_and_infinity_of_x_stay_in_their_row(format: str) -> None:
    weight = quantize(torch.randn(20, 256).abs() + 1, format)
    x = torch.randn(3, 256).bfloat16()
    x[0, 9], x[2, 40] = torch.nan, torch.inf
    actual = run(x, weight, CONFIG).cpu()
    assert actual[0].isnan().all() and actual[1].isfinite().all()
    assert (actual[2] == torch.inf).all()


def test_all_codes() -> None:
    """Each of 65536 words of four nibbles, in either half of a register (not in the
    interpreter)."""
    words = torch.arange(0, 65536, 8 if INTERPRETED else 1, dtype=torch.int32)
    words = torch.stack((words, words.flip(0)), 1).to(torch.int16).view(-1, 256)
    weight = quantize(torch.ones(len(words), 1024), "mxfp4")
    weight.packed.copy_(words.view(torch.uint8))
    x = torch.zeros(4, 1024)
    x[0, 0::8], x[1, 1::8], x[2, 6::8], x[3, 7::8] = 1.0, 2.0, 1.0, 2.0
    actual = run(x.bfloat16(), weight, CONFIG)
    assert is_near(actual, x.double() @ exact(weight).t(), 16)


# ---- experts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "format, gate, block_m",
    [
        ("nvfp4", "silu", 1), ("nvfp4", "clamped", 4), ("mxfp4", "silu", 4), ("mxfp4", "none", 1),
        ("int4_g128", "none", 4), ("fp8_e4m3_128x128", "clamped", 1), ("int8", "none", 1),
        ("int4_g32", "silu", 1), ("int4_g32_min", "clamped", 4), ("int4_g32_asym", "none", 1),
        ("int8_g16", "silu", 4),
    ],
)  # fmt: skip
def test_experts(format: str, gate: str, block_m: int) -> None:
    """Experts with none, one and more rows than a program takes; some rows without an expert."""
    weight = quantize(torch.randn(5, 2 * 21, 256) / 16, format)
    offsets = torch.tensor([3, 3, 4, 10, 11], dtype=torch.int32)
    x, indices = torch.randn(6, 256).bfloat16(), torch.randint(6, (13,), dtype=torch.int32)
    bias, row_weights = torch.randn(5, 42).bfloat16(), torch.rand(13) + 0.5
    names = ("row_indices", "row_weights", "expert_offsets", "bias")
    options = dict(zip(names, on_device(indices, row_weights, offsets, bias), strict=True))
    activation = GatedActivation(gate, 1.7, 2.0)
    config = make_config(16, block_k_of(format), 2, 2, block_m)
    columns = 42 // activation.num_inputs
    actual = run(x, weight, config, gate=activation, columns=columns, **options)
    args = GroupedGemmArgs(
        x.double(), indices, row_weights.double(), offsets, exact(weight), [], "dense", bias.double(),
        "none", activation,
    )  # fmt: skip
    assert is_near(actual, reference.grouped_gemm(args), 256)
    assert not actual[11:].any()


def test_results_are_deterministic_and_do_not_depend_on_other_rows() -> None:
    weight, x = quantize(torch.randn(3, 20, 256), "nvfp4"), torch.randn(7, 256).bfloat16()
    offsets = torch.tensor([2, 6, 7], dtype=torch.int32).to(DEVICE)
    first, second = (run(x, weight, CONFIG, expert_offsets=offsets) for _ in range(2))
    assert torch.equal(first, second)
    offsets = torch.tensor([0, 1, 1], dtype=torch.int32).to(DEVICE)
    alone = run(x[3:4], weight, CONFIG, expert_offsets=offsets)
    assert torch.equal(first[3], alone[0])


def test_experts_on_both_sides_of_the_crossover() -> None:
    weight = quantize(torch.randn(2, 24, 128), "nvfp4")
    values, crossover = exact(weight), 2 * HEURISTICS.max_rows_per_expert
    for rows in (crossover, crossover + 1):
        x, offsets = torch.randn(rows, 128).bfloat16(), torch.tensor([3, rows], dtype=torch.int32)
        actual = grouped_quant_linear(
            x.to(DEVICE), offsets.to(DEVICE), *tensors_of(weight), "nvfp4"
        )
        expected = torch.cat((x[:3].double() @ values[0].t(), x[3:].double() @ values[1].t()))
        assert is_near(actual, expected, 128)


@pytest.mark.parametrize(
    "format",
    ["nvfp4", "mxfp4", "int4_g64_asym", "int4_g32_min", "int4_g32", "int8_g16", "int8",
     "fp8_e4m3_128x128"],
)  # fmt: skip
@pytest.mark.parametrize("tokens, top_k", [(1, 3), (1, 8), (2, 2)])
def test_a_token_and_its_experts(format: str, tokens: int, top_k: int) -> None:
    """Both GEMMs, the gate and the weighted sum in two kernels; one pair has no expert."""
    up, down = (quantize(torch.randn(16, n, 128) / 11, format) for n in (256, 40))
    selected = torch.rand(tokens, 16).topk(top_k)[1]
    selected[0, -1] = 16
    x, weights = torch.randn(tokens, 128).bfloat16(), torch.rand(tokens, top_k)
    residual = torch.randn(tokens, 40).bfloat16()
    up_values, down_values = exact(up), exact(down)
    expected = residual.double()
    for t, row in enumerate(selected.tolist()):
        for e, weight in zip(row, weights[t].double(), strict=True):
            if e < 16:
                gate_half, up_half = (up_values[e] @ x[t].double()).chunk(2)
                h = (torch.nn.functional.silu(gate_half) * up_half).bfloat16().double()
                expected[t] += weight * (down_values[e] @ h)
    routes = Routes(weights.to(DEVICE), selected.to(DEVICE))
    args = SmallBatchArgs(
        x.to(DEVICE), routes, up.to(DEVICE), down.to(DEVICE), GatedActivation("silu"),
        residual_TD=residual.to(DEVICE),
    )  # fmt: skip
    actual = run_quantized_experts(args)
    assert actual.shape == (tokens, 40)
    assert is_near(actual, expected, 4096)  # h may round the other way


# ---- gate and residual -----------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["nvfp4", "int4_g128", "int4_g32_asym", "fp8_e4m3_row", "int8"])
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_residual_is_added_as_by_an_addition_of_its_own(format: str, rows: int) -> None:
    """The same bits as rounding the product first; rows of x and residual are slices.

    The interpreter truncates where a GPU rounds, so it is compared with float64.
    """
    weight, (bias,) = quantize(torch.randn(37, 384), format), on_device(torch.randn(37).bfloat16())
    x = torch.randn(rows, 3, 384).bfloat16().to(DEVICE)[:, 1]
    residual = torch.randn(rows, 50).bfloat16().to(DEVICE)[:, 5:42]
    actual = fused_quant_linear(x, weight.to(DEVICE), bias, residual=residual)
    product = quant_linear(x, *tensors_of(weight), format, bias)
    assert INTERPRETED or torch.equal(actual, residual + product)
    expected = x.cpu().double() @ exact(weight).t() + bias.cpu().double()
    assert is_near(actual, expected + residual.cpu().double(), 384, rounds_weights=True)


@pytest.mark.parametrize("format", ["nvfp4", "int4_g128", "fp8_e4m3_row"])
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_gate_of_merged_weights(format: str, kind: str) -> None:
    weight, x = quantize(torch.randn(2 * 35, 384) / 16, format), torch.randn(2, 3, 384).bfloat16()
    bias, gate = torch.randn(70).bfloat16(), GatedActivation(kind)
    actual = fused_quant_linear(x.to(DEVICE), weight.to(DEVICE), bias.to(DEVICE), gate=gate)
    expected = gate(x.double() @ exact(weight).t() + bias.double())
    assert actual.shape == (2, 3, 35) and is_near(actual, expected, 384)


def test_calls_that_the_fused_kernel_leaves_to_others() -> None:
    weight = quantize(torch.randn(36, 384), "int4_g128").to(DEVICE)
    rows = HEURISTICS.max_small_m + 1
    for x in (torch.zeros(rows, 384).bfloat16(), torch.zeros(1, 384), torch.zeros(0, 384).half()):
        assert fused_quant_linear(x.to(DEVICE), weight) is NotImplemented
    odd = quantize(torch.randn(37, 384), "int4_g128").to(DEVICE)
    x = torch.zeros(1, 384).bfloat16().to(DEVICE)
    assert fused_quant_linear(x, odd, gate=GatedActivation("silu")) is NotImplemented
    assert fused_quant_linear(x, weight, residual=x.float()[:, :36]) is NotImplemented
    assert fused_quant_linear(x, weight, residual=x[0, :36]) is NotImplemented


@pytest.mark.parametrize("format", ["int4_g128", "fp8_e4m3_row"])
def test_projections_of_a_layer_take_one_kernel_each(format: str, monkeypatch) -> None:
    launches = []

    def kernel(x: Tensor, *args, **options):
        launches.append(options)
        return fused_quant_linear(x, *args, **options)

    monkeypatch.setitem(fused_projections.FUSED_QUANT_LINEAR_KERNELS, DEVICE, kernel)
    weights = [quantize(torch.randn(n, 256) / 16, format) for n in (128, 128, 256)]
    linears = [QuantLinear(weight, activations="none").to(DEVICE) for weight in weights]
    gate, up, down = linears
    merge_quant_storage((gate, up))
    x = torch.randn(2, 256).bfloat16()
    with torch.no_grad():
        h = fused_projections.fused_gate_up(x.to(DEVICE), gate, up, "gelu")
        actual = fused_projections.fused_linear_add(x.to(DEVICE), x.to(DEVICE), down)
    w_gate, w_up, w_down = (exact(weight) for weight in weights)
    assert is_near(h, GatedActivation("gelu")(x.double() @ torch.cat((w_gate, w_up)).t()), 256)
    assert is_near(actual, x.double() + x.double() @ w_down.t(), 256, rounds_weights=True)
    assert len(launches) == 2
