"""Rank processes that live as long as the tests: each test sends them a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from fulgurite.kernels.dispatch.wire_format import Wire
from fulgurite.parallel.launch import Ranks
from tests.parallel.expert_cases import make_experts, make_inputs


def build_kernels() -> None:
    """Once, here: ranks then find them in the cache instead of building the same ones side by side."""
    for dtype in (torch.float32, torch.bfloat16):
        experts = make_experts("plain", 4, 2, dtype)
        x, routes = make_inputs(0, 3, 4, 2, dtype, None)
        for differentiated in (True, False):
            with torch.set_grad_enabled(differentiated):
                experts(x, routes)
        for name in ("fp8", "nvfp4"):
            Wire(name, 32).rounded(x)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(4)`: four processes, started when first asked for, and anew after a failure."""
    running: dict[int, Ranks] = {}
    build_kernels()

    def get(count: int) -> Ranks:
        if count not in running or not running[count].alive:
            running[count] = Ranks(count)
        return running[count]

    yield get
    for pool in running.values():
        pool.close()
