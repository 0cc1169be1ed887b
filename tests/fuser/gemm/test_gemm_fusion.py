"""GEMM fusion: one kernel for GEMM and epilogue, or the library's GEMM and a kernel.

Kernels run in Triton's interpreter (a sample in the normal run, everything with TRITON_INTERPRET=1) and on a GPU.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fulgurite import fuser
from fulgurite.compile import compile
from fulgurite.device import DeviceInfo
from fulgurite.fuser.codegen.triton.module import write_module
from fulgurite.fuser.gemm import fusion, heuristics, lower
from fulgurite.fuser.gemm.codegen import write_gemm
from fulgurite.fuser.gemm.frontend import lower_gemm_graph
from fulgurite.fuser.gemm.lower import LibraryGemmRegion, lower_gemm
from fulgurite.fuser.gemm.schedule import ScheduledGemm, make_problem, schedule_gemms
from fulgurite.fuser.ir import interpreter
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.lowering import has_triton
from fulgurite.fuser.runtime import compile_triton
from fulgurite.kernels.tuning.gemm_epilogue import GemmEpilogueConfig
from fulgurite.kernels.tuning.sm_90 import Sm90Heuristics
from tests.forked import run_pytest
from tests.fuser.support import check_against_eager, check_close, trace
from tests.fuser.triton_interpreter import patch

F = torch.nn.functional
HALF = torch.bfloat16
SM90 = Sm90Heuristics()
CPU = torch.device("cpu")
H200 = DeviceInfo("H200", 132, 4.2e12, 2.9e13, 256 << 10, 50 << 20, (torch.float32,))
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
runs = pytest.mark.filterwarnings("default") if INTERPRETED else pytest.mark.gpu
needs_triton = pytest.mark.skipif(not has_triton(), reason="Triton is not installed")
compiles = pytest.mark.skipif(
    not has_triton() or INTERPRETED, reason="Triton is not installed, or its interpreter is used"
)
SAMPLE = (
    "test_epilogues or test_odd_sizes or (test_layouts and 0) or test_model_with_fused_gemms"
    " or test_one_kernel"
)

# small tiles: by pointers and by TMA, one tile per program and persistent
CONFIGS = (
    GemmEpilogueConfig(32, 32, 16, 4, 3, use_tma=False, persistent=False),
    GemmEpilogueConfig(32, 64, 32, 4, 3, use_tma=True, persistent=True, group_m=2),
    GemmEpilogueConfig(
        64, 32, 16, 4, 3, use_tma=True, persistent=True, tile_loop="plain", tma_store=True
    ),
)
IDS = ["pointers", "tma", "tma_store"]
SPECIALIZED = GemmEpilogueConfig(128, 128, 64, 4, 3, tile_loop="warp_specialize")


def default_device() -> str:
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture(autouse=True)
def _interpreter() -> None:
    if INTERPRETED:
        patch()


def schedule(graph: Any, config: GemmEpilogueConfig | None = None) -> ScheduledGemm:
    return schedule_gemms(lower_gemm_graph(graph), H200, SM90, config)


def estimate(graph: Any) -> heuristics.FusionEstimate:
    return heuristics.estimate_fusion(graph, schedule(graph), CPU, H200)


def normal(*shape: int, dtype: torch.dtype = HALF, device: str | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device or default_device(), dtype)


def weight(depth: int, columns: int, **options: Any) -> Tensor:
    """Transposed, as a linear layer passes it to a GEMM."""
    return (normal(columns, depth, **options) * depth**-0.5).t()


def bias_gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(torch.addmm(b, x, w), approximate="tanh")


def residual(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return (x @ w).view(r.shape) + r


def gated(x: Tensor, w: Tensor) -> Tensor:
    both = x @ w
    half = w.shape[1] // 2
    return F.silu(both[:, :half]) * both[:, half:]


def gate_and_up(x: Tensor, g: Tensor, u: Tensor) -> Tensor:
    return F.silu(x @ g) * (x @ u)


def returned(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = x @ w
    return h, h.relu()


def scaled(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return ((x @ w).float() * s).to(torch.float16)


def quantized(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    blocks = (x @ w).float().view(x.shape[0], -1, 32)
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(x.shape[0], -1), scale


CASES: dict[str, tuple[Callable[..., Any], Callable[..., tuple[Tensor, ...]]]] = {
    "bias_gelu": (
        bias_gelu,
        lambda **o: (normal(70, 48, **o), weight(48, 90, **o), normal(90, **o)),
    ),
    "residual": (
        residual,
        lambda **o: (normal(70, 48, **o), weight(48, 90, **o), normal(2, 35, 90, **o)),
    ),
    "gated": (gated, lambda **o: (normal(70, 48, **o), weight(48, 180, **o))),
    "gate_and_up": (
        gate_and_up,
        lambda **o: (normal(70, 48, **o), weight(48, 90, **o), weight(48, 90, **o)),
    ),
    "returned": (returned, lambda **o: (normal(70, 48, **o), weight(48, 90, **o))),
    "scaled": (
        scaled,
        lambda **o: (
            normal(70, 48, **o),
            weight(48, 90, **o),
            normal(70, 1, **(o | {"dtype": torch.float32})),
        ),
    ),
}


def lowered(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    config: GemmEpilogueConfig,
    mode: str = "fake",
) -> Any:
    return lower_gemm(
        trace(function, arguments, mode), torch.device(default_device()), config=config
    )


@runs
@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
@pytest.mark.parametrize("name", CASES)
def test_epilogues(name: str, config: GemmEpilogueConfig) -> None:
    function, make = CASES[name]
    arguments = make()
    region = lowered(function, arguments, config)
    assert len(region.kernels) == 1
    check_against_eager(region(*arguments), function, arguments)


@runs
@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
@pytest.mark.parametrize(
    "sizes", [(2, 2, 2), (3, 17, 5), (31, 33, 7), (37, 64, 101), (65, 31, 8)], ids=str
)
def test_odd_sizes(sizes: tuple[int, int, int], config: GemmEpilogueConfig) -> None:
    rows, columns, depth = sizes
    arguments = (normal(rows, depth), weight(depth, columns), normal(columns))
    check_against_eager(lowered(bias_gelu, arguments, config)(*arguments), bias_gelu, arguments)


def layouts() -> list[tuple[Tensor, Tensor]]:
    """Matrices in row and column order, windows of wider ones, expanded rows."""
    x, w = normal(37, 24), weight(24, 40)
    wide, tall = normal(37, 32)[:, 8:], normal(64, 24)[3:43].t()
    return [
        (x, w),
        (x, w.contiguous()),
        (normal(24, 37).t(), w),
        (normal(24, 37).t(), w.contiguous()),
        (wide, tall),
        (normal(37, 25)[:, 1:], w),  # no row begins at 16 bytes
        (normal(1, 24).expand(37, 24), w),
    ]


@runs
@pytest.mark.parametrize("number", range(7))
def test_layouts(number: int) -> None:
    x, w = layouts()[number]
    arguments = (x, w, normal(40))
    for config in CONFIGS:
        check_against_eager(lowered(bias_gelu, arguments, config)(*arguments), bias_gelu, arguments)


def squared(x: Tensor) -> Tensor:
    return x @ x + x


@runs
def test_same_matrix_on_both_sides() -> None:
    x = normal(40, 40)
    for config in CONFIGS:
        check_against_eager(lowered(squared, (x,), config)(x), squared, (x,))


@runs
def test_float16_nan_and_inf() -> None:
    x, w, r = (t.to(torch.float16) for t in (normal(33, 16), weight(16, 32), normal(33, 32)))
    x[3, 4], x[5, 6], r[7, 8] = float("nan"), float("inf"), -float("inf")
    for config in CONFIGS:
        check_against_eager(lowered(residual, (x, w, r), config)(x, w, r), residual, (x, w, r))


@runs
@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_quantize_column_blocks(config: GemmEpilogueConfig) -> None:
    """Nearer to float64 than what eager quantizes after rounding the product."""
    arguments = (normal(70, 48), weight(48, 96))
    region = lowered(quantized, arguments, config)
    data, scale = region(*arguments)
    eager, eager_scale = quantized(*arguments)
    assert (
        data.dtype == eager.dtype and data.shape == eager.shape and scale.shape == eager_scale.shape
    )
    exact = arguments[0].double() @ arguments[1].double()
    check_close(scale, eager_scale, exact.view(70, 3, 32).abs().amax(-1, keepdim=True) / 448)

    def error(values: Tensor, scales: Tensor) -> float:
        whole = values.double().view(70, 3, 32) * scales.double()
        return float((whole.view(70, 96) - exact).norm())

    assert error(data, scale) <= 1.02 * error(eager, eager_scale)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="a tile at a time")
@pytest.mark.parametrize("name", ["bias_gelu", "residual", "gated", "quantized"])
@pytest.mark.parametrize("rows, depth", [(1000, 200), (8000, 1024)])
def test_large_gemms(name: str, rows: int, depth: int) -> None:
    """The tiles that are chosen for large products, at sizes that don't fill them; some walk over several."""
    arguments: tuple[Tensor, ...] = (normal(rows, depth), weight(depth, 768))
    arguments += {"bias_gelu": (normal(768),), "residual": (normal(rows, 768),)}.get(name, ())
    function = quantized if name == "quantized" else CASES[name][0]
    graph = trace(function, arguments)
    configs: list[GemmEpilogueConfig | None] = [None]
    if name == "gated":
        configs += SM90.gemm_epilogue_multi_configs
    if compile_triton.supports_warp_specialization():
        configs.append(SPECIALIZED)
    for config in configs:
        got = lower_gemm(graph, torch.device("cuda"), config=config)(*arguments)
        if name != "quantized":
            check_against_eager(got, function, arguments)
            continue
        whole = got[0].float().view(rows, -1, 32) * got[1]
        exact = arguments[0].double() @ arguments[1].double()
        assert (whole.view(rows, 768) - exact).norm() < 0.04 * exact.norm()


