"""Direct calls: the same results, errors and recompilations as through TorchDynamo."""

from __future__ import annotations

import threading

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules.module import register_module_forward_hook

import fulgurite
from fulgurite.capture.direct_call import DirectCall, make_binder

SCALE = 2.0


def count_dynamo_calls(compiled):
    """A list that grows by one entry for every later call through TorchDynamo."""
    run = (compiled.compiled if isinstance(compiled, nn.Module) else compiled).run
    if not isinstance(run, DirectCall):  # native; it holds the Python form's method
        _, values = run.__self__
        run = next(
            v.__self__ for v in values if isinstance(getattr(v, "__self__", None), DirectCall)
        )
    calls: list[int] = []
    captured = run.captured

    def counted(*args, **kwargs):
        calls.append(1)
        return captured(*args, **kwargs)

    run.captured = counted
    return calls


def test_second_call_bypasses_dynamo():
    compiled = fulgurite.compile(lambda x, y=1.0: torch.tanh(x) * y)
    x = torch.randn(5)
    compiled(x)
    calls = count_dynamo_calls(compiled)
    assert torch.allclose(compiled(x), torch.tanh(x))
    assert not calls
    assert torch.allclose(compiled(x, y=3.0), torch.tanh(x) * 3)  # another constant: recompiled
    assert calls
    del calls[:]
    assert torch.allclose(compiled(x, 3.0), torch.tanh(x) * 3)
    assert torch.allclose(compiled(x), torch.tanh(x))
    assert not calls


@pytest.mark.parametrize("change", ["shape", "dtype", "strides", "grad", "inference", "autocast"])
def test_failed_guards_go_through_dynamo(change):
    compiled = fulgurite.compile(lambda x: (x @ x.mT).sin())
    x = torch.randn(4, 4)
    compiled(x)
    calls = count_dynamo_calls(compiled)
    if change == "shape":
        other = torch.randn(6, 6)
    elif change == "dtype":
        other = x.double()
    elif change == "strides":
        other = torch.randn(4, 8)[:, ::2]
    else:
        other = x.clone().requires_grad_(change == "grad")
    mode = {
        "inference": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    }.get(change, torch.enable_grad)
    with mode():
        got, want = compiled(other), (other @ other.mT).sin()
    assert calls
    assert got.dtype == want.dtype and got.requires_grad == want.requires_grad
    assert torch.allclose(got, want, atol=1e-2 if change == "autocast" else 1e-6)


def test_globals_and_closures_are_guarded(monkeypatch):
    shift = 1.0

    def function(x):
        return x * SCALE + shift

    compiled = fulgurite.compile(function)
    x = torch.randn(3)
    for _ in range(2):
        assert torch.equal(compiled(x), x * 2 + 1)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    for _ in range(2):
        assert torch.equal(compiled(x), x * 3 + 1)
    shift = 5.0
    for _ in range(2):
        assert torch.equal(compiled(x), x * 3 + 5)


def test_changed_defaults_and_code_are_noticed():
    def function(x, by=2.0, *, more=1.0):
        return x * by + more

    compiled = fulgurite.compile(function)
    x = torch.randn(3)
    assert torch.equal(compiled(x), x * 2 + 1)
    assert torch.equal(compiled(x), x * 2 + 1)
    function.__defaults__ = (4.0,)
    assert torch.equal(compiled(x), x * 4 + 1)
    function.__kwdefaults__ = {"more": 3.0}
    assert torch.equal(compiled(x), x * 4 + 3)
    function.__code__ = (lambda x, by, *, more: x - by).__code__
    assert torch.equal(compiled(x), x - 4)


def test_graph_breaks_always_go_through_dynamo():
    def function(x):
        y = x.sin()
        print(end="")
        return y.cos()

    compiled = fulgurite.compile(function)
    x = torch.randn(3)
    compiled(x)
    calls = count_dynamo_calls(compiled)
    assert torch.allclose(compiled(x), x.sin().cos())
    assert len(calls) == 1 and compiled.breaks


