"""Matrix products with epilogues: one kernel for both, or the library's call and a kernel.

Kernels run in Triton's interpreter (a sample in the normal run, everything with TRITON_INTERPRET=1) and on a GPU.
"""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fulgurite import fuser
from fulgurite.compile import compile
from fulgurite.device import Device
from fulgurite.executors import epilogue
from fulgurite.fuser.codegen.triton.module import write_module
from fulgurite.fuser.frontend.pointwise import Unsupported
from fulgurite.fuser.gemm import heuristics, lower, pattern
from fulgurite.fuser.gemm.codegen import write_matmul
from fulgurite.fuser.gemm.library_fallback import LibraryRegion
from fulgurite.fuser.gemm.lower import kernel_name, lower_matmul, scheduled
from fulgurite.fuser.gemm.schedule import Tile, fits
from fulgurite.fuser.gemm.tiles import SEVERAL, neighbours
from fulgurite.fuser.ir import interpreter
from fulgurite.fuser.pipeline_triton import installed
from fulgurite.fuser.runtime import compile_triton
from tests.fuser.support import close, compare, trace

F = torch.nn.functional
HALF = torch.bfloat16
H200 = Device("H200", 132, 4.2e12, 2.9e13, 256 << 10, 50 << 20, (torch.float32,))
ROOT = Path(__file__).parents[2]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
runs = pytest.mark.filterwarnings("default") if INTERPRETED else pytest.mark.gpu
needs_triton = pytest.mark.skipif(not installed(), reason="Triton is not installed")
compiles = pytest.mark.skipif(
    not installed() or INTERPRETED, reason="Triton is not installed, or its interpreter is used"
)
SAMPLE = (
    "test_epilogues or test_odd_sizes or (test_layouts and 0) or test_a_model or test_every_number"
)

# small tiles, read by addresses and by descriptors, one a program and walked over
TILES = (
    Tile(32, 32, 16, 4, 3, descriptors=False, walking=False),
    Tile(32, 64, 32, 4, 3, descriptors=True, walking=True, rows_together=2),
    Tile(64, 32, 16, 4, 3, descriptors=True, walking=True, loop="plain", stores=True),
)
IDS = ["addresses", "descriptors", "stores"]
SPECIALIZED = Tile(128, 128, 64, 4, 3, loop="warp_specialize")


def place() -> str:
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture(autouse=True)
def _interpreter() -> None:
    if INTERPRETED:
        from tests.fuser import interpreter

        interpreter.patch()


def normal(*shape: int, dtype: torch.dtype = HALF, device: str | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device or place(), dtype)


def weight(depth: int, columns: int, **options: Any) -> Tensor:
    """As a linear layer gives it to a product: turned."""
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


def kept(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
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
    "kept": (kept, lambda **o: (normal(70, 48, **o), weight(48, 90, **o))),
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
    function: Callable[..., Any], arguments: tuple[Any, ...], tile: Tile, mode: str = "fake"
) -> Any:
    return lower_matmul(trace(function, arguments, mode), torch.device(place()), tile=tile)


@runs
@pytest.mark.parametrize("tile", TILES, ids=IDS)
@pytest.mark.parametrize("name", CASES)
def test_epilogues(name: str, tile: Tile) -> None:
    function, make = CASES[name]
    arguments = make()
    region = lowered(function, arguments, tile)
    assert len(region.kernels) == 1
    compare(region(*arguments), function, arguments)


@runs
@pytest.mark.parametrize("tile", TILES, ids=IDS)
@pytest.mark.parametrize(
    "sizes", [(2, 2, 2), (3, 17, 5), (31, 33, 7), (37, 64, 101), (65, 31, 8)], ids=str
)
def test_odd_sizes(sizes: tuple[int, int, int], tile: Tile) -> None:
    rows, columns, depth = sizes
    arguments = (normal(rows, depth), weight(depth, columns), normal(columns))
    compare(lowered(bias_gelu, arguments, tile)(*arguments), bias_gelu, arguments)


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
    for tile in TILES:
        compare(lowered(bias_gelu, arguments, tile)(*arguments), bias_gelu, arguments)


def squared(x: Tensor) -> Tensor:
    return x @ x + x


@runs
def test_a_matrix_on_both_sides() -> None:
    x = normal(40, 40)
    for tile in TILES:
        compare(lowered(squared, (x,), tile)(x), squared, (x,))


@runs
def test_float16_nan_and_infinity() -> None:
    x, w, r = (t.to(torch.float16) for t in (normal(33, 16), weight(16, 32), normal(33, 32)))
    x[3, 4], x[5, 6], r[7, 8] = float("nan"), float("inf"), -float("inf")
    for tile in TILES:
        compare(lowered(residual, (x, w, r), tile)(x, w, r), residual, (x, w, r))


