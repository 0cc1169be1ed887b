"""Activation checkpointing: the same losses, gradients and expert loads, from fewer saved bytes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fulgurite
from fulgurite.compile import record_compilations
from fulgurite.determinism import is_deterministic
from fulgurite.errors import ArgumentError
from fulgurite.train.loss import LossModule, LossSums
from fulgurite.train.remat import POLICIES, SAVED_OPS, apply_remat, compiler_policy
from tests.train.parallel.model_parallel_cases import make_batches, make_model


def run(policy: str, name: str, compiled: bool = False) -> tuple[LossSums, dict[str, Tensor], int]:
    """Sums, gradients, and the bytes that backward keeps beside parameters."""
    model = apply_remat(make_model(name), policy)
    loss_module: nn.Module = LossModule(model)
    if compiled:
        loss_module = fulgurite.compile(loss_module, remat=compiler_policy(policy))
    (batch,) = make_batches(0, 1, 61)
    saved = [0]

    def count(x: Tensor) -> Tensor:
        saved[0] += 0 if isinstance(x, nn.Parameter) else x.nbytes
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        sums = loss_module(batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT)
    sums.total.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return sums, found, saved[0]


@pytest.mark.parametrize("name", ["dots1", "qwen3_moe"])
def test_policies_compute_the_same(name):
    """To the bit: a layer that runs again computes the same. Loads are not counted twice."""
    wanted, gradients, most = run("none", name)
    assert wanted.load_LE is not None
    for policy in POLICIES:
        sums, found, saved = run(policy, name)
        assert torch.equal(sums.total, wanted.total) and torch.equal(sums.load_LE, wanted.load_LE)
        assert found.keys() == gradients.keys()
        assert all(torch.equal(found[key], gradients[key]) for key in gradients), policy
        assert (saved < most / 2) == (policy in ("selective", "full")), (policy, saved, most)


@pytest.mark.parametrize("name", sorted(SAVED_OPS))
def test_saved_operators_exist(name):
    namespace, op = name.split("::")
    assert hasattr(getattr(torch.ops, namespace), op)


def test_selective_recomputes_no_matmul():
    counts = {policy: count_matmuls(policy) for policy in ("none", "selective", "full")}
    assert counts["none"] == counts["selective"] < counts["full"], counts


class CountMatmuls(TorchDispatchMode):
    """Counts matmuls that run: checkpointing answers saved ones before they get here."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return function(*args, **(kwargs or {}))


def count_matmuls(policy: str) -> int:
    loss_module = LossModule(apply_remat(make_model("qwen3"), policy))
    (batch,) = make_batches(0, 1, 61)
    with CountMatmuls() as mode:
        sums = loss_module(batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT)
        sums.total.backward()
    return mode.count


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_checkpointed_layers_compile_without_a_break(policy):
    wanted, gradients, _ = run("none", "qwen3")
    with record_compilations() as compiled:
        sums, found, _ = run(policy, "qwen3", compiled=True)
    assert [record.breaks for record in compiled] == [[]]
    torch.testing.assert_close(sums.loss, wanted.loss, rtol=1e-5, atol=1e-5)
    for key in gradients:
        torch.testing.assert_close(found[key], gradients[key], rtol=1e-3, atol=1e-4)


def test_deterministic_mode_holds_where_backward_recomputes():
    """Backward of a GPU runs in a thread of its own, and the mode belongs to a thread."""
    seen: list[tuple[bool, bool]] = []

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((is_deterministic(), torch._C._current_graph_task_id() != -1))
            return x.sin()

    model = nn.Module()
    model.layers = nn.ModuleList([Layer()])
    apply_remat(model, "full")
    with fulgurite.deterministic():
        out = model.layers[0](torch.ones(3, requires_grad=True)).sum()
    thread = threading.Thread(target=out.backward)
    thread.start()
    thread.join()
    assert seen == [(True, False), (True, True)]


def test_names_and_evaluation_stay():
    plain, model = make_model("tied"), apply_remat(make_model("tied"), "full")
    assert model.state_dict().keys() == plain.state_dict().keys()
    (batch,) = make_batches(0, 1, 61)
    with torch.no_grad():
        arguments = batch.tokens_BT, batch.positions_BT
        assert torch.equal(model(*arguments), plain(*arguments))


def test_unknown_policies_and_models_without_layers():
    with pytest.raises(ArgumentError, match=r"parallel.remat='some'\n.*selective"):
        apply_remat(make_model("tied"), "some")
    with pytest.raises(ArgumentError, match="no layers to checkpoint"):
        apply_remat(nn.Linear(2, 2), "full")
