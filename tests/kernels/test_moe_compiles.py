"""The experts' Triton kernels compile for an H200 at the sizes of real models, without one."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs triton, and not its interpreter", allow_module_level=True)

from fulgurite.kernels.triton import grouped_matmul, moe, routing
from fulgurite.quant import quantize

from .compile_support import compile_launches

pytestmark = pytest.mark.slow
BF16 = torch.bfloat16


def test_sorting_and_summing(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = compile_launches(moe, monkeypatch)
    for tokens in (1, 4096):
        moe.index(torch.zeros(tokens, 8, dtype=torch.int64), 256)
    places = torch.zeros(8, 8, dtype=torch.int32)
    moe.combine(torch.empty(64, 7168, dtype=BF16), places, places, places, torch.ones(8, 8))
    assert all(kernel.kernels for kernel in kernels)


@pytest.mark.parametrize("tokens", [1, 8192])
def test_routing(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = compile_launches(routing, monkeypatch)
    groups = (8, "sigmoid", False, True, 2.5, 8, 4, "two")
    routing.route(torch.empty(tokens, 256), torch.empty(256), *groups)
    x, weight = torch.empty(tokens, 2048, dtype=BF16), torch.empty(128, 2048, dtype=BF16)
    routing.route_tokens(x, weight, None, None, 8, "softmax", False, True, 1.0, 1, 1, "max")
    routing.route_tokens(x, weight.float(), weight[:, 0].contiguous(), torch.empty(128), *groups)
    assert all(kernel.kernels for kernel in kernels)


@pytest.mark.parametrize("tokens", [1, 64, 8192])
@pytest.mark.parametrize(
    "format", ["dense", "fp8_e4m3_row", "fp8_e4m3_128x128", "nvfp4", "mxfp4", "int8", "int4_g128"]
)
def test_grouped_matmul(format: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = compile_launches(grouped_matmul, monkeypatch)
    experts, hidden, inner = 8, 1024, 512
    weight = torch.ones(experts, 2 * inner, hidden)
    data, scales = weight.to(BF16), []
    if format != "dense":
        packed = quantize(weight, format)
        data, scales = packed.packed, list(packed.scales.values())
    rows, ends = torch.zeros(2 * tokens, dtype=torch.int32), torch.zeros(experts, dtype=torch.int32)
    x = torch.empty(tokens, hidden, dtype=BF16)
    for gate, factors, bias in (("silu", None, None), ("clamped", torch.empty(2 * tokens), data)):
        bias = None if bias is None else torch.empty(experts, 2 * inner, dtype=BF16)
        grouped_matmul.grouped_matmul(
            x, rows, None, factors, ends, data, scales, format, bias, "none", gate, 1.7, 7.0
        )
    assert sum(len(kernel.kernels) for kernel in kernels) == 2


def test_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    (outer,) = (
        k for k in compile_launches(grouped_matmul, monkeypatch) if "outer" in k.function.__name__
    )
    ends = torch.zeros(8, dtype=torch.int32)
    for dtype, columns in ((BF16, 2048), (torch.float32, 1)):
        a, b = torch.empty(512, 1536, dtype=dtype), torch.empty(512, columns, dtype=dtype)
        grouped_matmul.grouped_outer(a, b, ends)
    assert len(outer.kernels) == 2
