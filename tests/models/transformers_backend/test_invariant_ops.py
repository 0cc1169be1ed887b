"""The ops that replace those of transformers' modules in deterministic mode: the modules' own results.

The kernels of the products and sums have tests of their own (`test_triton_invariant_gemm.py`); here
torch stands in for them, so that the modules run on a CPU. `test_gpu_batch_invariance.py` has both.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="its modules are tested")

from fulgurite.errors import ArgumentError
from fulgurite.models.transformers_backend import invariant_ops
from fulgurite.models.transformers_backend.invariant_ops import REPLACEMENTS, InvariantOps
from tests.models.transformers_backend.checkpoints import CASES, build_module

aten = torch.ops.aten


def plain_bmm(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    out = x.double() @ w.double()
    return (out if bias is None else out + bias.double()).to(x.dtype)


@pytest.fixture(autouse=True)
def _torch_for_triton(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(invariant_ops, "invariant_bmm", plain_bmm)
    monkeypatch.setattr(invariant_ops, "row_sum", lambda x: x.double().sum(1).float())


@pytest.mark.parametrize("case", list(CASES))
def test_modules_give_their_own_logits(case: str) -> None:
    module, ids = build_module(case), torch.arange(5)[None]
    options = {"input_ids": ids, "position_ids": torch.arange(5)[None], "use_cache": False}
    with torch.inference_mode():
        expected = module(**options).logits
        with InvariantOps():
            actual = module(**options).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


CALLS = {
    "mean": lambda x: x.mean(-1, keepdim=True),
    "mean of two dimensions": lambda x: x.mean((0, 2)),
    "sum": lambda x: x.sum(1),
    "sum in another dtype": lambda x: x.half().sum(1, dtype=torch.float32),
    "variance": lambda x: x.var(-1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True),
    "layer norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[1:]),
    "rms norm": lambda x: torch.nn.functional.rms_norm(x, x.shape[-1:], x[0, 0]),
    "softmax": lambda x: x.softmax(1),
    "log softmax": lambda x: x.log_softmax(-1),
    "smallest": lambda x: x.topk(2, largest=False).values,
    "sort": lambda x: x.sort(dim=1).indices,
    "index_add": lambda x: x.index_add(1, torch.tensor([0, 2, 0]), x[:, :3], alpha=2.0),
    "matmul": lambda x: x @ x.mT,
    "addmm with a matrix": lambda x: torch.addmm(x[0] @ x[1].mT, x[0], x[1].mT, beta=2, alpha=3),
    "baddbmm": lambda x: torch.baddbmm(x @ x.mT, x, x.mT, beta=0.5),
    "integers": lambda x: (x > 0).sum(1),
}


@pytest.mark.parametrize("name", CALLS)
def test_replaced_ops(name: str) -> None:
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode(), InvariantOps():
        actual = CALLS[name](x)
    torch.testing.assert_close(actual, CALLS[name](x), rtol=1e-4, atol=1e-4)


def test_equal_values_are_selected_in_the_order_of_their_indices() -> None:
    with InvariantOps():
        assert torch.ones(2, 9).topk(3).indices.tolist() == [[0, 1, 2]] * 2


class Scan(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(-1)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (Scan(), "Scan calls aten.cumsum"),
        (lambda x: x.mean(), "aten.mean"),
        (lambda x: torch.nn.functional.conv1d(x, x), "convolution"),
        (lambda x: x.scatter_reduce(0, torch.zeros_like(x).long(), x, "sum"), "scatter_reduce"),
    ],
)
def test_other_ops_are_refused_by_name(call, name: str) -> None:
    with InvariantOps(), pytest.raises(ArgumentError, match=name):
        call(torch.ones(1, 2, 3))


def test_every_replacement_is_an_operator_of_torch() -> None:
    assert all(isinstance(op, torch._ops.OpOverload) for op in REPLACEMENTS)
