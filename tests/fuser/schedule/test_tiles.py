"""Rows reduced side by side on CPUs: transposed tiles, buffered values and bools of column kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fulgurite.kernels.tuning import fuser_cpu as tuning
from tests.fuser import support
from tests.fuser.support import check_fused, lower_for_target

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.fixture(autouse=True)
def needs_cpp_kernels(target: None) -> None:
    if support.TARGET != "cpp":
        pytest.skip("schedules of C++ kernels")


def layer_norm(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:])


def softmax(x: torch.Tensor) -> torch.Tensor:
    return F.softmax(x, -1)


def group_norm(x: torch.Tensor) -> torch.Tensor:
    return F.group_norm(x, 2)


def log_sum_exp(x: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(F.silu(x), -1)


def first_maximum(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.argmax(-1), x.amax(-1)


def uses_tiles(function: Callable[..., Any], *arguments: torch.Tensor) -> bool:
    region = check_fused(function, *arguments)
    return any("transposed tiles" in str(kernel.schedule) for kernel in region.kernels)


@pytest.mark.covering
@pytest.mark.parametrize("function", [layer_norm, softmax, log_sum_exp, first_maximum])
@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64])
@pytest.mark.parametrize(("rows", "width"), [(16, 13), (77, 7), (130, 16), (1031, 31)])
def test_short_rows_run_side_by_side(
    function: Callable[..., Any], dtype: torch.dtype, rows: int, width: int
) -> None:
    assert uses_tiles(function, torch.randn(rows, width).to(dtype))


@pytest.mark.parametrize("width", [64, 256, 1024])
def test_long_rows_run_one_after_the_other(width: int) -> None:
    assert not uses_tiles(layer_norm, torch.randn(512, width))


@pytest.mark.parametrize("shape", [(40, 8, 13), (33, 4, 3, 7), (16, 2, 61)])
def test_rows_of_several_loops(shape: tuple[int, ...]) -> None:
    """A weight of each channel keeps the loops over channels and pixels apart."""
    weight = torch.randn(shape[1])
    assert uses_tiles(lambda x, w: F.group_norm(x, 2, w, w), torch.randn(shape), weight)


def test_rows_apart_in_memory() -> None:
    x = torch.randn(50, 40)
    assert uses_tiles(softmax, x[:, 3:16])
    assert uses_tiles(softmax, x.view(25, 2, 40)[:, 1, :13])
    assert uses_tiles(lambda x, y: layer_norm(x + y), x[:, :9], torch.randn(1, 9).expand(50, 9))


def test_infinities_and_nans_stay_in_their_rows() -> None:
    x = torch.randn(70, 11)
    x[3, 2], x[20, 0], x[21], x[69, 10] = float("nan"), float("inf"), -float("inf"), -0.0
    assert uses_tiles(softmax, x)


@pytest.mark.parametrize("function", [layer_norm, softmax, log_sum_exp])
def test_bits_of_a_row_do_not_depend_on_its_lane(function: Callable[..., Any]) -> None:
    """Whole vectors of lanes, and the single lanes at the end of a block."""
    x = torch.randn(1, 13).expand(93, 13).contiguous()
    region = lower_for_target(function, (x,))
    (result,) = region(x)
    assert torch.equal(result, result[:1].expand_as(result))


def test_few_rows_and_dynamic_rows() -> None:
    assert not uses_tiles(softmax, torch.randn(4, 13))
    check_fused(softmax, torch.randn(45, 13), mode="symbolic")


def test_long_sums_over_several_loops_are_accurate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their float accumulators are added to doubles, though each loop is short."""
    x = torch.full((200, 16, 100, 20), 0.1)
    region = lower_for_target(lambda x: x.sum((0, 2)), (x,))
    (result,) = region(x)
    expected = x.double().sum((0, 2))
    assert ((result - expected).abs() / expected).max() < 4e-7


