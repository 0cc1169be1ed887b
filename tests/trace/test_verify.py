"""The verifier finds every kind of broken trace and names the transform at fault."""

from __future__ import annotations

import gc
import weakref
from importlib import import_module

import pytest
import torch

import fulgurite
from fulgurite.errors import CompileError, VerifyError
from fulgurite.trace import verify
from fulgurite.trace.metadata import run_node
from fulgurite.trace.node_meta import set_executor

aten = torch.ops.aten


def compiled_with(change):
    """Compile a small function with a transform that applies `change` to the graph."""

    @fulgurite.transform(name="culprit")
    def culprit(trace):
        return trace.edit(change)

    f = fulgurite.compile(lambda x, y: ((x + y).relu(), x * 2), transforms=[culprit])
    return f(torch.randn(3, 4), torch.randn(4))


def first(graph, target):
    return next(n for n in graph.nodes if n.target is target)


def mutates_an_argument(graph):
    first(graph, aten.relu.default).target = aten.relu_.default


def records_a_wrong_shape(graph):
    node = first(graph, aten.relu.default)
    node.meta["val"] = node.meta["val"][:2]


def has_no_metadata(graph):
    first(graph, aten.relu.default).meta.pop("val")


def returns_an_input(graph):
    node = first(graph, aten.mul.Tensor)
    node.replace_all_uses_with(node.args[0])


def drops_an_output(graph):
    output = graph.output_node()
    output.args = ((output.args[0][0],),)


def changes_a_dtype(graph):
    node = first(graph, aten.relu.default)
    with graph.inserting_after(node):
        cast = graph.call_function(aten._to_copy.default, (node,), {"dtype": torch.float64})
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)


def uses_before_definition(graph):
    relu, add = first(graph, aten.relu.default), first(graph, aten.add.Tensor)
    relu.append(add)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (mutates_an_argument, "functional"),
        (records_a_wrong_shape, "metadata"),
        (returns_an_input, "same aliases"),
        (drops_an_output, "same interface"),
        (changes_a_dtype, "same interface"),
        (uses_before_definition, "defined once"),
    ],
)
def test_broken_transform_is_named(change, rule):
    with pytest.raises(VerifyError) as caught:
        compiled_with(change)
    text = str(caught.value)
    assert "culprit" in text and f"'{rule}'" in text
    assert "repro" in caught.value.details


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("shape", [(1, 4, 1, 1), (1, 4, 2, 2), (2, 4, 3, 1)])
def test_an_op_whose_decomposition_returns_its_input(shape, grad):
    """`channel_shuffle` copies. On FakeTensors it may run as views of the input, if no channel moves."""

    def shuffle(x):
        return torch.nn.functional.channel_shuffle(x, 1)

    x = torch.randn(shape).contiguous(memory_format=torch.channels_last)
    x = x.requires_grad_(grad) * 1
    torch.testing.assert_close(fulgurite.compile(shuffle, dynamic=True)(x), shuffle(x))


def functional_trace(function, *inputs):
    compiled = fulgurite.compile(function)
    compiled(*inputs)
    return next(trace for trace in compiled.history if trace.kind != "captured")


def test_ops_that_no_transform_touched_are_evaluated_once(monkeypatch):
    before = functional_trace(lambda x: (x + 1).relu() * 2, torch.randn(3))
    verify(before)
    evaluated = []

    def record(module, node, values):
        evaluated.append(node.name)
        return run_node(module, node, values)

    monkeypatch.setattr(import_module("fulgurite.trace.verify"), "run_node", record)

    def change(graph):
        relu = first(graph, aten.relu.default)
        relu.target, relu.args = aten.mul.Tensor, (relu.args[0], 3)

    after = before.edit(change)
    verify(after, before)
    names = [node.name for node in after.ops]
    assert evaluated == names[1:], "what reads a new value is evaluated too"
    verify(after)
    assert evaluated == names[1:], "this trace has been evaluated"


def test_equal_arguments_of_another_type_are_evaluated():
    """1 == 1.0, but an integer times a float is a float."""
    before = functional_trace(lambda x: x * 2, torch.arange(3))
    verify(before)

    def change(graph):
        product = first(graph, aten.mul.Tensor)
        product.args = (product.args[0], 2.0)

    with pytest.raises(VerifyError, match=r"is recorded as i64\[3\] but is f32\[3\]"):
        verify(before.edit(change), before)


