"""Parts of a cat are stored by the kernels that compute them, in slices of the cat's buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fulgurite
from fulgurite.fuser.frontend.lower_graph import lower_graph
from fulgurite.fuser.ir.interpreter import interpret_region
from fulgurite.fuser.ir.split_axes import split_axes
from fulgurite.fuser.ir.split_statements import find_split_candidates, split_statements
from fulgurite.fuser.ir.statement import verify_region
from fulgurite.fuser.segment import choose_slices
from tests.fuser import support
from tests.fuser.support import check_against_eager, check_fused, check_fused_again, trace

RUNS_ON_TRITON = True


@pytest.fixture
def always_split(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Splits every candidate: small tests would not gain from all of them."""
    for name in ("MIN_GAIN", "MIN_GAIN_CPU"):
        monkeypatch.setattr(choose_slices, name, float("-inf"))
    monkeypatch.setattr(choose_slices, "_shares_memory", lambda name, segments: True)
    yield


def gated(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Two values that share a costly one, which a `where` over both would compute twice."""
    shared = torch.exp(torch.sin(x) * y) / (1 + torch.cosh(x * y))
    shared = torch.tanh(shared + torch.erf(shared * y))
    return shared * x, shared + y


def swiglu_gradient(sums: Tensor, grad: Tensor) -> Tensor:
    a, b = sums.float().chunk(2, -1)
    grad = grad.float()
    parts = torch.ops.aten.silu_backward(grad * b, a), grad * F.silu(a)
    return torch.cat(parts, -1).to(torch.bfloat16)


def make_pair(*sizes: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(sizes), torch.randn(sizes)


def count_kernels(function: Callable[..., object], *arguments: Tensor) -> int:
    """Kernels of a GPU, for sizes that take long to run in an interpreter."""
    with support.target_device():
        given = tuple(map(support.to_target, arguments))
        return len(support.lower_for_target(function, given).kernels)


def test_gradient_of_gated_mlp() -> None:
    check_fused(swiglu_gradient, torch.randn(32, 66).bfloat16(), torch.randn(32, 33).bfloat16())


def test_gradient_of_gated_mlp_is_one_kernel() -> None:
    if support.TARGET == "cpp":
        pytest.skip("C++ kernels gain less")
    sums, grad = torch.randn(2048, 2048).bfloat16(), torch.randn(2048, 1024).bfloat16()
    with support.target_device():
        given = support.to_target(sums), support.to_target(grad)
        (kernel,) = support.lower_for_target(swiglu_gradient, given).kernels
    assert kernel.bytes_moved == 2 * (2 * sums.numel() + grad.numel())


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("size", [3, 8])
def test_dims(dim: int, size: int) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat(gated(x, y), dim) * 2

    check_fused(function, *make_pair(4, 6, size))
    if support.TARGET != "cpp":
        assert count_kernels(function, *make_pair(64, 96, 8 * size)) == 1


PROGRAMS: dict[str, Callable[..., object]] = {
    "three_parts": lambda x, y: torch.cat((*gated(x, y), x * y), 1).relu(),
    "copies_of_inputs": lambda x, y: torch.cat((x, *gated(x, y), y), 1),
    "parts_used_elsewhere": lambda x, y: (
        torch.cat(gated(x, y), 1),
        gated(x, y)[0].sum(0),
        gated(x, y)[1],
    ),
    "reduced_part": lambda x, y: torch.cat((x.softmax(-1), x.sum(-1, True), y * 2), 1),
    "rows_of_different_programs": lambda x, y: torch.cat(
        (F.layer_norm(x, x.shape[-1:]), y.sort(-1).values, x.cumsum(-1)), 1
    ),
    "type_promotion": lambda x, y: torch.cat(
        (gated(x, y)[0].half(), gated(x, y)[1].double(), (x > y)), 1
    ),
    "nested": lambda x, y: torch.cat(
        (torch.cat(gated(x, y), 1).exp(), torch.cat(gated(y, x), 1)), 1
    ),
    "nested_other_dim": lambda x, y: torch.cat(
        (torch.cat(gated(x, y), 1), torch.cat(gated(y, x), 1) * 2), 0
    ),
    "stack_first": lambda x, y: torch.stack(gated(x, y)) + 1,
    "stack_middle": lambda x, y: torch.stack((*gated(x, y), x), 1),
    "stack_last": lambda x, y: torch.stack(gated(x, y), -1).flatten(-2),
    "slices_of_it": lambda x, y: (
        (both := torch.cat(gated(x, y), 1)),
        both[:, 2 : x.shape[1]] * 3,
        both[:, 2:-1].exp(),
    ),
    "view_of_it": lambda x, y: torch.cat(gated(x, y), 1).view(x.shape[0], 2, -1).relu(),
    "transposed_reader": lambda x, y: (
        (both := torch.cat(gated(x, y), 1)),
        (both.t() * 2).contiguous(),
    ),
    "reduced_reader": lambda x, y: (
        (both := torch.cat(gated(x, y), 1)),
        both.sum(-1),
        both.softmax(0),
    ),
    "broadcast_reader": lambda x, y: torch.cat(gated(x, y), 1)[None] * torch.ones(3, 1, 1),
    "several_consumers": lambda x, y: (
        torch.cat(gated(x, y), 1).half(),
        torch.cat(gated(x, y), 1).relu(),
        torch.cat(gated(x, y), 1) > 0,
    ),
    "cat_with_zeros": lambda x, y: torch.cat(
        (-gated(x, y)[0], x.new_zeros(x.shape), gated(x, y)[1]), 1
    ),
    "pad": lambda x, y: F.pad(sum(gated(x, y)), (1, 2, 3, 0), value=2.5),
    "roll": lambda x, y: torch.roll(sum(gated(x, y)), 2, 1) + gated(x, y)[0],
    "slice_scatter": lambda x, y: torch.slice_scatter(
        gated(x, y)[0], gated(x, y)[1][:, 1:3], 1, 2, 4
    ),
    "select_scatter": lambda x, y: torch.select_scatter(gated(x, y)[0], x.sum(1), 1, 3),
    "gathered": lambda x, y: (
        (both := torch.cat(gated(x, y), 1)),
        both[:, (x[0] > 0).long() * 6 - 1],
    ),
    "scattered": lambda x, y: torch.cat(gated(x, y), 0).index_add(
        0, (x[:2, 0] > 0).long() * 4, torch.cat(gated(x, y), 1)[:2, : x.shape[1]]
    ),
    "empty_part": lambda x, y: torch.cat((gated(x, y)[0], x[:, :0], gated(x, y)[1]), 1) * 2,
    "one_column": lambda x, y: torch.cat((gated(x, y)[0], x.sum(1, True).exp()), 1),
    "same_part_twice": lambda x, y: torch.cat((gated(x, y)[0],) * 2, 1),
    "two_cats_of_a_part": lambda x, y: (
        torch.cat(gated(x, y), 1),
        torch.cat((gated(x, y)[1], gated(x, y)[0] * 2), 0),
    ),
    "expanded": lambda x, y: torch.cat((gated(x, y)[0], x[:, :1].exp().expand(-1, 4)), 1),
    "conjugate_free_complex": lambda x, y: torch.cat((torch.complex(x, y).abs(), x), 1),
}


@pytest.mark.covering
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("sizes", [(4, 8), (5, 7)])
def test_interpreted(name: str, sizes: tuple[int, int]) -> None:
    """The split IR is right, in the reference interpreter."""
    function, arguments = PROGRAMS[name], make_pair(*sizes)
    region = lower_graph(trace(function, arguments))
    split = split_statements(region, set(find_split_candidates(region)))
    for variant in (split, split_axes(split)):
        verify_region(variant)
        check_against_eager(interpret_region(variant, arguments), function, arguments)


@pytest.mark.covering
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("sizes", [(4, 8), (5, 7)])
def test_programs(name: str, sizes: tuple[int, int], always_split: None) -> None:
    check_fused(PROGRAMS[name], *make_pair(*sizes))


@pytest.mark.parametrize("name", PROGRAMS)
def test_chosen_programs(name: str) -> None:
    """The same where the cost model decides."""
    check_fused(PROGRAMS[name], *make_pair(6, 5))


DYNAMIC = [
    "three_parts",
    "copies_of_inputs",
    "nested",
    "stack_first",
    "slices_of_it",
    "reduced_reader",
    "cat_with_zeros",
    "reduced_part",
]


@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic_sizes(name: str, always_split: None) -> None:
    region = check_fused(PROGRAMS[name], *make_pair(4, 8), mode="symbolic")
    for sizes in ((3, 5), (1, 17), (16, 16)):
        check_fused_again(region, PROGRAMS[name], *make_pair(*sizes))


def test_dynamic_parts_of_different_sizes(always_split: None) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat((x.exp(), y.sin(), x * 2), 0).half()

    region = check_fused(function, torch.randn(4, 3), torch.randn(7, 3), mode="symbolic")
    assert region.region.slices
    check_fused_again(region, function, torch.randn(9, 3), torch.randn(2, 3))


def test_part_without_elements_at_run_time(always_split: None) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat((x.exp(), y.sin()), 0) * 2

    region = check_fused(function, torch.randn(4, 3), torch.randn(7, 3), mode="symbolic")
    check_fused_again(region, function, torch.randn(0, 3), torch.randn(5, 3))


def test_channels_last(always_split: None) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat(gated(x, y), 1).relu()

    pair = [t.to(memory_format=torch.channels_last) for t in make_pair(2, 5, 3, 4)]
    region = check_fused(function, *pair)
    assert region.region.slices


def write_slice(cache: Tensor, key: Tensor) -> tuple[Tensor, ...]:
    """What `cache[:, 2:4] = key * 2` is after functionalization."""
    cache.copy_(torch.slice_scatter(cache, key * 2, 1, 2, 4))
    return ()


def write_slice_of_input(cache: Tensor, key: Tensor) -> tuple[Tensor, ...]:
    rows = torch.slice_scatter(cache, key, 1, 3, 5)
    cache.copy_(torch.slice_scatter(rows, (key * 2).repeat(1, 4), 0, 0, 5))
    return ()


def write_cat(cache: Tensor, key: Tensor) -> tuple[Tensor, ...]:
    shared = torch.tanh(key.exp().sin())
    cache.copy_(torch.cat((shared * 2, shared + key, shared, shared), 1))
    return (shared.sum(),)


def write_and_read(cache: Tensor, key: Tensor) -> tuple[Tensor, ...]:
    old = cache.flip(1) * 3
    cache.copy_(torch.slice_scatter(cache, key, 1, 2, 4))
    return (old,)


def write_and_return(cache: Tensor, key: Tensor) -> tuple[Tensor, ...]:
    new = torch.slice_scatter(cache, key, 1, 2, 4)
    result = new * 2, new.sum(0)
    cache.copy_(new)
    return result


def rotate(cache: Tensor, key: Tensor) -> tuple[Tensor, ...]:
    cache.copy_(torch.roll(cache, 3, 1) + key.sum())
    return ()


def write_two_slices(cache: Tensor, key: Tensor) -> tuple[Tensor, ...]:
    once = torch.slice_scatter(cache, key.exp(), 1, 0, 2)
    cache.copy_(torch.slice_scatter(once, key.sin() * 2, 1, 5, 7))
    return ()


def write_nothing(cache: Tensor, key: Tensor) -> tuple[Tensor, ...]:
    cache.copy_(torch.roll(torch.roll(cache, 3, 1), -3, 1))
    return (key * 2,)


WRITES = [
    write_slice,
    write_slice_of_input,
    write_cat,
    write_and_read,
    write_and_return,
    rotate,
    write_two_slices,
    write_nothing,
]


@pytest.mark.parametrize("is_strided", [False, True])
@pytest.mark.parametrize("function", WRITES)
def test_writes_to_inputs(
    function: Callable[..., tuple[Tensor, ...]], is_strided: bool, always_split: None
) -> None:
    """A mutated input is right, also one whose strides are not those of the trace."""
    cache, key = torch.randn(5, 8), torch.randn(5, 2)
    with support.target_device():
        cache, key = support.to_target(cache), support.to_target(key)
        region = support.lower_for_target(function, (cache.clone(), key))
        given = cache.t().contiguous().t() if is_strided else cache.clone()
        want = cache.clone()
        results = region(given, key)
        for ours, theirs in zip(results, function(want, key), strict=True):
            torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(given, want)


def test_only_the_written_slice_is_stored() -> None:
    cache, key = torch.randn(64, 1024), torch.randn(64, 2)
    with support.target_device():
        arguments = tuple(map(support.to_target, (cache, key)))
        region = support.lower_for_target(write_slice, arguments)
    (kernel,) = region.kernels
    assert kernel.bytes_moved == 2 * 4 * key.numel()


def test_part_is_stored_by_its_own_statement(always_split: None) -> None:
    """A softmax and a cumulative sum have no copy: their kernels write into the slices."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat((x.softmax(-1), y.cumsum(-1)), 1)

    region = check_fused(function, *make_pair(8, 16))
    assert len(region.kernels) == 2
    assert all("cat" not in kernel.ops for kernel in region.kernels)


def test_cat_in_its_own_reduction_keeps_its_masks() -> None:
    """A row reduction of the cat is one kernel with a `where`."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat((x.exp(), y * 2), 1).softmax(-1)

    region = check_fused(function, *make_pair(8, 16))
    assert len(region.kernels) == 1 and not region.region.slices


def test_large_results_bypass_the_cache(always_split: None) -> None:
    """Each slice has a staging block of its own in C++."""
    x, y = make_pair(512, 1024)
    check_fused(lambda x, y: torch.cat(gated(x, y), 1).half(), x, y)


def test_value_that_another_kernel_recomputes(always_split: None) -> None:
    """A narrow value is stored by the kernel that owns it, not by one that recomputes it."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return (torch.tanh(torch.cat((x, y.half()), 2)) * 0.7).softmax(0)

    check_fused(function, *make_pair(2, 3, 4))


@pytest.mark.parametrize("kind", ["scatter_add", "index_copy", "cumsum", "sum", "fill"])
def test_parts_that_start_from_numbers(kind: str, always_split: None) -> None:
    """Zeros that values are added to at computed indices are no constant."""

    def make(x: Tensor, index: Tensor) -> Tensor:
        if kind == "scatter_add":
            return torch.zeros_like(x).scatter_add(0, index, x)
        if kind == "index_copy":
            return torch.ones_like(x).index_copy(0, index.sort().values, x)
        if kind == "cumsum":
            return torch.ones_like(x).cumsum(0)
        if kind == "sum":
            return torch.ones_like(x).sum(0, keepdim=True)
        return torch.full_like(x, 0.3)

    def function(x: Tensor, y: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        parts = make(x, index), make(y, index)
        return torch.cat(parts), torch.stack(parts) * 2

    check_fused(function, *make_pair(12), torch.randperm(12))


def scattered(x: Tensor, index: Tensor) -> Tensor:
    """A number with values on top: what a part reads is not that number."""
    return torch.zeros_like(x).index_put((index,), x[: len(index)], accumulate=True)


UPDATED = {
    "scatter": lambda x, index: scattered(x, index),
    "scan": lambda x, index: torch.ones_like(x).cumsum(0),
    "reduction": lambda x, index: torch.ones_like(x).sum(0),
}


@pytest.mark.parametrize("update", UPDATED.values(), ids=UPDATED)
def test_parts_read_the_result_of_a_statement_that_starts_from_a_number(
    always_split: None, update: Callable[[Tensor, Tensor], Tensor]
) -> None:
    def function(x: Tensor, index: Tensor) -> Tensor:
        padded = torch.slice_scatter(torch.zeros_like(x), x[2:] * 2, 0, 0, 4)
        return padded + update(x, index)

    check_fused(function, torch.randn(6, 5), torch.tensor([1, 0, 1]))


def test_a_value_on_which_a_scatter_stores_is_not_split() -> None:
    def function(x: Tensor) -> Tensor:
        padded = torch.select_scatter(torch.zeros(4, 6), x, 0, 0)
        index = torch.tensor([0, 2])
        return padded.index_fill(0, index, 0.0) + padded.index_select(0, index).sum()

    x = torch.linspace(-1, 1, 6)
    torch.testing.assert_close(fulgurite.compile(function)(x), function(x))
