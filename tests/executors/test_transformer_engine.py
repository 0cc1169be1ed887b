"""The TransformerEngine executor with a stand-in package: what it claims, and what it calls."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import fulgurite
from fulgurite.executors import executor_names, transformer_engine


class StandIn:
    """`transformer_engine.pytorch.Linear` and `fp8_autocast` in plain torch, and what they were given."""

    def __init__(self) -> None:
        self.recipes: list[Any] = []
        self.calls: list[tuple[int, ...]] = []
        self.modules: list[dict[str, Any]] = []

    def linear(self, in_features: int, out_features: int, **options: Any) -> nn.Module:
        stand_in = self
        stand_in.modules.append({"shape": (in_features, out_features), **options})

        class Linear(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                assert stand_in.recipes[-1] is not None, "called outside of fp8_autocast"
                assert x.shape[0] % 8 == 0 and not self.weight.is_meta
                stand_in.calls.append(tuple(x.shape))
                narrow = [t.to(torch.float8_e4m3fn).to(t.dtype) for t in (x, self.weight)]
                return nn.functional.linear(*narrow, self.bias)

        dtype, device = options["params_dtype"], options["device"]
        return Linear(in_features, out_features, options["bias"], dtype=dtype, device=device)

    @contextmanager
    def fp8_autocast(self, enabled: bool, fp8_recipe: Any) -> Iterator[None]:
        assert enabled
        self.recipes.append(fp8_recipe)
        yield
        self.recipes.append(None)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.common")
    root, pytorch, common = (types.ModuleType(name) for name in names)
    pytorch.Linear, pytorch.fp8_autocast = stand_in.linear, stand_in.fp8_autocast
    common.recipe = types.SimpleNamespace(Float8CurrentScaling=lambda: "current scaling")
    root.pytorch, root.common = pytorch, common
    for name, module in zip(names, (root, pytorch, common), strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(transformer_engine, "has_transformer_engine", lambda: True)
    monkeypatch.setattr(transformer_engine, "DEVICES", ("cuda", "cpu"))
    return stand_in


class Net(nn.Module):
    def __init__(self, hidden: int = 48) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, hidden), nn.Linear(hidden, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))) + 1


EXECUTORS = ["transformer_engine", "fuser", "torch"]


@pytest.mark.parametrize("rows", [8, 5])
def test_linears_run_in_fp8(package: StandIn, rows: int) -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(rows, 32)
    compiled = fulgurite.compile(model, executors=EXECUTORS)
    with torch.no_grad():
        for _ in range(2):
            found = compiled(x)
    assert [m["shape"] for m in package.modules] == [(32, 48), (48, 16)]
    assert [m["bias"] for m in package.modules] == [True, False]
    assert package.calls == [(8, 32), (8, 48)] * 2
    assert package.recipes[:2] == ["current scaling", None]
    error = (found - model(x)).norm() / model(x).norm()
    assert 0.001 < error < 0.1 and found.shape == (rows, 16)
    assert "transformer_engine" in str(compiled.last_trace())


def test_a_recipe_of_the_user(package: StandIn) -> None:
    executor = transformer_engine.TransformerEngineExecutor(recipe="delayed scaling")
    compiled = fulgurite.compile(Net(), executors=[executor, "torch"])
    with torch.no_grad():
        compiled(torch.randn(8, 32))
    assert package.recipes[0] == "delayed scaling"


def test_gradients_are_those_of_the_exact_products(package: StandIn) -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(8, 32, requires_grad=True)
    compiled = fulgurite.compile(model, executors=EXECUTORS)
    found = torch.autograd.grad(compiled(x).sum(), [x, *model.parameters()])
    wanted = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    assert package.calls == [(8, 32), (8, 48)], "backward is claimed"
    for one, two in zip(found, wanted, strict=True):
        assert (one - two).norm() <= 0.1 * two.norm()


def test_other_sizes_and_products_stay(package: StandIn) -> None:
    for model, x in (
        (Net(hidden=40), torch.randn(8, 32)),
        (Net().double(), torch.randn(8, 32).double()),
    ):
        with torch.no_grad():
            fulgurite.compile(model, executors=EXECUTORS)(x)
    fulgurite.compile(lambda a, b: a @ b, executors=EXECUTORS)(
        torch.randn(16, 16), torch.randn(16, 16)
    )
    assert not package.calls


def test_without_the_package_it_claims_nothing() -> None:
    assert "transformer_engine" in executor_names()
    model, x = Net(), torch.randn(8, 32)
    with torch.no_grad():
        found = fulgurite.compile(model, executors=EXECUTORS)(x)
        torch.testing.assert_close(found, model(x))
