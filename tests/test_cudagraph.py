"""CUDA graphs: when a call is captured, which inputs and outputs are copied or shared.

A fake capture needs no GPU; the last tests run on one.
"""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import Tensor, nn

import fulgurite
from fulgurite.cudagraph import MAX_CAPTURES_PER_SHAPE, MAX_SHAPES, GraphedFunction
from fulgurite.errors import ArgumentError
from fulgurite.executors.cudagraph import find_cuda_graphs


class FakeCapture:
    """Runs the function again on the memory it was captured with, as a graph does."""

    def __init__(self, run, inputs):
        self.run, self.inputs, self.memory = run, list(inputs), list(inputs)
        self.outputs = list(run(*inputs))

    def replay(self):
        for held, new in zip(self.outputs, self.run(*self.memory), strict=True):
            held.copy_(new)


class AddressOnlyCapture(FakeCapture):
    """Like a CUDA graph, holds addresses and no tensors."""

    def __init__(self, run, inputs):
        super().__init__(run, inputs)
        self.memory = []

    def replay(self):
        pass


def make(run=None, output_modes=("copied",), **options):
    run = run or (lambda x, w: (x * w,))
    return GraphedFunction("graph_0", run, output_modes, capture=FakeCapture, **options)


def count_captures(graphed: GraphedFunction) -> int:
    return sum(state.captures for state in graphed._states.values())


def test_user_outputs_are_right_and_never_overwritten():
    graphed, w = make(), torch.tensor([2.0, 3.0])
    given = []
    inputs = [torch.full((2,), float(step)) for step in range(6)]
    for step, x in enumerate(inputs):
        (result,) = graphed(x, w)
        given.append(result)
        w += 1  # read where it is, whatever it holds
        assert result.tolist() == [(2.0 + step) * step, (3.0 + step) * step]
    assert given[3].tolist() == [15.0, 18.0], "a later replay changed a result"
    assert graphed.replays == 4 and graphed.eager_calls == 2 and count_captures(graphed) == 1


def test_static_input_that_moves_is_copied_after_a_second_capture():
    graphed, x = make(), torch.ones(2)
    weights = [torch.full((2,), float(k)) for k in range(8)]
    for w in [weights[0]] * 4 + weights:
        assert graphed(x, w)[0].tolist() == w.tolist()
    assert count_captures(graphed) == 2, "from the second capture on it is copied"


def test_capture_is_disabled_if_static_inputs_keep_moving():
    def run(*inputs):
        return (sum(inputs),)

    graphed = GraphedFunction("graph_0", run, ["copied"], capture=FakeCapture)
    count = MAX_CAPTURES_PER_SHAPE + 1
    values = [torch.ones(2) for _ in range(count)]
    for moving in range(count):
        for _ in range(3):
            graphed(*values)
        values[moving] = torch.full((2,), 2.0)
        assert graphed(*values)[0].tolist() == [count + moving + 1.0] * 2
    assert count_captures(graphed) == MAX_CAPTURES_PER_SHAPE and "keep moving" in str(graphed)


def test_shared_outputs_are_not_overwritten_while_held():
    graphed, w = make(lambda x, w: (x * w, x + w), ("copied", "shared")), torch.ones(2)
    inputs = [torch.full((2,), float(step)) for step in range(5)]
    held = [graphed(x, w)[1] for x in inputs]
    assert [h.tolist() for h in held] == [[k + 1.0] * 2 for k in range(5)]
    assert graphed.replays == 1 and "still held" in str(graphed)
    held.clear()
    assert graphed(torch.full((2,), 9.0), w)[1].tolist() == [10.0, 10.0]
    assert graphed.replays == 2, "released outputs can be shared again"


def test_view_of_a_shared_output_counts_as_held():
    graphed, w = make(output_modes=("shared",)), torch.ones(2)
    for _ in range(3):
        view = graphed(torch.ones(2), w)[0][1:]
    graphed(torch.zeros(2), w)
    assert view.tolist() == [1.0]


def test_shared_view_of_a_parameter_does_not_block_replay():
    graphed, w = make(lambda x, w: (x * w, w.t()), ("copied", "shared")), torch.ones(2, 2)
    inputs = [torch.ones(2, 2) for _ in range(5)]
    held = [graphed(x, w)[1] for x in inputs]
    assert len(held) == 5 and graphed.replays == 3 and count_captures(graphed) == 1