@runs
@pytest.mark.parametrize("tile", TILES, ids=IDS)
def test_quantize_blocks_of_columns(tile: Tile) -> None:
    """Nearer to float64 than what eager quantizes after rounding the product."""
    arguments = (normal(70, 48), weight(48, 96))
    region = lowered(quantized, arguments, tile)
    data, scale = region(*arguments)
    eager, eager_scale = quantized(*arguments)
    assert (
        data.dtype == eager.dtype and data.shape == eager.shape and scale.shape == eager_scale.shape
    )
    exact = arguments[0].double() @ arguments[1].double()
    close(scale, eager_scale, exact.view(70, 3, 32).abs().amax(-1, keepdim=True) / 448)

    def error(values: Tensor, scales: Tensor) -> float:
        whole = values.double().view(70, 3, 32) * scales.double()
        return float((whole.view(70, 96) - exact).norm())

    assert error(data, scale) <= 1.02 * error(eager, eager_scale)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="a tile at a time")
@pytest.mark.parametrize("name", ["bias_gelu", "residual", "gated", "quantized"])
@pytest.mark.parametrize("rows, depth", [(1000, 200), (8000, 1024)])
def test_large_tiles(name: str, rows: int, depth: int) -> None:
    """The tiles that are chosen for large products, at sizes that don't fill them; some walk over several."""
    arguments: tuple[Tensor, ...] = (normal(rows, depth), weight(depth, 768))
    arguments += {"bias_gelu": (normal(768),), "residual": (normal(rows, 768),)}.get(name, ())
    function = quantized if name == "quantized" else CASES[name][0]
    graph = trace(function, arguments)
    several = list(SEVERAL) if name == "gated" else []
    for tile in [None, *several, *([SPECIALIZED] if compile_triton.may_specialize() else [])]:
        got = lower_matmul(graph, torch.device("cuda"), tile=tile)(*arguments)
        if name != "quantized":
            compare(got, function, arguments)
            continue
        whole = got[0].float().view(rows, -1, 32) * got[1]
        exact = arguments[0].double() @ arguments[1].double()
        assert (whole.view(rows, 768) - exact).norm() < 0.04 * exact.norm()


@runs
def test_addresses_that_are_not_aligned() -> None:
    """Descriptors need addresses at multiples of 16 bytes; others are read element by element."""
    memory, w = normal(40 * 24 + 8), weight(24, 32)
    x = memory[: 40 * 24].view(40, 24)
    region = lowered(residual, (x, w, normal(40, 32)), TILES[1])
    assert region.kernels[0].schedule.descriptors
    if INTERPRETED:
        return  # it launches what a GPU would for aligned addresses
    for offset in (0, 1, 2, 8):
        given = (memory[offset : offset + 40 * 24].view(40, 24), w, normal(40, 32))
        compare(region(*given), residual, given)


# without running kernels


def on_cpu(name: str) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    function, make = CASES[name]
    return function, make(device="cpu")


@pytest.mark.parametrize("name", CASES)
def test_the_region_says_what_it_computes(name: str) -> None:
    """Products are statements of the IR as well: interpreted, it is what eager computes."""
    function, arguments = on_cpu(name)
    read = pattern.read(trace(function, arguments))
    compare(interpreter.run(read.region, arguments), function, arguments)


@pytest.mark.parametrize("name", CASES)
def test_library_and_kernel(name: str) -> None:
    """The other way to run such a region, and what runs on a CPU."""
    function, arguments = on_cpu(name)
    region = fuser.lower(trace(function, arguments))
    assert isinstance(region, LibraryRegion) or INTERPRETED
    compare(region(*arguments), function, arguments)


def large(name: str) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    x, w = torch.zeros(8192, 1024, dtype=HALF), torch.zeros(4096, 1024, dtype=HALF).t()
    more = {"bias_gelu": (torch.zeros(4096, dtype=HALF),)}
    more["residual"] = (torch.zeros(8192, 4096, dtype=HALF),)
    return CASES[name][0], (x, w, *more.get(name, ()))


@pytest.mark.parametrize("name", ["bias_gelu", "gated"])
def test_kernel_text(name: str, golden: Any) -> None:
    schedule, part = scheduled(pattern.read(trace(*large(name))), H200)
    golden(
        f"triton_matmul_{name}.py", write_module([write_matmul(kernel_name(part), schedule, False)])
    )


