"""Indexed stores into the buffer of their initial values: without a copy where that is safe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fulgurite import fuser
from fulgurite.trace.node_meta import mark_donated
from tests.fuser import support

RUNS_ON_TRITON = True

SLOTS = torch.tensor([7, 2, 9, 4])


def store_keys(cache, slots, keys):
    cache.index_copy_(0, slots, keys * 2)
    return keys + 1


def read_after_store(cache, slots, keys):
    cache.index_put_((slots,), keys)
    return cache.sum(1)


def store_twice(cache, slots, keys):
    cache.index_fill_(0, slots[:2], 0.0)
    cache.index_add_(0, slots, keys)
    return ()


def store_rows_of_the_cache(cache, slots, keys):
    """The values are read from the buffer that is overwritten."""
    cache.index_copy_(0, slots, (cache + 1)[:4] + keys)
    return ()


def old_values_after_the_store(cache, slots, keys):
    old = (cache * keys[0]).sum(0)
    cache.index_add_(0, slots, keys)
    return old * cache[0], (cache - 1).amax(0)


def returned(cache, slots, keys):
    return cache.index_add_(0, slots, keys) * 1, cache.clone()


def other_base(cache, slots, keys):
    cache.copy_(torch.zeros_like(cache).index_add(0, slots, keys))
    return ()


# Each with whether the kernels store straight into the input.
MUTATIONS: list[tuple[Callable[..., Any], bool]] = [
    (store_keys, True),
    (read_after_store, True),
    (store_twice, True),
    (store_rows_of_the_cache, False),
    (old_values_after_the_store, False),  # one kernel reads old and new values
    (returned, False),
    (other_base, False),
]


@pytest.mark.covering
@pytest.mark.parametrize(
    ("function", "in_place"), MUTATIONS, ids=lambda part: getattr(part, "__name__", str(part))
)
@pytest.mark.parametrize("shape", [(10, 6), (10, 1), (10, 3, 5)], ids=str)
def test_mutated_inputs(
    function: Callable[..., Any], in_place: bool, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    given = [torch.randn(shape), SLOTS, torch.randn(4, *shape[1:])]
    given = [support.to_target(a) for a in given]

    def mutate(cache, slots, keys):
        results = function(cache, slots, keys)
        return results if isinstance(results, tuple) else (results,)

    copies = [a.clone() for a in given]
    with support.target_device():
        graph = make_fx(torch.func.functionalize(mutate, remove="mutations"), tracing_mode="fake")(
            *copies
        )
    region = fuser.lower_region(graph, use_triton=support.TARGET == "triton")
    ours, theirs = [a.clone() for a in given], [a.clone() for a in given]
    found, expected = region(*ours), mutate(*theirs)
    for got, want in zip((*found, *ours), (*expected, *theirs), strict=True):
        torch.testing.assert_close(got, want)
    names = [kernel.name for kernel in region.kernels]
    if in_place:
        assert not any(name.startswith("clone") for name in names), names


@pytest.mark.parametrize("donated", [True, False])
def test_donated_base(donated: bool) -> None:
    torch.manual_seed(1)
    given = [support.to_target(a) for a in (torch.randn(10, 6), SLOTS, torch.randn(4, 6))]

    def function(base, slots, rows):
        return base.index_add(0, slots, rows)

    with support.target_device():
        graph = make_fx(function, tracing_mode="fake")(*given)
    if donated:
        mark_donated(next(iter(graph.graph.nodes)))
    region = fuser.lower_region(graph, use_triton=support.TARGET == "triton")
    expected, base = function(*given), given[0].clone()
    (found,) = region(base, *given[1:])
    torch.testing.assert_close(found, expected)
    assert (found.data_ptr() == base.data_ptr()) == donated
    assert len(region.kernels) == 2 - donated