@runs
def test_unaligned_addresses() -> None:
    """Descriptors need addresses at multiples of 16 bytes; others are read element by element."""
    memory, w = normal(40 * 24 + 8), weight(24, 32)
    x = memory[: 40 * 24].view(40, 24)
    region = lowered(residual, (x, w, normal(40, 32)), CONFIGS[1])
    assert region.kernels[0].schedule.use_tma
    if INTERPRETED:
        return  # it launches what a GPU would for aligned addresses
    for offset in (0, 1, 2, 8):
        given = (memory[offset : offset + 40 * 24].view(40, 24), w, normal(40, 32))
        check_against_eager(region(*given), residual, given)


# ---- without running kernels


def on_cpu(name: str) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    function, make = CASES[name]
    return function, make(device="cpu")


@pytest.mark.parametrize("name", CASES)
def test_ir_of_a_gemm_region_computes_what_eager_does(name: str) -> None:
    """Products are statements of the IR as well: interpreted, it is what eager computes."""
    function, arguments = on_cpu(name)
    region = lower_gemm_graph(trace(function, arguments)).region
    check_against_eager(interpreter.interpret_region(region, arguments), function, arguments)


def test_names_with_capitals() -> None:
    """Nodes are named after the user's variables."""

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight).relu()

    arguments = (torch.randn(5, 8), torch.randn(8, 6))
    graph = trace(function, arguments)
    (product,) = (node for node in graph.graph.nodes if node.target is torch.ops.aten.mm.default)
    product._rename("q_X")
    region = lower_gemm_graph(graph).region
    check_against_eager(interpreter.interpret_region(region, arguments), function, arguments)


