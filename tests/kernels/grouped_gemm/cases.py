"""Problems of grouped GEMM tests: routed tokens, weights, and the reference in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fulgurite.kernels.elementwise.gated_activation import GatedActivation
from fulgurite.kernels.grouped_gemm import reference
from fulgurite.kernels.grouped_gemm.args import DENSE, GroupedGemmArgs
from fulgurite.kernels.moe.ops import ExpertOrder
from fulgurite.kernels.moe.reference import sort_by_expert
from fulgurite.kernels.tuning import LaunchConfig
from fulgurite.kernels.tuning.generic import GenericHeuristics
from fulgurite.quant import QuantTensor
from tests.kernels.moe.cases import make_routes

Shape = tuple[int, int, int, int, int, str]  # tokens, experts, top_k, K, rows of the weight, gate


def make_order(tokens: int, experts: int, top_k: int) -> ExpertOrder:
    """Routes of random tokens, one of them to no expert."""
    selected = make_routes(tokens, experts, top_k).experts_Tk
    selected[tokens // 2, 0] = -1
    return ExpertOrder(*sort_by_expert(selected, experts))


@dataclass(frozen=True)
class Problem:
    """Arguments of a grouped GEMM on the CPU with a dense weight, and the order of its rows."""

    args: GroupedGemmArgs
    order: ExpertOrder

    def expected(self) -> Tensor:
        """The reference in float64."""
        return reference.grouped_gemm(map_tensors(self.args, torch.Tensor.double))


def make_problem(
    shape: Shape, dtype: torch.dtype, with_epilogue: bool, is_gathered: bool = True
) -> Problem:
    """`with_epilogue`: row weights and a bias, too."""
    tokens, experts, top_k, size, columns, gate = shape
    generator = torch.Generator().manual_seed(tokens + columns)
    order, pairs = make_order(tokens, experts, top_k), tokens * top_k
    x = torch.randn(tokens if is_gathered else pairs, size, generator=generator).to(dtype)
    weight = torch.randn(experts, columns, size, generator=generator) / math.sqrt(size)
    row_weights = torch.rand(pairs, generator=generator) if with_epilogue else None
    bias = torch.randn(experts, columns, generator=generator).to(dtype) if with_epilogue else None
    args = GroupedGemmArgs(
        x, order.token_S if is_gathered else None, row_weights, order.offsets_E, weight.to(dtype), [],
        DENSE, bias, "none", GatedActivation(gate, 1.7, 0.9),
    )  # fmt: skip
    return Problem(args, order)


def with_quantized_weight(args: GroupedGemmArgs, weight: QuantTensor) -> GroupedGemmArgs:
    scales = list(weight.scales.values())
    return replace(args, data=weight.packed, scales=scales, format=weight.format.name)


def map_tensors(args: GroupedGemmArgs, function) -> GroupedGemmArgs:
    """`function` of every float tensor, for example a cast."""

    def apply(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else function(tensor)

    return replace(
        args,
        x=apply(args.x),
        row_weights=apply(args.row_weights),
        data=apply(args.data),
        scales=[function(scale) for scale in args.scales],
        bias=apply(args.bias),
    )


def to_device(args: GroupedGemmArgs, device: str) -> GroupedGemmArgs:
    moved = map_tensors(args, lambda tensor: tensor.to(device))
    indices = None if args.row_indices is None else args.row_indices.to(device)
    return replace(moved, row_indices=indices, offsets=args.offsets.to(device))


def assert_near(actual: Tensor, expected: Tensor, order: ExpertOrder) -> None:
    """Within a few roundings of the output; rows without an expert are zero."""
    assert actual.shape == expected.shape
    error = (actual.double() - expected).abs().max().item()
    assert error <= 6 * torch.finfo(actual.dtype).eps * max(1.0, expected.abs().max().item())
    assert not actual[order.offsets_E[-1] :].any()


class FixedConfig(GenericHeuristics):
    """One config for every 4-bit grouped GEMM."""

    def __init__(self, config: LaunchConfig) -> None:
        super().__init__()
        self.config = config

    def grouped_gemm_4bit(self, *_) -> LaunchConfig:
        return self.config
