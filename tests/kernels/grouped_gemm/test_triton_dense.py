"""Grouped GEMM with many rows on a GPU: gathered, gated and biased, against float64."""

from __future__ import annotations

import pytest
import torch

from fulgurite.kernels.elementwise.gated_activation import UNGATED
from fulgurite.kernels.grouped_gemm.args import DENSE, GroupedGemmArgs
from fulgurite.kernels.grouped_gemm.triton_dense import grouped_gemm_dense, supports_tma
from fulgurite.kernels.tuning import LaunchConfig
from tests.kernels.grouped_gemm.cases import Shape, assert_near, make_problem, to_device
from tests.kernels.triton_support import DEVICE, INTERPRETED

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
CONFIG = LaunchConfig(64, 32, 32, num_warps=4, num_stages=3, group_n=4)
SHAPES = [
    (1, 1, 1, 8, 2, "silu"),
    (70, 1, 1, 40, 64, "none"),
    (75, 3, 2, 72, 70, "silu"),
    (9, 5, 2, 64, 33, "none"),
    (40, 2, 1, 96, 128, "clamped"),
    (131, 2, 2, 32, 66, "gelu"),
]


def check(
    shape: Shape, dtype: torch.dtype, with_epilogue: bool, config: LaunchConfig = CONFIG
) -> None:
    problem = make_problem(shape, dtype, with_epilogue)
    args = to_device(problem.args, DEVICE)
    assert supports_tma(args.x, args.data)
    actual = grouped_gemm_dense(args, config).cpu()
    assert actual.dtype == dtype
    assert_near(actual, problem.expected(), problem.order)


@pytest.mark.parametrize("with_epilogue", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gathered_and_gated(shape: Shape, with_epilogue: bool) -> None:
    check(shape, torch.bfloat16, with_epilogue)


def test_float16() -> None:
    check(SHAPES[2], torch.float16, with_epilogue=True)


@pytest.mark.parametrize("gate", ["silu", "none"])
def test_the_config_of_large_layers(gate: str) -> None:
    block_n = 128 if gate == "silu" else 256
    config = LaunchConfig(128, block_n, 64, num_warps=8, num_stages=3, group_n=4)
    check((150, 1, 1, 128, 300, gate), torch.bfloat16, False, config)


def test_rows_that_are_sorted_already() -> None:
    x, weight = torch.randn(5, 16).bfloat16(), torch.randn(2, 24, 16).bfloat16()
    offsets = torch.tensor([2, 5], dtype=torch.int32)
    args = GroupedGemmArgs(x, None, None, offsets, weight, [], DENSE, None, "none", UNGATED)
    actual = grouped_gemm_dense(to_device(args, DEVICE), CONFIG)
    expected = torch.cat((x[:2].float() @ weight[0].float().T, x[2:].float() @ weight[1].float().T))
    torch.testing.assert_close(actual.cpu(), expected.bfloat16(), rtol=1e-2, atol=1e-2)


def test_operands_that_tensor_descriptors_do_not_support() -> None:
    x = torch.ones(2, 16, dtype=torch.bfloat16)
    weight = torch.ones(3, 24, 16, dtype=torch.bfloat16)
    assert supports_tma(x, weight)
    assert not supports_tma(x, weight.float())
    assert not supports_tma(x.float(), weight.float())
    assert not supports_tma(x, weight.transpose(1, 2))
    assert not supports_tma(x[:, :12], weight[:, :, :12].contiguous())