def test_capture_does_not_hold_static_inputs():
    w = torch.ones(2)
    before = torch._C._storage_Use_Count(w.untyped_storage()._cdata)
    graphed = GraphedFunction(
        "graph_0", lambda x, w: (x * 2,), ["copied"], capture=AddressOnlyCapture
    )
    for x in [torch.ones(2) for _ in range(4)]:
        graphed(x, w)
    assert graphed.replays == 2
    assert torch._C._storage_Use_Count(w.untyped_storage()._cdata) == before


def test_each_shape_is_captured_by_itself():
    graphed = make()
    inputs = [torch.arange(float(size)) for size in [3, 5, 3, 5, 3, 5, 0, 0, 0]]
    for x in inputs:
        assert graphed(x, x)[0].tolist() == (x * x).tolist()
    assert count_captures(graphed) == 3 and graphed.replays == 3
    for size in range(100, 100 + MAX_SHAPES):
        graphed(torch.ones(size), torch.ones(size))
    assert "pad to fewer" in str(graphed)


def test_strides_of_outputs():
    graphed = make(lambda x, w: (x.t() * w,), ("copied",))
    for _ in range(4):
        x = torch.randn(3, 2)
        (result,) = graphed(x, torch.ones(()))
        assert result.stride() == (x.t() * 1).stride() and torch.equal(result, x.t())


def test_failed_capture_warns_and_runs_eagerly():
    def failing_capture(run, inputs):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

    graphed = GraphedFunction("graph_0", lambda x: (x + 1,), ["copied"], capture=failing_capture)
    with pytest.warns(UserWarning, match="not permitted when stream is capturing. Compile without"):
        for _ in range(5):
            assert graphed(torch.zeros(1)).__getitem__(0).item() == 1
    assert graphed.replays == 0


def test_overlapping_input_runs_eagerly():
    graphed = make()
    with pytest.warns(UserWarning, match="overlaps itself"):
        for _ in range(5):
            assert graphed(torch.ones(1).expand(3), torch.ones(3))[0].tolist() == [1.0] * 3


def test_second_thread_runs_eagerly():
    inside, go = threading.Event(), threading.Event()

    def run(x):
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            go.wait(10)
        return (x + 1,)

    graphed = GraphedFunction("graph_0", run, ["copied"], capture=FakeCapture)
    thread = threading.Thread(target=graphed, args=(torch.zeros(1),))
    thread.start()
    inside.wait(10)
    assert graphed(torch.zeros(1))[0].item() == 1 and "second thread" in str(graphed)
    go.set()
    thread.join()


def test_nothing_is_captured_on_the_cpu():
    compiled = fulgurite.compile(lambda x: torch.relu(x) + 1, cudagraph=True)
    x = torch.randn(4)
    assert torch.equal(compiled(x), torch.relu(x) + 1)
    assert "graph_0" not in str(compiled.last_trace())


def test_capturable_parts_of_a_trace_become_graphs(monkeypatch):
    """On the CPU, with the fake capture: the graphs run, print and load."""
    monkeypatch.setattr("fulgurite.executors.cudagraph.is_capturable", lambda n: n.name != "cos")
    monkeypatch.setattr("fulgurite.executors.cudagraph.CAPTURE", FakeCapture)

    def f(x, w):
        return torch.softmax(torch.relu(x @ w).cos() @ w, -1), x + 1

    compiled = fulgurite.compile(f, cudagraph=True, executors=["torch"])
    w = torch.randn(3, 3, requires_grad=True)
    for _ in range(8):
        x = torch.randn(2, 3)
        torch.testing.assert_close(compiled(x, w), f(x, w))
        ours = torch.autograd.grad(compiled(x, w)[0].square().sum(), w)
        torch.testing.assert_close(ours, torch.autograd.grad(f(x, w)[0].square().sum(), w))
    trace = compiled.last_trace()
    assert len(find_cuda_graphs(trace)) == 2 and sum(g.replays for g in find_cuda_graphs(trace)) > 4
    assert "def graph_1(" in str(trace) and "cos = torch.cos(relu)" in str(trace)
    torch.testing.assert_close(list(trace.load()(x, w))[:2], list(f(x, w)))
    assert "CUDA graph" in str(compiled.explain())


def test_mutated_inputs():
    """Each call counts once: a capture runs the function too, and copied inputs are copied back."""

    def run(x, still, moving):
        still.add_(x)
        moving.mul_(2)
        return (x + still,)

    graphed, still = make(run, mutated_inputs=[1, 2]), torch.zeros(2)
    for step in range(1, 7):
        x, moving = torch.ones(2), torch.full((2,), float(step))
        (result,) = graphed(x, still, moving)
        assert still.tolist() == [step, step] and result.tolist() == [step + 1.0] * 2
        assert moving.tolist() == [2.0 * step] * 2
    assert graphed.replays == 4


