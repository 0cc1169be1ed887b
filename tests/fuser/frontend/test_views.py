"""Views, and ops that only move elements: index maps, not copies."""

from __future__ import annotations

import os

import pytest
import torch

import fulgurite
from fulgurite import fuser
from tests.fuser.support import (
    check_against_eager,
    check_fused,
    check_fused_again,
    check_interpreted,
    lower_for_target,
    to_target,
    trace,
)

RUNS_ON_TRITON = True

F = torch.nn.functional


def rope(q, cos, sin):
    half = q.shape[-1] // 2
    return q * cos + torch.cat([-q[..., half:], q[..., :half]], -1) * sin


CASES = {
    "reshape": lambda x: x.view(4, 6, 10).exp().reshape(24, 10) + 1,
    "reshape_split": lambda x: x.exp().view(2, 12, 2, 5).permute(0, 2, 1, 3).reshape(2, 24, 5) * 2,
    "merge_then_split": lambda x: (x * 2).view(-1).exp().view(12, 20).sum(1),
    "odd_reshape": lambda x: (x * 2).view(16, 15).exp() + x.view(16, 15),
    "permute": lambda x: x.view(4, 6, 10).permute(2, 0, 1).exp(),
    "transposed_copy": lambda x: (x.t() + 1).contiguous(),
    "expand": lambda x: x[:, :1].expand(24, 10) + x,
    "slice": lambda x: x[3:20:2, 1:] * 2,
    "slice_end": lambda x: x[-5:, :-3] * 2,
    "select": lambda x: x[3] * x[-1],
    "squeeze": lambda x: (x.unsqueeze(1) * 2).squeeze(1) + x.unsqueeze(0).squeeze(),
    "flip": lambda x: x.flip(0) + x.flip(1) * 2 + x.flip((0, 1)),
    "split": lambda x: sum(part.exp() for part in x.split(8)),
    "split_uneven": lambda x: tuple(part.exp() for part in x.split(7)),
    "chunk": lambda x: x.chunk(2, 1)[0].sigmoid() * x.chunk(2, 1)[1],
    "unbind": lambda x: x.unbind(1)[3] + x.unbind(1)[0],
    "cat": lambda x: torch.cat([x, x * 2, x[:3] + 1], 0),
    "cat_inner": lambda x: torch.cat([x[:, :3], x.exp(), x[:, 7:] * 2], 1) + 1,
    "cat_sum": lambda x: torch.cat([x, x * 2], 1).sum(1),
    "stack": lambda x: torch.stack([x, x * 2, x + 1], 1),
    "stack_last": lambda x: torch.stack([x.cos(), x.sin()], -1).view(24, 20),
    "pad": lambda x: F.pad(x, (1, 2, 3, 0), value=0.5) * 2,
    "pad_crop": lambda x: F.pad(x, (-1, 2), value=1.0),
    "roll": lambda x: torch.roll(x, 3, 0) + torch.roll(x, -2, 1),
    "tril": lambda x: x.tril() + x.triu(2),
    "diagonal": lambda x: x[:10].diagonal() * 2,
    "unfold": lambda x: x.unfold(0, 5, 3).sum(-1),
    "repeat": lambda x: x.repeat(2, 3) + 1,
    "repeat_interleave": lambda x: (
        x.view(4, 6, 10)[:, :, None].expand(4, 6, 3, 10).reshape(72, 10) * 2
    ),
    "arange": lambda x: x + torch.arange(10) * torch.arange(0, 1, 0.1),
    "mask": lambda x: x.masked_fill(torch.arange(24)[:, None] >= torch.arange(10)[None], -1e9),
    "factories": lambda x: torch.zeros_like(x) + torch.ones(10) * torch.full((24, 1), 3.0) + x,
    "slice_scatter": lambda x: torch.slice_scatter(x, x[:5] * 2, 0, 3, 8),
    "select_scatter": lambda x: torch.select_scatter(x, x[0] * 2, 0, 4),
    "channels_last": lambda x: (x.view(2, 3, 4, 10) + 1).to(memory_format=torch.channels_last) * 2,
    "softmax_of_heads": lambda x: (
        torch.softmax(x.view(4, 6, 10).transpose(0, 1), -1).transpose(0, 1).reshape(24, 10) + 1
    ),
    "sum_of_reshape": lambda x: x.exp().view(4, 60).sum(1) + x.view(4, 6, 10).sum((1, 2)),
    "shifted_difference": lambda x: x[:, 1:] - x[:, :-1],
    "self_transpose": lambda x: (lambda s: s + s.t() * 2)(x[:10] * 3),
    "softmax_shift": lambda x: torch.softmax(x, -1)[:, 1:] * 2,
}


@pytest.mark.parametrize("name", CASES)
def test_index_maps_in_the_interpreter(name: str) -> None:
    torch.manual_seed(0)
    check_interpreted(CASES[name], torch.randn(24, 10))


def test_index_maps() -> None:
    """All cases in one region."""
    torch.manual_seed(0)

    def function(x):
        found = []
        for case in CASES.values():
            result = case(x)
            found += result if isinstance(result, tuple) else [result]
        return tuple(found)

    check_fused(function, torch.randn(24, 10))


@pytest.mark.parametrize("names", [list(CASES)[k::8] for k in range(8)])
def test_index_maps_separately(names: list[str]) -> None:
    torch.manual_seed(1)
    for name in names:
        check_fused(CASES[name], torch.randn(24, 10))


def test_rope_is_one_kernel() -> None:
    torch.manual_seed(0)
    region = check_fused(rope, torch.randn(2, 3, 5, 8), torch.randn(5, 8), torch.randn(5, 8))
    assert len(region.kernels) == 1