def for_hopper(name: str, tile: Tile | None = None) -> Any:
    """The kernel of a large product, compiled for a GPU that need not be here."""
    from triton.backends.compiler import GPUTarget

    schedule, part = scheduled(pattern.read(trace(*large(name))), H200, tile)
    stage = write_matmul(kernel_name(part), schedule, False)
    module = compile_triton.load_module(write_module([stage]))
    return compile_triton.compile_stage(
        getattr(module, stage.name), stage, compile_triton.ALIGNED, GPUTarget("cuda", 90, 32)
    )


def waits_on_sums(made: Any) -> int:
    """Places in machine code where warps wait for their sums: in the loop, and behind it."""
    return str(made.asm["sass"]).count("WARPGROUP.DEPBAR")


@compiles
def test_it_compiles_for_a_gpu() -> None:
    """With the tensor cores' own instructions, copies by the tensor memory accelerator, and no spills."""
    made = for_hopper("gated")
    assert "wgmma.mma_async" in made.asm["ptx"] and "cp.async.bulk.tensor" in made.asm["ptx"]
    assert made.metadata.shared <= 227 << 10
    # where the loop over tiles is one with that over the inner dimension, two sums wait after every instruction
    assert waits_on_sums(made) == 2 and barriers_lie_apart(made)


def barriers_lie_apart(made: Any) -> bool:
    """Is every barrier in memory of its own? One set up twice is where something else comes to lie."""
    places = re.findall(r"mbarrier\.init\S* \[(%r\d+)\]", made.asm["ptx"])
    return len(places) == len(set(places)) > 0


@compiles
@pytest.mark.parametrize("name", ["gated", "residual"])
def test_barriers_of_a_loop_with_warps_apart(name: str) -> None:
    """Where they don't lie apart, tiles are copied over them, and the result is NaN on a GPU."""
    assert barriers_lie_apart(for_hopper(name, SPECIALIZED)) == compile_triton.may_specialize()


@pytest.mark.slow
@compiles
@pytest.mark.parametrize("name", ["gated", "residual", "bias_gelu"])
def test_what_a_search_tries_compiles(name: str) -> None:
    schedule, _ = scheduled(pattern.read(trace(*large(name))), H200)
    may = compile_triton.may_specialize()
    for tile in neighbours(schedule.nest, schedule.accumulators, H200, may):
        assert barriers_lie_apart(for_hopper(name, tile)), tile


@compiles
def test_a_loop_with_warps_apart_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower, "may_specialize", lambda: False)
    with pytest.raises(Unsupported, match="warps apart"):
        lower_matmul(trace(*on_cpu("gated")), torch.device("cpu"), tile=SPECIALIZED)


@pytest.mark.parametrize("specialize", [True, False])
@pytest.mark.parametrize("name, products", [("gated", 2), ("residual", 1)])
def test_a_search_tries_tiles_that_fit(name: str, products: int, specialize: bool) -> None:
    schedule, _ = scheduled(pattern.read(trace(*large(name))), H200)
    near = neighbours(schedule.nest, schedule.accumulators, H200, specialize)
    assert len(near) > 3 and all(fits(tile, products) for tile in near)
    assert {tile.walking for tile in near} == {True, False}
    assert ("warp_specialize" in {tile.loop for tile in near}) == specialize


def rows_normed(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(x @ w, -1)


def turned(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).t() + (x @ w)


@pytest.mark.parametrize("function", [rows_normed, turned])
def test_what_is_no_epilogue(function: Callable[..., Any]) -> None:
    arguments = (normal(48, 16, device="cpu"), weight(16, 48, device="cpu"))
    graph = trace(function, arguments)
    with pytest.raises(Unsupported):
        scheduled(pattern.read(graph), H200)
    compare(fuser.lower(graph)(*arguments), function, arguments)  # the library does its part


# the choice


class Model(nn.Module):
    """Two linears with epilogues, one whose reader needs whole rows, and one that nothing generated reads."""

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
def as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epilogue, "_on_gpu", lambda node: True)
    monkeypatch.setattr(heuristics, "_measured", lambda *_: True)


def final(model: nn.Module, **options: Any) -> tuple[Any, Any, str]:
    torch.manual_seed(0)
    x = normal(2, 19, 48, device="cpu")
    compiled = compile(model, **options)
    with torch.no_grad():
        got, want = compiled(x), model(x)
    exact = copy.deepcopy(model).double()(x.double())
    close(got, want, exact.detach())
    return compiled, got, str(compiled.last_trace())


