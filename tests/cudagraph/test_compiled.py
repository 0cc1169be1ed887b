"""CUDA graphs of compiled programs, with fake captures on the CPU, against eager."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fulgurite
from fulgurite import transforms
from fulgurite.errors import ArgumentError, FulguriteError
from fulgurite.executors import cudagraph
from fulgurite.executors.cudagraph import find_cuda_graphs
from tests.cudagraph.fake import FakeStopwatch, use_fake_captures
from tests.cudagraph.programs import Net, graphed


@pytest.fixture(autouse=True)
def fake_captures():
    with use_fake_captures():
        yield


def make_pair(**options):
    torch.manual_seed(0)
    eager = Net().double()
    original = copy.deepcopy(eager)
    return eager, original, fulgurite.compile(original, **{"cudagraph": True, **options})


def assert_same_gradients(ours: nn.Module, eager: nn.Module) -> None:
    for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_inference_with_held_results_and_changed_parameters():
    eager, original, compiled = make_pair()
    held = []
    with torch.no_grad():
        for step in range(10):
            x = torch.randn(4, 8, dtype=torch.float64)
            held.append((compiled(x), eager(x)))
            if step == 5:
                for model in (eager, original):
                    model.up.weight.mul_(2)  # in place
            if step == 7:
                for model in (eager, original):
                    model.down.weight.data = (
                        model.down.weight.data.clone() + 1
                    )  # at another address
    torch.testing.assert_close([a for a, _ in held], [b for _, b in held], rtol=1e-4, atol=1e-5)
    assert graphed(compiled).replays > 3


def test_a_program_without_inputs_on_the_device():
    """Only the program creates tensors there."""

    class Table(nn.Module):
        def forward(self, n: int) -> Tensor:
            table = torch.linspace(-1, 1, 8).sort(descending=True)[0]
            return table.view(1, 8) @ table.view(8, 1) * n

    compiled = fulgurite.compile(Table(), cudagraph=True, executors=["torch"])
    for _ in range(6):
        torch.testing.assert_close(compiled(2), Table()(2))
    assert graphed(compiled).replays > 2


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_training(accumulate, set_to_none):
    eager, original, compiled = make_pair()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (eager, original)]
    for step in range(8 * accumulate):
        x = torch.randn(4, 8, dtype=torch.float64)
        for model in (eager, compiled):
            model(x).square().mean().backward()
        assert_same_gradients(original, eager)
        if step % accumulate == accumulate - 1:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
    for ours, theirs in zip(original.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    forward, backward = graphed(compiled, "forward"), graphed(compiled, "backward")
    assert forward.replays >= 3 * accumulate, str(forward)
    assert backward.replays >= 2 * accumulate, str(backward)


def test_two_forwards_before_their_backwards():
    eager, original, compiled = make_pair()
    for _ in range(10):
        x, y = torch.randn(4, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
        for model in (eager, compiled):
            first, second = model(x), model(y)
            first.sum().backward()
            (second * 2).sum().backward()
        assert_same_gradients(original, eager)
        eager.zero_grad(), original.zero_grad()
    assert graphed(compiled, "forward").replays >= 8, str(graphed(compiled, "forward"))


def test_forward_without_backward_and_graphs_kept_for_later():
    eager, original, compiled = make_pair()
    kept = []
    for step in range(8):
        x = torch.randn(4, 8, dtype=torch.float64)
        losses = eager(x).square().sum(), compiled(x).square().sum()
        if step % 2:
            kept.append(losses)
    for ours, theirs in ((b, a) for a, b in kept):
        ours.backward(), theirs.backward()
    assert_same_gradients(original, eager)


def test_parameter_hooks_see_gradients_of_their_call():
    eager, original, compiled = make_pair()
    seen: dict[str, list[Tensor]] = {"ours": [], "eager": []}
    original.up.weight.register_hook(lambda g: seen["ours"].append(g))
    eager.up.weight.register_hook(lambda g: seen["eager"].append(g))
    for _ in range(8):
        x = torch.randn(4, 8, dtype=torch.float64)
        compiled(x).sum().backward(), eager(x).sum().backward()
        compiled.zero_grad(), eager.zero_grad()
    torch.testing.assert_close(seen["ours"], seen["eager"], rtol=1e-4, atol=1e-5)


def test_gradient_that_a_hook_scales_in_place():
    eager, original, compiled = make_pair()
    for model in (eager, original):
        model.up.weight.register_hook(lambda g: g.mul_(3))
    for _ in range(8):
        x = torch.randn(4, 8, dtype=torch.float64)
        compiled(x).sum().backward(), eager(x).sum().backward()
    assert_same_gradients(original, eager)


@pytest.mark.parametrize("executors", [["torch"], ["fuser", "torch"]])
def test_random_numbers_are_those_without_graphs(executors):
    def f(x: Tensor) -> Tensor:
        return F.dropout(x.sin() @ x.t(), 0.5).cos()

    with_graphs = fulgurite.compile(f, cudagraph=True, executors=executors)
    without = fulgurite.compile(f, cudagraph=False, executors=executors)
    x, results = torch.randn(32, 16), []
    for compiled in (with_graphs, without):
        compiled(x)
        torch.manual_seed(3)
        drawn = [compiled(x) for _ in range(6)]
        torch.manual_seed(3)
        results.append([*drawn, *(compiled(x) for _ in range(3)), torch.rand(3)])
    torch.testing.assert_close(results[0], results[1])
    assert not torch.equal(results[0][3], results[0][4])


def test_modes_of_torch():
    eager, _, compiled = make_pair()
    modes = [torch.no_grad, torch.inference_mode, torch.enable_grad]
    for step in range(24):
        x = torch.randn(4, 8, dtype=torch.float64)
        with modes[step % 3]():
            ours, theirs = compiled(x), eager(x)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        assert ours.is_inference() == theirs.is_inference()
        assert ours.requires_grad == theirs.requires_grad


def test_autocast():
    eager, _, compiled = make_pair()
    for step in range(12):
        x = torch.randn(4, 8, dtype=torch.float64)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=step % 2 == 0):
            ours, theirs = compiled(x), eager(x)
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.02, atol=0.05)


def test_sizes_and_dtypes():
    compiled = fulgurite.compile(lambda x: torch.softmax(x @ x.t(), -1) + 1, cudagraph=True)
    for step in range(60):
        x = torch.randn(
            (3, 5, 5, 9, 1)[step % 5], 4, dtype=(torch.float32, torch.float64)[step % 2]
        )
        torch.testing.assert_close(compiled(x), torch.softmax(x @ x.t(), -1) + 1)
    replays = [g.replays for g in map(last_graphed, compiled.graphs) if g is not None]
    assert sum(replays) >= 10


def last_graphed(record):
    return next(iter(record.compiled_graphs.values())).graphed


def test_running_statistics():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3), nn.BatchNorm1d(3))
    plain = copy.deepcopy(net)
    compiled = fulgurite.compile(net, cudagraph=True)
    for _ in range(9):
        x = torch.randn(5, 4)
        torch.testing.assert_close(compiled(x), plain(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(dict(net.named_buffers()), dict(plain.named_buffers()))
    assert graphed(compiled, "forward").replays >= 3


def test_parts_of_a_trace(monkeypatch):
    """Ops that can't be captured stay between the graphs; the trace shows and loads them."""
    real = cudagraph.is_capturable
    monkeypatch.setattr(
        cudagraph, "is_capturable", lambda n, device: n.name != "cos" and real(n, device)
    )

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
    graphs = find_cuda_graphs(trace)
    assert len(graphs) == 2 and sum(g.replays for g in graphs) > 4
    assert "def graph_1(" in str(trace) and "cos = torch.cos(relu)" in str(trace)
    torch.testing.assert_close(list(trace.load()(x, w))[:2], list(f(x, w)))
    assert "CUDA graph" in str(compiled.explain())


