"""The suite `run_generate`: how rounds become rows, and one engine measured for real."""

from __future__ import annotations

import argparse

import pytest
import torch

from fulgurite.bench.generate import cpu as suite
from fulgurite.errors import ArgumentError


def measured(prefill, decode, first=100.0, peak=500.0, **more):
    return {"prefill": prefill, "decode": decode, "first_token_ms": first, "peak_mib": peak, **more}


def test_a_row_is_the_better_of_its_rounds_and_is_compared_at_the_same_threads():
    rounds = [measured(100, 40, 90, decode_4=70), measured(120, 30, 80, decode_4=90)]
    rows = [
        suite._best_of_rounds(1, "fulgurite", rounds),
        suite._best_of_rounds(1, "llama.cpp", [measured(60, 20)]),
        suite._best_of_rounds(2, "llama.cpp", [measured(1, 1)]),
    ]
    suite._add_ratios(rows)
    assert rows[0]["prefill"] == 120 and rows[0]["decode"] == 40
    assert rows[0]["first_token_ms"] == 80 and rows[0]["decode_4"] == 90
    assert rows[0]["prefill_times_llama"] == 2 and rows[0]["decode_times_llama"] == 2
    assert "prefill_times_llama" not in rows[1]
    assert "2.00, 2.00" in suite.format_table(rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there():
    with pytest.raises(ArgumentError, match="no CUDA device"):
        suite.run_generate(argparse.Namespace(device="cuda", model=None, quick=True, output=None))


@pytest.mark.slow
def test_our_engine_measures_itself(monkeypatch):
    monkeypatch.setattr(suite, "PROMPT_TOKENS", 20)
    monkeypatch.setattr(suite, "NEW_TOKENS", 4)
    monkeypatch.setattr(suite, "BATCHES", (1, 2))
    found = suite._run_engine_process("fulgurite", 1)
    assert found is not None and found["decode"] > 0 and found["decode_2"] > 0
