"""Random floats of Python inside a compiled function: the numbers, dtypes and precision of eager mode."""

from __future__ import annotations

import random

import pytest
import torch

import fulgurite


def products(x: torch.Tensor) -> tuple[torch.Tensor, float]:
    number = random.random()
    return x * number + random.uniform(1, 2), number * 2 - 1


def arithmetic(x: torch.Tensor) -> torch.Tensor:
    angle = (random.uniform(0, 1) - 0.5) * 2 / random.uniform(1, 2)
    return torch.sin(x) * angle + x**angle


def own_generator(x: torch.Tensor) -> torch.Tensor:
    return x * GENERATOR.random() + GENERATOR.randint(1, 5)


GENERATOR = random.Random(0)


def products_of_draws(x: torch.Tensor) -> torch.Tensor:
    return x * random.uniform(0, 1) + (x + 1) * random.uniform(1, 2)


@pytest.mark.parametrize("program", [products, products_of_draws, arithmetic, own_generator])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex128]
)
def test_random_floats_are_those_of_eager_mode(program, dtype):
    compiled = fulgurite.compile(program)
    for size in (2, 3, 3, 4):
        x = (torch.rand(size) * 4 + 1).to(dtype)
        results = []
        for function in (program, compiled):
            random.seed(size)
            GENERATOR.seed(size)
            results.append(function(x))
        tolerance = {"rtol": 1e-13, "atol": 1e-13} if dtype in (torch.float64,) else {}
        torch.testing.assert_close(results[1], results[0], **tolerance)


def test_gradients_of_products_with_a_random_float():
    compiled = fulgurite.compile(lambda x: (x * random.uniform(0, 1)).square())
    for seed in (1, 2, 3):
        x = torch.randn(3, requires_grad=True)
        random.seed(seed)
        number = random.uniform(0, 1)
        random.seed(seed)
        compiled(x).sum().backward()
        torch.testing.assert_close(x.grad, 2 * x.detach() * number * number)


def test_a_new_random_float_does_not_recompile():
    compiled = fulgurite.compile(lambda x: x * random.uniform(1, 2), fullgraph=True)
    for _ in range(5):
        compiled(torch.ones(3))
    assert len(compiled.graphs) == 1