@pytest.mark.parametrize("name", CASES)
def test_library_gemm_and_kernel(name: str) -> None:
    """The other way to run such a region, and what runs on a CPU."""
    function, arguments = on_cpu(name)
    region = fuser.lower_region(trace(function, arguments))
    assert isinstance(region, LibraryGemmRegion) or INTERPRETED
    check_against_eager(region(*arguments), function, arguments)


def large(name: str) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    x, w = torch.zeros(8192, 1024, dtype=HALF), torch.zeros(4096, 1024, dtype=HALF).t()
    more = {"bias_gelu": (torch.zeros(4096, dtype=HALF),)}
    more["residual"] = (torch.zeros(8192, 4096, dtype=HALF),)
    return CASES[name][0], (x, w, *more.get(name, ()))


@pytest.mark.parametrize("name", ["bias_gelu", "gated"])
def test_kernel_text(name: str, golden: Any) -> None:
    scheduled = schedule(trace(*large(name)))
    source = write_gemm(scheduled.kernel_name, scheduled.schedule, False)
    golden(f"triton_gemm_{name}.py", write_module([source]))


def compile_for_hopper(name: str, config: GemmEpilogueConfig | None = None) -> Any:
    """The kernel of a large GEMM, compiled for a GPU that need not be present."""
    from triton.backends.compiler import GPUTarget

    scheduled = schedule(trace(*large(name)), config)
    source = write_gemm(scheduled.kernel_name, scheduled.schedule, False)
    module = compile_triton.load_module(write_module([source]))
    function, target = getattr(module, source.name), GPUTarget("cuda", 90, 32)
    return compile_triton.compile_for_target(function, source, compile_triton.ALIGNED, target)


