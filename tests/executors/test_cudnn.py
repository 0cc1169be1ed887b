"""The cuDNN executor with a faked `cudnn` module: what it claims, and what it calls with which arguments."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fulgurite.executors import cudnn as executor
from fulgurite.executors import executor_names
from fulgurite.executors.cudnn import BACKWARD, CUDNN, FORWARD, Attention

aten = torch.ops.aten


class FakeResult:
    """A tensor of a graph."""

    def __init__(self, name: str) -> None:
        self.name, self.calls = name, dict[str, Any]()

    def __getattr__(self, name: str) -> Any:
        def record(value: Any) -> FakeResult:
            self.calls[name] = value
            return self

        return record


class FakeGraph:
    """Computes attention by torch, and keeps what it was given."""

    def __init__(self, **options: Any) -> None:
        self.options, self.steps = options, list[str]()

    def tensor_like(self, tensor: torch.Tensor) -> FakeResult:
        return FakeResult(f"{tuple(tensor.shape)} {tensor.stride()}")

    def sdpa(self, **given: Any) -> tuple[FakeResult, ...]:
        self.given, self.results = given, (FakeResult("o"), FakeResult("stats"))
        return self.results

    def sdpa_backward(self, **given: Any) -> tuple[FakeResult, ...]:
        self.given, self.results = given, tuple(map(FakeResult, ("dq", "dk", "dv")))
        return self.results

    def get_workspace_size(self) -> int:
        return 16

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.steps.append(name)

    def execute(
        self, tensors: dict[Any, torch.Tensor], workspace: torch.Tensor, handle: Any
    ) -> None:
        assert handle == "handle" and workspace.numel() == 16
        value = {name: tensors[t] for name, t in self.given.items() if isinstance(t, FakeResult)}
        repeats = value["q"].shape[1] // value["k"].shape[1]
        q = value["q"].float().requires_grad_()
        k, v = (value[n].float().requires_grad_() for n in "kv")
        scores = q @ k.repeat_interleave(repeats, 1).transpose(-1, -2) * self.given["attn_scale"]
        if self.given["use_causal_mask"]:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            scores = scores.masked_fill(~mask, float("-inf"))
        out = scores.softmax(-1) @ v.repeat_interleave(repeats, 1)
        if "dO" in value:
            found = torch.autograd.grad(out, (q, k, v), value["dO"].float())
        else:
            found = (out.detach(), scores.logsumexp(-1, keepdim=True).detach())
        for result, tensor in zip(self.results, found, strict=True):
            tensors[result].copy_(tensor)


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("cudnn")
    module.graphs = []

    def pygraph(**options: Any) -> FakeGraph:
        module.graphs.append(FakeGraph(**options))
        return module.graphs[-1]

    module.pygraph, module.create_handle = pygraph, lambda: "handle"
    module.set_stream = lambda handle, stream: None
    module.destroy_handle = lambda handle: None
    module.data_type = types.SimpleNamespace(FLOAT="float", BFLOAT16="bf16", HALF="half")
    module.heur_mode = types.SimpleNamespace(A="a", FALLBACK="fallback")
    monkeypatch.setitem(sys.modules, "cudnn", module)
    monkeypatch.setattr(executor, "has_cudnn", lambda: True)
    stream = types.SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    return module


def attention_graph(device: str, causal: bool = True, heads: int = 2, size: int = 16, **options):
    """Forward and backward as an fx graph of flash attention ops, on fake tensors."""
    with FakeTensorMode():
        q = torch.empty(2, 4, 5, size, device=device, dtype=options.get("dtype", torch.bfloat16))
        k = torch.empty(2, heads, 5, size, device=device, dtype=q.dtype)

        def run(q, k, v, grad):
            out = FORWARD(q, k, v, options.get("dropout", 0.0), causal, scale=options.get("scale"))
            back = BACKWARD(grad, q, k, v, out[0], out[1], out[2], out[3], 5, 5, 0.0, causal,
                            out[6], out[7], scale=options.get("scale"))  # fmt: skip
            return out[0], *back

        return make_fx(run)(q, k, k, q)


def nodes(graph, target) -> list[torch.fx.Node]:
    return [node for node in graph.graph.nodes if node.target is target]


def test_it_is_registered_and_claims_nothing_without_the_package():
    assert "cudnn" in executor_names()
    (node,) = nodes(attention_graph("cuda"), FORWARD)
    assert not CUDNN.claims(node)


@pytest.mark.usefixtures("cudnn")
def test_claims():
    assert all(
        CUDNN.claims(n) for t in (FORWARD, BACKWARD) for n in nodes(attention_graph("cuda"), t)
    )
    for refused in (
        {"device": "cpu"}, {"size": 20}, {"size": 256}, {"heads": 3},
        {"dropout": 0.1}, {"dtype": torch.float32},
    ):  # fmt: skip
        graph = attention_graph(**({"device": "cuda"} | refused))
        assert not CUDNN.claims(nodes(graph, FORWARD)[0]), refused


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_forward_and_backward(cudnn, causal, heads, scale):
    graph = attention_graph("cuda", causal, heads, scale=scale)
    torch.manual_seed(0)
    q = torch.randn(2, 5, 4, 16).transpose(1, 2).bfloat16()
    k, v = (torch.randn(2, heads, 5, 16).bfloat16() for _ in range(2))
    ((forward,), (backward,)) = nodes(graph, FORWARD), nodes(graph, BACKWARD)
    attend = Attention(forward)
    given = {"query": q, "key": k, "value": v}
    out = torch.empty_like(q)
    stats = torch.empty(2, 4, 5, 1)
    attend.execute({"q": q, "k": k, "v": v}, {"o": out, "stats": stats})
    (built,) = cudnn.graphs
    assert built.options["io_data_type"] == "bf16" and built.given["use_causal_mask"] == causal
    assert built.steps == ["validate", "build_operation_graph", "create_execution_plans",
                           "check_support", "build_plans"]  # fmt: skip
    assert built.results[0].calls["set_stride"] == list(q.stride())
    assert built.results[1].calls["set_data_type"] == "float"
    leaves = [t.float().requires_grad_() for t in (q, k, v)]
    exact = F.scaled_dot_product_attention(*leaves, is_causal=causal, scale=scale, enable_gqa=True)
    torch.testing.assert_close(out.float(), exact.detach(), rtol=2e-2, atol=2e-2)
    grad = torch.randn_like(q)
    found = Attention(backward).run_backward(
        given | {"out": out, "grad_out": grad, "logsumexp": stats.squeeze(-1)}
    )
    for ours, theirs in zip(found, torch.autograd.grad(exact, leaves, grad.float()), strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=2e-2, atol=2e-2)