def test_side_effects_happen_at_every_call():
    seen = []

    def function(x):
        seen.append(x.shape[0])
        return x + 1

    compiled = fulgurite.compile(function)
    for _ in range(4):
        compiled(torch.zeros(3))
    assert seen == [3, 3, 3, 3]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x, *more, scale: float = 1.0):
        return x * self.weight * scale + sum(more)


class Derived(Model):
    def forward(self, x, *more, scale: float = 1.0):
        return super().forward(x, *more, scale=scale).tanh()


@pytest.mark.parametrize("kind", [Model, Derived])
def test_modules(kind):
    model = kind()
    compiled = fulgurite.compile(model)
    x = torch.randn(3)
    with torch.no_grad():
        compiled(x, x, scale=2.0)
        calls = count_dynamo_calls(compiled)
        assert torch.allclose(compiled(x, x, scale=2.0), model(x, x, scale=2.0))
        model.weight.mul_(3)
        assert torch.allclose(compiled(x, x, scale=2.0), model(x, x, scale=2.0))
    assert not calls


def test_module_hooks_added_later_run():
    model = Model()
    compiled = fulgurite.compile(model)
    x = torch.randn(3)
    compiled(x), compiled(x)
    handle = model.register_forward_hook(lambda module, given, result: result + 100)
    assert torch.allclose(compiled(x), x * model.weight + 100)
    handle.remove()
    assert torch.allclose(compiled(x), x * model.weight)


@pytest.mark.parametrize(
    "module, shape",
    [
        (nn.Linear(3, 3), (2, 3)),
        (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Sequential(nn.Tanh())), (2, 3)),
        (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), (2, 3, 4)),
        (nn.MultiheadAttention(4, 2, batch_first=True), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_torch_modules(module, shape):
    compiled = fulgurite.compile(module, executors="torch")
    given = (torch.randn(2, 3, 4),) * 3 if shape is None else (torch.randn(shape),)
    compiled(*given)
    calls = count_dynamo_calls(compiled)
    for name in ("training", "evaluating"):
        module.train(name == "training")
        torch.testing.assert_close(compiled(*given), module(*given))
        del calls[:]
        torch.testing.assert_close(compiled(*given), module(*given))
        assert not calls, name
    with torch.no_grad():
        next(module.parameters()).mul_(3)
        torch.testing.assert_close(compiled(*given), module(*given))


def test_two_torch_modules_of_one_class():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    ones = [fulgurite.compile(module, executors="torch") for module in (first, second)]
    x = torch.randn(2, 3)
    for _ in range(3):
        for compiled, module in zip(ones, (first, second), strict=True):
            torch.testing.assert_close(compiled(x), module(x))


def test_torch_module_that_changes():
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    compiled = fulgurite.compile(module, executors="torch")
    x = torch.randn(2, 3)

    def agree():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), module(x))

    agree()
    module[1] = nn.Tanh()
    agree()
    module.append(nn.Linear(3, 2))
    agree()
    module[0].weight = nn.Parameter(torch.ones(3, 3))
    agree()
    module.forward = lambda x: x - 5
    agree()
    del module.forward
    handle = module.register_forward_hook(lambda module, given, result: result + 100)
    agree()
    handle.remove()
    agree()


class Layered(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x) * 2


@pytest.mark.parametrize("make", [Layered, lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh())])
def test_layer_hooks_added_later_run(make):
    module = make()
    layer = next(iter(module.children()))
    compiled = fulgurite.compile(module, executors="torch")
    x = torch.randn(2, 3)
    compiled(x), compiled(x)
    handle = layer.register_forward_hook(lambda module, given, result: result + 100)
    torch.testing.assert_close(compiled(x), module(x))
    handle.remove()
    torch.testing.assert_close(compiled(x), module(x))
    layer.register_forward_pre_hook(lambda module, given: (given[0] * 3,))
    torch.testing.assert_close(compiled(x), module(x))


