"""A step of the pipeline that fails: built-in ones are left out, the user's own raise."""

from __future__ import annotations

import pytest
import torch

import fulgurite
from fulgurite import compiled_graph, session
from fulgurite.errors import CompileError, FallbackWarning, VerifyError
from fulgurite.trace import Trace
from fulgurite.transforms import Transform


@pytest.fixture(autouse=True)
def _not_strict(monkeypatch):
    monkeypatch.delenv("FULGURITE_STRICT")


def fail(*args, **kwargs):
    raise KeyError("a bug")


def program(x):
    return (torch.relu(x) * 1 + 2).sum(-1)


def gradient(function, x):
    x = x.clone().requires_grad_()
    function(x).sum().backward()
    return x.grad


def test_a_built_in_step_is_left_out(monkeypatch):
    broken = Transform("simplify_algebra", "after_autograd", fail)
    monkeypatch.setattr(session, "SIMPLIFY", (broken, *session.SIMPLIFY[2:]))
    compiled, x = fulgurite.compile(program), torch.randn(4, 5)
    with pytest.warns(FallbackWarning, match="step simplify_algebra could not be compiled"):
        torch.testing.assert_close(compiled(x), program(x))
    stages = [trace.stage for trace in compiled.history]
    assert "simplify_algebra" not in stages and stages[-1] == "final"
    assert "the trace before this step" in str(compiled.explain())


def test_python_runs_if_the_host_program_fails(monkeypatch):
    monkeypatch.setattr(compiled_graph, "build_host_program", fail)
    compiled, x = fulgurite.compile(program), torch.randn(4, 5)
    with pytest.warns(FallbackWarning, match="host program could not be compiled"):
        compiled(x)
    torch.testing.assert_close(compiled(x), program(x))
    assert "the Python of the trace" in str(compiled.explain())


def test_torch_runs_every_op_if_lowering_fails(monkeypatch):
    original = session.lower_trace
    calls = []

    def lower_trace(trace, executors, *options):
        calls.append(executors)
        return fail() if len(executors) > 1 else original(trace, executors, *options)

    monkeypatch.setattr(session, "lower_trace", lower_trace)
    compiled, x = fulgurite.compile(program), torch.randn(4, 5)
    with pytest.warns(FallbackWarning, match="forward 0 could not be compiled: final failed"):
        grad = gradient(compiled, x)
    torch.testing.assert_close(grad, gradient(program, x))
    assert "fuser" not in str(compiled.last_trace()) and "torch.relu" in str(compiled.last_trace())
    assert [t.stage for t in compiled.graphs[0].stages("backward")].count("claimed") == 1


def test_the_captured_graph_runs_if_autograd_fails(monkeypatch):
    monkeypatch.setattr(session, "run_aot_autograd", fail)
    compiled, x = fulgurite.compile(program), torch.randn(4, 5)
    with pytest.warns(FallbackWarning, match="graph 0 could not be compiled"):
        torch.testing.assert_close(compiled(x), program(x))
    torch.testing.assert_close(gradient(compiled, x), gradient(program, x))
    assert "op by op as captured" in str(compiled.explain())
    monkeypatch.setenv("FULGURITE_STRICT", "1")
    with pytest.raises(Exception, match="a bug"):
        fulgurite.compile(program)(torch.randn(3, 3))


@pytest.mark.parametrize("phase", ["before_autograd", "after_autograd", "after_claim"])
def test_a_users_transform_raises(phase):
    mine = fulgurite.transform(phase=phase, name="mine")(fail)
    with pytest.raises(CompileError, match="mine failed on .*KeyError: 'a bug'"):
        fulgurite.compile(program, transforms=[mine])(torch.randn(4, 5))


def test_a_users_transform_survives_the_fallback(monkeypatch):
    """The captured graph that runs is the one after the user's transforms of it."""

    def double(trace: Trace) -> Trace:
        def change(graph):
            (output,) = graph.output_node().args[0]
            with graph.inserting_before(graph.output_node()):
                graph.output_node().args = ((graph.call_function(torch.mul, (output, 2)),),)

        return trace.edit(change)

    monkeypatch.setattr(session, "run_aot_autograd", fail)
    transform = fulgurite.transform(phase="before_autograd")(double)
    compiled, x = fulgurite.compile(program, transforms=[transform]), torch.randn(4, 5)
    with pytest.warns(FallbackWarning):
        torch.testing.assert_close(compiled(x), 2 * program(x))


def test_a_trace_that_does_not_verify_raises(monkeypatch):
    def drop_output(trace: Trace) -> Trace:
        return trace.edit(lambda graph: setattr(graph.output_node(), "args", ((),)))

    broken = Transform("fold_constants", "after_autograd", drop_output)
    monkeypatch.setattr(session, "SIMPLIFY", (broken,))
    with pytest.raises(VerifyError):
        fulgurite.compile(program)(torch.randn(4, 5))


def test_an_interrupt_is_raised(monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "lower_trace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fulgurite.compile(program)(torch.randn(4, 5))


def test_the_warning_says_where_the_failure_is(monkeypatch):
    def reject(*args, **kwargs):
        raise CompileError("the C++ compiler rejected a generated kernel", where="a.cpp:12: oops")

    monkeypatch.setattr(session, "run_aot_autograd", reject)
    with pytest.warns(FallbackWarning, match=r"generated kernel\n  where +a\.cpp:12: oops\n  runs"):
        fulgurite.compile(program)(torch.randn(3))
