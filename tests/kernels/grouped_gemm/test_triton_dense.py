"""Grouped GEMM with many rows on a GPU: gathered, gated and biased, against float64."""

from __future__ import annotations

from dataclasses import replace

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
LARGE_CONFIG = LaunchConfig(128, 256, 64, num_warps=8, num_stages=3, group_n=4)
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
    assert supports_tma(args.x, args.data, args.gate.is_gated)
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
    config = replace(LARGE_CONFIG, block_n=128 if gate == "silu" else 256)
    check((150, 1, 1, 128, 300, gate), torch.bfloat16, False, config)


@pytest.mark.parametrize("first, stride", [(0, 16), (0, 20), (3, 24)])
@pytest.mark.parametrize("n_contiguous", [False, True])
def test_rows_that_are_sorted_already(first: int, stride: int, n_contiguous: bool) -> None:
    """Contiguous, or at addresses that tensor descriptors don't take."""
    x, weight = torch.randn(5, stride).bfloat16(), torch.randn(2, 24, 16).bfloat16()
    x = x.to(DEVICE)[:, first : first + 16]
    if n_contiguous:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    offsets = torch.tensor([2, 5], dtype=torch.int32)
    args = GroupedGemmArgs(x, None, None, offsets, weight, [], DENSE, None, "none", UNGATED)
    actual = grouped_gemm_dense(to_device(args, DEVICE), CONFIG)
    rows, (first_weight, second_weight) = x.cpu().float(), weight.float()
    expected = torch.cat((rows[:2] @ first_weight.T, rows[2:] @ second_weight.T))
    torch.testing.assert_close(actual.cpu(), expected.bfloat16(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "shape",
    [(70, 1, 1, 40, 64, "none"), (75, 3, 2, 72, 72, "none"), (150, 2, 1, 130, 304, "none")],
    ids=str,
)
@pytest.mark.parametrize("config", [CONFIG, LARGE_CONFIG], ids=["small", "large"])
def test_weights_with_contiguous_columns(shape: Shape, config: LaunchConfig) -> None:
    """As the gradient of x has them: a view of [E, K, N]."""
    problem = make_problem(shape, torch.bfloat16, with_epilogue=True)
    args = problem.args
    stored = args.data.transpose(1, 2).contiguous()
    args = to_device(replace(args, data=stored), DEVICE)
    args = replace(args, data=args.data.transpose(1, 2))
    assert supports_tma(args.x, args.data, is_gated=False)
    assert_near(grouped_gemm_dense(args, config).cpu(), problem.expected(), problem.order)


def test_operands_that_tensor_descriptors_do_not_support() -> None:
    x = torch.ones(2, 16, dtype=torch.bfloat16)
    weight = torch.ones(3, 24, 16, dtype=torch.bfloat16)
    transposed = weight.transpose(1, 2).contiguous().transpose(1, 2)
    for is_gated in (False, True):
        assert supports_tma(x, weight, is_gated)
        assert supports_tma(x, transposed, is_gated) != is_gated
        assert not supports_tma(x, weight.float(), is_gated)
        assert not supports_tma(x.float(), weight.float(), is_gated)
        assert not supports_tma(x[:, :12], weight[:, :, :12].contiguous(), is_gated)
        assert not supports_tma(x, transposed[:, :20], is_gated)
        assert not supports_tma(x[:, :8], weight[:, :, ::2], is_gated)
