"""Large matmuls of CPU graphs put their results into kept memory; others stay torch's."""

from __future__ import annotations

import pytest
import torch

import fulgurite
from fulgurite.executors import kept
from fulgurite.fuser.runtime import memory_pool

LARGE = 600  # squared, in float32: more than the pool's smallest block


def operands(kind: str, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    a, b = torch.randn(2, size, size).to(dtype)
    if kind == "bmm":
        return a.view(1, size, size), b.t().unsqueeze(0)
    if kind == "addmm":
        return torch.randn(size).to(dtype), a, b
    return a.t(), b


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["mm", "bmm", "addmm"])
def test_same_numbers(kind, dtype):
    given = operands(kind, LARGE, dtype)
    mine, wanted = getattr(kept, kind)(*given), getattr(torch, kind)(*given)
    assert torch.equal(mine, wanted) and mine.stride() == wanted.stride()


def spelled(size: int, dynamic: bool = False) -> str:
    compiled = fulgurite.compile(lambda a, b: a @ b, dynamic=dynamic)
    with torch.no_grad():
        compiled(*torch.randn(2, size, size))
    return str(compiled.history[-1])


def test_only_large_ones_of_fixed_size():
    assert "kept.mm(" in spelled(LARGE)
    assert "torch.mm(" in spelled(64) and "kept.mm(" not in spelled(64)
    assert "kept.mm(" not in spelled(LARGE, dynamic=True)


def test_a_result_that_is_held_is_never_overwritten():
    compiled = fulgurite.compile(lambda a, b: a @ b)
    a, b = torch.randn(2, LARGE, LARGE)
    with torch.no_grad():
        first = compiled(a, b)
        wanted = first.clone()
        for _ in range(3):
            compiled(b, a)
    assert torch.equal(first, wanted)


def test_memory_of_dropped_results_is_taken_again():
    memory_pool.release()
    a, b = torch.randn(2, LARGE, LARGE)
    place = kept.mm(a, b).data_ptr()
    smaller = kept.mm(a[: LARGE - 20], b)  # of another size: a part of the same block
    assert smaller.data_ptr() == place


def test_the_text_of_a_trace_runs():
    compiled = fulgurite.compile(lambda a, b: a @ b)
    a, b = torch.randn(2, LARGE, LARGE)
    with torch.no_grad():
        wanted = compiled(a, b)
        (found,) = compiled.history[-1].load()(a, b)
    assert torch.equal(found, wanted)
