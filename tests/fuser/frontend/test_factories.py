"""linspace against eager: dtypes, one number, ends from tensors and symbols."""

from __future__ import annotations

import pytest
import torch

from tests.fuser.support import (
    check_fused,
    check_fused_again,
    check_layout,
    lower_for_target,
    target_device,
    to_target,
)

RUNS_ON_TRITON = True

ENDS = [(0, 1), (-3.7, 9.25), (5, -5), (2, 2), (1e30, -1e30), (float("nan"), 1)]


def lines(dtype: torch.dtype, steps: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    ends = ENDS if dtype.is_floating_point and dtype != torch.float16 else ENDS[:4]
    return tuple(torch.linspace(a, b, steps, dtype=dtype, device=x.device) for a, b in ends)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8])
@pytest.mark.parametrize("steps", [0, 1, 2, 7, 100])
def test_integers(steps: int, dtype: torch.dtype) -> None:
    check_fused(lambda x: lines(dtype, steps, x), torch.zeros(1))


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("steps", [0, 1, 2, 7, 100])
def test_floats(steps: int, dtype: torch.dtype) -> None:
    """Eager starts at the first number of each vector register, so its bits depend on the CPU."""
    x = torch.zeros(1)
    with target_device():
        found = lower_for_target(lambda x: lines(dtype, steps, x), [to_target(x)])(to_target(x))
    for ours, eager, exact in zip(found, lines(dtype, steps, x), lines(torch.float64, steps, x)):
        ours, scale = ours.cpu(), exact.abs().nan_to_num().amax() if steps else 0
        check_layout(ours, eager)
        assert torch.equal(ours.isnan(), eager.isnan())
        allowed = 2 * (eager.double() - exact).abs() + 2 * torch.finfo(dtype).eps * scale
        assert ((ours.double() - exact).abs() <= allowed)[~exact.isnan()].all()


def test_ends_are_exact() -> None:
    def line(x: torch.Tensor) -> torch.Tensor:
        return torch.linspace(0.1, 0.7, 1001, device=x.device) * x

    x = torch.ones(())
    (found,) = check_fused(line, x)(x)
    assert (found[0], found[-1]) == (torch.tensor(0.1), torch.tensor(0.7))


def test_ends_from_tensors() -> None:
    def lines(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        low, high = x.min(), x.max()
        return (
            torch.linspace(low, high, 9) * 2,
            torch.linspace(low, 3, 9),
            torch.linspace(-1, high, 5, dtype=torch.int64),
        )

    check_fused(lines, torch.randn(4, 5, generator=torch.Generator().manual_seed(0)))


def test_ends_from_sizes() -> None:
    def line(x: torch.Tensor) -> torch.Tensor:
        return torch.linspace(-x.shape[0], x.shape[1], 7, device=x.device) + x.sum()

    region = check_fused(line, torch.ones(4, 5), mode="symbolic")
    check_fused_again(region, line, torch.ones(3, 8))
