"""The CPU suite of fusions: one small case, measured end to end."""

from __future__ import annotations

import torch

from fulgurite.bench.fusions.cpu import format_table, measure_case
from fulgurite.bench.fusions.cpu_cases import Case


def test_a_case_is_a_row_of_the_table():
    case = Case("small", lambda x: torch.sin(x) * 2, lambda: [torch.randn(64, 64)])
    row = measure_case(case, copy=1e10)
    assert row["case"] == "small" and len(row["kernels"]) == 1
    assert row["fulgurite_ms"] > 0 and row["of_copy"] > 0
    assert "small" in format_table([row])
