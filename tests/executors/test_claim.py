"""Claim: the first executor that can run an op, late decomposition, and unclaimed ops."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
import torch.nn.functional as F

import fulgurite
from fulgurite.errors import CompileError
from fulgurite.trace.node_meta import executor_of

aten = torch.ops.aten


class ClaimingExecutor(fulgurite.Executor):
    """Claims some ops and runs them through torch, counting regions."""

    name = "claiming"

    def __init__(self, *names, accepts_decomposed=False):
        self.names = names
        type(self).accepts_decomposed_ops = accepts_decomposed
        self.regions = []

    def claims(self, node):
        return any(str(node.target).startswith(f"aten.{name}") for name in self.names)

    def lower(self, region):
        self.regions.append(region)
        return region.forward


def executors_of(compiled):
    trace = next(t for t in compiled.history if t.stage == "claimed")
    return [(str(n.target).removeprefix("aten."), executor_of(n)) for n in trace.ops]


def test_first_claiming_executor_gets_the_op():
    mine = ClaimingExecutor("add", "mul")
    f = fulgurite.compile(lambda x: (x + 1).relu() * 2, executors=[mine, "torch"])
    x = torch.randn(3)
    assert torch.equal(f(x), (x + 1).relu() * 2)
    assert executors_of(f) == [
        ("add.Tensor", "claiming"),
        ("relu.default", "torch"),
        ("mul.Tensor", "claiming"),
    ]
    assert len(mine.regions) == 2  # relu stands between them
    text = str(f.last_trace())
    assert "@fulgurite.region('claiming')" in text and "# claiming   1 op " in text


def test_composite_op_is_decomposed_if_all_decomposed_ops_are_claimed():
    decomposed_ops = ("amax", "sub", "exp", "sum", "div", "var_mean", "mul", "add", "rsqrt")
    both = lambda x: F.softmax(x, -1) + F.layer_norm(x, (4,))  # noqa: E731
    x = torch.randn(3, 4)
    f = fulgurite.compile(
        both, executors=[ClaimingExecutor(*decomposed_ops, accepts_decomposed=True), "torch"]
    )
    torch.testing.assert_close(f(x), both(x))
    assert "claiming" in {e for _, e in executors_of(f)}
    assert not any("softmax" in op or "layer_norm" in op for op, _ in executors_of(f))
    assert "softmax" in str(next(t for t in f.history if t.stage == "eliminate_dead_code"))
    # without exp nobody claims all of softmax: it stays composite, and layer_norm is still decomposed
    fewer = [name for name in decomposed_ops if name != "exp"]
    g = fulgurite.compile(
        both, executors=[ClaimingExecutor(*fewer, accepts_decomposed=True), "torch"]
    )
    torch.testing.assert_close(g(x), both(x))
    assert ("_softmax.default", "torch") in executors_of(g)
    assert not any("layer_norm" in op for op, _ in executors_of(g))


def test_views_are_not_decomposed(monkeypatch):
    """Torch's own rule for a view of no elements of conjugated numbers fails, and there is nothing to gain."""
    decomposed = []
    monkeypatch.setattr(
        import_module("fulgurite.executors.claim"),
        "decompose",
        lambda module, node: decomposed.append(str(node.target)),
    )
    f = fulgurite.compile(
        lambda x: x.mH.view(-1), executors=[ClaimingExecutor(accepts_decomposed=True), "torch"]
    )
    x = torch.empty(0, 3, 4, dtype=torch.complex64)
    assert f(x).shape == (0,)
    assert "aten.view.default" not in decomposed and "aten.permute.default" not in decomposed
    assert ("view.default", "torch") in executors_of(f)


def test_unclaimed_op_is_an_error_with_a_hint():
    with pytest.raises(CompileError) as caught:
        fulgurite.compile(lambda x: x.relu(), executors=[ClaimingExecutor("add")])(torch.ones(3))
    assert "no executor claims aten.relu" in str(caught.value)
    assert "'torch'" in caught.value.details["next"] and "f32[3]" in caught.value.details["input"]
    assert "repro" in caught.value.details


