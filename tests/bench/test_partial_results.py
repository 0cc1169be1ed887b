"""GPU suites save every row at once: an interrupted run keeps its results."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fulgurite.bench import dispatch, mla
from fulgurite.bench.fusions import gpu
from fulgurite.bench.generate import gpu as generate_gpu
from fulgurite.bench.models import suite

Suite = Callable[[argparse.Namespace], None]


class Stopped(Exception):
    """The run is interrupted."""


def stops_after(count: int, result: Callable[..., Any]) -> Callable[..., Any]:
    """A measurement that is interrupted after `count` calls."""
    calls: Iterator[int] = iter(range(count))

    def measure(*args: Any, **named: Any) -> Any:
        if next(calls, None) is None:
            raise Stopped
        return result(*args, **named)

    return measure


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Suite], list[Any]]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def stopped(suite: Suite) -> list[Any]:
        path = tmp_path / "out.json"
        with pytest.raises(Stopped):
            suite(argparse.Namespace(device="cuda", quick=False, output=str(path)))
        rows: list[Any] = json.loads(path.read_text())["rows"]
        return rows

    return stopped


def figures(*_: Any) -> dict[str, Any]:
    return {"case": "rows", "bytes": 1, "fulgurite_percent": 90.0, "difference": 0.0,
            "fulgurite_ms": 1.0, "compile_s": 1.0}  # fmt: skip


def gemm_row(case: Any) -> dict[str, Any]:
    return {"group": "matmul", "case": case.name, "speedup": 1.0, "difference": 0.0}


def test_fusions(saved: Callable[[Suite], list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.results, "fresh_cache_environment", dict)
    monkeypatch.setattr(gpu, "measure_copy_bandwidth", lambda: 1e12)
    monkeypatch.setattr(gpu, "measure_case", stops_after(7, figures))
    assert len(saved(gpu.run_fusions_gpu)) == 7
    monkeypatch.setattr(gpu, "measure_case", figures)
    monkeypatch.setattr("fulgurite.bench.fusions.gemm_epilogues.measure_case", gemm_row)
    compiled = stops_after(3, lambda *_, **__: {"torch_compile_percent": 50.0})
    monkeypatch.setattr(gpu, "measure_compiled", compiled)
    assert sum("torch_compile_percent" in row for row in saved(gpu.run_fusions_gpu)) == 3


def test_gemm_epilogues(
    saved: Callable[[Suite], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.results, "fresh_cache_environment", dict)
    monkeypatch.setattr(gpu, "measure_copy_bandwidth", lambda: 1e12)
    monkeypatch.setattr(gpu, "measure_case", figures)
    monkeypatch.setattr(
        "fulgurite.bench.fusions.gemm_epilogues.measure_case", stops_after(2, gemm_row)
    )
    assert [row["case"] for row in saved(gpu.run_fusions_gpu) if "speedup" in row] == [
        "bias gelu, K 512",
        "residual, K 512",
    ]


def test_generate(saved: Callable[[Suite], list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate_gpu.hardware, "measure_cuda_copy_bandwidth", lambda: 1e12)
    monkeypatch.setattr(generate_gpu, "measure_gemm_flops", lambda: 1e12)
    row = stops_after(2, lambda shape, *_: [{"shape": shape, "what": "x", "batch": 1, "ms": 1.0}])
    monkeypatch.setattr(generate_gpu, "measure_model", row)
    rows = saved(generate_gpu.run_generate_gpu)
    assert [row["shape"] for row in rows] == list(generate_gpu.MODELS[:2])
    assert all(row["copy_gb_s"] == 1000 for row in rows)


def test_dispatch(saved: Callable[[Suite], list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "measure_gpu_copy_bandwidth", lambda: 1e12)
    monkeypatch.setattr(dispatch, "_measure_kernels", stops_after(4, lambda *_: {}))
    assert len(saved(dispatch.run_dispatch)) == 4


def test_mla(saved: Callable[[Suite], list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla, "measure_roofline", lambda run: (1e12, 1e12))
    monkeypatch.setattr(mla, "measure_decode", stops_after(5, lambda *_: {}))
    assert len(saved(mla.run_mla)) == 1 + 5


def test_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failure is printed, and other models are still measured."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(suite.results, "fresh_cache_environment", dict)
    kinds = ("forward", "train")

    def in_process(call: str, environment: dict[str, str]) -> Any:
        if "resnet50" in call and "torch.compile" in call:
            raise subprocess.CalledProcessError(1, call)
        if call.startswith("measure_warm"):
            every = dict.fromkeys(suite.CANDIDATES, 0.1)
            return {kind: {"seconds": every, "gpu": every, "differs": 0.0} for kind in kinds}
        return {f"{kind}_{what}": 1.0 for kind in kinds for what in ("first_s", "bytes")}

    monkeypatch.setattr(suite, "_run_in_process", in_process)
    path = tmp_path / "out.json"
    with pytest.raises(subprocess.CalledProcessError):
        suite.run_models(argparse.Namespace(device="cuda", quick=False, output=str(path)))
    cases = {row["case"].split()[0] for row in json.loads(path.read_text())["rows"]}
    assert cases == {"llama_1b", "deepseek_block"}
    output = capsys.readouterr().out
    assert "resnet50 bfloat16 failed" in output and "eager, first: forward 1.0 s" in output
