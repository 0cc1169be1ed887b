"""Saves of a small model: a row each, and the table."""

from __future__ import annotations

from functools import partial
from itertools import count

from fulgurite.bench.train import stall, suite
from fulgurite.bench.train.workloads import NANO, Workload
from tests.bench.train.test_suite import SMALL


def test_every_save_has_a_row() -> None:
    workload = Workload("x", "LlamaForCausalLM", NANO | SMALL, 2, 16)
    step, batches, _ = suite.make_train_step(workload, suite.EAGER, "none", "cpu")
    run = partial(suite._run_next, step, count(), batches)
    rows = list(stall.measure_stall("x", step, run, 1))
    assert [row["save"] for row in rows] == [0, 1, 2]
    weights = sum(p.nbytes for p in step.model.parameters())
    assert all(row["call_ms"] > 0 and row["bytes"] > 3 * weights * 0.9 for row in rows)
    assert stall.format_stalls(rows).count("GiB") == 3
