"""Which launches run after the replay of a CUDA graph, and that results stay right."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import fulgurite
from fulgurite.executors import result_tail
from fulgurite.trace import Trace
from fulgurite.trace.node_meta import set_fake_value
from fulgurite.trace.region import Region
from tests.cudagraph.fake import use_fake_captures

ROWS, WIDTH, VOCABULARY = 6, 8, 40


@pytest.fixture(autouse=True)
def fake_captures(monkeypatch):
    monkeypatch.setattr(result_tail, "MIN_RESULT_BYTES", 4 * ROWS * VOCABULARY)
    with use_fake_captures():
        yield


def run(function, make_inputs, calls=8, **options):
    """Call it, and compare all results at the end: they are held. Returns the graphed function."""
    compiled = fulgurite.compile(function, cudagraph=True, **options)
    held = []
    with torch.no_grad():
        for _ in range(calls):
            inputs = make_inputs()
            held.append((compiled(*inputs), function(*inputs)))
    for ours, theirs in held:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    graphed = compiled.session.compiled_graph(-1, None).graphed
    assert graphed.replays >= 4, str(graphed)
    return graphed


def make_draw(*weights):
    return lambda: (torch.randn(ROWS, WIDTH), *weights)


def hidden(x, w):
    return torch.tanh(torch.relu(x @ w) @ w)


W, OUT = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, VOCABULARY)


def kept_bytes(graphed) -> int:
    return graphed.memory.pool(0).on(torch.device("cpu")).kept_bytes


@pytest.mark.parametrize("executors", [["torch"], ["fuser", "torch"]])
def test_logits_are_made_after_the_replay(executors):
    graphed = run(lambda x, w, out: hidden(x, w) @ out, make_draw(W, OUT), executors=executors)
    assert graphed.tail is not None and graphed.tail.outputs == (0,)
    assert kept_bytes(graphed) < 4 * ROWS * VOCABULARY, "the graph's memory has no second buffer"


def test_large_inputs_of_the_last_launch_are_made_after_the_replay_too():
    def f(x, w, out):
        return (hidden(x, w) @ out)[:, : VOCABULARY - 1].clone()

    result_tail.MIN_RESULT_BYTES -= 4 * ROWS
    graphed = run(f, make_draw(W, OUT), executors=["torch"])
    assert graphed.tail is not None
    assert kept_bytes(graphed) < 4 * ROWS * VOCABULARY


def test_small_results_are_copied_beside_large_ones():
    def f(x, w, out):
        y = hidden(x, w)
        return y.sum(-1), y @ out, y

    graphed = run(f, make_draw(W, OUT))
    assert graphed.tail is not None and graphed.tail.outputs == (1,)


def test_views_of_a_large_result_share_its_memory():
    def f(x, w, out):
        logits = hidden(x, w) @ out
        return logits, logits[1:]

    graphed = run(f, make_draw(W, OUT))
    assert graphed.tail is not None


def test_result_that_the_head_reads_stays_in_the_head():
    def f(x, w, out):
        logits = hidden(x, w) @ out
        return logits, logits.softmax(-1).sum()

    assert run(f, make_draw(W, OUT), executors=["torch"]).tail is None


@pytest.mark.parametrize("executors", [["torch"], ["fuser", "torch"]])
def test_random_numbers_are_drawn_in_order(executors):
    """Those of a large result come first: it may not be made later than the others."""

    def f(x, w, out):
        drawn = torch.rand(ROWS, VOCABULARY) + x.sum()
        return drawn, F.dropout(hidden(x, w) @ w, 0.5).sum(0) @ w

    modes = (True, False)
    compiled = [fulgurite.compile(f, cudagraph=mode, executors=executors) for mode in modes]
    x = torch.randn(ROWS, WIDTH)
    for seed in range(6):
        results = []
        for one in compiled:
            torch.manual_seed(seed)
            results.append(one(x, W, OUT))
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("overwrites", [False, True])
def test_buffer_that_the_head_overwrites_is_not_read_later(overwrites):
    """A region may store its result in the buffer of a matmul (a donated buffer)."""
    mm, inner = torch.ops.aten.mm.default, fx.Graph()
    inner.output((inner.call_function(torch.ops.aten.sin.default, (inner.placeholder("y"),)),))

    def call(y):
        return (y.sin_() if overwrites else y.sin(),)

    call.overwritten_inputs = (0,) if overwrites else ()
    region = Region("sin_0", "fuser", fx.GraphModule({}, inner), call)
    graph = fx.Graph()
    x, out = graph.placeholder("x"), graph.placeholder("out")
    y = graph.call_function(mm, (x, x))
    logits = graph.call_function(mm, (y, out))
    sine = graph.call_function(region, (y,))
    item = graph.call_function(operator.getitem, (sine, 0))
    last = graph.call_function(mm, (item, x))
    graph.output((logits, last))
    square, wide = torch.empty(WIDTH, WIDTH), torch.empty(WIDTH, VOCABULARY)
    values = {x: square, y: square, sine: (square,), item: square, last: square}
    for node, value in (values | {out: wide, logits: wide}).items():
        set_fake_value(node, value)
    trace = Trace(fx.GraphModule({}, graph), "inference", "final")
    split = result_tail.split_tail(trace, ("copied", "copied"))
    assert (split is None) == overwrites
    if split is not None:
        given = [torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, VOCABULARY)]
        *results, internal = split.head.compile()(list(given))
        (made,) = split.tail.run([internal, *(given[k] for k in split.tail.inputs)])
        expected = trace.compile()(list(given))
        assert results[0] is None
        torch.testing.assert_close([made, results[1]], list(expected))


def test_a_trace_of_one_launch_is_not_split():
    assert run(lambda x, out: x @ out, make_draw(OUT), executors=["torch"]).tail is None


def test_other_sizes():
    compiled = fulgurite.compile(
        lambda x, w, out: hidden(x, w) @ out, cudagraph=True, dynamic=True, executors=["torch"]
    )
    with torch.no_grad():
        for rows in [ROWS, 9, 12] * 6:
            x = torch.randn(rows, WIDTH)
            torch.testing.assert_close(compiled(x, W, OUT), hidden(x, W) @ OUT)


def test_training_keeps_saved_tensors_in_the_graph():
    """Only what backward does not need is made after the replay."""
    w, out = W.clone().requires_grad_(), OUT.clone().requires_grad_()
    f = lambda x, w, out: (torch.tanh(hidden(x, w) @ out), hidden(x, w) @ out)  # noqa: E731
    compiled = fulgurite.compile(f, cudagraph=True, executors=["torch"])
    for _ in range(8):
        x = torch.randn(ROWS, WIDTH)
        for run_one in (f, compiled):
            first, second = run_one(x, w, out)
            (first.sum() + second.square().sum()).backward()
            if run_one is f:
                expected = [w.grad, out.grad]
                w.grad = out.grad = None
        torch.testing.assert_close([w.grad, out.grad], expected, rtol=1e-4, atol=1e-4)
        w.grad = out.grad = None
    forward = compiled.session.compiled_graph(-1, "forward").graphed
    assert forward.replays >= 3
    assert forward.tail is not None and max(forward.tail.outputs) < 2, (
        "saved tensors keep their place"
    )


def test_an_error_in_the_tail_leaves_the_capture_usable():
    graphed = run(lambda x, w, out: hidden(x, w) @ out, make_draw(W, OUT), executors=["torch"])
    (call,) = [call for state in graphed._states.values() for call in state.calls()]
    tail = call._tail

    def fail(inputs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    call._tail = result_tail.ResultTail(fail, tail.inputs, tail.outputs)
    x = torch.randn(ROWS, WIDTH)
    with pytest.raises(torch.OutOfMemoryError):
        graphed([x, W, OUT])
    assert not graphed.memory.lock.locked()
    call._tail = tail
    (result,) = graphed([x, W, OUT])
    torch.testing.assert_close(result, hidden(x, W) @ OUT)


def test_captures_keep_no_inputs_for_the_tail():
    graphed = run(
        lambda x, w, out: hidden(x, w) @ out.t(),
        make_draw(W, OUT.t().contiguous()),
        executors=["torch"],
    )
    (call,) = [call for state in graphed._states.values() for call in state.calls()]
    assert all(value.shape == (ROWS, WIDTH) for value in call._internal), "views of inputs, say"
