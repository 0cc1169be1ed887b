"""Repro scripts are standalone, compare with eager and print times."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fulgurite
from fulgurite import native
from fulgurite.errors import CompileError
from fulgurite.kernels.gemm.dense_linear import dense_linear
from fulgurite.repro import make_inputs
from tests.forked import run_program


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
    """In a fresh process, where `import fulgurite` alone defines no operators of a graph."""
    compiled = fulgurite.compile(lambda x, w, i: dense_linear(x, w)[i].relu())
    with fulgurite.deterministic():
        compiled(torch.randn(4, 8), torch.randn(6, 8), torch.tensor([0, 2]))
    path = compiled.save_repro(tmp_path / "repro.py")
    assert "torch.ops.fulgurite.dense_linear" in path.read_text()
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "agrees with eager" in done.stdout
    for name in ("eager", "torch.compile", "fulgurite"):
        assert any(line.startswith(name) for line in done.stdout.splitlines())


def run(path, **variables):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FULGURITE_")}
    environment |= {"FULGURITE_CACHE_DIR": os.environ["FULGURITE_CACHE_DIR"], **variables}
    return run_program(Path(path), environment)


def test_a_failure_fails_again_with_the_same_environment(monkeypatch, tmp_path):
    """The compiler of the environment does not work: the script brings that with it."""
    monkeypatch.setenv("FULGURITE_CXX", shutil.which("false"))
    monkeypatch.setattr(native, "find_compiler", native.find_compiler.__wrapped__)
    monkeypatch.setattr(native, "_loaded", {})
    with pytest.raises(CompileError, match="does not run") as raised:
        fulgurite.compile(lambda x: torch.tanh(x + 1234.5))(torch.randn(6))
    script = raised.value.details["repro"]
    again = run(script)
    assert again.returncode == 1 and "CompileError" in again.stderr
    assert raised.value.what in again.stderr


def test_a_failure_in_backward_fails_again(monkeypatch, tmp_path):
    """A compiler that rejects the kernel of the backward graph only."""
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\nfor a in "$@"; do case "$a" in *.cpp) grep -q gelu_backward "$a" && exit 1;; esac; done\n'
        'exec g++ "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("FULGURITE_CXX", str(compiler))
    monkeypatch.setattr(native, "find_compiler", native.find_compiler.__wrapped__)
    x = torch.randn(6, requires_grad=True)
    compiled = fulgurite.compile(nn.functional.gelu)
    loss = compiled(x).sum()
    with pytest.raises(CompileError, match="rejected") as raised:
        loss.backward()
    again = run(raised.value.details["repro"])
    assert again.returncode == 1 and raised.value.what in again.stderr


def test_script_carries_options_and_settings(monkeypatch, tmp_path):
    monkeypatch.setenv("FULGURITE_NUM_THREADS", "1")
    torch.set_float32_matmul_precision("high")
    try:
        compiled = fulgurite.compile(
            lambda x: torch.mm(x, x).relu(), remat="full", autotune=False, fullgraph=True
        )
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            compiled(torch.randn(4, 4))
        path = compiled.save_repro(tmp_path / "repro.py")
    finally:
        torch.set_float32_matmul_precision("highest")
    text = path.read_text()
    assert "'FULGURITE_NUM_THREADS': '1'" in text and "FULGURITE_CACHE_DIR" not in text
    assert "torch.set_float32_matmul_precision('high')" in text
    assert "with torch.set_grad_enabled(False), torch.autocast('cpu', torch.bfloat16):" in text
    assert "remat='full', autotune=False, cudagraph='auto'" in text and "fullgraph=True" in text
    assert f"torch: {torch.__version__}" in text
    done = run(path)
    assert done.returncode == 0, done.stderr


def test_script_of_symbolic_sizes_is_dynamic(tmp_path):
    compiled = fulgurite.compile(lambda x: torch.softmax(x, -1))
    for rows in (3, 5):
        compiled(torch.randn(rows, 4))
    assert "dynamic=True" in compiled.save_repro(tmp_path / "repro.py").read_text()
