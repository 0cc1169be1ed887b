"""A few rows times packed weights, one weight or experts', against float64 given the decoded weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fulgurite.kernels.grouped_gemm import ops as plain
from fulgurite.quant import QuantTensor, quantize, repack_gguf, resolve_format
from tests.kernels.triton_support import DEVICE, INTERPRETED, on_device

from fulgurite.kernels.gemm import triton_launch, triton_quant_linear  # isort: skip
from fulgurite.kernels.moe.triton_small_batch_quantized import run_quantized_experts  # isort: skip
from fulgurite.kernels.gemm.triton_small_m import launch_small_m_gemm  # isort: skip
from fulgurite.kernels.elementwise.gated_activation import GATE_IDS

from fulgurite.kernels.tuning.config import LaunchConfig  # isort: skip
from fulgurite.kernels.tuning.sm_90 import Sm90Heuristics  # isort: skip
from fulgurite.kernels.tuning.small_m import SMALL_M  # isort: skip

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
NIBBLES = ["nvfp4", "mxfp4", "int4_g128", "int4_g64_asym"]
OTHERS = ["int8", "fp8_e4m3_row", "fp8_e4m3_128x128", "fp8_e5m2_row", "mxfp8_e4m3"]
GROUPS = ["int4_g32", "int4_g32_asym", "int4_g32_min", "int8_g16", "int8_g32"]


def parts_of(packed: QuantTensor) -> tuple[Tensor, list[Tensor]]:
    data, *scales = on_device(packed.packed, *packed.scales.values())
    return data, scales


def small_m_config(
    block_n: int, block_k: int, num_warps: int, num_stages: int, block_m: int
) -> LaunchConfig:
    return LaunchConfig(block_m, block_n, block_k, num_warps, num_stages, small_m=True)


def few(x: Tensor, packed: QuantTensor, tile: LaunchConfig, **more: object) -> Tensor:
    entry = resolve_format(packed.format.name)
    weight = triton_launch.dequant_scheme(entry)
    assert weight is not None
    parts = triton_launch.make_operand(*parts_of(packed), entry, weight)
    count = x.shape[0] if more.get("rows") is None else more["rows"].shape[0]
    out = torch.full((count, more.pop("columns", packed.shape[-2])), 7.0).to(x.dtype).to(DEVICE)
    launch_small_m_gemm(
        x.to(DEVICE), parts, weight, tile, out, tensor_scale=entry.family == "nvfp4", **more
    )
    return out


def near(ours: Tensor, exact: Tensor, terms: int, rounded: bool = False) -> bool:
    rounding = torch.finfo(ours.dtype).eps * (1 if INTERPRETED else 0.5)  # it cuts bits off
    rounding *= 2 if rounded else 1  # so are the weights
    error = (ours.cpu().double() - exact).norm()
    return bool(error <= (rounding + terms**0.5 * 2.0**-22) * exact.norm())


def depth_of(format: str) -> int:
    return triton_launch.dequant_scheme(resolve_format(format)).block_k if "int4" in format else 128


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # of the first turn of MXFP4
@pytest.mark.parametrize("format", [*NIBBLES, *OTHERS, *GROUPS])
@pytest.mark.parametrize("rows, m", [(1, 1), (4, 3), (16, 15), (8, 9)])
def test_rows_of_x(format: str, rows: int, m: int) -> None:
    packed = quantize(torch.randn(37, 384) * torch.randn(37, 1).exp(), format)
    x = torch.randn(m, 384).bfloat16()
    found = few(x, packed, small_m_config(16, depth_of(format), 2, 2, rows))
    exact = x.double() @ packed.dequantize(torch.float32).double().t()
    assert near(found, exact, 384)


@pytest.mark.parametrize("format", GROUPS)
@pytest.mark.parametrize("k", [32, 160, 416])
def test_groups_of_integers(format: str, k: int) -> None:
    """float16 rows too; columns that fill no step; one weight stands out, so its place is right."""
    dense = torch.zeros(21, k)
    dense[3, k - 1], dense[20, 0] = 5.0, -3.0
    packed = quantize(dense + torch.randn(21, k) / 64, format)
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.randn(2, k).to(dtype)
        found = triton_quant_linear.quant_linear(x.to(DEVICE), *parts_of(packed), format)
        exact = x.double() @ packed.dequantize(torch.float32).double().t()
        assert found.dtype == dtype and near(found, exact, k)


def test_weights_of_gguf_regrouped() -> None:
    """A file's blocks, as a GPU reads them, by the few rows' kernel and by the tiled one."""
    for name in ("q4_0", "q4_1", "q8_0", "q4_k", "q6_k"):
        packed = quantize(torch.randn(20, 512), name)
        grouped = repack_gguf(packed)
        for m in (1, 17):
            x = torch.randn(m, 512).bfloat16()
            found = triton_quant_linear.quant_linear(
                x.to(DEVICE), *parts_of(grouped), grouped.format.name
            )
            exact = x.double() @ packed.dequantize(torch.float32).double().t()
            assert near(found, exact, 512, rounded=m > SMALL_M), (name, m)


@pytest.mark.parametrize("tile", [(16, 64, 1), (32, 256, 2), (16, 128, 4), (64, 128, 2)], ids=str)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "int8", "int4_g32_asym", "int4_g32_min"])
def test_tiles(format: str, tile: tuple[int, int, int]) -> None:
    packed = quantize(torch.randn(65, 416), format)
    x = torch.randn(2, 416).bfloat16()
    found = few(x, packed, small_m_config(*tile, 3, 4))
    assert near(found, x.double() @ packed.dequantize(torch.float32).double().t(), 416)


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered")  # of the first turn
@pytest.mark.parametrize("code", [0, 1, 128, 129, 191, 251])
def test_every_size_of_an_mxfp4_scale(code: int) -> None:
    """Scales above 2 take the second turn; zero blocks, with the smallest scale, don't need it."""
    packed = quantize(torch.randn(20, 256), "mxfp4")
    packed.scale.view(torch.uint8)[::3, 2] = code
    packed.scale.view(torch.uint8)[:, 5] = 0
    x = (torch.randn(3, 256) * 2.0**-40).bfloat16()
    found = few(x, packed, small_m_config(16, 128, 2, 2, 4))
    assert near(found, x.double() @ packed.dequantize(torch.float32).double().t(), 256)


