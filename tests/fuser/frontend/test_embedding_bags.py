"""embedding_bag and its gradients against eager: modes, padding, empty bags, NaN, offsets, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fulgurite
from tests.fuser import support
from tests.fuser.support import check_fused, check_fused_again

RUNS_ON_TRITON = True

NAN, INF = float("nan"), float("inf")
MODES = ["sum", "mean", "max"]
OFFSETS = torch.tensor([0, 3, 3, 9, 17, 17])


def make_indices(count: int = 20, rows: int = 11, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, rows, (count,), generator=torch.Generator().manual_seed(seed))


def make_weight(dtype: torch.dtype = torch.float32, columns: int = 7) -> torch.Tensor:
    return torch.randn(11, columns, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("padding_idx", [None, 4])
@pytest.mark.parametrize("mode", MODES)
def test_bags(mode: str, padding_idx: int | None, dtype: torch.dtype) -> None:
    def bags(indices: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return F.embedding_bag(indices, weight, offsets, mode=mode, padding_idx=padding_idx)

    check_fused(bags, make_indices(), make_weight(dtype), OFFSETS)
    check_fused(bags, make_indices(1), make_weight(dtype), OFFSETS[:1])
    check_fused(bags, torch.full((6,), 4), make_weight(dtype, columns=1), OFFSETS[:3])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(4, 5), (1, 6), (6, 1), (3, 33)])
def test_rows_of_a_matrix_are_bags(shape: tuple[int, int], mode: str) -> None:
    """Sums and means of such bags are one kernel, together with what follows."""

    def bags(indices: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.embedding_bag(indices, weight, mode=mode) * 2

    indices = make_indices(shape[0] * shape[1]).view(shape)
    region = check_fused(bags, indices, make_weight())
    if mode != "max" and shape[0] > 1:
        assert len(region.kernels) == 1


@pytest.mark.parametrize("mode", MODES)
def test_special_values(mode: str) -> None:
    """A maximum keeps the first element until another is greater: a NaN stays only there."""
    weight = make_weight()
    weight[2], weight[5, :3], weight[6], weight[7] = NAN, INF, -INF, -0.0
    offsets = torch.tensor([0, 2, 4, 6, 8])
    indices = torch.tensor([2, 3, 3, 2, 6, 2, 2, 2, 7, 5, 1])
    check_fused(lambda i, w, o: F.embedding_bag(i, w, o, mode=mode), indices, weight, offsets)


def test_weights_of_lookups_and_integer_types() -> None:
    def bags(i: torch.Tensor, w: torch.Tensor, o: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return F.embedding_bag(i, w, o, mode="sum", per_sample_weights=s, padding_idx=3)

    scales = torch.randn(20, generator=torch.Generator().manual_seed(2))
    check_fused(bags, make_indices(), make_weight(), OFFSETS, scales)
    check_fused(bags, make_indices().int(), make_weight(), OFFSETS.int(), scales)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("end", [20, 18])
def test_last_offset(end: int, mode: str) -> None:
    """torch's CPU kernels leave out lookups after it in sums only."""
    if support.TARGET == "cuda" and end != 20:
        pytest.skip("the kernels of GPUs read to the end")

    def bags(i: torch.Tensor, w: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        return F.embedding_bag(i, w, o, mode=mode, include_last_offset=True)

    offsets = torch.tensor([0, 4, 4, 15, end])
    for dtype in (torch.float32, torch.float64):
        check_fused(bags, make_indices(), make_weight(dtype), offsets)


@pytest.mark.parametrize("mode", MODES)
def test_symbolic_sizes(mode: str) -> None:
    def bags(i: torch.Tensor, w: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        return F.embedding_bag(i, w, o, mode=mode) + 1

    region = check_fused(bags, make_indices(), make_weight(), OFFSETS, mode="symbolic")
    check_fused_again(region, bags, make_indices(33, seed=3), make_weight(), OFFSETS[:4])


def gradients(function: Callable[..., torch.Tensor], *arguments: Any) -> list[torch.Tensor]:
    leaves = [a for a in arguments if a.requires_grad]
    return list(torch.autograd.grad(function(*arguments).square().sum(), leaves))


@pytest.mark.covering
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fused_forward_and_backward(dtype: torch.dtype, mode: str) -> None:
    if support.TARGET == "triton":
        pytest.skip("fuse runs C++ kernels on CPU tensors")
    device = "cuda" if support.TARGET == "cuda" else "cpu"
    given = [make_indices(), make_weight(dtype), OFFSETS]
    indices, weight, offsets = (x.to(device) for x in given)
    weight.requires_grad_()

    def bags(i: torch.Tensor, w: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        return F.embedding_bag(i, w * 2, o, mode=mode, padding_idx=4)

    for padded in (bags, lambda i, w, o: F.embedding_bag(i, w * 2, o, mode=mode)):
        fused = fulgurite.fuse(padded)
        expected = gradients(padded, indices, weight, offsets)
        found = gradients(fused, indices, weight, offsets)
        eps = torch.finfo(dtype).eps  # of gradients up to about 50
        torch.testing.assert_close(found, expected, rtol=2 * eps, atol=8 * eps)


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_gradient_of_weights_of_lookups(padding_idx: int | None) -> None:
    if support.TARGET == "triton":
        pytest.skip("fuse runs C++ kernels on CPU tensors")
    device = "cuda" if support.TARGET == "cuda" else "cpu"
    scales = torch.randn(20, generator=torch.Generator().manual_seed(2))
    given = [make_indices(), make_weight(), OFFSETS, scales]
    arguments = [x.to(device) for x in given]
    for position in (1, 3):
        arguments[position].requires_grad_()

    def bags(i: torch.Tensor, w: torch.Tensor, o: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        options = {"per_sample_weights": s, "padding_idx": padding_idx}
        return F.embedding_bag(i, w, o, mode="sum", **options)

    expected = gradients(bags, *arguments)
    torch.testing.assert_close(gradients(fulgurite.fuse(bags), *arguments), expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("problem", ["first offset", "last offset", "large row", "negative row"])
def test_errors_are_those_of_eager(problem: str, mode: str) -> None:
    if support.TARGET != "cpp":
        pytest.skip("a GPU kernel traps on a device-side assert, like torch's")
    indices, offsets = make_indices(), OFFSETS.clone()
    if problem == "first offset":
        offsets[0] = 1
    elif problem == "last offset":
        offsets[-1] = 21
    else:
        indices[7] = 11 if problem == "large row" else -1

    def bags(i: torch.Tensor, w: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        return F.embedding_bag(i, w, o, mode=mode) * 2

    with pytest.raises((RuntimeError, IndexError)) as expected:
        bags(indices, make_weight(), offsets)
    with pytest.raises(expected.type) as found:
        fulgurite.fuse(bags)(indices, make_weight(), offsets)
    assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]


def test_offsets_out_of_order_are_an_error() -> None:
    """torch's own results for them depend on the mode and the dtype; here it raises, too."""
    if support.TARGET != "cpp":
        pytest.skip("a GPU kernel traps on a device-side assert")
    fused = fulgurite.fuse(lambda i, w, o: F.embedding_bag(i, w, o, mode="sum") * 2)
    with pytest.raises((IndexError, RuntimeError), match="out of range|index_size"):
        fused(make_indices(), make_weight(), torch.tensor([0, 5, 4]))