def test_views_of_inputs_are_returned_as_views() -> None:
    x = to_target(torch.randn(6, 8))
    region = check_fused(lambda x: (x.t(), x[2:4], x.view(3, 16), x * 2), x)
    transposed, part, viewed, _ = region(x)
    for alias in (transposed, part, viewed):
        assert alias.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_views_of_results_share_their_memory() -> None:
    region = check_fused(lambda x: (lambda y: (y, y.t(), y[1:]))(x.exp()), torch.randn(6, 8))
    whole, transposed, part = region(to_target(torch.randn(6, 8)))
    assert transposed.data_ptr() == whole.data_ptr()
    assert part.data_ptr() == whole[1:].data_ptr()


def test_gathers() -> None:
    torch.manual_seed(0)
    x, table = torch.randn(12, 9), torch.randn(30, 5)
    rows, wide = torch.randint(0, 12, (7,)), torch.randint(0, 9, (12, 4))
    tokens = torch.randint(0, 30, (3, 6))

    def function(x, table, rows, wide, tokens):
        return (
            torch.gather(x, 1, wide) * 2,
            x.index_select(0, rows) + 1,
            F.embedding(tokens, table) * 3,
            x[rows] - 1,
            x[rows, rows.clamp(max=8)] * 2,
            x[:, wide[0]] + 1,
            x[rows - 12] * 2,
            torch.take_along_dim(x, wide, 1).exp(),
            F.embedding(tokens, table).sum(-1),
        )

    check_fused(function, x, table, rows, wide, tokens)


def test_gathers_from_empty_tensors() -> None:
    """A loop-invariant index is loaded before the loops, but not if the loops are empty."""

    def first(x, rows):
        first = torch.zeros_like(rows)
        return x[first[:, None], first] * 2, x.index_select(0, first)

    check_fused(first, torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64))
    region = check_fused(
        first, torch.randn(3, 2), torch.zeros(5, dtype=torch.int64), mode="symbolic"
    )
    check_fused_again(region, first, torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64))


def test_gather_out_of_range_raises() -> None:
    table = torch.randn(30, 5)
    region = check_fused(lambda t, i: F.embedding(i, t) * 2, table, torch.tensor([1, 2]))
    with pytest.raises(IndexError, match="out of range"):
        region(table, torch.tensor([1, 30]))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter")
def test_interpreted_kernels_check_positions() -> None:
    x, index = torch.randn(30, 5), torch.tensor([1, 30])
    gathered = lower_for_target(lambda x, i: F.embedding(i, x) * 2, (x, index))
    stored = lower_for_target(lambda x, i: x.index_copy(0, i, x[:2]) * 2, (x, index))
    for region in (gathered, stored):
        with pytest.raises(Exception, match="index out of range"):
            region(x, index)


def test_negative_indices() -> None:
    """index counts them from the end; gather raises, as in eager."""
    x, negative = torch.randn(5, 3), torch.tensor([[-1, 0, 1]])
    check_fused(lambda x, i: x[i[0]] * 2, x, negative)
    region = check_fused(lambda x, i: torch.gather(x, 0, i) * 2, x, negative.abs())
    with pytest.raises(RuntimeError, match="out of bounds"):
        region(x, negative)


def test_names_that_clash_with_generated_code() -> None:
    """Program names that equal a kernel's buffers, functions or keywords."""
    names = [
        "x",
        "x_row",
        "x_acc",
        "x_partial",
        "x_partials",
        "x_out",
        "x_total",
        "exp",
        "double",
        "i",
        "j0",
        "error",
        "index1_",
        "main",
    ]

    def function(*xs):
        total = sum(x * 2 for x in xs)
        return (total, torch.softmax(total, 1), total.sum(0), *(x.sum(1) for x in xs))

    inputs = [torch.randn(20, 30) for _ in names]
    graph = trace(function, inputs)
    for node, name in zip(graph.graph.find_nodes(op="placeholder"), names, strict=True):
        node._rename(name)
    for node, name in zip(
        graph.graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList),
        names,
        strict=False,
    ):
        node._rename(f"{name}_sum")
    check_against_eager(fuser.lower_region(graph)(*inputs), function, inputs)


def test_expanded_empty_tensors() -> None:
    """All strides are 0, so loads must stay inside the loops, which are empty."""
    check_fused(lambda x: ((1 - x) / x).sum(0), torch.ones(1, 1, 1).expand(0, 2, 1))
    check_fused(lambda x: (x * 2).amax(-1), torch.ones(1).expand(3, 0, 5))


def test_strided_slice_of_an_empty_tensor() -> None:
    check_fused(lambda x: x.cumsum(1).flatten()[::3] * 2, torch.zeros(16, 2, 0, 17))


def test_squeeze_of_a_scalar() -> None:
    check_fused(lambda x: x.sum().squeeze(-1) * 2, torch.randn(5))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16], ids=str)
def test_constants_in_narrow_formats(dtype: torch.dtype) -> None:
    """A kernel with a reduction stores the constant itself."""
    x = torch.randn(3, 3)
    check_fused(lambda x: (torch.ones_like(x).to(dtype).T, (torch.ones_like(x) != 0).sum(-2)), x)


@pytest.mark.parametrize("function", [torch.cat, torch.stack])
def test_many_parts_are_left_to_torch(function):
    """One condition for each of them: expressions would be nested deeper than Python can recurse."""
    x = torch.randn(400, 3)
    compiled = fulgurite.compile(lambda x: function(x.unbind()) * 2)
    assert torch.equal(compiled(x), function(x.unbind()) * 2)
    assert f"torch.{function.__name__}(" in str(compiled.last_trace())
