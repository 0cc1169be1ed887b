"""Dtype views of equal and of other width, packed and narrow floats, and as_strided: exact bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fulgurite
from fulgurite import fuser
from fulgurite.fuser.frontend.lower_graph import lower_graph
from fulgurite.fuser.ir.interpreter import interpret_region
from fulgurite.fuser.ir.split_axes import split_axes
from fulgurite.fuser.ir.statement import verify_region
from tests.fuser import support
from tests.fuser.support import as_tuple, check_fused, check_interpreted, check_layout, trace

RUNS_ON_TRITON = True

GPU_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOAT8 = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, *FLOAT8),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
]
INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_bits(function: Callable[..., Any], *arguments: torch.Tensor) -> fuser.FusedRegion:
    """Checks that interpreter and kernels return exactly eager's bits."""
    graph = trace(function, arguments)
    region = lower_graph(graph)
    verify_region(region)
    lowered = fuser.lower_region(graph)
    eager = as_tuple(function(*arguments))
    runs = [interpret_region(variant, arguments) for variant in (region, split_axes(region))]
    for results in (*runs, lowered(*arguments)):
        for ours, theirs in zip(results, eager, strict=True):
            check_layout(ours, theirs)
            bytes_ = [t.contiguous().view(torch.uint8) for t in (ours, theirs)]
            assert torch.equal(*bytes_), f"{ours} instead of {theirs}"
    return lowered


def view_as_all_dtypes(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views a tensor as every dtype, through an integer of its width, so that no bit is lost."""
    return tuple(x.view(dtype).view(INTEGER_OF_SIZE[dtype.itemsize]) + 1 for dtype in DTYPES)


@pytest.mark.parametrize("dtypes", [DTYPES[k::3] for k in range(3)])
def test_views_of_every_pair_of_dtypes(dtypes: list[torch.dtype]) -> None:
    torch.manual_seed(0)
    bits = torch.randint(-(2**62), 2**62, (3, 8))
    check_bits(
        lambda *xs: tuple(r for x in xs for r in view_as_all_dtypes(x)),
        *(bits.view(dtype)[1:] for dtype in dtypes),
    )


def test_bits_of_computed_values() -> None:
    torch.manual_seed(1)

    def function(x):
        doubled = (x * 2).view(torch.int32) ^ 7
        half = (x * 2).to(torch.bfloat16).view(torch.int16) + 1
        return (
            doubled,
            doubled.view(torch.float32),
            half,
            (x + 1).view(torch.int64),
            x.view(torch.uint8),
        )

    check_bits(function, torch.randn(5, 16))


def test_packed_float4() -> None:
    """Unpacks and packs two numbers per byte, as input and as output."""
    codes = torch.randint(0, 256, (6, 8), dtype=torch.uint8)
    packed = codes.view(torch.float4_e2m1fn_x2)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

    def widen(q, table):
        both = q.view(torch.uint8)
        low, high = table[(both & 15).long()], table[(both >> 4).long()]
        return torch.stack([low, high], -1).flatten(-2) * 2

    check_bits(widen, packed, table)
    region = fuser.lower_region(trace(lambda u: (u + 1).view(torch.float4_e2m1fn_x2), (codes,)))
    (result,) = region(codes)
    assert result.dtype == torch.float4_e2m1fn_x2
    assert torch.equal(result.view(torch.uint8), codes + 1)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_float8_codes(dtype: torch.dtype) -> None:
    """Every number rounds, saturates or overflows to torch's code."""
    if support.TARGET != "cpp" and dtype not in GPU_FLOAT8:
        pytest.skip(f"generated GPU code leaves {dtype} to torch")
    torch.manual_seed(2)
    edges = [0.0, -0.0, 240.0, 247.9, 248.0, 448.0, 464.0, 465.0, 480.0, 57344.0, 61440.0, 3.4e38]
    limits = [
        2.0**-127,
        2.0**-128,
        2.0**-149,
        1.5 * 2.0**127,
        float("inf"),
        -float("inf"),
        float("nan"),
    ]
    spread = torch.randn(4000) * 10.0 ** torch.arange(-20, 20).repeat(100)
    values = torch.cat([torch.tensor([*edges, *limits]), torch.arange(0, 3000) * 0.25, spread])
    region = fuser.lower_region(trace(lambda v: (v * 1).to(dtype), (values,)))
    assert torch.equal(region(values)[0].view(torch.uint8), values.to(dtype).view(torch.uint8))
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    check_fused(lambda c: c.to(torch.float32) * 1, codes)


STRIDED = {
    "part": lambda z: z.as_strided((3, 4), (2, 5), 3) * 2,
    "of_result": lambda z: (z * 3).as_strided((4, 4, 3), (8, 2, 1)) + 1,
    "of_transposed": lambda z: (z.t() * 2).as_strided((5,), (9,), 2) + 1,
    "of_slice": lambda z: z[1:].as_strided((3,), (1,), 8) * 1,
    "transposed": lambda z: z.t().as_strided((4, 5), (1, 7)) + 1,
    "repeated": lambda z: z.as_strided((2, 2), (0, 1)) * 1,
    "windows": lambda z: z.unfold(0, 3, 1) * 2 + z.as_strided((4, 8, 3), (8, 1, 8)),
    "returned": lambda z: z.as_strided((3, 4), (2, 5), 3),
}


def test_as_strided() -> None:
    z = torch.randn(6, 8)
    for case in STRIDED.values():
        check_interpreted(case, z)
    check_fused(lambda z: tuple(case(z) for case in STRIDED.values()), z)
    offset = torch.randn(100)[10:58].view(6, 8)
    check_fused(
        lambda z: (z.as_strided((3, 4), (2, 5), 13) * 2, z[1:].as_strided((3,), (1,)) * 1), offset
    )


def test_as_strided_out_of_bounds_is_unsupported() -> None:
    x = torch.randn(100)[10:58]
    graph = trace(lambda z: z.as_strided((4,), (1,), 0) * 1, (x,))
    node = next(n for n in graph.graph.nodes if n.target is torch.ops.aten.as_strided.default)
    assert "out of bounds" in str(fuser.unsupported_reason(node))


@pytest.mark.parametrize(
    "function",
    [lambda x: x.to(torch.float32) * 2, lambda x: x + 1, lambda x: x * x, lambda x: x.sum()],
)
def test_arithmetic_on_packed_floats_is_refused_as_in_eager(function: Any) -> None:
    x = torch.randint(0, 256, (4, 6), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with pytest.raises(NotImplementedError):
        function(x)
    torch._dynamo.reset()
    with pytest.raises(NotImplementedError):
        fulgurite.compile(function)(x)


def test_views_and_copies_of_packed_floats() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.t().contiguous().view(torch.uint8) + 1).view(torch.float4_e2m1fn_x2)

    x = torch.randint(0, 256, (4, 6), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    torch._dynamo.reset()
    assert torch.equal(fulgurite.compile(f)(x).view(torch.uint8), f(x).view(torch.uint8))
