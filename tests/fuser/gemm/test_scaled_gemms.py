"""Scaled matmuls with epilogues: every form of the call, every scaling, one kernel.

Kernels run in Triton's interpreter (a sample in the normal run, everything with TRITON_INTERPRET=1) and on a GPU.
The reference is the dequantized product in float64.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from fulgurite.compile import compile
from fulgurite.device import DeviceInfo
from fulgurite.fuser.codegen.triton.module import write_module
from fulgurite.fuser.gemm import fusion, heuristics
from fulgurite.fuser.gemm.calls import unsupported_reason
from fulgurite.fuser.gemm.codegen import write_gemm
from fulgurite.fuser.gemm.frontend import lower_gemm_graph
from fulgurite.fuser.gemm.lower import LibraryGemmRegion, lower_gemm
from fulgurite.fuser.gemm.schedule import schedule_gemms
from fulgurite.fuser.ir import interpreter
from fulgurite.fuser.lowering import has_triton
from fulgurite.fuser.runtime import compile_triton
from fulgurite.kernels.gemm.scaled_mm import scaled_mm_op
from fulgurite.kernels.tuning.gemm_epilogue import GemmEpilogueConfig
from fulgurite.kernels.tuning.sm_90 import Sm90Heuristics
from fulgurite.quant import quantize
from tests.forked import run_pytest
from tests.fuser.support import check_close, trace
from tests.fuser.triton_interpreter import patch

HALF = torch.bfloat16
SM90 = Sm90Heuristics()
CPU = torch.device("cpu")
H200 = DeviceInfo("H200", 132, 4.2e12, 2.9e13, 256 << 10, 50 << 20, (torch.float32,))
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
runs = pytest.mark.filterwarnings("default") if INTERPRETED else pytest.mark.gpu
CONFIGS = {  # block_k in 16-bit elements
    "pointers": GemmEpilogueConfig(32, 32, 16, 4, 3, use_tma=False, persistent=False),
    "tma": GemmEpilogueConfig(64, 64, 32, 4, 3, persistent=True, group_m=2, tma_store=True),
}
# form of the call and formats of the matrices
FORMS = {
    "tensor": ("private", "fp8_e4m3_tensor", "fp8_e4m3_tensor"),
    "row": ("private", "fp8_e4m3_row", "fp8_e4m3_row"),
    "row_v2": ("public", "fp8_e4m3_row", "fp8_e4m3_row"),
    "e5m2": ("ours", "fp8_e5m2_row", "fp8_e4m3_tensor"),
    "ours_row": ("ours", "fp8_e4m3_row", "fp8_e4m3_row"),
    "blocks": ("ours", "fp8_e4m3_1x128", "fp8_e4m3_128x128"),
    "row_blocks": ("ours", "fp8_e4m3_1x128", "fp8_e4m3_1x128"),
    "blocks_v2": ("public", "fp8_e4m3_1x128", "fp8_e4m3_128x128"),
}
KINDS = {
    "fp8_e4m3_row": ScalingType.RowWise,
    "fp8_e4m3_1x128": ScalingType.BlockWise1x128,
    "fp8_e4m3_128x128": ScalingType.BlockWise128x128,
}


@pytest.fixture(autouse=True)
def _interpreter() -> None:
    if INTERPRETED:
        patch()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


class Product:
    """A scaled matmul [m, k] x [k, n] in one form: its call, its arguments, its value in float64."""

    def __init__(self, form: str, m: int = 70, n: int = 96, k: int = 160, seed: int = 0) -> None:
        self.kind, self.left, self.right = FORMS[form]
        if form == "blocks_v2":
            n, k = 128, 256  # torch takes whole blocks only
        a, b = (
            quantize(normal(m, k, seed=0), self.left),
            quantize(normal(n, k, seed=seed), self.right),
        )
        self.exact = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
        scales = a.scales["scale"], b.scales["scale"]
        if self.kind != "ours" and self.right.endswith("row"):
            scales = scales[0], scales[1].t()
        elif self.kind == "public":
            scales = (
                scales[0].t().contiguous().t(),
                F.pad(scales[1], (0, -scales[1].shape[1] % 4)).t(),
            )
        self.arguments: tuple[Tensor, ...] = (a.packed, b.packed, *scales)
        if self.kind != "ours":  # torch's forms take [K, N]
            self.arguments = (a.packed, b.packed.t(), *scales)
        if not INTERPRETED and torch.cuda.is_available():
            self.arguments = tuple(t.cuda() for t in self.arguments)

    def __call__(
        self, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        if self.kind == "private":
            return torch._scaled_mm(a, b, scale_a, scale_b, bias, out_dtype=HALF)
        if self.kind == "ours":
            return scaled_mm_op(
                a, [scale_a], self.left, b, [scale_b], self.right, bias, HALF
            )  # fmt: skip
        return F.scaled_mm(
            a, b, scale_a, KINDS[self.left], scale_b, KINDS[self.right], bias=bias,
            output_dtype=HALF,
        )  # fmt: skip

    def on_cpu(self) -> tuple[Tensor, ...]:
        return tuple(t.cpu() for t in self.arguments)


def device_of(product: Product) -> torch.device:
    return product.arguments[0].device


def relu_residual(y: Tensor, r: Tensor) -> Tensor:
    return y.relu() + r


def gated(y: Tensor, r: Tensor) -> Tensor:
    half = y.shape[1] // 2
    return F.silu(y[:, :half]) * y[:, half:]


def rounded(y: Tensor, r: Tensor) -> Tensor:
    return (F.gelu(y, approximate="tanh") * r).to(torch.float16)


EPILOGUES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu_residual": relu_residual, "gated": gated, "rounded": rounded
}  # fmt: skip


def with_epilogue(product: Product, name: str) -> Callable[..., Tensor]:
    def function(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, r: Tensor, bias: Tensor):
        return EPILOGUES[name](product(a, b, scale_a, scale_b, bias), r)

    return function


def extras(product: Product) -> tuple[Tensor, Tensor]:
    m, n = product.exact.shape
    return normal(m, n, seed=5).to(device_of(product), HALF), normal(n).to(device_of(product), HALF)


def check(got: Tensor, product: Product, name: str, r: Tensor, bias: Tensor) -> None:
    """The error is at most twice that of the same epilogue on a product that was rounded first."""
    exact = product.exact + bias.double().cpu()
    want = EPILOGUES[name](exact.to(HALF), r.cpu())
    assert got.dtype == want.dtype and got.shape == want.shape and got.is_contiguous()
    check_close(got.cpu(), want, EPILOGUES[name](exact, r.double().cpu()))


@runs
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("form", FORMS)
def test_one_kernel_with_scales_bias_and_epilogue(form: str, config: str) -> None:
    product = Product(form)
    for name in EPILOGUES:
        function, more = with_epilogue(product, name), extras(product)
        graph = trace(function, (*product.arguments, *more))
        region = lower_gemm(graph, device_of(product), config=CONFIGS[config])
        assert len(region.kernels) == 1 and "scaled_mm" in region.kernels[0].ops
        (got,) = region(*product.arguments, *more)
        check(got, product, name, *more)


@runs
@pytest.mark.parametrize("sizes", [(2, 16, 16), (33, 48, 272), (130, 144, 400)], ids=str)
@pytest.mark.parametrize("form", ["row", "blocks", "row_blocks"])
def test_odd_sizes(form: str, sizes: tuple[int, int, int]) -> None:
    product = Product(form, *sizes)
    function, more = with_epilogue(product, "relu_residual"), extras(product)
    graph = trace(function, (*product.arguments, *more))
    for config in CONFIGS.values():
        (got,) = lower_gemm(graph, device_of(product), config=config)(*product.arguments, *more)
        check(got, product, "relu_residual", *more)


@runs
@pytest.mark.parametrize("form", ["row", "blocks"])
def test_gate_and_up_share_a_kernel_and_quantize_the_result(form: str) -> None:
    """Two products of one left matrix, a gate, and the cast for the next matmul."""
    gate, up = Product(form, n=128, seed=1), Product(form, n=128, seed=2)

    def function(a, b, sa, sb, c, sc):
        h = (F.silu(gate(a, b, sa, sb)) * up(a, c, sa, sc)).float().view(a.shape[0], -1, 64)
        scale = h.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
        return (h / scale).to(torch.float8_e4m3fn).view(a.shape[0], -1), scale

    arguments = (*gate.arguments, up.arguments[1], up.arguments[3])
    config = GemmEpilogueConfig(32, 64, 32, 4, 3, use_tma=False, persistent=False)
    region = lower_gemm(trace(function, arguments), device_of(gate), config=config)
    assert len(region.kernels) == 1
    data, scale = (t.cpu() for t in region(*arguments))
    exact = (F.silu(gate.exact) * up.exact).view(70, -1, 64)
    assert ((data.double().view_as(exact) * scale.double()) - exact).norm() < 0.04 * exact.norm()
    torch.testing.assert_close(
        scale.double(), exact.abs().amax(-1, keepdim=True) / 448, rtol=1e-4, atol=0
    )


@pytest.mark.parametrize("form", FORMS)
def test_ir_of_a_scaled_gemm(form: str) -> None:
    """The interpreted IR, and the library's call followed by a kernel."""
    product = Product(form)
    more = tuple(t.cpu() for t in extras(product))
    arguments = (*product.on_cpu(), *more)
    graph = trace(with_epilogue(product, "relu_residual"), arguments)
    region = lower_gemm_graph(graph).region
    (got,) = interpreter.interpret_region(region, arguments)
    check(got, product, "relu_residual", *more)
    if "v2" not in form or "row" in form:  # torch has no such CPU kernel
        (got,) = LibraryGemmRegion(graph, CPU)(*arguments)
        check(got, product, "relu_residual", *more)


