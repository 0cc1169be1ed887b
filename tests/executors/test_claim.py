"""The priority walk: first come, late decomposition, and what nobody takes."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
import torch.nn.functional as F

import fulgurite
from fulgurite.errors import CompileError

aten = torch.ops.aten


class Takes(fulgurite.Executor):
    """Claims some ops and runs them through torch, counting regions."""

    name = "takes"

    def __init__(self, *names, pieces=False):
        self.names = names
        type(self).takes_pieces = pieces
        self.regions = []

    def claims(self, node):
        return any(str(node.target).startswith(f"aten.{name}") for name in self.names)

    def lower(self, region):
        self.regions.append(region)
        return region.forward


def executors_of(compiled):
    trace = next(t for t in compiled.history if t.stage == "claimed")
    return [(str(n.target).removeprefix("aten."), n.meta["executor"]) for n in trace.ops]


def test_the_first_that_claims_gets_it():
    mine = Takes("add", "mul")
    f = fulgurite.compile(lambda x: (x + 1).relu() * 2, executors=[mine, "torch"])
    x = torch.randn(3)
    assert torch.equal(f(x), (x + 1).relu() * 2)
    assert executors_of(f) == [
        ("add.Tensor", "takes"),
        ("relu.default", "torch"),
        ("mul.Tensor", "takes"),
    ]
    assert len(mine.regions) == 2  # relu stands between them
    text = str(f.last_trace())
    assert "@fulgurite.region('takes')" in text and "# takes   1 op " in text


def test_a_composite_op_is_taken_apart_when_all_its_pieces_are_wanted():
    pieces = ("amax", "sub", "exp", "sum", "div", "var_mean", "mul", "add", "rsqrt")
    both = lambda x: F.softmax(x, -1) + F.layer_norm(x, (4,))  # noqa: E731
    x = torch.randn(3, 4)
    f = fulgurite.compile(both, executors=[Takes(*pieces, pieces=True), "torch"])
    torch.testing.assert_close(f(x), both(x))
    assert "takes" in {e for _, e in executors_of(f)}
    assert not any("softmax" in op or "layer_norm" in op for op, _ in executors_of(f))
    assert "softmax" in str(next(t for t in f.history if t.stage == "dead_code"))
    # without exp nobody can finish softmax: it stays whole, and layer_norm is still taken apart
    fewer = [name for name in pieces if name != "exp"]
    g = fulgurite.compile(both, executors=[Takes(*fewer, pieces=True), "torch"])
    torch.testing.assert_close(g(x), both(x))
    assert ("_softmax.default", "torch") in executors_of(g)
    assert not any("layer_norm" in op for op, _ in executors_of(g))


def test_a_view_is_not_taken_apart(monkeypatch):
    """Torch's own rule for a view of no elements of conjugated numbers fails, and there is nothing to gain."""
    taken_apart = []
    monkeypatch.setattr(
        import_module("fulgurite.executors.claim"),
        "decompose",
        lambda module, node: taken_apart.append(str(node.target)),
    )
    f = fulgurite.compile(lambda x: x.mH.view(-1), executors=[Takes(pieces=True), "torch"])
    x = torch.empty(0, 3, 4, dtype=torch.complex64)
    assert f(x).shape == (0,)
    assert "aten.view.default" not in taken_apart and "aten.permute.default" not in taken_apart
    assert ("view.default", "torch") in executors_of(f)


def test_an_op_nobody_takes_is_an_error_with_the_way_out():
    with pytest.raises(CompileError) as caught:
        fulgurite.compile(lambda x: x.relu(), executors=[Takes("add")])(torch.ones(3))
    assert "no executor claims aten.relu" in str(caught.value)
    assert "'torch'" in caught.value.rows["next"] and "f32[3]" in caught.value.rows["input"]
    assert "repro" in caught.value.rows


def test_a_failing_executor_is_named_with_a_repro(tmp_path, monkeypatch):
    class Fails(Takes):
        name = "fails"

        def lower(self, region):
            raise ZeroDivisionError("boom")

    monkeypatch.setenv("FULGURITE_REPRO", str(tmp_path))
    with pytest.raises(CompileError) as caught:
        fulgurite.compile(lambda x: (x + 1) * 2, executors=[Fails("add", "mul"), "torch"])(
            torch.ones(2, 3)
        )
    error = caught.value
    assert "'fails'" in str(error) and "boom" in str(error) and "aten.mul" in str(error)
    assert "test_claim.py" in error.rows["where"] and "f32[2, 3]" in error.rows["input"]
    (script,) = tmp_path.iterdir()
    assert error.rows["repro"] == str(script)


def normed(x, w, v):
    """Three norms: two equal calls, and one of another size."""
    return F.layer_norm(x, (6,), w) + F.layer_norm(x * 2, (6,), w), F.layer_norm(x[:, :3], (3,), v)


@pytest.mark.parametrize(("dynamic", "times"), [(False, 2), (True, 3)])
def test_equal_calls_are_taken_apart_once(monkeypatch, dynamic, times):
    """Where sizes are symbols each is its own."""
    module = import_module("fulgurite.executors.claim")
    seen = []

    def decompose(graph, node, real=module.decompose):
        seen.append(str(node.target))
        return real(graph, node)

    monkeypatch.setattr(module, "decompose", decompose)
    compiled = fulgurite.compile(normed, executors=["fuser", "torch"], tune=False, dynamic=dynamic)
    inputs = torch.randn(5, 6), torch.randn(6), torch.randn(3)
    torch.testing.assert_close(compiled(*inputs), normed(*inputs))
    assert seen.count("aten.native_layer_norm.default") == times
    text = str(next(t for t in compiled.history if t.stage == "claimed"))
    assert text.count("aten.rsqrt.default(") == 3 and "native_layer_norm" not in text