def test_running_statistics_inside_graphs(monkeypatch):
    monkeypatch.setattr("fulgurite.executors.cudagraph.is_capturable", lambda n: True)
    monkeypatch.setattr("fulgurite.executors.cudagraph.CAPTURE", FakeCapture)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3), nn.BatchNorm1d(3))
    plain = copy.deepcopy(net)
    compiled = fulgurite.compile(net, cudagraph=True)
    for _ in range(7):
        x = torch.randn(5, 4)
        torch.testing.assert_close(compiled(x), plain(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(dict(net.named_buffers()), dict(plain.named_buffers()))
    (graph,) = find_cuda_graphs(compiled.last_trace())
    assert graph.replays == 5 and len(graph.mutated_inputs) == 6


def test_cudagraph_needs_one_graph():
    with pytest.raises(ArgumentError, match="one graph"):
        fulgurite.compile(lambda x: x, cudagraph=True, granularity="blocks")
    with pytest.raises(ArgumentError, match="cudagraph='yes'"):
        fulgurite.compile(lambda x: x, cudagraph="yes")


# ---- on a GPU -------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.norm, self.dropout = nn.LayerNorm(64), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.dropout(self.down(torch.nn.functional.gelu(self.up(x)))))


def graphs_of(compiled, kind=None):
    return find_cuda_graphs(compiled.last_trace(kind))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().cuda()


@pytest.mark.gpu
def test_inference_on_a_gpu(net):
    compiled = fulgurite.compile(net, cudagraph=True)
    kept = []
    inputs = [torch.randn(16, 64, device="cuda") for _ in range(6)]
    with torch.no_grad():
        for x in inputs:
            kept.append((compiled(x), net(x)))
        net.up.weight.mul_(2)
        x = torch.randn(16, 64, device="cuda")
        kept.append((compiled(x), net(x)))
    for ours, eager in kept:
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
    (graph,) = graphs_of(compiled.compiled)
    assert graph.replays == 5 and not graph.notes
    assert "graph_0: 5 replays, 2 eager calls" in str(compiled.explain())


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_on_a_gpu(net, accumulate):
    torch.manual_seed(0)
    other = Net().cuda()
    compiled = fulgurite.compile(other, cudagraph=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (net, other)]
    batches = [torch.randn(16, 64, device="cuda") for _ in range(10 * accumulate)]
    losses = []
    for step, x in enumerate(batches):
        for model in (net, compiled):
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.item())
        if step % accumulate == accumulate - 1:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    torch.testing.assert_close(losses[::2], losses[1::2], rtol=1e-3, atol=1e-4)
    for ours, eager in zip(other.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-3)
    forward, backward = (graphs_of(compiled.compiled, kind) for kind in ("forward", "backward"))
    assert forward[0].replays >= 7, str(forward)
    assert backward[0].replays >= (5 if accumulate == 1 else 3), str(backward)


@pytest.mark.gpu
@pytest.mark.parametrize("executors", [["torch"], ["fuser", "torch"]])
def test_every_replay_draws_new_random_numbers(executors):
    compiled = fulgurite.compile(
        lambda x: torch.nn.functional.dropout(x, 0.5), cudagraph=True, executors=executors
    )
    x = torch.ones(4096, device="cuda")
    masks = [compiled(x) != 0 for _ in range(8)]
    for one in range(8):
        assert 0.4 < masks[one].float().mean() < 0.6
        for two in range(one):
            assert not torch.equal(masks[one], masks[two])


@pytest.mark.gpu
def test_host_ops_stay_between_graphs():
    def f(x, w):
        y = torch.relu(x @ w) + 1
        picked = y[y.sum(1) > y.sum()]  # a size that depends on data
        return (picked.sum() + (y @ w).softmax(-1)).sum(0)

    compiled = fulgurite.compile(f, cudagraph=True, fullgraph=False)
    w = torch.randn(32, 32, device="cuda")
    for _ in range(6):
        x = torch.randn(32, 32, device="cuda")
        torch.testing.assert_close(compiled(x, w), f(x, w), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_changing_lengths():
    compiled = fulgurite.compile(lambda x: torch.softmax(x * 2, -1), cudagraph=True, dynamic=True)
    for length in [5, 64, 5, 64, 5, 64, 5, 64, 7]:
        x = torch.randn(3, length, device="cuda")
        torch.testing.assert_close(compiled(x), torch.softmax(x * 2, -1))
