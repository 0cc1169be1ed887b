"""Launch plans: what is recorded and replayed, and what stays as it is."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="its kernels are launched")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter has no cached launches", allow_module_level=True)

from fulgurite.kernels.common import launch_recorder
from fulgurite.kernels.common.launch_plan import clear_plans
from fulgurite.kernels.common.launch_recorder import LaunchPlan, Recorder
from fulgurite.kernels.moe import ops, reference
from fulgurite.kernels.moe.router_config import RouterConfig, Routes
from fulgurite.kernels.moe.routing import route_tokens
from fulgurite.quant import quantize


class FakeLauncher:
    """Stands for a compiled kernel: remembers the arguments of its launches."""

    def __init__(self):
        self.calls = []

    def __call__(self, *arguments):
        self.calls.append(arguments)


def record(function, *inputs):
    """The recorder of a call of `function(recorder, *inputs)`, and its plan."""
    recorder = Recorder(inputs)
    with recorder:
        result = function(recorder, *inputs)
    return recorder, recorder.make_plan(result)


def launch(recorder, run, *arguments):
    tensors = [(k, value) for k, value in enumerate(arguments) if isinstance(value, torch.Tensor)]
    raw = [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in arguments]
    recorder.add_launch(run, (1, 1, 1), ("function", "metadata"), raw, tensors)


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(
        launch_recorder, "allocate", lambda s, t, dtype: torch.empty_strided(s, t, dtype=dtype)
    )
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)


def test_addresses_of_inputs_results_and_workspace(on_cpu):
    run = FakeLauncher()

    def function(recorder, x, y):
        hidden, out = x.new_empty(100), torch.empty(4, 6)
        launch(recorder, run, x, y[2:], hidden, 5)
        launch(recorder, run, hidden[3:], hidden, out)
        return out

    x, y = torch.randn(8), torch.randn(8)
    _, plan = record(function, x, y)
    assert plan is not None and plan.workspace_bytes == 512
    other_x, other_y = torch.randn(8), torch.randn(8)
    result = plan.replay([other_x.data_ptr(), other_y.data_ptr()], torch.device("cpu"))
    assert result.shape == (4, 6)
    first, second = (call[6:] for call in run.calls)
    assert first[:2] == (other_x.data_ptr(), other_y.data_ptr() + 8) and first[3] == 5
    workspace = first[2]
    assert second == (workspace + 12, workspace, result.data_ptr())
    assert run.calls[0][:6] == (1, 1, 1, 7, "function", "metadata")
    again = plan.replay([x.data_ptr(), y.data_ptr()], torch.device("cpu"))
    assert again.data_ptr() != result.data_ptr()


def test_results_that_are_views_and_tuples(on_cpu):
    def function(recorder, x):
        counts, order = x.new_empty(9), x.new_empty(3, 2)
        launch(recorder, FakeLauncher(), x, counts, order)
        return Routes(counts[:5], order)

    _, plan = record(function, torch.randn(4))
    result = plan.replay([0], torch.device("cpu"))
    assert type(result) is Routes and result[0].shape == (5,) and result[1].shape == (3, 2)


@pytest.mark.parametrize(
    "function",
    [
        lambda recorder, x: x + 1,
        lambda recorder, x: torch.zeros(3),
        lambda recorder, x: x.new_empty(3).fill_(1),
        lambda recorder, x: x.t().contiguous(),
        lambda recorder, x: x,
        lambda recorder, x: x.view(-1),
        lambda recorder, x: (x.new_empty(3), 5),
        lambda recorder, x: (lambda y: (y[:1], y[1:]))(x.new_empty(3)),
        lambda recorder, x: launch(recorder, print, torch.ones(1)) or x.new_empty(2),
        lambda recorder, x: recorder.fail() or x.new_empty(2),
    ],
)
def test_other_functions_have_no_plan(function):
    assert record(function, torch.randn(3, 4))[1] is None


def test_two_inputs_in_one_storage_have_no_plan():
    x = torch.randn(8)

    def function(recorder, a, b):
        launch(recorder, print, a, b)
        return a.new_empty(2)

    assert record(function, x[:4], x[4:])[1] is None
    assert record(function, x[:4], x[4:].clone())[1] is not None


def test_cpu_tensors_run_as_they_are():
    weights, experts = torch.rand(5, 2), torch.randint(0, 4, (5, 2))
    order = ops.sort_by_expert(experts, 4)
    assert torch.equal(order.offsets_E, reference.sort_by_expert(experts, 4)[1])
    assert not ops.sort_by_expert.plans and weights.shape == experts.shape


def make_layer(tokens, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).to("cuda", dtype)

    x, router = randn(tokens, 64), randn(8, 64, scale=0.1)
    return x, router, randn(8, 96, 64, scale=0.1), randn(8, 64, 48, scale=0.1)


def run_layer(x, router, gate_up, down):
    routes = route_tokens(x, router, RouterConfig(2, renormalize=True))
    return ops.fused_experts(x, routes, gate_up, down)


def without_plans(function, *arguments):
    clear_plans()
    result = function(*arguments)
    clear_plans()
    return result


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 16, 40, 129, 400])
def test_replayed_layers_equal_the_first_call(tokens):
    layer = make_layer(tokens)
    expected = without_plans(run_layer, *layer)
    for _ in range(5):
        torch.testing.assert_close(run_layer(*layer), expected, rtol=0, atol=0)
    assert any(isinstance(plan, LaunchPlan) for plan in route_tokens.plans.values())
    for seed in (1, 2):  # other addresses and values
        other = make_layer(tokens, seed=seed)
        found = run_layer(*other)
        torch.testing.assert_close(found, without_plans(run_layer, *other), rtol=0, atol=0)
        for _ in range(3):
            run_layer(*layer)


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["fp8", "int8"])
@pytest.mark.parametrize("tokens", [1, 20])
def test_quantized_experts(format, tokens):
    x, router, gate_up, down = make_layer(tokens)
    layer = (x, router, quantize(gate_up, format), quantize(down, format))
    with torch.no_grad():
        expected = without_plans(run_layer, *layer)
        for _ in range(5):
            torch.testing.assert_close(run_layer(*layer), expected, rtol=0, atol=0)


@pytest.mark.gpu
def test_calls_that_plans_do_not_cover():
    layer = make_layer(6)
    for _ in range(4):
        run_layer(*layer)
    unaligned = torch.empty(6 * 64 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(6, 64)
    unaligned.copy_(layer[0])
    expected = run_layer(*layer)
    torch.testing.assert_close(run_layer(unaligned, *layer[1:]), expected, rtol=0, atol=0)
    x = layer[0].clone().requires_grad_()
    run_layer(x, *layer[1:]).sum().backward()
    assert x.grad is not None
    strided = torch.empty(6, 128, device="cuda", dtype=torch.bfloat16)[:, :64]
    strided.copy_(layer[0])
    torch.testing.assert_close(run_layer(strided, *layer[1:]), expected)


@pytest.mark.gpu
def test_replays_in_a_cuda_graph_and_on_other_streams():
    layer = make_layer(4)
    for _ in range(4):
        expected = run_layer(*layer)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.testing.assert_close(run_layer(*layer), expected, rtol=0, atol=0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run_layer(*layer)
    layer[0].copy_(make_layer(4, seed=3)[0])
    graph.replay()
    torch.testing.assert_close(out, without_plans(run_layer, *layer), rtol=0, atol=0)