def test_parts_with_donated_buffers(monkeypatch):
    """A region that overwrites an input of its part runs right while it is warmed up and captured."""
    monkeypatch.setattr("fulgurite.executors.donation.MIN_DONATED_BYTES", 0)
    real = cudagraph.is_capturable
    monkeypatch.setattr(
        cudagraph, "is_capturable", lambda n, device: "mm" not in n.name and real(n, device)
    )

    def f(x, w):
        return F.gelu(x @ w).sin() @ w

    compiled = fulgurite.compile(f, cudagraph=True)
    w = torch.randn(12, 12)
    for _ in range(8):
        x = torch.randn(12, 12)
        torch.testing.assert_close(compiled(x, w), f(x, w), rtol=1e-4, atol=1e-5)


def test_trace_that_writes_to_its_inputs_is_not_split(monkeypatch):
    real = cudagraph.is_capturable
    monkeypatch.setattr(
        cudagraph, "is_capturable", lambda n, device: "sel" not in n.name and real(n, device)
    )

    def f(a, b):
        a[2] = 1
        t = b.exp2()
        b.unsqueeze(0).neg_()
        return (t,)

    compiled = fulgurite.compile(f, cudagraph=True)
    for shapes in [((3, 0, 0, 0), (0, 0, 0, 0)), ((3, 2), (4,))]:
        for _ in range(4):
            ours = torch.zeros(shapes[0], dtype=torch.int64), torch.randn(shapes[1])
            theirs = tuple(value.clone() for value in ours)
            torch.testing.assert_close(compiled(*ours), f(*theirs))
            torch.testing.assert_close(ours, theirs)


