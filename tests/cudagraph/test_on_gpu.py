"""CUDA graphs of compiled programs on a GPU, against eager."""

from __future__ import annotations

import copy
import gc
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fulgurite
from fulgurite.executors.cudagraph import find_cuda_graphs
from tests.cudagraph.programs import Net, graphed

pytestmark = pytest.mark.gpu


def make_pair(**options):
    torch.manual_seed(0)
    eager = Net(width=64).cuda()
    original = copy.deepcopy(eager)
    return eager, original, fulgurite.compile(original, **{"cudagraph": True, **options})


def draw(rows: int = 16) -> Tensor:
    return torch.randn(rows, 64, device="cuda")


def test_inference():
    eager, original, compiled = make_pair()
    held = []
    with torch.no_grad():
        for step in range(12):
            x = draw()
            held.append((compiled(x), eager(x)))
            for model in (eager, original):
                if step == 5:
                    model.up.weight.mul_(2)
                if step == 7:
                    model.down.weight.data = model.down.weight.data.clone() + 1
    for ours, theirs in held:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    graph = graphed(compiled)
    assert graph.replays >= 6, str(graph)
    assert f"{graph.replays} replays" in str(compiled.explain())


@pytest.mark.parametrize("mode", [True, "auto"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_training(accumulate, mode):
    eager, original, compiled = make_pair(cudagraph=mode)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (eager, original)]
    for step in range(24 * accumulate):
        x = draw()
        losses = []
        for model in (eager, compiled):
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.item())
        assert abs(losses[0] - losses[1]) < 1e-3 * (1 + abs(losses[0])), step
        if step % accumulate == accumulate - 1:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for ours, theirs in zip(original.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    forward, backward = graphed(compiled, "forward"), graphed(compiled, "backward")
    print(forward, backward, sep="\n")
    if mode is True:
        assert forward.replays >= 20 * accumulate, str(forward)
        assert backward.replays >= 16 * accumulate, str(backward)


def test_auto_measures_and_decides():
    eager, _, compiled = make_pair(cudagraph="auto")
    with torch.no_grad():
        for _ in range(20):
            x = draw()
            torch.testing.assert_close(compiled(x), eager(x), rtol=1e-4, atol=1e-4)
    text = str(compiled.explain())
    assert "captured" in text and "host" in text and "device" in text, text


def test_large_matmuls_stay_uncaptured():
    w = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    compiled = fulgurite.compile(lambda x: torch.relu(x @ w) @ w)
    for _ in range(14):
        compiled(w)
    graph = compiled.session.compiled_graph(-1, None).graphed
    assert graph is not None and graph.captures == 0, str(graph)
    assert "the device bounds a call" in str(graph)


@pytest.mark.parametrize("executors", [["torch"], ["fuser", "torch"]])
def test_random_numbers_are_those_without_graphs(executors):
    def f(x: Tensor) -> Tensor:
        return F.dropout(x.sin() @ x.t(), 0.5).cos()

    with_graphs = fulgurite.compile(f, cudagraph=True, executors=executors)
    without = fulgurite.compile(f, cudagraph=False, executors=executors)
    x, results = torch.randn(128, 64, device="cuda"), []
    for compiled in (with_graphs, without):
        for _ in range(4):
            compiled(x)
        torch.manual_seed(3)
        drawn = [compiled(x) for _ in range(6)]
        torch.manual_seed(3)
        drawn += [compiled(x) for _ in range(3)]
        results.append([*drawn, torch.rand(3, device="cuda")])
    torch.testing.assert_close(results[0], results[1])
    assert not torch.equal(results[0][3], results[0][4])


def test_host_ops_stay_between_graphs():
    def f(x, w):
        y = torch.relu(x @ w) + 1
        picked = y[y.sum(1) > y.sum()]  # a size that depends on data
        return (picked.sum() + (y @ w).softmax(-1)).sum(0)

    compiled = fulgurite.compile(f, cudagraph=True, fullgraph=False)
    w = torch.randn(32, 32, device="cuda")
    for _ in range(8):
        x = torch.randn(32, 32, device="cuda")
        torch.testing.assert_close(compiled(x, w), f(x, w), rtol=1e-4, atol=1e-4)


def test_changing_sizes():
    def f(x):
        return torch.softmax(x @ x.t(), -1) * 2 + x.sum()

    compiled = fulgurite.compile(f, cudagraph=True, dynamic=True)
    for length in [5, 64, 5, 64, 5, 64, 5, 64, 7] * 3:
        x = torch.randn(length, 64, device="cuda")
        torch.testing.assert_close(compiled(x), f(x), rtol=1e-4, atol=1e-4)


def test_running_statistics():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 8)).cuda()
    plain = copy.deepcopy(net)
    compiled = fulgurite.compile(net, cudagraph=True)
    for _ in range(9):
        x = draw()
        torch.testing.assert_close(compiled(x), plain(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(dict(net.named_buffers()), dict(plain.named_buffers()))


def test_another_stream_and_an_enclosing_capture():
    eager, _, compiled = make_pair()
    side = torch.cuda.Stream()
    with torch.no_grad():
        for step in range(8):
            x = draw()
            if step % 2:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    ours = compiled(x)
                torch.cuda.current_stream().wait_stream(side)
            else:
                ours = compiled(x)
            torch.testing.assert_close(ours, eager(x), rtol=1e-4, atol=1e-4)
        x = draw()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = compiled(x)
        x.copy_(draw())
        graph.replay()
        torch.testing.assert_close(captured, eager(x), rtol=1e-4, atol=1e-4)
    assert "another stream" in str(graphed(compiled))


def test_threads_with_streams():
    eager, _, compiled = make_pair()
    with torch.no_grad():
        compiled(draw())

    def work(seed: int) -> int:
        stream = torch.cuda.Stream() if seed % 2 else torch.cuda.current_stream()
        wrong = 0
        with torch.cuda.stream(stream), torch.no_grad():
            for _ in range(40):
                x = draw()  # random numbers, while another thread captures
                wrong += not torch.allclose(compiled(x), eager(x), rtol=1e-3, atol=1e-3)
        return wrong

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(work, range(4))) == 0


FAILED_CAPTURE = """
import torch
from fulgurite.cudagraph.capture import CudaCapturedCall, LivePool, capture_stream

device = torch.device("cuda", 0)
x = torch.randn(16, 16, device=device)
x @ x, torch.rand(2, device=device)
pool = LivePool(device, capture_stream(device))


def wait(inputs):
    y = torch.rand_like(x) @ x
    y.sum().item()
    return [y]


def run_out_of_memory(inputs):
    return [torch.rand_like(x), torch.empty(1 << 45, device=device)]


messages = []
for run in [run_out_of_memory, run_out_of_memory, wait, wait]:
    try:
        CudaCapturedCall(run, [], pool)
    except RuntimeError as error:
        messages.append(str(error).splitlines()[0])
    else:
        raise AssertionError("nothing failed")
    torch.rand(2, device=device)  # the random generator works
    torch.cuda.synchronize()
assert "no more captures" in messages[-1] and "no more captures" not in messages[-2], messages


def wait_without_random_numbers(inputs):
    y = x @ x
    return [y, y.sum().item()]


for _ in range(3):  # torch's generator takes no part, so these don't count
    try:
        CudaCapturedCall(wait_without_random_numbers, [], pool)
    except RuntimeError as error:
        assert "no more captures" not in str(error), error
    else:
        raise AssertionError("nothing failed")
    call = CudaCapturedCall(lambda inputs: [x @ x], [], pool)
    x.normal_()
    call.replay()
    torch.testing.assert_close(call.outputs[0], x @ x)
before = torch.cuda.memory_allocated()
side = torch.cuda.Stream()
for _ in range(50):
    torch.empty(1 << 20, device=device).record_stream(side)
torch.cuda.synchronize()
torch.empty(1, device=device)
assert torch.cuda.memory_allocated() <= before + (1 << 22), "no capture seems to be under way"
"""


def test_torch_works_after_failed_captures():
    """In a process of its own, which other tests don't share if it does not."""
    done = subprocess.run(
        [sys.executable, "-c", FAILED_CAPTURE], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_capture_that_fails_runs_plain():
    eager, _, compiled = make_pair()
    with torch.no_grad():
        compiled(draw()), compiled(draw())
        graph = graphed(compiled)
        graph.captured = raise_out_of_memory
        for _ in range(6):
            x = draw()
            torch.testing.assert_close(compiled(x), eager(x), rtol=1e-4, atol=1e-4)
    assert "out of memory" in str(graph) and graph.replays == 0


def raise_out_of_memory(inputs):
    if torch.cuda.is_current_stream_capturing():
        raise torch.OutOfMemoryError("CUDA out of memory")
    return inputs


def test_interrupted_capture():
    eager, _, compiled = make_pair()
    with torch.no_grad():
        compiled(draw()), compiled(draw())
        graph = graphed(compiled)
        real, plain = graph.captured, graph.plain

        def interrupted(inputs):
            real(inputs)
            raise KeyboardInterrupt

        graph.captured = interrupted
        for _ in range(2):
            try:
                compiled(draw())
            except KeyboardInterrupt:
                break
        graph.captured, graph.plain = real, plain
        for _ in range(8):
            x = draw()
            torch.testing.assert_close(compiled(x), eager(x), rtol=1e-4, atol=1e-4)
        assert graph.replays >= 4, str(graph)


def test_memory_is_freed_with_the_program():
    def reserved() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    w = torch.randn(2048, 2048, device="cuda")

    def run_program() -> int:
        def function(x):
            return torch.relu(x @ w) @ w + 1

        compiled = fulgurite.compile(function, cudagraph=True)
        for _ in range(6):
            compiled(torch.randn(2048, 2048, device="cuda"))
        assert compiled.session.compiled_graph(-1, None).graphed.replays > 2
        return 0

    sizes = []
    for _ in range(4):
        run_program()
        torch._dynamo.reset()
        sizes.append(reserved())
    assert sizes[-1] <= sizes[1], sizes


def test_parts_are_found_in_the_trace():
    def f(x, w):
        return torch.relu(x @ w) + 1, (x.cpu() * 2).cuda() @ w

    compiled = fulgurite.compile(f, cudagraph=True)
    w = torch.randn(32, 32, device="cuda")
    for _ in range(8):
        x = torch.randn(32, 32, device="cuda")
        torch.testing.assert_close(compiled(x, w), f(x, w), rtol=1e-4, atol=1e-4)
    graphs = find_cuda_graphs(compiled.last_trace())
    assert graphs and sum(graph.replays for graph in graphs) > 2, str(compiled.last_trace())


class DroppedAttention(nn.Module):
    """Attention with a learned bias and dropout: torch's memory-efficient kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4, 32, 32))

    def forward(self, q: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, v, attn_mask=self.bias, dropout_p=0.5) * 1


@pytest.mark.parametrize("mode", [True, "auto"])
def test_attention_with_dropout(mode):
    """Backward drops what forward dropped, wherever forward left the seed.

    The values are the identity, so the output is the matrix of probabilities after dropout.
    """
    torch.manual_seed(0)
    compiled = fulgurite.compile(DroppedAttention().cuda().half(), cudagraph=mode)
    draw = random.Random(0)
    for step in range(60):
        q = torch.randn(2, 4, 32, 32, device="cuda", dtype=torch.float16)
        v = torch.eye(32, device="cuda", dtype=torch.float16).expand(2, 4, -1, -1).clone()
        v.requires_grad_()
        if step >= 20 and draw.random() < 0.2:
            compiled(q, v)  # without backward
        out = compiled(q, v)
        kept = compiled(q, v) if step >= 20 and draw.random() < 0.2 else None
        gradient = torch.randn_like(out)
        expected = out.detach().mT @ gradient
        for retain in [True, False] if step >= 20 and draw.random() < 0.3 else [False]:
            (found,) = torch.autograd.grad(out, v, gradient, retain_graph=retain)
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
        if kept is not None:
            (found,) = torch.autograd.grad(kept, v, gradient)
            torch.testing.assert_close(found, kept.detach().mT @ gradient, rtol=2e-2, atol=2e-2)
        assert 0.3 < (out == 0).float().mean() < 0.7
        del out, kept, found
    if mode is True:
        for kind in ("forward", "backward"):
            assert graphed(compiled, kind).replays >= 20, str(graphed(compiled, kind))
