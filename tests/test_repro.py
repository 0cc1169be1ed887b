"""Repro scripts are standalone, compare with eager and print times."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import nn

import fulgurite
from fulgurite.repro import make_inputs


def test_saved_script_is_standalone(tmp_path):
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    compiled = fulgurite.compile(model)
    compiled(torch.randn(3, 4).t().contiguous().t())
    path = compiled.save_repro(tmp_path / "deep" / "repro.py")
    text = path.read_text()
    assert "torch._C._nn.linear" in text and "test_repro" not in text.split("def forward")[0]
    namespace = {"__name__": "loaded"}
    exec(compile(text, str(path), "exec"), namespace)
    inputs = make_inputs(namespace["INPUTS"])
    assert [tuple(i.shape) for i in inputs] == [(8, 4), (8,), (3, 4), (2, 8), (2,)]
    assert inputs[2].stride() == (1, 3) and inputs[0].requires_grad and not inputs[2].requires_grad
    weight, bias, x, weight_2, bias_2 = inputs
    expected = nn.functional.gelu(x @ weight.t() + bias) @ weight_2.t() + bias_2
    torch.testing.assert_close(namespace["forward"](*inputs)[0], expected)


def test_script_compares_and_times(tmp_path):
    compiled = fulgurite.compile(lambda x, i: x[i].sin() + 1)
    compiled(torch.randn(5, 3), torch.tensor([0, 2]))
    path = compiled.save_repro(tmp_path / "repro.py")
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "agrees with eager" in done.stdout
    for name in ("eager", "torch.compile", "fulgurite"):
        assert any(line.startswith(name) for line in done.stdout.splitlines())
