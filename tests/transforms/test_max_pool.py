"""Max pooling with offsets inside the window, forward and backward, against eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fulgurite
from fulgurite.transforms.max_pool import max_pool2d_offsets

WINDOWS = [
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 2},
    {"kernel_size": (3, 1), "stride": (1, 2), "padding": (1, 0)},
    {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
    {"kernel_size": 2, "stride": 3, "ceil_mode": True},
    {"kernel_size": (2, 3), "stride": 1, "padding": 1, "dilation": (3, 2)},
    {"kernel_size": 3, "stride": (3, 2), "padding": 1, "dilation": 2, "ceil_mode": True},
    {"kernel_size": 6, "stride": 2, "padding": 3},  # too large to unroll
    {"kernel_size": 12, "padding": 1},  # too large for an int8
]
EXECUTORS = [["fuser", "torch"], ["torch"]]


def run_both(function, x, executors):
    """Results and gradients of eager and of the compiled function, and the compiled function."""
    compiled = fulgurite.compile(function, executors=executors, autotune=False)
    found = []
    for each in (function, compiled):
        given = x.detach().requires_grad_()
        result = each(given)
        weights = torch.arange(1.0, result.numel() + 1, dtype=result.dtype).view_as(result)
        result.backward(weights)
        found.append((result.detach(), given.grad))
    return (*found, compiled)


def saved_dtypes(compiled):
    trace = compiled.last_trace(kind="forward")
    return [node.meta["val"].dtype for node in trace.outputs[1:]]


@pytest.mark.covering
@pytest.mark.parametrize("executors", EXECUTORS, ids="-".join)
@pytest.mark.parametrize("number", range(len(WINDOWS)), ids=lambda k: str(WINDOWS[k]))
def test_windows_match_eager(number, executors):
    torch.manual_seed(0)
    window, layouts = WINDOWS[number], [torch.contiguous_format, torch.channels_last]
    for layout in layouts if executors == ["torch"] else [layouts[number % 2]]:
        x = torch.randint(0, 6, (2, 3, 11, 13)).float().contiguous(memory_format=layout)  # ties
        eager, ours, compiled = run_both(lambda x: F.max_pool2d(x, **window), x, executors)
        torch.testing.assert_close(ours, eager, rtol=0, atol=0)
        assert [t.stride() for t in ours] == [t.stride() for t in eager]
    kernel = window["kernel_size"]
    size = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    saved = saved_dtypes(compiled)
    assert (torch.int8 in saved) == (size[0] * size[1] <= 128)
    assert (torch.int64 in saved) == (size[0] * size[1] > 128)


@pytest.mark.parametrize("executors", EXECUTORS, ids="-".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_nonfinite_values_and_dtypes(dtype, executors):
    torch.manual_seed(0)
    x = torch.randn(2, 4, 9, 9).to(dtype)
    x[0, 0, 2:7, 2:7] = -torch.inf  # windows without another value
    x[0, 1, 0] = -torch.inf
    x[0, 1, 1] = -torch.inf
    x[0, 2, ::3, ::2] = torch.nan
    x[0, 3, 4:6] = torch.inf
    x[1, 0] = 0.0
    x[1, 0, ::2] = -0.0
    eager, ours, _ = run_both(lambda x: F.max_pool2d(x, 3, 2, 1), x, executors)
    torch.testing.assert_close(ours[0], eager[0], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(ours[1].float(), eager[1].float(), rtol=1e-2, atol=0)


@pytest.mark.parametrize("executors", EXECUTORS, ids="-".join)
def test_other_ranks_and_layouts(executors):
    torch.manual_seed(0)
    for function, x in [
        (lambda x: F.max_pool2d(x, 2, 1, 1), torch.randn(5, 7, 6)),
        (lambda x: F.max_pool1d(x, 3, 2, 1), torch.randn(2, 5, 17)),
        (lambda x: F.max_pool2d(x, 2), torch.randn(7, 6, 3, 2).permute(3, 2, 0, 1)),
        (lambda x: F.max_pool2d(x, 2), torch.randn(2, 1, 4, 4)),
        (lambda x: F.max_pool2d(x, 1), torch.randn(1, 3, 1, 1)),
        (lambda x: F.max_pool2d(x, 2).relu(), torch.randn(2, 3, 8, 16)[..., ::2]),
    ]:
        eager, ours, _ = run_both(function, x, executors)
        torch.testing.assert_close(ours, eager, rtol=0, atol=0)
        assert [t.stride() for t in ours] == [t.stride() for t in eager]


def test_saved_bytes():
    """One byte per maximum instead of eight."""
    x = torch.randn(2, 8, 32, 32, requires_grad=True)
    compiled = fulgurite.compile(lambda x: F.max_pool2d(x.relu(), 3, 2, 1), autotune=False)
    compiled(x)
    saved = compiled.last_trace(kind="forward").outputs[1:]
    sizes = [node.meta["val"].nbytes for node in saved]
    assert sum(sizes) == 2 * 8 * (32 * 32 * 4 + 16 * 16), "the relu, and one byte per window"


def test_returned_indices_stay_int64():
    def function(x):
        return F.max_pool2d(x, 2, return_indices=True)

    x = torch.randn(1, 2, 6, 6, requires_grad=True)
    compiled = fulgurite.compile(function, autotune=False)
    ours, eager = compiled(x), function(x)
    torch.testing.assert_close(ours, eager)
    assert ours[1].dtype == torch.int64


def test_offsets_inside_windows():
    x = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8], [9, 0, 1, 2], [3, 4, 5, 9]])[None, None]
    values, offsets = max_pool2d_offsets(x, [2, 2], [2, 2], [0, 0], [1, 1], False)
    assert values.flatten().tolist() == [6, 8, 9, 9] and offsets.flatten().tolist() == [3, 3, 0, 3]
