"""In-place writes through views change the elements of the views and no others."""

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


SPLITS = {
    "unsafe_split": lambda x: torch.unsafe_split(x, 2),
    "unsafe_split of rows": lambda x: x.unsafe_split(3, dim=-1),
    "unsafe_split_with_sizes": lambda x: torch.unsafe_split_with_sizes(x, [1, x.size(0) - 1]),
    "named arguments": lambda x: torch.unsafe_split(split_size=2, input=x, dim=1),
    "unsafe_chunk": lambda x: torch.unsafe_chunk(x, 2, 1),
}


def write_to_a_part(x, split):
    split(x)[-1].mul_(2)
    return x + 1


def write_to_the_base(x, split):
    part = split(x)[0]
    x.add_(1)
    return part * 2


def write_to_a_part_of_a_result(x, split):
    y = x * 2
    split(y)[0][0] = 5
    return y


@pytest.mark.parametrize("write", [write_to_a_part, write_to_the_base, write_to_a_part_of_a_result])
@pytest.mark.parametrize("split", SPLITS)
def test_parts_share_the_memory_of_their_base(split, write):
    compiled = fulgurite.compile(lambda x: write(x, SPLITS[split]))
    for rows, columns in ((4, 6), (6, 8), (8, 12)):  # the last two have symbolic sizes
        ours = torch.randn(rows, columns)
        theirs = ours.clone()
        torch.testing.assert_close(compiled(ours), write(theirs, SPLITS[split]))
        torch.testing.assert_close(ours, theirs)


def test_gradient_of_parts():
    def f(x):
        first, second = torch.unsafe_chunk(x, 2)
        return (first.sin() * second).sum()

    x = torch.randn(8, requires_grad=True)
    (found,) = torch.autograd.grad(fulgurite.compile(f)(x), x)
    torch.testing.assert_close(found, torch.autograd.grad(f(x), x)[0])
