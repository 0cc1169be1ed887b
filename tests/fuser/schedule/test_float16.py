"""float16 in row and pointwise C++ kernels: blocks are converted by the instructions of the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.fuser import support
from tests.fuser.support import check_fused, lower_for_target

F16 = torch.float16


@pytest.fixture(autouse=True)
def needs_cpp_kernels(target: None) -> None:
    if support.TARGET != "cpp":
        pytest.skip("schedules of C++ kernels")


def test_every_number_is_read_and_written_exactly() -> None:
    x = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(F16)
    region = check_fused(lambda x: (x.float(), -x), x)
    assert "widen_block" in region.kernels[0].source
    wide, negative = region(x)
    assert torch.equal(wide.isnan(), x.isnan()) and torch.equal(negative.isnan(), x.isnan())
    numbers = ~x.isnan()
    assert torch.equal(wide[numbers].view(torch.int32), x.float()[numbers].view(torch.int32))
    assert torch.equal(negative[numbers].view(torch.int16), (-x)[numbers].view(torch.int16))


def test_results_are_rounded_to_nearest_even() -> None:
    """Halves between all neighbours, numbers beside them, overflow and subnormal results."""
    codes = torch.arange(0x7C00).to(torch.int16).view(F16).float()
    halves = (codes[1:] + codes[:-1]) / 2
    beside = [halves, halves * (1 + 2**-20), halves * (1 - 2**-20)]
    x = torch.cat([*beside, torch.tensor([65519.9, 65520.0, 1e9, torch.inf, 1e-9, 2.0**-25])])
    x = torch.cat([x, -x])
    (result,) = lower_for_target(lambda x: x.half(), (x,))(x)
    assert torch.equal(result.view(torch.int16), x.half().view(torch.int16))


@pytest.mark.parametrize("shape", [(7,), (3, 16), (9, 61), (5, 512), (2, 3, 1031), (1, 40000)])
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_rows_of_any_length(shape: tuple[int, ...], mode: str) -> None:
    """Blocks, their ends, several passes over a block, two loads of one tensor, in-place results."""
    x, bias = torch.randn(shape).to(F16), torch.randn(shape[-1]).to(F16)
    check_fused(lambda x, b: F.silu(x) * x.flip(0) + b, x, bias, mode=mode)
    check_fused(lambda x: (F.softmax(x, -1), x[..., 1:] * x[..., :-1]), x, mode=mode)


@pytest.mark.parametrize("shape", [(40, 61), (3, 300, 77), (2, 5, 600)])
def test_columns(shape: tuple[int, ...]) -> None:
    """The lanes of each point, whole blocks and the last one; values of several passes."""
    x, scale = torch.randn(shape).to(F16), torch.rand(shape[-1]).to(F16)

    def standardize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x) * scale
        return (x - x.mean(-2, keepdim=True)) * (x * x).sum(-2, keepdim=True).rsqrt()

    region = check_fused(standardize, x, scale)
    assert any("widen_block" in kernel.source for kernel in region.kernels)
    check_fused(lambda x: (x.sum(-2), x.amax(-2)), x)


@pytest.mark.parametrize("dtype", [F16, torch.bfloat16])
def test_packed_columns_are_copied_as_integers(dtype: torch.dtype) -> None:
    """g++ does not vectorize some loops that copy structs."""
    (kernel,) = check_fused(lambda x: F.softmax(x, 0), torch.randn(1000, 1000).to(dtype)).kernels
    assert "packed loads" in str(kernel.schedule) and ".code = arg0_1[" in kernel.source


def test_results_in_place() -> None:
    x = torch.randn(33, 700).to(F16)
    expected = x * 3 + x.sum(-1, keepdim=True)
    region = lower_for_target(lambda x: x.copy_(x * 3 + x.sum(-1, keepdim=True)), (x.clone(),))
    region(x)
    torch.testing.assert_close(x, expected, atol=0.05, rtol=2e-3)