def test_nan_scales_make_nan_of_their_rows() -> None:
    packed = quantize(torch.randn(20, 256), "mxfp4")
    packed.scale.view(torch.uint8)[3, 2] = 255
    found = (
        few(torch.randn(2, 256).bfloat16(), packed, small_m_config(16, 128, 2, 2, 4)).isnan().cpu()
    )
    assert found[:, 3].all() and found.sum() == 2


@pytest.mark.parametrize("format", ["nvfp4", "int4_g32"])
def test_nan_and_infinity_of_x_stay_in_their_row(format: str) -> None:
    packed = quantize(torch.randn(20, 256).abs() + 1, format)
    x = torch.randn(3, 256).bfloat16()
    x[0, 9], x[2, 40] = torch.nan, torch.inf
    found = few(x, packed, small_m_config(16, 128, 2, 2, 4)).cpu()
    assert found[0].isnan().all() and found[1].isfinite().all() and (found[2] == torch.inf).all()


def test_all_codes() -> None:
    """Each of 65536 words of four nibbles, in either half of a register; the interpreter has none."""
    words = torch.arange(0, 65536, 8 if INTERPRETED else 1, dtype=torch.int32)
    words = torch.stack((words, words.flip(0)), 1).to(torch.int16).view(-1, 256)
    packed = quantize(torch.ones(len(words), 1024), "mxfp4")
    packed.packed.copy_(words.view(torch.uint8))
    x = torch.zeros(4, 1024)
    x[0, 0::8], x[1, 1::8], x[2, 6::8], x[3, 7::8] = 1.0, 2.0, 1.0, 2.0
    found = few(x.bfloat16(), packed, small_m_config(16, 128, 2, 2, 4))
    assert near(found, x.double() @ packed.dequantize(torch.float32).double().t(), 16)


