"""`fulgurite.compile` on a CUDA device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fulgurite
from fulgurite.models import tiny
from fulgurite.transforms import annotate, find_nonfinite

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("granularity", ["model", "blocks"])
def test_model_moves_to_the_gpu_and_trains(granularity):
    model = tiny.Transformer(
        num_layers=4, hidden_size=64, num_heads=4, intermediate_size=96, vocab_size=128
    )
    compiled = fulgurite.compile(model, granularity=granularity)
    tokens = torch.randint(0, 128, (2, 17))
    on_cpu = compiled(tokens)
    compiled.to("cuda")
    tokens = tokens.cuda()
    loss = compiled(tokens)
    torch.testing.assert_close(loss.cpu(), on_cpu, rtol=1e-4, atol=1e-4)
    loss.backward()
    ours = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(tokens).backward()
    torch.testing.assert_close(ours, [p.grad for p in model.parameters()], rtol=1e-3, atol=1e-4)
    assert "cuda:0" in str(compiled.last_trace("forward"))


def test_random_ops_match_eager():
    def f(x):
        return F.dropout(x, 0.4), torch.rand_like(x), torch.randn(5, device=x.device)

    x = torch.randn(64, 33, device="cuda", requires_grad=True)
    torch.manual_seed(3)
    expected = f(x)
    torch.manual_seed(3)
    ours = fulgurite.compile(f, executors=["torch"])(x)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_small_dtypes(dtype):
    def f(x):
        return (x.float() * 2 + 1).to(dtype).float().sum(-1)

    x = torch.randn(7, 129, device="cuda").to(dtype)
    torch.testing.assert_close(fulgurite.compile(f)(x), f(x))


def test_traces_run_from_their_text():
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32)).cuda()
    compiled = fulgurite.compile(model)
    x = torch.randn(5, 16, device="cuda")
    compiled(x).sum().backward()
    for trace in compiled.history:
        inputs = [torch.randn(n.meta["val"].shape, device="cuda") for n in trace.inputs]
        expected = trace.run(*inputs)
        torch.testing.assert_close(trace.load()(*inputs), expected)


def test_instrumentation_and_inductor():
    def f(x):
        return F.silu(x) * x.softmax(-1)

    x = torch.randn(64, 128, device="cuda")
    for options in (
        dict(transforms=[annotate, find_nonfinite]),
        dict(executors=["inductor", "torch"]),
        dict(executors=["inductor", "torch"], autotune=True),
    ):
        torch.testing.assert_close(fulgurite.compile(f, **options)(x), f(x))