def count_accumulator_waits(made: Any) -> int:
    """Places in machine code where warps wait for their sums: in the loop, and behind it."""
    return str(made.asm["sass"]).count("WARPGROUP.DEPBAR")


@compiles
def test_compiles_to_wgmma_and_tma() -> None:
    """With the tensor cores' own instructions, copies by the tensor memory accelerator, and no spills."""
    made = compile_for_hopper("gated")
    assert "wgmma.mma_async" in made.asm["ptx"] and "cp.async.bulk.tensor" in made.asm["ptx"]
    assert made.metadata.shared <= 227 << 10
    # where the loop over tiles is one with that over the inner dimension, two sums wait after every instruction
    assert count_accumulator_waits(made) == 2 and barriers_have_own_memory(made)


def barriers_have_own_memory(made: Any) -> bool:
    """Is every barrier in memory of its own? One set up twice is where something else comes to lie."""
    places = re.findall(r"mbarrier\.init\S* \[(%r\d+)\]", made.asm["ptx"])
    return len(places) == len(set(places)) > 0


@compiles
@pytest.mark.parametrize("name", ["gated", "residual"])
def test_barriers_of_warp_specialized_loops(name: str) -> None:
    """Where they don't lie apart, tiles are copied over them, and the result is NaN on a GPU."""
    assert (
        barriers_have_own_memory(compile_for_hopper(name, SPECIALIZED))
        == compile_triton.supports_warp_specialization()
    )


def autotune_configs(name: str, warp_specialize: bool) -> list[GemmEpilogueConfig]:
    gemm = schedule(trace(*large(name))).schedule
    problem = make_problem(gemm.nest, gemm.accumulators, H200)
    return SM90.autotune_gemm_epilogue_configs(problem, warp_specialize)


@pytest.mark.slow
@compiles
@pytest.mark.parametrize("name", ["gated", "residual", "bias_gelu"])
def test_autotune_candidates_compile(name: str) -> None:
    for config in autotune_configs(name, compile_triton.supports_warp_specialization()):
        assert barriers_have_own_memory(compile_for_hopper(name, config)), config


@compiles
def test_warp_specialization_is_refused_where_triton_miscompiles_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lower, "supports_warp_specialization", lambda: False)
    with pytest.raises(Unsupported, match="warp-specialized"):
        lower_gemm(trace(*on_cpu("gated")), CPU, config=SPECIALIZED)


@pytest.mark.parametrize("specialize", [True, False])
@pytest.mark.parametrize("name, num_gemms", [("gated", 2), ("residual", 1)])
def test_autotune_candidates_fit_shared_memory(name: str, num_gemms: int, specialize: bool) -> None:
    configs = autotune_configs(name, specialize)
    assert len(configs) > 3
    assert all(SM90.fits_gemm_epilogue(config, num_gemms) for config in configs)
    assert {config.persistent for config in configs} == {True, False}
    assert ("warp_specialize" in {config.tile_loop for config in configs}) == specialize


