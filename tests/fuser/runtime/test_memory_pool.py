"""The memory pool: large outputs reuse blocks, and a block in use is never overwritten."""

from __future__ import annotations

import itertools
import random
import threading

import pytest
import torch

from fulgurite.fuser.runtime import memory_pool
from tests.fuser.support import check_fused

LARGE = (1024, 512)


@pytest.fixture(autouse=True)
def clean():
    memory_pool.set_pooling(True)
    memory_pool.release_pool()
    yield
    memory_pool.set_pooling(True)
    memory_pool.release_pool()


def test_output_in_use_is_never_overwritten() -> None:
    region = check_fused(lambda x: x * 2, torch.randn(LARGE))
    held = [region(torch.full(LARGE, float(k)))[0] for k in range(6)]
    for k, result in enumerate(held):
        assert bool((result == 2 * k).all())


def test_views_keep_their_block() -> None:
    region = check_fused(lambda x: x * 2, torch.randn(LARGE))
    views = []
    for k in range(4):
        result = region(torch.full(LARGE, float(k)))[0]
        views += [result[5:9].t(), result.view(-1)[7:], result.detach().numpy()[0]]
        del result
    for k in range(4):
        for view in views[3 * k : 3 * k + 3]:
            assert float(view.min()) == float(view.max()) == 2.0 * k


def test_saved_tensors_keep_their_block() -> None:
    region = check_fused(lambda x: x * 2, torch.randn(LARGE))
    leaf = torch.ones(LARGE, requires_grad=True)
    out = leaf * region(torch.full(LARGE, 3.0))[0]
    for k in range(3):
        region(torch.full(LARGE, float(k)))
    out.sum().backward()
    assert bool((leaf.grad == 6.0).all())


def test_released_blocks_are_reused() -> None:
    region = check_fused(lambda x: x * 2, torch.randn(LARGE))
    memory_pool.release_pool()
    first = region(torch.randn(LARGE))[0]
    address = first.data_ptr()
    assert memory_pool.pooled_bytes() == 0
    del first
    assert memory_pool.pooled_bytes() >= 2 << 20
    assert region(torch.randn(LARGE))[0].data_ptr() == address
    memory_pool.release_pool()
    assert memory_pool.pooled_bytes() == 0


def test_pooling_disabled() -> None:
    memory_pool.set_pooling(False)
    region = check_fused(lambda x: x * 2, torch.randn(LARGE))
    region(torch.randn(LARGE))
    assert memory_pool.pooled_bytes() == 0


@pytest.mark.parametrize("dtype", memory_pool.DLPACK_CODES)
def test_every_dtype_and_layout(dtype: torch.dtype) -> None:
    made = memory_pool.allocate((1000, 3000), (1, 1000), dtype)
    assert made.dtype == dtype
    assert made.stride() == (1, 1000)
    made.fill_(1)
    assert bool((made == 1).all())
    assert made.data_ptr() % 64 == 0


def test_many_threads() -> None:
    """Concurrent calls of one region share nothing."""
    region = check_fused(
        lambda x: torch.softmax(x * 2, 0) + x.sum(1, keepdim=True), torch.randn(LARGE)
    )
    failures: list[int] = []

    def work(seed: int) -> None:
        x = torch.full(LARGE, float(seed))
        for _ in range(5):
            result = region(x)[0]
            want = 1 / 1024 + seed * 512.0
            if not torch.allclose(result, torch.full(LARGE, want), rtol=1e-4):
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_live_temporaries_never_overlap() -> None:
    generator = random.Random(0)
    for _ in range(200):
        lifetimes = []
        for _ in range(generator.randrange(1, 12)):
            first = generator.randrange(8)
            last = first + generator.randrange(4)
            lifetimes.append(
                memory_pool.Lifetime(first, last, generator.choice([1, 64, 100, 4096, 9999]))
            )
        offsets, total = memory_pool.assign_offsets(lifetimes)
        spans = [(p, p + one.bytes, one) for p, one in zip(offsets, lifetimes, strict=True)]
        assert all(p % memory_pool.ALIGNMENT == 0 for p in offsets)
        assert total == max(end for _, end, _ in spans)
        for a, b in itertools.combinations(spans, 2):
            together = a[2].first <= b[2].last and b[2].first <= a[2].last
            assert not together or a[1] <= b[0] or b[1] <= a[0]


def test_chain_of_temporaries_needs_two_slots() -> None:
    _, total = memory_pool.assign_offsets([memory_pool.Lifetime(k, k + 1, 4096) for k in range(10)])
    assert total == 2 * 4096


def test_kernels_of_one_call_share_an_arena() -> None:
    def chain(x):
        for dim in (0, 1, 0, 1):
            x = torch.softmax(x, dim)
        return x

    region = check_fused(chain, torch.randn(300, 500))
    assert "arena" in region.launcher
