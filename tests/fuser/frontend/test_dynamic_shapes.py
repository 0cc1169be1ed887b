"""Dynamic sizes: symbols are kernel arguments, and one kernel serves all lengths."""

from __future__ import annotations

import pytest
import torch

import fulgurite
from fulgurite import fuser
from tests.fuser.support import check_fused, check_fused_again, trace

RUNS_ON_TRITON = True

F = torch.nn.functional


def attention_mask(x):
    n = x.shape[-1]
    return x.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -1e9).softmax(-1)


CASES = {
    "pointwise": (lambda x: F.gelu(x) * 2, (13, 40)),
    "norm": (lambda x: F.layer_norm(x, (x.shape[-1],)), (13, 40)),
    "rms": (lambda x: F.rms_norm(x, (40,)) * 2, (13, 40)),
    "softmax_rows": (lambda x: x.softmax(-1), (13, 40)),
    "softmax_columns": (lambda x: x.softmax(0), (13, 40)),
    "sums": (lambda x: (x.sum(0), x.sum(1), x.sum(), x.mean(), x.var(0)), (13, 40)),
    "flatten": (lambda x: (x + 1).reshape(-1).cos(), (13, 40)),
    "heads": (lambda x: (x * 2).view(x.shape[0], 5, 8).transpose(0, 1).contiguous() + 1, (13, 40)),
    "cat": (lambda x: torch.cat([x, x * 2], 0) + 1, (13, 40)),
    "cat_inner": (lambda x: torch.cat([x, x * 2], 1).sum(1), (13, 40)),
    "halves": (lambda x: torch.cat([-x[:, 20:], x[:, :20]], 1) * 2, (13, 40)),
    "slice": (lambda x: x[1:, :-1] * x[:-1, 1:], (13, 40)),
    "transpose": (lambda x: (x.t() + 1).contiguous(), (13, 40)),
    "argmax": (lambda x: (x.argmax(1), x.argmax(), *x.max(0)), (13, 40)),
    "arange": (lambda x: x + torch.arange(x.shape[1]) * x.shape[0], (13, 40)),
    "mask": (attention_mask, (3, 13, 13)),
    "row_and_column": (lambda x: (x.softmax(-1), (x * 2).sum(0)), (13, 40)),
}

OTHER = {(13, 40): [(7, 40), (1000, 40), (2, 40)], (3, 13, 13): [(5, 31, 31), (2, 64, 64)]}


@pytest.mark.parametrize("name", CASES)
def test_one_kernel_for_all_lengths(name: str) -> None:
    function, shape = CASES[name]
    torch.manual_seed(0)
    region = check_fused(function, torch.randn(shape), mode="symbolic")
    for other in OTHER[shape]:
        check_fused_again(region, function, torch.randn(other))


def test_sizes_can_be_outputs() -> None:
    def function(x):
        return x * 2, x.shape[0], x.shape[0] * 3 + x.shape[1]

    graph = trace(function, (torch.randn(7, 5),), "symbolic")
    region = fuser.lower_region(graph)
    x = torch.randn(11, 6)
    doubled, rows, more = region(x)
    assert torch.equal(doubled, x * 2)
    assert (rows, more) == (11, 39)


def test_two_tensors_share_a_symbol() -> None:
    region = check_fused(
        lambda x, w: F.rms_norm(x, (x.shape[1],), w),
        torch.randn(9, 24),
        torch.randn(24),
        mode="symbolic",
    )
    x, w = torch.randn(33, 70), torch.randn(70)
    check_fused_again(region, lambda x, w: F.rms_norm(x, (x.shape[1],), w), x, w)


def test_reshape_whose_sizes_are_quotients_of_products() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).reshape(-1, 8).exp()

    region = check_fused(f, torch.randn(13, 40), mode="symbolic")
    check_fused_again(region, f, torch.randn(6, 12))


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the CPU, on every target")
def test_a_size_that_a_guard_pins_to_one_broadcasts() -> None:
    """A half of two columns is one column, and it meets a mask of two."""

    def function(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.glu(x, 2).masked_fill(mask, 1)

    x, mask = torch.randn(2, 2, 2), torch.rand(2, 2, 2) < 0.5
    compiled = fulgurite.compile(function, dynamic=True)
    torch.testing.assert_close(compiled(x, mask), function(x, mask))
