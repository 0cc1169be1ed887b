"""Large matmuls of CPU graphs allocate their outputs from the memory pool."""

from __future__ import annotations

import pytest
import torch

import fulgurite
from fulgurite.executors import pooled_matmul
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
def test_same_values_as_torch(kind, dtype):
    given = operands(kind, LARGE, dtype)
    mine, wanted = getattr(pooled_matmul, kind)(*given), getattr(torch, kind)(*given)
    assert torch.equal(mine, wanted) and mine.stride() == wanted.stride()


def final_text(size: int, dynamic: bool = False) -> str:
    compiled = fulgurite.compile(lambda a, b: a @ b, dynamic=dynamic)
    with torch.no_grad():
        compiled(*torch.randn(2, size, size))
    return str(compiled.history[-1])


def test_only_large_static_matmuls_are_pooled():
    assert "pooled_matmul.mm(" in final_text(LARGE)
    assert "torch.mm(" in final_text(64) and "pooled_matmul.mm(" not in final_text(64)
    assert "pooled_matmul.mm(" not in final_text(LARGE, dynamic=True)


def test_output_in_use_is_never_overwritten():
    compiled = fulgurite.compile(lambda a, b: a @ b)
    a, b = torch.randn(2, LARGE, LARGE)
    with torch.no_grad():
        first = compiled(a, b)
        wanted = first.clone()
        for _ in range(3):
            compiled(b, a)
    assert torch.equal(first, wanted)


def test_released_memory_is_reused():
    memory_pool.release_pool()
    a, b = torch.randn(2, LARGE, LARGE)
    place = pooled_matmul.mm(a, b).data_ptr()
    smaller = pooled_matmul.mm(a[: LARGE - 20], b)  # of another size: a part of the same block
    assert smaller.data_ptr() == place


def test_printed_trace_runs():
    compiled = fulgurite.compile(lambda a, b: a @ b)
    a, b = torch.randn(2, LARGE, LARGE)
    with torch.no_grad():
        wanted = compiled(a, b)
        (found,) = compiled.history[-1].load()(a, b)
    assert torch.equal(found, wanted)
