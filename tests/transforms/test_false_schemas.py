"""Custom operators that mutate an argument against their schema are caught with FULGURITE_VERIFY=1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

import fulgurite
from fulgurite.errors import ArgumentError


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.library.Library]:
    """Three plain operators: one lies, one is functional, one declares its mutation."""
    monkeypatch.setenv("FULGURITE_VERIFY", "1")
    found = torch.library.Library("false_schemas", "FRAGMENT")
    found.define("lies(Tensor x, Tensor y) -> Tensor")
    found.define("functional(Tensor x, Tensor y) -> Tensor")
    found.impl("lies", lambda x, y: y.mul_(2) + x, "CPU")
    found.impl("functional", lambda x, y: x + y, "CPU")
    for name in ("lies", "functional"):
        found.impl(name, lambda x, y: torch.empty_like(x), "Meta")
    yield found
    found._destroy()


@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference_mode"])
def test_a_mutation_is_an_error(library: torch.library.Library, mode: str) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.ops.false_schemas.lies(x * 2, y) + 1

    context = nullcontext() if mode == "grad" else getattr(torch, mode)()
    with context, pytest.raises(ArgumentError, match="false_schemas.lies.* mutated its argument y"):
        fulgurite.compile(f)(torch.ones(3), torch.ones(3))


def test_a_functional_operator_is_not_one(library: torch.library.Library) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.ops.false_schemas.functional(x * 2, y.t()) + 1

    compiled = fulgurite.compile(f)
    x = torch.tensor([[1.0, float("nan")], [0.0, -0.0]])  # NaN equals itself bit by bit
    with torch.inference_mode():
        for _ in range(2):
            torch.testing.assert_close(compiled(x, x), f(x, x), equal_nan=True)


def test_without_verification_there_is_no_check(
    library: torch.library.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FULGURITE_VERIFY", "0")
    compiled = fulgurite.compile(lambda x: torch.ops.false_schemas.functional(x, x) * 2)
    assert compiled(torch.ones(3)).sum() == 12
    assert "check_arguments" not in str(compiled.last_trace())
