"""Verification of a run by its receipt: hashes compared, random steps replayed.

    report = verify_run(folder, steps=3, seed=0, replay=replay, hash_data=hash_data)

In: the folder of a run; functions that replay steps and hash its data. Out: `VerifyReport`: what was
checked, what is wrong, and the recorded and replayed losses.

Checked are, in this order: the chain of the receipt, its summary, the stored configuration, the data,
every checkpoint that is still there, and the losses of random steps. A step is replayed from the checkpoint
before it, or from the start. All steps on the way are compared too. Losses of a deterministic run must be
equal to the bit; others within a tolerance, and the report says which.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fulgurite.errors import ArgumentError
from fulgurite.train.checkpoint import (
    CheckpointError,
    hash_checkpoint,
    list_checkpoints,
    verify_checkpoint,
)
from fulgurite.train.config import ParallelSection, TrainConfig
from fulgurite.train.config_file import from_mapping, read_config
from fulgurite.train.receipt import (
    LINES,
    SUMMARY,
    describe_environment,
    find_broken_line,
    hash_sources,
    parse_lines,
    read_lines,
    summarize,
)

MAX_REPLAY = 200  # steps from a checkpoint to a step that may be chosen
# Of a loss that is not deterministic, relative: the weights' dtype bounds how far few steps drift.
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}

# (configuration, checkpoint or None for the start, last step) -> loss of every step up to the last
ReplayFunction = Callable[[TrainConfig, Path | None, int], Mapping[int, float]]
DataFunction = Callable[[TrainConfig], Mapping[str, str]]


@dataclass(frozen=True)
class ReplayedStep:
    """A step that was computed again."""

    step: int
    recorded: float
    replayed: float
    tolerance: float | None  # None: to the bit

    @property
    def is_equal(self) -> bool:
        if self.recorded.hex() == self.replayed.hex():
            return True
        if self.tolerance is None:
            return False
        return math.isclose(self.recorded, self.replayed, rel_tol=self.tolerance)

    def describe(self) -> str:
        return (
            f"step {self.step}: the receipt says {self.recorded.hex()} ({self.recorded:.6f}), "
            f"the replay gives {self.replayed.hex()} ({self.replayed:.6f})"
        )


@dataclass
class VerifyReport:
    """What a verification found."""

    chosen: list[int] = field(default_factory=list)
    replayed: list[ReplayedStep] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def has_passed(self) -> bool:
        return not self.problems and bool(self.replayed)

    def describe(self) -> str:
        lines = [f"checked: {text}" for text in self.checked]
        lines += [f"note: {text}" for text in self.notes]
        lines += [f"PROBLEM: {text}" for text in self.problems]
        lines.append("verified" if self.has_passed else "NOT verified")
        return "\n".join(lines)


def verify_run(
    folder: Path | str,
    *,
    replay: ReplayFunction,
    hash_data: DataFunction,
    steps: int = 3,
    seed: int | None = None,
) -> VerifyReport:
    """Check the receipt of a run, and replay `steps` random steps of it."""
    folder, report = Path(folder), VerifyReport()
    if not (folder / LINES).exists():
        raise ArgumentError(f"{folder} has no {LINES}", next="give the folder of a run")
    if steps < 1:
        raise ArgumentError(f"{steps} steps can't be replayed", next="replay at least one")
    events = parse_lines(read_lines(folder))
    _check_chain(events, report)
    receipt = _summarize(events, folder, report)
    config = replace(_read_config(receipt, folder), output=str(folder))
    _check_losses(receipt, report)
    _check_summary(folder, receipt, report)
    _check_stored_config(folder, config, report)
    _note_code(receipt, report)
    _check_data(receipt, hash_data(config), report)
    starts = _check_checkpoints(folder, receipt, report)
    since = _find_last_change(events, report)
    starts = {step: path for step, path in starts.items() if step >= since}
    _replay(config, receipt, starts, replay, random.Random(seed), steps, report)
    return report


def _check_chain(events: list[dict[str, Any]], report: VerifyReport) -> None:
    broken = find_broken_line(events)
    if broken is None:
        report.checked.append(f"the chain of {len(events)} lines of {LINES}")
    else:
        report.problems.append(
            f"{LINES} line {broken} was changed, or a line before it was removed"
        )


def _summarize(events: list[dict[str, Any]], folder: Path, report: VerifyReport) -> dict[str, Any]:
    try:
        return summarize(events)
    except (KeyError, TypeError, ValueError) as error:  # a changed line lacks its fields
        details = "; ".join(report.problems) or None
        raise ArgumentError(f"{folder / LINES} can't be read: {error!r}", others=details) from error


def _read_config(receipt: dict[str, Any], folder: Path) -> TrainConfig:
    if not receipt["config"]:
        raise ArgumentError(
            f"{folder / LINES} has no configuration", next="verify a run of fulgurite train"
        )
    return from_mapping(receipt["config"], where=str(folder / LINES))


def _check_losses(receipt: dict[str, Any], report: VerifyReport) -> None:
    recorded = sorted(int(step) for step in receipt["losses"])
    missing = sorted(set(range(1, recorded[-1] + 1)) - set(recorded)) if recorded else []
    if missing:
        report.problems.append(f"{LINES} has no loss of step {missing[0]} ({len(missing)} missing)")


def _check_summary(folder: Path, receipt: dict[str, Any], report: VerifyReport) -> None:
    if not (folder / SUMMARY).exists():
        report.notes.append(f"the run has no {SUMMARY}: it did not end by itself")
        return
    try:
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    except ValueError as error:
        report.problems.append(f"{SUMMARY} can't be read: {error}")
        return
    receipt = json.loads(json.dumps(receipt))
    differing = sorted(
        k for k in receipt.keys() | summary.keys() if receipt.get(k) != summary.get(k)
    )
    if differing and not receipt["is_finished"]:
        report.notes.append(f"{SUMMARY} is of an earlier part of the run, which goes on")
    elif differing:
        report.problems.append(f"{SUMMARY} differs from {LINES} in {', '.join(differing)}")
    else:
        report.checked.append(f"{SUMMARY} says the same")


def _check_stored_config(folder: Path, config: TrainConfig, report: VerifyReport) -> None:
    path = folder / "config.toml"
    if not path.exists():
        return
    stored, recorded = _flatten(asdict(read_config(path))), _flatten(asdict(config))
    differing = [
        name
        for name, value in stored.items()
        if value is not None and name != "output" and recorded.get(name) != value
    ]
    if differing:
        report.problems.append(f"config.toml differs from the receipt in {', '.join(differing)}")
    else:
        report.checked.append("config.toml is that of the receipt")


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and name != "fields":
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _find_last_change(events: list[dict[str, Any]], report: VerifyReport) -> int:
    """The step since which the run had its last configuration; steps before it are not replayed."""
    starts = [event for event in events if event.get("kind") == "start"]
    configs = [{**event["config"], "output": None} for event in starts]
    since = 0
    for start, before, config in zip(starts[1:], configs, configs[1:]):
        if before != config:
            since = start["step"]
    if since:
        report.notes.append(
            f"the configuration changed in the restart at step {since}; steps before it are not replayed"
        )
    return since


def _note_code(receipt: dict[str, Any], report: VerifyReport) -> None:
    if receipt["code"]["sha256"] == hash_sources():
        report.checked.append(f"the code is that of the run ({receipt['code']['version']})")
    else:
        report.notes.append("the code is not that of the run; bits may differ for that reason")
    here = describe_environment(receipt["environment"]["device"])
    for name in sorted(receipt["environment"].keys() | here.keys()):
        before, now = receipt["environment"].get(name), here.get(name)
        if before != now:
            report.notes.append(
                f"{name} was {before} and is {now}; bits may differ for that reason"
            )


def _check_data(receipt: dict[str, Any], now: Mapping[str, str], report: VerifyReport) -> None:
    before = receipt["data"] or {}
    for name in sorted(before.keys() | now.keys()):
        if name not in now:
            report.problems.append(f"data {name} is gone")
        elif name not in before:
            report.problems.append(f"data {name} was not there when the run began")
        elif before[name] != now[name]:
            report.problems.append(f"data {name} has other content than the run had")
    if not any(text.startswith("data ") for text in report.problems):
        report.checked.append(f"the hashes of {len(now)} parts of the data")


def _check_checkpoints(
    folder: Path, receipt: dict[str, Any], report: VerifyReport
) -> dict[int, Path | None]:
    """Verify all checkpoints; returns those to start from, by step."""
    starts: dict[int, Path | None] = {0: None}
    for step, path in list_checkpoints(folder / "checkpoints"):
        recorded = receipt["checkpoints"].get(path.name)
        try:
            verify_checkpoint(path)
            digest = hash_checkpoint(path)
        except CheckpointError as error:
            report.problems.append(error.one_line())
            continue
        if recorded is None:
            report.problems.append(f"checkpoint {path.name} is not in the receipt")
        elif recorded != digest:
            report.problems.append(f"checkpoint {path.name} is not the one that the run wrote")
        else:
            report.checked.append(f"every byte of checkpoint {path.name}")
            starts[step] = path
    return starts


def choose_steps(
    recorded: list[int], starts: list[int], count: int, generator: random.Random
) -> dict[int, list[int]]:
    """Random recorded steps, by the step of the checkpoint that they are replayed from."""
    reachable: dict[int, int] = {}
    for step in recorded:
        start = max((s for s in starts if s < step), default=None)
        if start is not None and step - start <= MAX_REPLAY:
            reachable[step] = start
    chosen = sorted(generator.sample(sorted(reachable), min(count, len(reachable))))
    groups: dict[int, list[int]] = {}
    for step in chosen:
        groups.setdefault(reachable[step], []).append(step)
    return groups


def _choose_tolerance(
    config: TrainConfig, receipt: dict[str, Any], report: VerifyReport
) -> float | None:
    """How far a loss may be from the recorded one; None: not a bit.

    The replay is on one rank. Replicated data ranks have the bits of one rank; other layouts add in
    another order.
    """
    section = config.parallel
    degrees = (section.tensor, section.expert, section.pipeline, section.context)
    is_replicated = section.data_shard == 1 and max(degrees) == 1
    if config.deterministic and (receipt["ranks"] == 1 or is_replicated):
        return None
    if config.deterministic:
        report.notes.append(
            f"the layout of {receipt['ranks']} ranks adds in another order than the one rank of the replay"
        )
    return TOLERANCES.get(config.model.dtype or "float32", max(TOLERANCES.values()))


def _replay(
    config: TrainConfig,
    receipt: dict[str, Any],
    starts: dict[int, Path | None],
    replay: ReplayFunction,
    generator: random.Random,
    count: int,
    report: VerifyReport,
) -> None:
    losses = {int(step): float.fromhex(text) for step, text in receipt["losses"].items()}
    groups = choose_steps(sorted(losses), sorted(starts), count, generator)
    tolerance = _choose_tolerance(config, receipt, report)
    config = replace(config, parallel=ParallelSection(remat=config.parallel.remat))
    for start, chosen in groups.items():
        report.chosen += chosen
        for step, loss in sorted(replay(config, starts[start], chosen[-1]).items()):
            if step not in losses:
                report.problems.append(f"the replay reaches step {step}, which is not recorded")
                continue
            found = ReplayedStep(step, losses[step], loss, tolerance)
            report.replayed.append(found)
            if not found.is_equal:
                report.problems.append(found.describe())
        missing = set(chosen) - {found.step for found in report.replayed}
        report.problems += [f"the replay did not reach step {step}" for step in sorted(missing)]
    if not groups:
        report.problems.append("no recorded step is near enough to a checkpoint to be replayed")
        return
    how = "to the bit" if tolerance is None else f"within {tolerance:g} of the loss"
    steps = ", ".join(map(str, report.chosen))
    report.checked.append(f"{len(report.replayed)} replayed losses, {how}; chosen: {steps}")
