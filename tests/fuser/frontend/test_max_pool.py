"""Max pooling with int8 offsets as C++ and Triton kernels, against torch's own pooling."""

from __future__ import annotations

import pytest
import torch

from fulgurite.transforms.max_pool import max_pool2d_offsets, max_pool2d_offsets_backward
from tests.fuser import support
from tests.fuser.support import check_fused

RUNS_ON_TRITON = True

WINDOWS = [
    ([3, 3], [2, 2], [1, 1], [1, 1], False),
    ([2, 3], [3, 1], [1, 1], [2, 2], True),
    ([2, 2], [2, 2], [0, 0], [1, 1], False),
]


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_forward_and_backward(window, last):
    torch.manual_seed(0)
    x = torch.randint(0, 9, (2, 5, 9, 11)).float()
    x[0, 0, 3, 3:6] = torch.nan
    if not (last and torch.cuda.is_available()):  # eager's GPU kernel gives index 0 there
        x[0, 1] = -torch.inf
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    forward = max_pool2d_offsets.overload
    region = check_fused(lambda x: forward(x, *window), x)
    assert len(region.kernels) == 1
    values, offsets = max_pool2d_offsets(x, *window)
    grad = torch.randn_like(values)
    rest = ([9, 11], *window, last)
    backward = max_pool2d_offsets_backward.overload
    region = check_fused(lambda g, o: backward(g, o, *rest), grad, offsets)
    # C++ adds planes up at the saved offsets, on top of zeros
    assert len(region.kernels) == (2 if support.TARGET == "cpp" and not last else 1)
