"""Attributes of tensors that FakeTensors lack."""

from __future__ import annotations

import numpy as np
import torch

import fulgurite


def test_nbytes():
    compiled = fulgurite.compile(lambda x: x * x.nbytes, fullgraph=True)
    for size in (2, 3, 5):
        for dtype in (torch.float32, torch.float64):
            x = torch.ones(size, 3, dtype=dtype)
            torch.testing.assert_close(compiled(x), x * (size * 3 * dtype.itemsize))


def test_memory_for_other_libraries():
    x = torch.arange(3.0)
    compiled = fulgurite.compile(lambda x: (x + 1, (x * 2).__array__(), (x * 3).__dlpack__()))
    total, array, capsule = compiled(x)
    torch.testing.assert_close(total, x + 1)
    np.testing.assert_array_equal(array, [0, 2, 4])
    torch.testing.assert_close(torch.from_dlpack(capsule), x * 3)