def test_expensive_values_are_computed_once() -> None:
    """A channel norm of a GELU: the second and third pass read the values of the first."""

    def function(x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(x)
        return (x - x.mean(1, keepdim=True)) * x.var(1, keepdim=True).rsqrt()

    (kernel,) = check_fused(function, torch.randn(3, 24, 61)).kernels
    assert kernel.source.count("const float gelu = (") == 1
    assert "[24][64]" in kernel.source, "lanes are as many as there are columns"


def test_bools_of_lanes_are_arrays_of_integers() -> None:
    """g++ vectorizes no loop that reads bools beside floats."""

    def function(x: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
        total = torch.where(limit > 0, x.sum(1, keepdim=True), 0.0)
        return torch.where(limit == 0, 0.0, x * total)

    kernels = check_fused(function, torch.randn(3, 24, 61), torch.randn(3, 1, 61)).kernels
    assert not any("alignas(64) bool" in kernel.source for kernel in kernels)


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [F32, BF16, torch.uint8, F64, torch.bool])
@pytest.mark.parametrize(("rows", "columns"), [(127, 131), (129, 145), (1000, 17), (19, 1031)])
def test_transposes_of_odd_sizes(dtype: torch.dtype, rows: int, columns: int) -> None:
    x = (torch.randn(rows, columns) * 50).abs().to(dtype)
    (result,) = lower_for_target(
        lambda x: x.t().clone(memory_format=torch.contiguous_format), (x,)
    )(x)
    assert torch.equal(result, x.t())


def test_transposes_do_not_read_behind_the_last_row() -> None:
    """The tensor ends at the end of a page; the next page may not be read."""
    import ctypes
    import mmap

    size, pages = 61 * 61 * 4, 6
    memory = mmap.mmap(-1, pages * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    last = address + (pages - 1) * mmap.PAGESIZE
    assert libc.mprotect(ctypes.c_void_p(last), mmap.PAGESIZE, 0) == 0
    start = (pages - 1) * mmap.PAGESIZE - size
    x = torch.frombuffer(memory, dtype=F32, count=61 * 61, offset=start).view(61, 61)
    assert x.data_ptr() + size == last
    x.copy_(torch.randn(61, 61))
    for function in (lambda x: F.softmax(x[:, 48:], -1), lambda x: x.t() + 1.0):
        (result,) = lower_for_target(function, (x,))(x)
        torch.testing.assert_close(result, function(x))
    assert tuning.MIN_TILED_LANES <= 61
    libc.mprotect(ctypes.c_void_p(last), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE)


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64])
@pytest.mark.parametrize("width", [13, 31, 61, 125])
def test_the_end_of_a_row_is_a_whole_vector(dtype: torch.dtype, width: int) -> None:
    def function(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.erf(x.flip(1) * scale), x.flip(1) > 0

    x, scale = torch.randn(9, 5, width).to(dtype), torch.randn(5, 1).to(dtype)
    kernels = check_fused(function, x, scale).kernels
    assert any("padded tail" in str(kernel.schedule) for kernel in kernels)
    x[0, 0, -1], x[8, 4, -1] = float("nan"), -float("inf")
    check_fused(function, x, scale)


def test_the_end_of_a_row_in_place() -> None:
    """An output may take the memory of an input: the end of a row is loaded before it is stored."""
    x, shift = torch.randn(6, 5, 13), torch.randn(5, 1)
    expected = torch.erf(x + shift)
    region = lower_for_target(lambda x, shift: x.copy_(torch.erf(x + shift)), (x.clone(), shift))
    (result,) = region(x, shift)
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize(("width", "function"), [(64, torch.erf), (61, torch.neg)])
def test_even_or_cheap_rows_have_no_tail(width: int, function: Callable[..., Any]) -> None:
    (kernel,) = check_fused(lambda x: function(x.flip(1)), torch.randn(9, 5, width)).kernels
    assert "padded tail" not in str(kernel.schedule)