def large(form: str) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    product = Product("ours_row" if form == "row" else form, 256, 512, 512)
    return with_epilogue(product, "gated"), (*product.on_cpu(), normal(256, 512).to(HALF),
                                             normal(512).to(HALF))  # fmt: skip


@pytest.mark.skipif(not has_triton() or INTERPRETED, reason="Triton's compiler is not available")
@pytest.mark.parametrize("form", ["row", "blocks"])
def test_compiles_to_float8_wgmma(form: str) -> None:
    from triton.backends.compiler import GPUTarget

    scheduled = schedule_gemms(lower_gemm_graph(trace(*large(form))), H200, SM90)
    source = write_gemm(scheduled.kernel_name, scheduled.schedule, False)
    module = compile_triton.load_module(write_module([source]))
    made = compile_triton.compile_for_target(
        getattr(module, source.name), source, compile_triton.ALIGNED, GPUTarget("cuda", 90, 32)
    )
    assert "e4m3.e4m3" in made.asm["ptx"] and "wgmma.mma_async" in made.asm["ptx"]
    assert made.metadata.shared <= 227 << 10


def test_fast_accumulation_is_only_used_where_it_was_asked_for() -> None:
    a, b = (normal(64, 64).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones(())
    for is_fast in (False, True):

        def function(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
            y = torch._scaled_mm(a, b, s, s, out_dtype=HALF, use_fast_accum=is_fast)
            return y.relu()

        graph = trace(function, (a, b.t(), one))
        scheduled = schedule_gemms(lower_gemm_graph(graph), H200, SM90)
        text = write_gemm("kernel", scheduled.schedule, False).text
        assert ("max_num_imprecise_acc" in text) != is_fast


def test_what_stays_with_the_library() -> None:
    a, b = (normal(64, 64).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones(())

    def reason(function: Callable[..., Any]) -> str | None:
        graph = trace(function, (a, b, one)).graph
        return next(unsupported_reason(n) for n in graph.nodes if "scaled_mm" in str(n.target))

    assert reason(lambda a, b, s: torch._scaled_mm(a, b.t(), s, s, out_dtype=HALF)) is None
    assert "float8 result" in str(
        reason(lambda a, b, s: torch._scaled_mm(a, b.t(), s, s, out_dtype=a.dtype))
    )
    assert "scaled" in str(
        reason(lambda a, b, s: torch._scaled_mm(a, b.t(), s, s, None, s, out_dtype=HALF))
    )


def test_a_compiled_program_fuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the whole pipeline, on what pretends to be a GPU."""
    monkeypatch.setattr(fusion, "_is_on_gpu", lambda node: True)
    monkeypatch.setattr(heuristics, "_is_in_measured_range", lambda *_: True)
    monkeypatch.setattr(Sm90Heuristics, "gemm_epilogue_prologue_seconds", -1.0)
    product = Product("row")
    more = tuple(t.cpu() for t in extras(product))
    function = with_epilogue(product, "relu_residual")
    compiled = compile(function, autotune=False)
    got = compiled(*product.on_cpu(), *more)
    check(got, product, "relu_residual", *more)
    region, *_ = str(compiled.last_trace()).split("def forward(")
    assert "scaled_mm" in region and "relu" in region


@pytest.mark.skipif(INTERPRETED or not has_triton(), reason="already in the interpreter")
def test_sample_in_the_interpreter() -> None:
    sample = "(test_one_kernel and (row or blocks) and tma) or test_gate_and_up or compiled_program"
    done = run_pytest(__file__, "-k", sample, TRITON_INTERPRET="1")
    assert done.returncode == 0, "TRITON_INTERPRET=1 pytest " + done.output[-4000:]
