"""Rank processes that live as long as the tests of this folder: each test sends them a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from fulgurite.parallel.processes.launch import RankPool
from tests.kernels.dispatch.cases import round_trip
from tests.parallel.experts.expert_cases import make_experts, make_inputs
from tests.ranks import keep_pools


def build_kernels() -> None:
    """Once, here: ranks then find them in the cache instead of building the same ones side by side."""
    for dtype in (torch.float32, torch.bfloat16):
        experts = make_experts("plain", 4, 2, dtype)
        x, routes = make_inputs(0, 3, 4, 2, dtype, None)
        for differentiated in (True, False):
            with torch.set_grad_enabled(differentiated):
                experts(x, routes)
        for name in ("fp8", "nvfp4"):
            round_trip(name, x)


@pytest.fixture(scope="package")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(4)`: four processes, started when first asked for, and anew after a failure."""
    build_kernels()
    with keep_pools() as get:
        yield get


@pytest.fixture(scope="module")
def ranks_with_groups() -> Iterator[Callable[[int], RankPool]]:
    """Ranks that keep their groups over the tests of a file."""
    with keep_pools(closes_meshes=False) as get:
        yield get
