"""The suite `train`: all candidates compute the same, and every row is printed."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fulgurite.bench.train import suite
from fulgurite.bench.train.workloads import NANO, NANO_MOE, Workload, make_workloads
from fulgurite.errors import ArgumentError

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 128}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "WARMUP_STEPS", {"cpu": 0})
    monkeypatch.setattr(suite, "TIMED_STEPS", {"cpu": 1})


@pytest.mark.parametrize("documents", [1, 3])
def test_candidates_have_the_same_loss(documents: int) -> None:
    workload = Workload("x", "LlamaForCausalLM", NANO | SMALL, 2, 32, 2, documents)
    rows = [suite.measure(workload, name, "none", "cpu") for name in (suite.EAGER, suite.OURS)]
    assert rows[0]["first_loss"] == pytest.approx(rows[1]["first_loss"], rel=1e-5)
    assert rows[0]["tokens"] == 128 and all(row["tokens_per_second"] > 0 for row in rows)
    table = suite.format_table(rows)
    assert "eager" in table and "fulgurite" in table


@pytest.mark.parametrize(
    "architecture, fields", [("LlamaForCausalLM", NANO), ("Qwen3MoeForCausalLM", NANO_MOE)]
)
def test_the_model_of_transformers_trains(
    architecture: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eagerly: its loss of random tokens falls, and all its weights change."""
    monkeypatch.setattr(torch, "compile", lambda module: module)
    workload = Workload("x", architecture, fields | SMALL, 2, 16)
    step, batches, flops = suite.make_train_step(workload, suite.TRANSFORMERS, "none", "cpu")
    before = {name: weight.clone() for name, weight in step.model.named_parameters()}
    losses = [step(number, batches).loss for number in range(1, 9)]
    assert losses[0] == pytest.approx(math.log(128), rel=0.05) and losses[-1] < losses[0]
    assert flops > 0
    for name, weight in step.model.named_parameters():
        assert "experts" in name or not torch.equal(weight, before[name]), name


def test_packed_documents_are_not_for_transformers() -> None:
    names = [
        [name for name, _ in suite.list_candidates(workload)]
        for workload in make_workloads("cuda", True)
    ]
    assert suite.TRANSFORMERS in names[0] and suite.TRANSFORMERS not in names[1]


def test_a_failed_candidate_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("out of luck\nmore")

    monkeypatch.setattr(suite, "make_step", fail)
    row = suite.measure(make_workloads("cpu", True)[0], suite.OURS, "none", "cpu")
    assert row["error"] == "out of luck" and "failed" in suite.format_table([row])


def test_a_name_that_matches_nothing_replaces_no_results() -> None:
    suite.check_only("TWIN", "cpu", True)
    with pytest.raises(ArgumentError, match="names: .*stall, twin"):
        suite.check_only("nosuch", "cpu", True)


def test_batches_of_documents() -> None:
    workload = Workload("x", "Qwen3MoeForCausalLM", NANO_MOE, 2, 10, documents=3)
    (batch,) = workload.make_batches("cpu")
    assert batch.positions_BT[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert batch.documents_BT is not None and batch.documents_BT[1].tolist()[-2:] == [2, 2]
    assert torch.equal(batch.tokens_BT[:, 1:], batch.labels_BT[:, :-1])


def test_workloads_of_a_gpu_are_known_models() -> None:
    names = [workload.name for workload in make_workloads("cuda", False)]
    assert len(names) == len(set(names)) == 5
    assert [*suite.list_candidates(make_workloads("cuda", False)[-1])][-1] == (
        suite.OURS,
        "fp8_rowwise",
    )


def run(path: Path, only: str | None, candidates: str = ",".join(suite.CANDIDATES)) -> list[Any]:
    suite.run_train(
        argparse.Namespace(
            device="cpu", quick=True, output=str(path), only=only, candidates=candidates
        )
    )
    return list(json.loads(path.read_text())["rows"])


@pytest.fixture
def extras(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves and twins that are measured at once."""
    stall = {"model": "x", "save": 0, "bytes": 1, "step_ms": 1.0, "call_ms": 1.0, "loop_ms": 1.0}
    twin = {"model": "y", "parameters": 1, "active_parameters": 1, "tokens_per_second": 1.0}
    twin |= {"best_loss": 1.0}
    full = twin | {"seconds_to_target": 1.0, "target_loss": 1.0, "speedup": 1.0}
    monkeypatch.setitem(suite.EXTRAS, "stall", lambda *_: iter([stall]))
    monkeypatch.setitem(suite.EXTRAS, "twin", lambda *_: iter([twin, full]))


def test_parts_of_the_suite_share_a_file(extras: None, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    assert [row["kind"] for row in run(path, "stall")] == ["stall"]
    rows = run(path, "twin")
    assert [row["kind"] for row in rows] == ["stall", "twin"]
    assert rows[1]["speedup"] == 1.0, "the complete row replaces the first one"
    text = suite.format_tables(rows)
    assert "GiB" in text and "1.0 s to 1.000" in text
    assert [row["kind"] for row in run(path, "twin")] == ["stall", "twin"]


def test_rows_of_another_machine_are_not_mixed_in(extras: None, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    run(path, "stall")
    content = json.loads(path.read_text())
    content["machine"]["processor"] = "another"
    path.write_text(json.dumps(content))
    with pytest.raises(ArgumentError, match=r"another machine or version \(processor\)"):
        run(path, "twin")


def test_an_interrupted_run_keeps_its_rows(
    extras: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stops(*arguments: object) -> Iterator[dict[str, Any]]:
        yield {"model": "x", "save": 0, "bytes": 1, "step_ms": 1.0, "call_ms": 1.0, "loop_ms": 1.0}
        raise KeyboardInterrupt

    monkeypatch.setitem(suite.EXTRAS, "stall", stops)
    path = tmp_path / "rows.json"
    with pytest.raises(KeyboardInterrupt):
        run(path, "stall")
    assert len(json.loads(path.read_text())["rows"]) == 1


def test_candidates_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        suite, "measure", lambda w, c, r, d: {"model": w.name, "candidate": c, "recipe": r,
                                              "error": "not run"}
    )  # fmt: skip
    rows = run(tmp_path / "rows.json", "packed", "fulgurite,eager")
    assert [row["candidate"] for row in rows] == [suite.EAGER, suite.OURS]
    with pytest.raises(ArgumentError, match="--candidates inductor"):
        run(tmp_path / "rows.json", "packed", "inductor")
