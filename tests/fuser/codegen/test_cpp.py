"""Golden texts of generated C++ kernels, which a person has read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fulgurite import device
from fulgurite.fuser.codegen.cpp import translation_unit
from fulgurite.fuser.codegen.cpp.expressions import RESERVED, SUFFIXES, identifier
from fulgurite.fuser.frontend import lower_graph
from fulgurite.fuser.ir import split_axes
from fulgurite.fuser.lowering import name_kernel
from fulgurite.fuser.schedule.cpu.choose import choose_cpu_schedule
from fulgurite.fuser.segment import segment_region
from fulgurite.fuser.segment.build_loop_nest import build_loop_nest
from fulgurite.fuser.segment.inplace import store_in_place
from tests.fuser.support import trace

F = torch.nn.functional
CPU = device.DeviceInfo("a CPU", 2, 2e10, 8e10, 48 << 10, 2 << 20, (torch.float32,))


def rope(q, cos, sin):
    return q * cos + torch.cat([-q[..., 32:], q[..., :32]], -1) * sin


def norm_backward(g, x, w):
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    normal = x * rstd
    gw = g * w
    return rstd * (gw - normal * (gw * normal).mean(-1, keepdim=True)), (g * normal).sum(0)


def batch_norm(x, mean, variance):
    var, average = torch.var_mean(x, (0, 2), correction=0)
    mean.mul_(0.9).add_(average * 0.1)
    variance.mul_(0.9).add_(var * 0.1)
    return (x - average[:, None]) * torch.rsqrt(var[:, None] + 1e-5)


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple:
    return tuple(torch.zeros(shape, dtype=dtype) for shape in shapes)


CASES: dict[str, tuple[Callable, tuple]] = {
    "gelu_bias": (lambda x, b: F.gelu(x + b, approximate="tanh"), tensors((4096, 1024), (1024,))),
    "silu_mul_bf16": (
        lambda a, b: F.silu(a) * b,
        tensors((4096, 1024), (4096, 1024), dtype=torch.bfloat16),
    ),
    "rms_norm": (lambda x, w: F.rms_norm(x, (1024,), w, 1e-6), tensors((4096, 1024), (1024,))),
    "layer_norm": (lambda x, w: F.layer_norm(x, (1024,), w, w), tensors((4096, 1024), (1024,))),
    "softmax": (lambda x: torch.softmax(x, -1), tensors((4096, 1024))),
    "softmax_columns": (lambda x: torch.softmax(x, 0), tensors((512, 1024))),
    "cross_entropy": (
        lambda x, t: F.cross_entropy(x, t),
        (torch.zeros(512, 1000), torch.zeros(512, dtype=torch.int64)),
    ),
    "rope": (rope, tensors((2, 8, 128, 64), (128, 64), (128, 64))),
    "sum_columns": (lambda x: (x * 2).sum(0), tensors((4096, 4096))),
    "sum_all": (lambda x: x.sum(), tensors((4096, 4096))),
    "transpose": (lambda x: (x.t() + 1).contiguous(), tensors((1000, 2000))),
    "rms_norm_backward": (norm_backward, tensors((4096, 512), (4096, 512), (512,))),
    "batch_norm": (batch_norm, tensors((16, 256, 49), (256,), (256,))),
    "embedding": (
        lambda i, t: F.embedding(i, t) * 3,
        (torch.zeros(64, 100, dtype=torch.int64), torch.zeros(5000, 512)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_kernel_text(name: str, golden) -> None:
    function, arguments = CASES[name]
    region = split_axes.split_axes(
        lower_graph.lower_graph(trace(function, arguments), corrects_means=True)
    )
    texts = []
    segments = segment_region(region, CPU.l2_cache_bytes)
    _, nests = store_in_place(region, [build_loop_nest(region, part) for part in segments])
    for number, (part, nest) in enumerate(zip(segments, nests, strict=True)):
        schedule = choose_cpu_schedule(nest, CPU)
        texts.append(translation_unit.write_kernel(name_kernel(part, number), schedule).text)
    assert len(texts) == 1, "each of these is one kernel"
    golden(f"fuser_{name}.cpp", "\n".join(texts))


def test_names_of_cpp_and_names_with_an_underscore_are_told_apart() -> None:
    names = ["sin", "sin_", "sin__", "x", "x_", "i0", "i0_", "a_out", "a_out_", "if", "if_", "s1_"]
    printed = [identifier(name) for name in names]
    assert len(set(printed)) == len(names) and not RESERVED & set(printed)


def test_no_name_with_a_suffix_is_a_function_of_our_headers() -> None:
    for name in ("transpose", "make", "x"):
        assert not {identifier(name) + suffix for suffix in SUFFIXES} & RESERVED


def write_kernels(function: Callable, arguments: tuple) -> list[str]:
    region = split_axes.split_axes(lower_graph.lower_graph(trace(function, arguments)))
    segments = segment_region(region, CPU.l2_cache_bytes)
    _, nests = store_in_place(region, [build_loop_nest(region, part) for part in segments])
    schedules = [choose_cpu_schedule(nest, CPU) for nest in nests]
    return [
        translation_unit.write_kernel(name_kernel(part, k), schedule).text
        for k, (part, schedule) in enumerate(zip(segments, schedules, strict=True))
    ]


def test_lookups_are_outside_of_the_loop_along_a_stored_row() -> None:
    source, target = torch.zeros(2, 400, dtype=torch.int64)
    arguments = (torch.zeros(80, 64), source, target, torch.zeros(400, 1))
    *_, text = write_kernels(
        lambda x, source, target, w: torch.zeros_like(x).index_add(0, target, x[source] * w),
        arguments,
    )
    outer, inner = text.split("#pragma omp simd")
    assert outer.count("_index(") == 2 and "_index(" not in inner


@pytest.mark.parametrize(("width", "variants"), [(24, 2), (64, 1), (600, 2)])
def test_blocks_of_columns_have_a_constant_number_of_lanes(width: int, variants: int) -> None:
    (text,) = write_kernels(lambda x: x - x.mean(0), (torch.zeros(200, width),))
    lanes = [line for line in text.splitlines() if "const int64_t lanes =" in line]
    assert len(lanes) == variants
    assert all(line.split()[-1].strip(";").isdigit() for line in lanes)
