"""The GPU half of `fulgurite bench quant`, small and on the CPU: every figure is there."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from fulgurite.bench.quant import gpu

SHAPES = [(128, 256), (256, 128)]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    def count_calls(calls, replays=5):
        for call in calls:
            call()
        return 1e-3 * len(calls)

    monkeypatch.setattr(gpu, "SHAPES", SHAPES)
    monkeypatch.setattr(gpu, "GGUF_SHAPE", SHAPES[0])
    monkeypatch.setattr(gpu, "M_SIZES", (1, 3, 16, 17))
    monkeypatch.setattr(gpu, "CAST_SHAPE", (128, 256))
    monkeypatch.setattr(gpu, "copies_beyond_cache", lambda nbytes: 2)
    monkeypatch.setattr(gpu, "measure_gpu_copy_bandwidth", lambda: 1e9)
    monkeypatch.setattr(gpu, "randn_bf16", lambda *shape: torch.randn(shape).bfloat16())
    monkeypatch.setattr(gpu, "time_in_cuda_graph", count_calls)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")


def test_every_figure_is_there(tmp_path, capsys):
    output = tmp_path / "figures.json"
    gpu.run_quant_gpu(argparse.Namespace(quick=False, output=str(output)))
    rows = json.loads(output.read_text())["rows"]
    count = {part: sum(row["part"] == part for row in rows) for part in ("scaled_mm", "quantize")}
    assert count == {"scaled_mm": 2 * 3 * 4, "quantize": 9 + 3}
    linears = [row for row in rows if row["part"] == "weight-only"]
    assert len(linears) == 3 * (2 * len(gpu.WEIGHT_FORMATS) + len(gpu.GGUF_FORMATS))
    assert all(row["us"] > 0 and row["bf16_us"] > 0 and row["of_copy"] > 0 for row in linears)
    printed = capsys.readouterr().out
    assert "best / ours" in printed and "× bf16" in printed and str(output) in printed


def test_bytes_that_are_read_twice_count_twice():
    rows = {row["format"]: row for row in gpu.measure_casts(copy=1e9)}
    numbers = 128 * 256
    moved = {name: rows[name]["of_copy"] * rows[name]["us"] * 1e3 for name in rows}
    assert moved["fp8_e4m3_row"] == pytest.approx(numbers * 3 + 128 * 4)
    assert moved["fp8_e4m3_tensor"] == pytest.approx(numbers * 5 + 4)
    assert moved["nvfp4"] == pytest.approx(numbers * 4.5 + numbers / 16 + 4)
    assert moved["fp8_e4m3_row transposed"] == pytest.approx(numbers * 5 + 256 * 4)
