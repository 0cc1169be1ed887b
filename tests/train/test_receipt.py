"""A receipt survives kills, holds every bit, and names what was changed; verify replays."""

from __future__ import annotations

import json
import math
import random
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fulgurite.errors import ArgumentError
from fulgurite.train import receipt as receipts
from fulgurite.train.checkpoint import CheckpointManager, training_state
from fulgurite.train.config import CheckpointSection, TrainConfig
from fulgurite.train.config_file import from_mapping, to_toml
from fulgurite.train.receipt import (
    Receipt,
    ReceiptWarning,
    extend_chain,
    find_broken_line,
    hash_sources,
    parse_lines,
    read_lines,
    summarize,
)
from fulgurite.train.verify import MAX_REPLAY, VerifyReport, choose_steps, verify_run
from tests.train import tiny_run
from tests.train.fault_worker import World, build

LOSSES = [0.1, 1 / 3, 5e-324, math.nan, math.inf, -0.0, torch.tensor(0.7)]


def test_losses_keep_every_bit(tmp_path: Path) -> None:
    receipt = Receipt.open(tmp_path, config=TrainConfig(), data={"b": "2", "a": "1"}, ranks=2)
    for step, loss in enumerate(LOSSES, start=1):
        receipt.record(step, loss)
    receipt.close()
    receipt.close()
    summary = json.loads((tmp_path / "receipt.json").read_text())
    assert [float.fromhex(x).hex() for x in summary["losses"].values()] == [
        float(x).hex() for x in LOSSES
    ]
    assert summary["data"] == {"a": "1", "b": "2"} and summary["ranks"] == 2
    assert summary["code"]["sha256"] == hash_sources() and summary["is_finished"]
    assert summary["config"]["optimizer"]["betas"] == [0.9, 0.95]
    assert find_broken_line(parse_lines(read_lines(tmp_path))) is None


def test_a_full_disk_delays_lines_and_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipt = Receipt.open(tmp_path)
    with monkeypatch.context() as patch, Path("/dev/full").open("ab", buffering=0) as full:
        patch.setattr(receipt, "_file", full)
        receipt.record(1, 0.5)
        receipt.record(2, 0.25)
    assert not summarize(parse_lines(read_lines(tmp_path)))["losses"]
    receipt.record(3, 0.125)
    receipt.close()
    events = parse_lines(read_lines(tmp_path))
    assert find_broken_line(events) is None
    assert list(summarize(events)["losses"]) == ["1", "2", "3"]


@pytest.mark.parametrize("cut", [1, 7, 40])
def test_half_a_line_is_removed_at_the_next_start(tmp_path: Path, cut: int) -> None:
    receipt = Receipt.open(tmp_path)
    receipt.record(1, 0.5)
    receipt.record(2, 0.25)
    del receipt  # killed
    path = tmp_path / "receipt.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    receipt = Receipt.open(tmp_path, step=1)
    receipt.record(2, 0.25)
    receipt.close()
    events = parse_lines(read_lines(tmp_path))
    assert find_broken_line(events) is None
    assert [e["kind"] for e in events] == ["start", "step", "start", "step", "end"]
    assert summarize(events)["starts"] == [0, 1]


def test_repeated_steps_of_a_deterministic_run(tmp_path: Path) -> None:
    config = TrainConfig(deterministic=True)
    Receipt.open(tmp_path, config=config).record(1, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        receipt = Receipt.open(tmp_path, config=config)
        receipt.record(1, 0.5)
    with pytest.warns(ReceiptWarning, match=r"step 1 .* 0x1\.0\S*p-1 .* 0x1\.8\S*p-1 now"):
        receipt.record(1, 0.75)
    relaxed = Receipt.open(tmp_path, config=TrainConfig())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        relaxed.record(1, 0.5)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda lines: lines[:2] + [lines[2].replace('"0x1.', '"0x2.')] + lines[3:], 3),
        (lambda lines: lines[:2] + lines[3:], 3),
        (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], 2),
        (lambda lines: [*lines[:3], "not json", *lines[3:]], 4),
        (lambda lines: [*lines, lines[-1]], 7),
        (lambda lines: lines[1:], 1),
    ],
)
def test_a_changed_line_is_named(
    tmp_path: Path, change: Callable[[list[str]], list[str]], line: int
) -> None:
    receipt = Receipt.open(tmp_path)
    for step in range(1, 5):
        receipt.record(step, 0.3 * step)
    receipt.close()
    lines = read_lines(tmp_path)
    assert find_broken_line(parse_lines(lines)) is None
    assert find_broken_line(parse_lines(change(lines))) == line


def test_the_hash_of_the_sources_sees_every_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "version.py").write_text("")
    (tmp_path / "part" / "a.py").write_text("x = 1")
    monkeypatch.setattr(receipts.version, "__file__", str(tmp_path / "version.py"))
    hashes = []
    for name, text in [("a.py", "x = 1"), ("a.py", "x = 2"), ("b.py", "")]:
        (tmp_path / "part" / name).write_text(text)
        hashes.append(hash_sources.__wrapped__())
    assert len(set(hashes)) == 3