def test_global_hooks_see_each_module_once():
    module = Layered()
    compiled = fulgurite.compile(module, executors="torch")
    x = torch.randn(2, 3)
    compiled(x), compiled(x)
    seen = []
    handle = register_module_forward_hook(lambda module, given, result: seen.append(module))
    try:
        torch.testing.assert_close(
            compiled(x), 2 * nn.functional.linear(x, *module.layer.parameters())
        )
    finally:
        handle.remove()
    assert seen == [module.layer, module]


def test_forward_mode_derivatives():
    compiled = fulgurite.compile(lambda x: x.sin() * 2)
    x = torch.randn(3)
    compiled(x), compiled(x)
    with forward_ad.dual_level():
        result = forward_ad.unpack_dual(compiled(forward_ad.make_dual(x, torch.ones(3))))
    torch.testing.assert_close(result.tangent, 2 * x.cos())


def test_forward_set_on_an_instance():
    model = Model()
    compiled = fulgurite.compile(model)
    x = torch.randn(3)
    compiled(x), compiled(x)
    model.forward = lambda x: x - 5
    assert torch.allclose(compiled(x), x - 5)
    del model.forward
    assert torch.allclose(compiled(x), x * model.weight)


def test_gradients():
    compiled = fulgurite.compile(lambda x: (x.exp() * x).sum())
    for _ in range(3):
        x = torch.randn(4, requires_grad=True)
        compiled(x).backward()
        assert torch.allclose(x.grad, (x.exp() * (x + 1)).detach())


def test_dynamo_reset_drops_the_entries():
    compiled = fulgurite.compile(lambda x: x.sin() + 1)
    x = torch.randn(3)
    compiled(x), compiled(x)
    torch._dynamo.reset()
    calls = count_dynamo_calls(compiled)
    assert torch.allclose(compiled(x), x.sin() + 1)
    assert calls


def test_compiler_stance():
    compiled = fulgurite.compile(lambda x: x.sin() + 1)
    x = torch.randn(3)
    compiled(x), compiled(x)
    calls = count_dynamo_calls(compiled)
    with torch.compiler.set_stance("force_eager"):
        compiled(x)
    assert calls


def test_inside_another_compiled_function():
    inner = fulgurite.compile(lambda x: x.sin() + 1)
    x = torch.randn(3)
    inner(x), inner(x)

    def outer(x):
        y = inner(x)
        torch._dynamo.graph_break()
        return inner(y) * 2

    compiled = torch.compile(outer, backend="eager")
    for _ in range(2):
        assert torch.allclose(compiled(x), ((x.sin() + 1).sin() + 1) * 2)


def test_concurrent_threads():
    compiled = fulgurite.compile(lambda x, n: x.sin() * n, dynamic=True)
    compiled(torch.randn(7), 7)  # torch 2.11 itself crashes if several threads capture at once
    wrong: list[int] = []

    def use(size: int) -> None:
        x = torch.randn(size)
        for _ in range(50):
            if not torch.allclose(compiled(x, size), x.sin() * size):
                wrong.append(size)

    threads = [threading.Thread(target=use, args=(size,)) for size in (3, 4, 5, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_binder_matches_python():
    outside = 7

    def function(a, /, b, *rest, c, d=4, **more):
        return outside

    bound = make_binder(function)(1, 2, 3, c=5, e=6)
    wanted = {"a": 1, "b": 2, "rest": (3,), "c": 5, "d": 4, "more": {"e": 6}, "outside": 7}
    assert bound == wanted
    assert make_binder(lambda *, k: k)(k=1) == {"k": 1}
    assert make_binder(lambda: 0)() == {}
    for wrong in (lambda f: f(1, c=2), lambda f: f(1, 2), lambda f: f(1, 2, c=3, b=4)):
        with pytest.raises(TypeError) as ours:
            wrong(make_binder(function))
        with pytest.raises(TypeError) as pythons:
            wrong(function)
        assert str(ours.value) == str(pythons.value)
