"""The CPU half of `fulgurite bench quant`, small: every figure is there and makes sense."""

from __future__ import annotations

import pytest
import torch

from fulgurite.bench.quant import cpu, cpu_quantize
from fulgurite.kernels.common.cpu_library import load_library


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(cpu, "SHAPE", (128, 256))
    monkeypatch.setattr(cpu, "BEYOND_CACHE_BYTES", 1 << 17)
    monkeypatch.setattr(cpu_quantize, "SHAPE", (64, 256))


@torch.no_grad()
@pytest.mark.parametrize("format", ["q4_1", "fp8_e4m3_row"])
def test_linears(format):
    weight = torch.randn(128, 256)
    rows = cpu.measure_format(format, weight, (1, 17), cpu.copy_dense_weights(weight), threads=1)
    assert [row["rows"] for row in rows] == [1, 17]
    for row in rows:
        assert row["ms"] > 0 and row["float32_ms"] > 0 and row["of_plain_read"] > 0
        assert row["times_dequantized"] > row["times_best_of_torch"]
    assert format in cpu.format_table(rows)


def test_casts():
    rows = cpu_quantize.measure_casts(quick=True)
    assert {row["dtype"] for row in rows} == {"float32", "bfloat16"}
    assert all(row["of_copy"] > 0 and row["bytes"] > 0 for row in rows)
    assert "of copy" in cpu_quantize.format_cast_table(rows)


@pytest.mark.parametrize("lines", [0, 3, 16, 17, 32, 1000])
def test_the_plain_read_reads_every_line(lines):
    """Sixteen lines at a time: all of them but fewer than sixteen a thread at the end of its share."""
    memory = torch.ones(lines * 8, dtype=torch.int64)
    for threads in (1, 2):
        read = load_library().read_memory(memory.data_ptr(), lines * 64, threads)
        assert read % 8 == 0 and lines * 8 - 16 * 8 * threads < read <= lines * 8