# ---- experts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "format, gate, rows",
    [
        ("nvfp4", "silu", 1), ("nvfp4", "clamped", 4), ("mxfp4", "silu", 4), ("mxfp4", "none", 1),
        ("int4_g128", "none", 4), ("fp8_e4m3_128x128", "clamped", 1), ("int8", "none", 1),
        ("int4_g32", "silu", 1), ("int4_g32_min", "clamped", 4), ("int4_g32_asym", "none", 1),
        ("int8_g16", "silu", 4),
    ],
)  # fmt: skip
def test_experts(format: str, gate: str, rows: int) -> None:
    """Experts with none, one and more rows than a program takes; some rows of no expert."""
    packed = quantize(torch.randn(5, 2 * 21, 256) / 16, format)
    ends = torch.tensor([3, 3, 4, 10, 11], dtype=torch.int32)
    x, which = torch.randn(6, 256).bfloat16(), torch.randint(6, (13,), dtype=torch.int32)
    bias, factors = torch.randn(5, 42).bfloat16(), torch.rand(13) + 0.5
    columns = 42 if gate == "none" else 21
    given = dict(zip(("rows", "factors", "ends", "bias"), on_device(which, factors, ends, bias)))
    tile = small_m_config(16, depth_of(format), 2, 2, rows)
    found = few(x, packed, tile, gate=(GATE_IDS[gate], 1.7, 2.0), columns=columns, **given)
    wanted = plain.reference(
        x.double(), which, None, factors.double(), ends, packed.dequantize(torch.float32).double(), [],
        "dense", bias.double(), "none", gate, 1.7, 2.0,
    )  # fmt: skip
    assert near(found, wanted, 256)
    assert not found[11:].any()


def test_the_same_twice_and_in_any_company() -> None:
    """A row's result depends neither on the run nor on which rows stand beside it."""
    packed = quantize(torch.randn(3, 20, 256), "nvfp4")
    x = torch.randn(7, 256).bfloat16()
    tile = small_m_config(16, 128, 2, 2, 4)
    ends = torch.tensor([2, 6, 7], dtype=torch.int32).to(DEVICE)
    first, second = (few(x, packed, tile, ends=ends) for _ in range(2))
    assert torch.equal(first, second)
    alone = few(x[3:4], packed, tile, ends=torch.tensor([0, 1, 1], dtype=torch.int32).to(DEVICE))
    assert torch.equal(first[3], alone[0])


def test_few_and_more_rows_of_experts_agree() -> None:
    """On both sides of where the kernel changes."""
    packed = quantize(torch.randn(2, 24, 128), "nvfp4")
    exact = packed.dequantize(torch.float32).double()
    data, scales = parts_of(packed)
    for count in (
        2 * Sm90Heuristics.small_m_rows_per_expert,
        2 * Sm90Heuristics.small_m_rows_per_expert + 1,
    ):
        x, ends = torch.randn(count, 128).bfloat16(), torch.tensor([3, count], dtype=torch.int32)
        given = (x.to(DEVICE), ends.to(DEVICE), data, scales, "nvfp4")
        wanted = torch.cat((x[:3].double() @ exact[0].t(), x[3:].double() @ exact[1].t()))
        assert near(triton_quant_linear.grouped_quant_linear(*given), wanted, 128)


@pytest.mark.parametrize(
    "format",
    ["nvfp4", "mxfp4", "int4_g64_asym", "int4_g32_min", "int4_g32", "int8_g16", "int8",
     "fp8_e4m3_128x128"],
)  # fmt: skip
@pytest.mark.parametrize("tokens, per_token", [(1, 3), (1, 8), (2, 2)])
def test_a_token_and_its_experts(format: str, tokens: int, per_token: int) -> None:
    """Both matmuls, the gate and the weighted sum in two kernels; one pair has no expert."""
    up, down = (quantize(torch.randn(16, n, 128) / 11, format) for n in (256, 40))
    chosen = torch.rand(tokens, 16).topk(per_token)[1]
    chosen[0, -1] = 16
    x, weights = torch.randn(tokens, 128).bfloat16(), torch.rand(tokens, per_token)
    residual = torch.randn(tokens, 40).bfloat16()
    wide_up, wide_down = (w.dequantize(torch.float32).double() for w in (up, down))
    wanted = residual.double()
    for t, row in enumerate(chosen.tolist()):
        for e, weight in zip(row, weights[t].double(), strict=True):
            if e < 16:
                left, right = (wide_up[e] @ x[t].double()).chunk(2)
                h = (torch.nn.functional.silu(left) * right).bfloat16().double()
                wanted[t] += weight * (wide_down[e] @ h)
    found = run_quantized_experts(
        *on_device(x, chosen, weights), up.to(DEVICE), down.to(DEVICE), "silu", 0.0, 0.0,
        None, residual.to(DEVICE),
    )  # fmt: skip
    assert found.shape == (tokens, 40) and near(found, wanted, 4096)  # h may round the other way