@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products join what reads them where that pays; the rest stays with the library, and says why."""
    monkeypatch.setattr(heuristics, "START_SECONDS", -1.0)
    compiled, _, text = final(Model(), tune=False)
    region, *_ = text.split("def forward(")
    assert region.count("aten.mm") == region.count("aten.addmm") == 1
    assert "library: a reduction of 48 columns of a product" in text
    assert text.count("torch.addmm(") == 2
    assert ("mm_" in str(compiled.explain())) == INTERPRETED  # else the library and a kernel run it
    x = normal(2, 19, 48, device="cpu")
    with torch.no_grad():
        before = compiled(x)
        compiled.replace_trace(text)  # what is printed is the program
        close(compiled(x), before, before.double(), slack=64)


@runs
@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_every_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel for all of them."""
    monkeypatch.setattr(heuristics, "START_SECONDS", -1.0)
    model = Model().to(place())
    compiled = compile(model, tune=False, dynamic=True)
    with torch.no_grad():
        for rows in (19, 2, 31, 33, 97):
            x = normal(2, rows, 48)
            exact = copy.deepcopy(model).double()(x.double())
            close(compiled(x), model(x), exact)
    assert len(compiled.graphs) == 1 and "aten.mm" in str(compiled.last_trace())


@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_a_product_that_loses_more_stays_with_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heuristics, "LOSS", 1e9)
    _, _, text = final(Model(), tune=False)
    assert "one kernel saves" in text and "aten.mm" not in text.split("def forward(")[0]


@pytest.mark.usefixtures("as_if_on_a_gpu")
@pytest.mark.parametrize("faster", [epilogue.ONE, epilogue.APART])
def test_the_clock_decides_once(
    faster: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`tune=True` measures both and keeps the answer; a second compilation reads it."""
    monkeypatch.setenv("FULGURITE_CACHE", str(tmp_path))
    asked: list[Any] = []

    def pretended(calls: dict[str, Any], *_: Any) -> dict[str, float]:
        asked.append(calls)
        return {name: 1.0 if name == faster else 2.0 for name in calls}

    monkeypatch.setattr(epilogue.timing, "compare_on", pretended)
    for again in (False, True):
        compiled, _, text = final(Model(), tune=True)
        decisions = [
            d for d in compiled.graphs[0].decisions if d.winner in (epilogue.ONE, epilogue.APART)
        ]
        assert [d.winner for d in decisions] == [faster] and decisions[0].cached is again
        assert ("aten.mm" in text.split("def forward(")[0]) == (faster == epilogue.ONE)
    assert sum(epilogue.ONE in calls for calls in asked) == 1


@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_a_wrong_kernel_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """However fast it is."""
    monkeypatch.setenv("FULGURITE_CACHE", str(tmp_path))
    times = {epilogue.ONE: 1.0, epilogue.APART: 2.0}
    monkeypatch.setattr(
        epilogue.timing, "compare_on", lambda calls, *_: {n: times.get(n, 1.5) for n in calls}
    )
    lower = fuser.lower

    def wrong(module: Any, tune: bool = False, **more: Any) -> Any:
        made = lower(module, **more)
        return (lambda *given: [t * float("nan") for t in made(*given)]) if tune else made

    monkeypatch.setattr(epilogue.fuser, "lower", wrong)
    decision = epilogue.measured(trace(*on_cpu("residual")), heuristics.Expected("", 0, 0, 0, True))
    assert decision.winner == epilogue.APART
    assert "wrong" in epilogue._times(decision)


def test_unmeasured_sizes_stay_with_the_library() -> None:
    for name in ("bias_gelu", "residual", "gated"):
        assert heuristics.expected(trace(*large(name))).pays
    assert not heuristics.expected(trace(*large("kept"))).pays

    def kept_in_another_shape(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h, activated = kept(x, w)
        return h.view(8, 1024, -1).transpose(0, 1), activated

    assert not heuristics.expected(trace(kept_in_another_shape, large("kept")[1])).pays
    few = (
        normal(16, 1024, device="cpu"),
        weight(1024, 4096, device="cpu"),
        normal(4096, device="cpu"),
    )
    expect = heuristics.expected(trace(bias_gelu, few))
    assert not expect.pays and "tune=True" in expect.why


def test_what_is_saved() -> None:
    """Products are not read again."""
    size = 70 * 90 * 2
    for name, bytes_ in (("bias_gelu", size), ("gate_and_up", 2 * size), ("gated", 2 * size)):
        assert heuristics.saved_bytes(pattern.read(trace(*on_cpu(name)))) == bytes_


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="already in the interpreter")
def test_a_sample_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", str(Path(__file__)), "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-k", SAMPLE], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, "TRITON_INTERPRET=1 pytest " + done.stdout[-4000:]