def test_failing_executor_is_named_with_a_repro(tmp_path, monkeypatch):
    class Fails(ClaimingExecutor):
        name = "fails"

        def lower(self, region):
            raise ZeroDivisionError("boom")

    monkeypatch.setenv("FULGURITE_REPRO_DIR", str(tmp_path))
    with pytest.raises(CompileError) as caught:
        fulgurite.compile(lambda x: (x + 1) * 2, executors=[Fails("add", "mul"), "torch"])(
            torch.ones(2, 3)
        )
    error = caught.value
    assert "'fails'" in str(error) and "boom" in str(error) and "aten.mul" in str(error)
    assert "test_claim.py" in error.details["where"] and "f32[2, 3]" in error.details["input"]
    (script,) = tmp_path.iterdir()
    assert error.details["repro"] == str(script)


def normed(x, w, v):
    """Three norms: two equal calls, and one of another size."""
    return F.layer_norm(x, (6,), w) + F.layer_norm(x * 2, (6,), w), F.layer_norm(x[:, :3], (3,), v)


@pytest.mark.parametrize(("dynamic", "times"), [(False, 2), (True, 3)])
def test_equal_calls_are_decomposed_once(monkeypatch, dynamic, times):
    """Where sizes are symbols each is its own."""
    module = import_module("fulgurite.executors.claim")
    seen = []

    def decompose(graph, node, real=module.decompose):
        seen.append(str(node.target))
        return real(graph, node)

    monkeypatch.setattr(module, "decompose", decompose)
    compiled = fulgurite.compile(
        normed, executors=["fuser", "torch"], autotune=False, dynamic=dynamic
    )
    inputs = torch.randn(5, 6), torch.randn(6), torch.randn(3)
    torch.testing.assert_close(compiled(*inputs), normed(*inputs))
    assert seen.count("aten.native_layer_norm.default") == times
    text = str(next(t for t in compiled.history if t.stage == "claimed"))
    assert text.count("aten.rsqrt.default(") == 3 and "native_layer_norm" not in text


def test_op_whose_decomposition_refuses_the_dtype_stays_whole():
    """torch decomposes nan_to_num with isneginf, which takes no complex numbers."""
    z = torch.complex(torch.tensor([1.0, torch.nan]), torch.tensor([2.0, torch.inf]))
    compiled = fulgurite.compile(lambda z: z.nan_to_num() * 2)
    torch.testing.assert_close(compiled(z), z.nan_to_num() * 2)
    assert ("nan_to_num.default", "torch") in executors_of(compiled)


def test_decomposition_with_other_strides_is_copied_to_the_ops_strides(monkeypatch):
    module = import_module("fulgurite.transforms.decompose")
    table = {aten.logit.default: lambda x, eps=None: (x / (1 - x)).log().contiguous()}
    monkeypatch.setattr(module, "decomposition_table", lambda: table)
    x = torch.rand(3, 5).T
    result = fulgurite.compile(torch.logit)(x)
    assert result.stride() == torch.logit(x).stride() == (1, 5)
    torch.testing.assert_close(result, torch.logit(x))


def test_decomposition_with_another_shape_is_not_used(monkeypatch):
    """torch 2.11 decomposes vector_norm of one element without squeezing its dimension."""
    module = import_module("fulgurite.transforms.decompose")
    table = {aten.logit.default: lambda x, eps=None: (x / (1 - x)).log()[None]}
    monkeypatch.setattr(module, "decomposition_table", lambda: table)
    x = torch.rand(3, 5)
    compiled = fulgurite.compile(torch.logit)
    torch.testing.assert_close(compiled(x), torch.logit(x))
    assert executors_of(compiled) == [("logit.default", "torch")]