def softmax_of_rows(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(x @ w, -1)


def plus_transposed(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).t() + (x @ w)


@pytest.mark.parametrize("function", [softmax_of_rows, plus_transposed])
def test_unsupported_epilogues_run_by_the_library(function: Callable[..., Any]) -> None:
    arguments = (normal(48, 16, device="cpu"), weight(16, 48, device="cpu"))
    graph = trace(function, arguments)
    with pytest.raises(Unsupported):
        schedule(graph)
    check_against_eager(fuser.lower_region(graph)(*arguments), function, arguments)


# ---- the decision


class Model(nn.Module):
    """Two linears with epilogues, one that a row reduction reads, and one without an epilogue."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(48, 64, dtype=HALF)
        self.gate = nn.Linear(48, 64, bias=False, dtype=HALF)
        self.down = nn.Linear(64, 48, dtype=HALF)
        self.last = nn.Linear(48, 32, dtype=HALF)

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(F.silu(self.gate(x)) * self.up(x))
        return self.last(F.rms_norm(x + h, (48,)))


@pytest.fixture
def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "_is_on_gpu", lambda node: True)
    monkeypatch.setattr(heuristics, "_is_in_measured_range", lambda *_: True)


def final(model: nn.Module, **options: Any) -> tuple[Any, Any, str]:
    torch.manual_seed(0)
    x = normal(2, 19, 48, device="cpu")
    compiled = compile(model, **options)
    with torch.no_grad():
        got, want = compiled(x), model(x)
    exact = copy.deepcopy(model).double()(x.double())
    check_close(got, want, exact.detach())
    return compiled, got, str(compiled.last_trace())


@pytest.mark.usefixtures("pretend_gpu")
def test_model_with_fused_gemms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Profitable GEMMs are fused; others stay with the library, and the trace says why."""
    monkeypatch.setattr(Sm90Heuristics, "gemm_epilogue_prologue_seconds", -1.0)
    compiled, _, text = final(Model(), autotune=False)
    assert [t.stage for t in compiled.history][-3:] == ["claimed", "gemm_fusion", "final"]
    region, *_ = text.split("def forward(")
    assert region.count("aten.mm") == region.count("aten.addmm") == 1
    assert "library: a reduction of 48 columns of a GEMM" in text
    assert text.count("torch.addmm(") == 2
    assert ("    mm_" in str(compiled.explain())) == INTERPRETED  # else by the library
    x = normal(2, 19, 48, device="cpu")
    with torch.no_grad():
        before = compiled(x)
        compiled.replace_trace(text)  # the printed text runs
        check_close(compiled(x), before, before.double(), slack=64)


@runs
@pytest.mark.usefixtures("pretend_gpu")
def test_one_kernel_for_every_m(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sm90Heuristics, "gemm_epilogue_prologue_seconds", -1.0)
    model = Model().to(default_device())
    compiled = compile(model, autotune=False, dynamic=True)
    with torch.no_grad():
        for rows in (19, 2, 31, 33, 97):
            x = normal(2, rows, 48)
            exact = copy.deepcopy(model).double()(x.double())
            check_close(compiled(x), model(x), exact)
    assert len(compiled.graphs) == 1 and "aten.mm" in str(compiled.last_trace())


@pytest.mark.usefixtures("pretend_gpu")
def test_gemms_are_scheduled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowering uses the schedule that the step "gemm_fusion" decided by."""
    monkeypatch.setattr(Sm90Heuristics, "gemm_epilogue_prologue_seconds", -1.0)
    scheduled: list[Any] = []

    def count(*arguments: Any) -> ScheduledGemm:
        scheduled.append(schedule_gemms(*arguments))
        return scheduled[-1]

    monkeypatch.setattr(fusion, "schedule_gemms", count)
    monkeypatch.setattr(lower, "schedule_gemms", count)
    monkeypatch.setattr(lower, "is_interpreted", lambda: True)  # so that it lowers the kernel
    monkeypatch.setattr(lower, "TritonRegion", lambda *_: lower.LibraryGemmRegion(_graph[0], CPU))
    _graph = [trace(*on_cpu("gate_and_up"))]
    function, arguments = on_cpu("gate_and_up")
    with torch.no_grad():
        compile(function, autotune=False)(*arguments)
    assert len(scheduled) == 1


@pytest.mark.usefixtures("pretend_gpu")
def test_unprofitable_fusion_stays_with_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sm90Heuristics, "gemm_epilogue_slowdown", 1e9)
    _, _, text = final(Model(), autotune=False)
    assert "fusion saves" in text and "aten.mm" not in text.split("def forward(")[0]


@pytest.mark.usefixtures("pretend_gpu")
@pytest.mark.parametrize("faster", [fusion.FUSED, fusion.UNFUSED])
def test_autotune_measures_once(
    faster: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`autotune=True` times both and caches the decision; a second compilation reads it."""
    monkeypatch.setenv("FULGURITE_CACHE_DIR", str(tmp_path))
    asked: list[Any] = []

    def fake_times(calls: dict[str, Any], *_: Any) -> dict[str, float]:
        asked.append(calls)
        return {name: 1.0 if name == faster else 2.0 for name in calls}

    monkeypatch.setattr(fusion.timing, "median_times_on", fake_times)
    for again in (False, True):
        compiled, _, text = final(Model(), autotune=True)
        decisions = [
            d for d in compiled.graphs[0].decisions if d.winner in (fusion.FUSED, fusion.UNFUSED)
        ]
        assert [d.winner for d in decisions] == [faster] and decisions[0].cached is again
        assert ("aten.mm" in text.split("def forward(")[0]) == (faster == fusion.FUSED)
    assert sum(fusion.FUSED in calls for calls in asked) == 1


@pytest.mark.usefixtures("pretend_gpu")
def test_wrong_results_are_never_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FULGURITE_CACHE_DIR", str(tmp_path))
    times = {fusion.FUSED: 1.0, fusion.UNFUSED: 2.0}
    monkeypatch.setattr(
        fusion.timing, "median_times_on", lambda calls, *_: {n: times.get(n, 1.5) for n in calls}
    )

    def lower_wrong(module: Any, device: torch.device, autotune: bool = False) -> Any:
        region = lower.lower_gemm_region(module, device)
        return lambda *inputs: [t * float("nan") for t in region(*inputs)]

    monkeypatch.setattr(fusion, "lower_gemm_region", lower_wrong)
    decision = fusion.measure_fusion(trace(*on_cpu("residual")), CPU, "")
    assert decision.winner == fusion.UNFUSED
    assert "wrong" in fusion._describe_times(decision)


def test_only_measured_sizes_are_fused() -> None:
    for name in ("bias_gelu", "residual", "gated"):
        assert estimate(trace(*large(name))).is_profitable
    assert not estimate(trace(*large("returned"))).is_profitable

    def returned_in_another_shape(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h, activated = returned(x, w)
        return h.view(8, 1024, -1).transpose(0, 1), activated

    assert not estimate(trace(returned_in_another_shape, large("returned")[1])).is_profitable
    small = (
        normal(16, 1024, device="cpu"),
        weight(1024, 4096, device="cpu"),
        normal(4096, device="cpu"),
    )
    found = estimate(trace(bias_gelu, small))
    assert not found.is_profitable and "autotune=True" in found.reason


def test_saved_bytes() -> None:
    """GEMM outputs are not read again."""
    size = 70 * 90 * 2
    for name, bytes_ in (("bias_gelu", size), ("gate_and_up", 2 * size), ("gated", 2 * size)):
        assert heuristics.saved_bytes(lower_gemm_graph(trace(*on_cpu(name)))) == bytes_


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="already in the interpreter")
def test_sample_in_the_interpreter() -> None:
    done = run_pytest(__file__, "-k", SAMPLE, TRITON_INTERPRET="1")
    assert done.returncode == 0, "TRITON_INTERPRET=1 pytest " + done.output[-4000:]
