"""In-place writes through `unfold` change the elements of the windows and no others."""

from __future__ import annotations

import pytest
import torch

import fulgurite


def double(x):
    x.unfold(-1, 2, 2).mul_(2)
    return x + 1


def assign(x):
    windows = x.unfold(0, 1, 2)
    windows[1:] = windows[1:] - 1
    return windows.sum()


def of_a_result(x):
    y = (x * 2).t()
    y.unfold(0, 2, 2)[..., 0] += 5
    return y


def of_a_view(x):
    x[1:].unfold(0, 2, 2).neg_()
    return x.sum(0)


@pytest.mark.parametrize("function", [double, assign, of_a_result, of_a_view])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided"])
def test_values_outside_the_windows_stay(function, layout):
    compiled = fulgurite.compile(function)
    for rows, columns in ((6, 7), (8, 4), (10, 9)):  # the last two have symbolic sizes
        base = torch.randn(2 * rows, 2 * columns)
        given = {
            "contiguous": base[:rows, :columns].contiguous(),
            "transposed": base[:columns, :rows].t(),
            "strided": base[::2, 1::2],
        }[layout]
        ours = torch.empty_strided(given.shape, given.stride()).copy_(given)
        theirs = torch.empty_strided(given.shape, given.stride()).copy_(given)
        torch.testing.assert_close(compiled(ours), function(theirs))
        torch.testing.assert_close(ours, theirs)


def test_a_last_window_that_ends_before_its_step():
    def f(x):
        x.unfold(-1, 2, 3).mul_(2)

    for x in (torch.randn(8), torch.randn(3, 5)):
        ours = x.clone()
        fulgurite.compile(f)(ours)
        f(x)
        torch.testing.assert_close(ours, x)


def test_gradients():
    def f(x):
        y = x * 1
        y.unfold(0, 2, 3).mul_(2)
        return (y**2).sum()

    x = torch.randn(8, requires_grad=True)
    (found,) = torch.autograd.grad(fulgurite.compile(f)(x), x)
    torch.testing.assert_close(found, torch.autograd.grad(f(x), x)[0])
