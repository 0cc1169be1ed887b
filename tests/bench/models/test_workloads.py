"""The models that are timed whole on a GPU, at their small sizes."""

from __future__ import annotations

import pytest
import torch

from fulgurite.bench.models import suite, workloads


@pytest.mark.parametrize("name", ["resnet50", "deepseek_block"])
def test_a_workload_gives_a_loss_and_gradients(name):
    torch.manual_seed(0)
    model, inputs = workloads.WORKLOADS[name](True)
    loss = model(*inputs)
    loss.backward()
    assert loss.dim() == 0 and torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_the_models_of_a_gpu_are_others():
    assert ("llama_1b", "bfloat16") in suite.cases_for("cuda")
    assert ("gpt2", "float32") in suite.cases_for("cpu")