def test_decision_is_in_explain_and_the_trace():
    eager, _, compiled = make_pair(cudagraph="auto")
    with torch.no_grad():
        for _ in range(20):
            x = torch.randn(4, 8, dtype=torch.float64)
            torch.testing.assert_close(compiled(x), eager(x), rtol=1e-4, atol=1e-5)
    text = "captured: host 10 µs, device 5 µs, wall 15 µs; without: host 100 µs, device 5 µs, "
    text += "wall 105 µs"
    assert text in str(compiled.explain())
    assert f"CUDA graph: {text}" in str(compiled.last_trace())


def test_device_bound_graph_is_not_captured():
    with use_fake_captures(FakeStopwatch([10e-6], [1e-3])):
        eager, _, compiled = make_pair(cudagraph="auto")
        with torch.no_grad():
            for _ in range(12):
                x = torch.randn(4, 8, dtype=torch.float64)
                torch.testing.assert_close(compiled(x), eager(x), rtol=1e-4, atol=1e-5)
        assert graphed(compiled).captures == 0
        assert "not captured: the device bounds a call" in str(compiled.last_trace())


def test_repeated_layers():
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Net() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    torch.manual_seed(0)
    eager = Stack().double()
    for granularity in ("auto", "blocks", "model"):
        model = copy.deepcopy(eager)
        compiled = fulgurite.compile(model, cudagraph=True, granularity=granularity)
        for step in range(10):
            x = torch.randn(4, 8, dtype=torch.float64)
            for one in (eager, compiled):
                one(x).square().mean().backward()
            assert_same_gradients(model, eager)
            if step % 2:
                eager.zero_grad(), model.zero_grad()
        eager.zero_grad()


def test_nested_compiled_functions():
    inner = fulgurite.compile(lambda x: (x @ x).relu(), cudagraph=True)

    @torch._dynamo.disable
    def call_inner(x):
        return inner(x)

    outer = fulgurite.compile(lambda x: call_inner(x.sin()).cos() @ x, cudagraph=True)
    for _ in range(8):
        x = torch.randn(4, 4)
        torch.testing.assert_close(outer(x), (x.sin() @ x.sin()).relu().cos() @ x)


def test_edited_trace_replaces_the_graph():
    compiled = fulgurite.compile(lambda x: torch.relu(x @ x) + 1, cudagraph=True)
    x = torch.randn(3, 3)
    for _ in range(5):
        compiled(x)
    text = str(compiled.last_trace())
    compiled.replace_trace(text)
    torch.testing.assert_close(compiled(x), torch.relu(x @ x) + 1)
    assert compiled.session.compiled_graph(-1, None).graphed is None


def test_transform_that_checks_values_on_the_host():
    compiled = fulgurite.compile(
        lambda x: torch.relu(x @ x) + 1, cudagraph=True, transforms=[transforms.find_nonfinite]
    )
    for _ in range(8):
        compiled(torch.randn(3, 3))
    with pytest.raises(FulguriteError, match="nan|inf"):
        compiled(torch.full((3, 3), 1e30))


def test_threads():
    eager, _, compiled = make_pair()
    wrong = []
    with torch.no_grad():
        compiled(torch.randn(4, 8, dtype=torch.float64))

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(30):
            x = torch.randn(4, 8, dtype=torch.float64, generator=generator)
            with torch.no_grad():
                if not torch.allclose(compiled(x), eager(x), rtol=1e-4, atol=1e-5):
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_memory_is_freed_with_the_program():
    def function(x):
        return torch.relu(x @ x) + 1

    compiled = fulgurite.compile(function, cudagraph=True)
    for _ in range(6):
        compiled(torch.randn(3, 3))
    pool = compiled.session.graph_memory.forward.pool(0).on(torch.device("cpu"))
    assert pool.outputs
    del compiled, function
    torch._dynamo.reset()
    gc.collect()
    assert not pool.outputs


def test_only_known_modes():
    with pytest.raises(ArgumentError, match="cudagraph='yes'"):
        fulgurite.compile(lambda x: x, cudagraph="yes")


def test_nothing_is_captured_on_the_cpu(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr("fulgurite.executors.cudagraph.BACKEND", fulgurite.cudagraph.CUDA)
    for mode in (True, "auto"):
        compiled = fulgurite.compile(lambda x: torch.relu(x @ x) + 1, cudagraph=mode)
        x = torch.randn(4, 4)
        for _ in range(4):
            torch.testing.assert_close(compiled(x), torch.relu(x @ x) + 1)
        assert compiled.session.compiled_graph(-1, None).graphed is None
