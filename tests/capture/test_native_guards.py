"""The native guard on saved-tensor hooks: no Python without hooks, TorchDynamo's decision inside them."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import fulgurite
from fulgurite.host_api import unavailable_reason

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason="no host programs here")


def program(x: Tensor) -> Tensor:
    return (x * x).sin()


def test_a_call_runs_no_guard_in_python() -> None:
    compiled, x = fulgurite.compile(program, cudagraph=False), torch.ones(3)
    for _ in range(4):
        compiled(x)
    names: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            names.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        compiled(x)
    finally:
        sys.setprofile(None)
    # the entry, its check for an enclosing capture, what TorchDynamo generated
    assert names == ["__call__", "is_capturing", "is_dynamo_compiling", "program"]


@pytest.mark.parametrize("captures_inside", [False, True])
def test_hooks_see_what_a_compiled_graph_saves(captures_inside: bool) -> None:
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    def step(uses_hooks: bool) -> tuple[Tensor, int]:
        x = torch.full((3,), 0.5, requires_grad=True)
        packed.clear()
        if uses_hooks:
            with saved_tensors_hooks(pack, lambda tensor: tensor):
                y = compiled(x)
        else:
            y = compiled(x)
        y.sum().backward()
        assert x.grad is not None
        return x.grad, len(packed)

    compiled = fulgurite.compile(program, cudagraph=False)
    x = torch.full((3,), 0.5, requires_grad=True)
    program(x).sum().backward()
    for _ in range(3):
        for uses_hooks in (captures_inside, not captures_inside):
            gradient, count = step(uses_hooks)
            torch.testing.assert_close(gradient, x.grad)
            assert bool(count) == uses_hooks
