"""The experts of a few tokens, against the definition in float64."""

from __future__ import annotations

import pytest
import torch

from .triton_support import DEVICE, INTERPRETED  # isort: skip

from fulgurite.kernels.moe import Gate
from fulgurite.kernels.routing import FEW_TOKENS
from fulgurite.kernels.triton import few_experts

SILU = Gate("silu")
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]


def tensors(tokens, per_token, experts, hidden, inner, dtype):
    generator = torch.Generator().manual_seed(tokens + hidden)
    shapes = {"x": (tokens, hidden), "gate_up": (experts, 2 * inner, hidden),
              "down": (experts, hidden, inner), "residual": (tokens, hidden)}  # fmt: skip
    made = {
        name: torch.randn(shape, generator=generator).to(dtype).to(DEVICE)
        for name, shape in shapes.items()
    }
    made["chosen"] = torch.stack(
        [torch.randperm(experts, generator=generator)[:per_token] for _ in range(tokens)]
    ).to(DEVICE)
    made["weights"] = torch.rand(tokens, per_token, generator=generator).to(DEVICE)
    return made


def definition(x, chosen, weights, gate_up, down, gate, norm, residual, dtype):
    """One pair after the other; h is rounded as the kernels round it."""
    x = x.double()
    if norm is not None:
        scale, eps, offset = norm
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (scale.double() + offset)
    out = residual.double().clone() if residual is not None else torch.zeros_like(x)
    for token in range(len(x)):
        for expert, weight in zip(chosen[token].tolist(), weights[token].tolist(), strict=True):
            if 0 <= expert < len(down):
                sums = gate_up[expert].double() @ x[token]
                h = gate(sums).to(dtype).double()
                out[token] += weight * (down[expert].double() @ h)
    return out


def check(given, gate=SILU, residual=True, norm=None):
    given = {**given, "residual": given["residual"] if residual else None}
    dtype = given["x"].dtype
    wanted = definition(**given, gate=gate, norm=norm, dtype=dtype)
    got = few_experts.experts(
        given["x"], given["chosen"], given["weights"], given["gate_up"], given["down"],
        gate.kind, gate.alpha, gate.limit, norm, given["residual"],
    )  # fmt: skip
    assert got.dtype == dtype
    error = (got.double() - wanted).abs().max()
    assert error <= 16 * torch.finfo(dtype).eps * wanted.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "tokens, per_token, experts", [(1, 8, 16), (1, 1, 1), (2, 3, 5), (2, 2, 2)]
)
def test_the_sum_of_their_experts(tokens, per_token, experts, dtype):
    check(tensors(tokens, per_token, experts, 512, 256, dtype))


@pytest.mark.parametrize("hidden, inner", [(1, 1), (67, 13), (130, 300)])
def test_odd_sizes(hidden, inner):
    check(tensors(2, 3, 4, hidden, inner, torch.float32))
    check(tensors(2, 3, 4, hidden, inner, torch.float32), residual=False)


@pytest.mark.parametrize("hidden", [67, 512])
def test_norm(hidden):
    given = tensors(2, 3, 4, hidden, 32, torch.float32)
    scale = torch.randn(hidden).to(DEVICE)
    check(given, norm=(scale, 1e-5, 0.0))
    check(given, norm=(scale, 1e-2, 1.0))


def test_gates():
    given = tensors(1, 2, 3, 64, 32, torch.float32)
    for gate in (Gate("gelu"), Gate("gelu_pytorch_tanh"), Gate("clamped", 1.702, 0.7)):
        check(given, gate)


def test_numbers_of_no_expert_add_nothing():
    given = tensors(2, 4, 4, 32, 256, torch.float32)
    given["chosen"][0, 1], given["chosen"][1, 0] = -1, 4
    check(given)
    given["down"][:] = float("nan")
    given["chosen"][:] = 99
    got = few_experts.experts(
        given["x"], given["chosen"], given["weights"], given["gate_up"], given["down"],
        "silu", 0.0, 0.0, None, given["residual"],
    )  # fmt: skip
    assert torch.equal(got, given["residual"])


def test_what_is_left_to_others():
    given = tensors(FEW_TOKENS + 1, 2, 4, 32, 16, torch.float32)
    rest = (given["gate_up"], given["down"], "silu", 0.0, 0.0, None, None)
    routes = (given["chosen"], given["weights"])
    assert few_experts.experts(given["x"], *routes, *rest) is NotImplemented
    assert few_experts.experts(given["x"][:0], *routes, *rest) is NotImplemented
    assert few_experts.experts(given["x"][:1].double(), *routes, *rest) is NotImplemented
    turned = (given["gate_up"].mT.contiguous().mT, *rest[1:])
    assert few_experts.experts(given["x"][:1], *routes, *turned) is NotImplemented
