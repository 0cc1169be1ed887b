"""`fulgurite::recurrence`: the C++ kernel against the plain formula in float64."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from fulgurite import device
from fulgurite.kernels.conv.ops import pack_bias, pack_weight
from fulgurite.kernels.recurrent import cpu, ops


def make_arguments(cell: str, directions: int, steps: int, batch: int, hidden: int) -> tuple:
    torch.manual_seed(0)
    columns = cpu.GATES[cell] * hidden
    gates = [torch.randn(batch, steps, columns).transpose(0, 1) for _ in range(directions)]
    weights = [torch.randn(columns, hidden) / hidden**0.5 for _ in range(directions)]
    biases = [torch.randn(columns) for _ in range(directions)]
    packed = [pack_weight(one, 1) for one in weights], [pack_bias(one, None, 1) for one in biases]
    states = [torch.randn(directions, batch, hidden) for _ in range(2)]
    return gates, *packed, states[0], states[1] if cell == "lstm" else None, cell


def in_float64(arguments: tuple) -> tuple:
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.double, arguments)


@pytest.mark.parametrize("cell", cpu.CELLS)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    "sizes", [(1, 4, 1, 5), (2, 3, 7, 33), (2, 1, 2, 16), (1, 2, 9, 70)], ids=str
)
def test_kernel_equals_the_formula(cell: str, threads: int, sizes: tuple[int, ...]) -> None:
    arguments = make_arguments(cell, *sizes)
    before = [gate.clone() for gate in arguments[0]]
    with mock.patch.object(device, "num_cpu_threads", lambda: threads):
        actual = cpu.recurrence(*arguments)
    exact = ops._reference(*in_float64(arguments))
    plain = ops._reference(*arguments)
    for ours, wanted, rounded in zip(actual, exact, plain, strict=True):
        assert ours.shape == wanted.shape
        if ours.numel():
            error, bound = ((one.double() - wanted).abs().max() for one in (ours, rounded))
            assert error <= 2 * bound + 1e-6
    assert all(map(torch.equal, arguments[0], before))


def test_nan_stays_in_its_row_of_the_batch() -> None:
    arguments = make_arguments("gru", 2, 4, 3, 17)
    arguments[0][0][1, 1] = float("nan")
    out, _, _ = cpu.recurrence(*arguments)
    assert out[1:, 1, :17].isnan().all()
    assert not out[:, [0, 2]].isnan().any()


def test_other_dtypes_run_as_the_formula() -> None:
    arguments = in_float64(make_arguments("lstm", 1, 3, 2, 8))
    assert cpu.recurrence(*arguments) is NotImplemented