# --- verify


def replay(config: TrainConfig, checkpoint: Path | None, last: int) -> Mapping[int, float]:
    """The tiny run of these tests, from a checkpoint to a step."""
    model, optimizer = build(sharded=False)
    step = 0
    if checkpoint is not None:
        with CheckpointManager(checkpoint.parent) as manager:
            step = manager.load(checkpoint, {**training_state(model, optimizer), "step": 0})
    losses = {}
    while step < last:
        losses[step + 1] = tiny_run.run_step(model, optimizer, step, World())
        step += 1
    return losses


DATA = {"a.txt": "11", "b.txt": "22"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of 9 steps with checkpoints at 6, 8 and 9."""
    config = TrainConfig(
        output=str(tmp_path),
        steps=9,
        deterministic=True,
        checkpoint=CheckpointSection(every=2, keep=3),
    )
    tiny_run.train(config)
    edit_start(tmp_path, lambda start: start.update(data=DATA))
    return tmp_path


def edit_start(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the first line of a receipt as the run itself could have written it."""
    events = parse_lines(read_lines(folder))
    change(events[0])
    write_events(folder, events)


def write_events(folder: Path, events: list[dict[str, Any]]) -> None:
    """Write a receipt with a chain that is right."""
    chain, lines = "", []
    for event in events:
        fields = {key: value for key, value in event.items() if key != "chain"}
        chain = extend_chain(chain, fields)
        lines.append(json.dumps({**fields, "chain": chain}))
    (folder / "receipt.jsonl").write_text("\n".join(lines) + "\n")
    receipts.write_summary(folder)


def verify(folder: Path, steps: int = 9, data: Mapping[str, str] = DATA) -> VerifyReport:
    return verify_run(folder, replay=replay, hash_data=lambda config: data, steps=steps, seed=0)


def test_an_honest_run_is_verified(run: Path) -> None:
    report = verify(run)
    assert report.has_passed, report.describe()
    assert report.chosen == list(range(1, 10))
    assert [found.step for found in report.replayed] == list(range(1, 10))
    assert "to the bit" in report.describe() and "step-000008" in report.describe()
    few = verify(run, steps=2)
    assert few.has_passed and len(few.chosen) == 2


def test_a_changed_loss_is_named(run: Path) -> None:
    """Also if the chain was computed again."""
    events = parse_lines(read_lines(run))
    event = next(e for e in events if e["kind"] == "step" and e["step"] == 7)
    event["loss"] = math.nextafter(float.fromhex(event["loss"]), math.inf).hex()
    write_events(run, events)
    report = verify(run)
    assert not report.has_passed and len(report.problems) == 1
    assert report.problems[0].startswith("step 7: the receipt says")


def test_a_changed_line_is_reported(run: Path) -> None:
    lines = read_lines(run)
    lines[4] = lines[4].replace('"loss": "0x1.', '"loss": "0x1.f')
    (run / "receipt.jsonl").write_text("\n".join(lines) + "\n")
    problems = "\n".join(verify(run).problems)
    assert "receipt.jsonl line 5 was changed" in problems
    assert "receipt.json differs from receipt.jsonl in losses" in problems


def test_changed_data_are_named(run: Path) -> None:
    report = verify(run, data={"a.txt": "11", "b.txt": "23", "c.txt": "1"})
    assert report.problems == [
        "data b.txt has other content than the run had",
        "data c.txt was not there when the run began",
    ]
    assert verify(run, data={"a.txt": "11"}).problems == ["data b.txt is gone"]


def test_a_damaged_checkpoint_is_named(run: Path) -> None:
    file = run / "checkpoints" / "step-000008" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(bytes(data))
    report = verify(run)
    assert len(report.problems) == 1 and "step-000008" in report.problems[0]
    assert len(report.replayed) == 9  # from the checkpoint before


def test_an_exchanged_checkpoint_is_named(run: Path) -> None:
    """Whole by itself, but not that of the run."""
    model, optimizer = build(sharded=False)
    with CheckpointManager(run / "checkpoints", CheckpointSection(keep=9)) as manager:
        manager.save(8, {**training_state(model, optimizer), "step": 8})
        manager.save(20, {**training_state(model, optimizer), "step": 20})
    assert verify(run).problems == [
        "checkpoint step-000008 is not the one that the run wrote",
        "checkpoint step-000020 is not in the receipt",
    ]


def test_a_changed_configuration_is_named(run: Path) -> None:
    config = from_mapping(parse_lines(read_lines(run))[0]["config"])
    (run / "config.toml").write_text(to_toml(config))
    assert verify(run).has_passed
    changed = replace(config, optimizer=replace(config.optimizer, weight_decay=0.7))
    (run / "config.toml").write_text(to_toml(changed))
    assert verify(run).problems == [
        "config.toml differs from the receipt in optimizer.weight_decay"
    ]


def test_runs_that_are_not_deterministic_have_a_tolerance(run: Path) -> None:
    edit_start(run, lambda start: start["config"].update(deterministic=False))
    events = parse_lines(read_lines(run))
    step = next(e for e in events if e["kind"] == "step")
    step["loss"] = (float.fromhex(step["loss"]) * (1 + 1e-6)).hex()
    write_events(run, events)
    report = verify(run)
    assert report.has_passed and "within 0.0001" in report.describe()
    step["loss"] = (float.fromhex(step["loss"]) * (1 + 1e-3)).hex()
    write_events(run, events)
    assert not verify(run).has_passed


def test_layouts_that_add_in_another_order_have_a_tolerance(run: Path) -> None:
    edit_start(run, lambda start: start["config"]["parallel"].update(tensor=2))
    assert "to the bit" in verify(run).describe()  # one rank, whatever it says
    edit_start(run, lambda start: start.update(ranks=2))
    report = verify(run)
    assert report.has_passed and "adds in another order" in report.describe()
    assert "within 0.0001" in report.describe()
    edit_start(run, lambda start: start["config"]["parallel"].update(tensor=1))
    assert "to the bit" in verify(run).describe()


def test_a_run_may_be_moved(run: Path, tmp_path: Path) -> None:
    seen = []

    def spy(config: TrainConfig, checkpoint: Path | None, last: int) -> Mapping[int, float]:
        seen.append(config.output)
        return replay(config, checkpoint, last)

    moved = tmp_path.parent / f"{tmp_path.name}-moved"
    run.rename(moved)
    report = verify_run(moved, replay=spy, hash_data=lambda c: DATA, steps=1)
    assert report.has_passed and set(seen) == {str(moved)}


def test_other_code_is_a_note(run: Path) -> None:
    edit_start(run, lambda start: start["code"].update(sha256="0"))
    edit_start(run, lambda start: start["environment"].update(torch="1.0"))
    report = verify(run)
    assert report.has_passed
    assert any("code is not that of the run" in note for note in report.notes)
    assert any(note.startswith("torch was 1.0") for note in report.notes)


def test_a_missing_step_is_named(run: Path) -> None:
    events = parse_lines(read_lines(run))
    write_events(run, [e for e in events if e.get("kind") != "step" or e["step"] != 3])
    assert "receipt.jsonl has no loss of step 3 (1 missing)" in verify(run).problems


def test_folders_without_a_receipt(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="no receipt"):
        verify(tmp_path)
    Receipt.open(tmp_path).close()
    with pytest.raises(ArgumentError, match="no configuration"):
        verify(tmp_path)
    with pytest.raises(ArgumentError, match="0 steps"):
        verify(tmp_path, steps=0)


def test_steps_far_from_a_checkpoint_are_not_chosen() -> None:
    recorded = list(range(1, 1001))
    groups = choose_steps(recorded, [0, 500], 5000, random.Random(0))
    assert groups == {
        0: list(range(1, MAX_REPLAY + 1)),
        500: list(range(501, 501 + MAX_REPLAY)),
    }
    assert choose_steps([5], [9], 3, random.Random(0)) == {}


def test_a_run_that_was_killed_has_no_summary_and_verifies(run: Path) -> None:
    (run / "receipt.json").unlink()
    report = verify(run)
    assert report.has_passed and "did not end by itself" in report.describe()


def test_seeds_choose_steps(run: Path) -> None:
    def choose(seed: int) -> tuple[int, ...]:
        report = verify_run(run, replay=replay, hash_data=lambda c: DATA, steps=2, seed=seed)
        return tuple(report.chosen)

    assert len({choose(seed) for seed in range(6)}) > 1
    assert choose(3) == choose(3)


def test_steps_before_a_change_of_the_configuration_are_not_replayed(tmp_path: Path) -> None:
    """A run that was resumed with more steps and another rate at step 4."""
    section = CheckpointSection(every=2, keep=9)
    config = TrainConfig(output=str(tmp_path), steps=4, deterministic=True, checkpoint=section)
    tiny_run.train(config)
    tiny_run.train(replace(config, steps=8))
    report = verify(tmp_path, data={})
    assert report.has_passed, report.describe()
    assert report.chosen == [5, 6, 7, 8]
    assert any("restart at step 4" in note for note in report.notes)


def test_a_run_that_goes_on_with_another_config_or_other_data_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "step-000001").mkdir()
    path = tmp_path / "step-000001"
    (path / "manifest.json").write_text("{}")
    config = TrainConfig(seed=1)
    Receipt.open(tmp_path, config=config, data={"sources": "a", "tokens": "b"}).close()
    data = {"sources": "a", "tokens": "b"}
    Receipt.open(tmp_path, config=config, data=data, step=1, resumed_from=path).close()
    assert not caplog.records
    changed = replace(config, seed=2, steps=7, output="moved")
    data = {"sources": "a", "tokens": "c"}
    Receipt.open(tmp_path, config=changed, data=data, step=1, resumed_from=path).close()
    assert [record.getMessage() for record in caplog.records] == [
        "the run goes on with another config: seed 1 → 2",
        "the run goes on with other data than before: tokens changed",
    ]