def test_aliases_of_untouched_ops_are_compared():
    """Both ops have the arguments and the metadata that they had; only the outputs change."""
    before = functional_trace(lambda x: (x.exp(), x.exp().sin()), torch.randn(3))
    verify(before)

    def change(graph):
        (one, _) = graph.output_node().args[0]
        graph.output_node().args = ((one, one),)

    with pytest.raises(VerifyError, match="shares memory with output 0; before, with nothing"):
        verify(before.edit(change), before)


def test_missing_metadata_is_filled_in():
    assert len(compiled_with(has_no_metadata)) == 2


def test_failing_transform_is_named():
    def explode(trace):
        raise KeyError("missing")

    with pytest.raises(CompileError, match=r"explode failed on inference 0.*KeyError: 'missing'"):
        fulgurite.compile(lambda x: x + 1, transforms=[explode])(torch.ones(2))


def test_transform_that_returns_nothing_is_named():
    with pytest.raises(fulgurite.FulguriteError, match="forgetful returned NoneType"):

        @fulgurite.transform
        def forgetful(trace):
            pass

        fulgurite.compile(lambda x: x + 1, transforms=[forgetful])(torch.ones(2))


def test_unclaimed_ops_are_found():
    f = fulgurite.compile(lambda x: x + 1)
    f(torch.ones(2))
    claimed = next(t for t in f.history if t.stage == "claimed")
    verify(claimed)
    for node in (bad := claimed.edit(lambda graph: None)).ops:
        del node.meta["executor"]
    with pytest.raises(VerifyError, match="has no executor"):
        verify(bad)


def test_interface_is_checked_before_autograd():
    @fulgurite.transform(phase="before_autograd", name="culprit")
    def culprit(trace):
        return trace.edit(drops_an_output)

    with pytest.raises(VerifyError, match="1 outputs instead of 2"):
        fulgurite.compile(lambda x: (x + 1, x * 2), transforms=[culprit])(torch.randn(3))


def returns_none(graph):
    output = graph.output_node()
    output.args = ((None, output.args[0][1]),)


def calls_a_module(graph):
    graph.owning_module.add_module("linear", torch.nn.Linear(4, 4))
    output = graph.output_node()
    with graph.inserting_before(output):
        called = graph.call_module("linear", (output.args[0][0],))
    output.args = ((called, output.args[0][1]),)


@pytest.mark.parametrize(
    ("change", "rule"), [(returns_none, "same interface"), (calls_a_module, "functional")]
)
def test_forbidden_nodes_after_autograd(change, rule):
    with pytest.raises(VerifyError, match=rule):
        compiled_with(change)


def test_transform_that_modifies_its_input_is_named():
    def culprit(trace):
        first(trace.graph, aten.relu.default).target = aten.sigmoid.default
        return trace

    with pytest.raises(VerifyError, match="culprit modified the trace it was given"):
        fulgurite.compile(lambda x: x.relu(), transforms=[culprit])(torch.randn(3))


@pytest.mark.parametrize("phase", ["before_autograd", "after_autograd", "after_claim"])
def test_transform_may_add_constants(phase):
    @fulgurite.transform(phase=phase)
    def doubled(trace):
        def change(graph):
            output = graph.output_node()
            (result,) = output.args[0]
            graph.owning_module.register_buffer("two", torch.full((3,), 2.0))
            with graph.inserting_before(output):
                product = graph.call_function(torch.mul, (result, graph.get_attr("two")))
                set_executor(product, "torch")
            output.args = ((product,),)

        return trace.edit(change)

    compiled = fulgurite.compile(lambda x: x + 1, transforms=[doubled])
    assert compiled(torch.zeros(3)).tolist() == [2.0] * 3
    trace = compiled.last_trace()
    inputs = {"x": torch.zeros(3), "two": torch.full((3,), 2.0)}  # AOTAutograd may make it an input
    result = trace.load()(*(inputs[node.name] for node in trace.inputs))
    assert result[0].tolist() == [2.0] * 3


def test_programs_are_freed_although_they_were_verified(monkeypatch):
    """What the verifier remembers of a stage keeps no program alive."""
    monkeypatch.setenv("FULGURITE_VERIFY", "1")
    weight = torch.randn(8, 8)

    def compile_once():
        compiled = fulgurite.compile(lambda x: torch.relu(x @ weight) @ weight + 1)
        compiled(torch.randn(4, 8))
        return weakref.ref(compiled.session)

    sessions = [compile_once() for _ in range(2)]
    torch._dynamo.reset()
    gc.collect()
    assert [session() for session in sessions] == [None, None]
