"""A mixture of experts beside its dense twin: text in, the wall time of each to the same loss out.

Both are trained by the loop of `fulgurite train` for the same seconds: same text, tokenizer, batch, rates
and compiler. Their sizes are those of `--size`, where the twins have about as many active parameters.
Held-out loss is measured every so many steps; its time, and that of the first steps, which compile, don't
count. The loss to reach is the worse of the two best ones, so that both reach it.

    speedup = seconds of the dense twin / seconds of the mixture, to that loss

The text is Python source of the torch package: 48 MB that every install has. Rates are constant after
warmup, so a run may end at any time.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fulgurite.bench import results
from fulgurite.train.config import (
    CheckpointSection,
    DataSection,
    ModelSection,
    OptimizerSection,
    TrainConfig,
)
from fulgurite.train.evaluate import evaluate
from fulgurite.train.setup import Parts, build_parts, resolve
from fulgurite.train.step import TrainStep
from fulgurite.train.trainer import make_loader

Row = dict[str, Any]
Curve = list[tuple[float, float]]  # seconds of training, held-out loss
MIXTURE, DENSE = "mixture of experts", "dense twin"
ARCHITECTURES = {DENSE: "Qwen3ForCausalLM", MIXTURE: "Dots1ForCausalLM"}
COMPILE_STEPS = 8  # CUDA graphs are captured after a few calls
STEPS = 2000  # sets warmup and the rate of balancing; no twin gets that far


@dataclass(frozen=True)
class TwinBudget:
    """What a device has time for.

    Attributes:
        size: of `--size`.
        seconds: of training, each twin.
        every: steps between two evaluations.
        batches: of an evaluation.
        files: of the text, at most.
    """

    size: str
    seconds: float
    every: int
    batches: int
    files: int


BUDGETS = {
    ("cuda", False): TwinBudget("small", 35.0, 50, 8, 10_000),
    ("cuda", True): TwinBudget("tiny", 10.0, 50, 8, 500),
    ("cpu", False): TwinBudget("nano", 90.0, 20, 8, 200),
    ("cpu", True): TwinBudget("nano", 4.0, 4, 2, 40),
}


def measure_twins(device: str, quick: bool) -> Iterator[Row]:
    """A row for each twin when it has run, and again, with times to the same loss, when both have."""
    budget = BUDGETS[device.partition(":")[0], quick]
    with tempfile.TemporaryDirectory() as folder:
        curves = {}
        rows: dict[str, Row] = {}
        for name, architecture in ARCHITECTURES.items():
            torch._dynamo.reset()
            parts = build_parts(resolve(make_config(Path(folder), architecture, device, budget), 1))
            curves[name], row = train_for(parts, budget)
            rows[name] = row | {"model": name, "curve": curves[name]}
            yield rows[name]
            del parts
    target = max(min(loss for _, loss in curve) for curve in curves.values())
    for name, row in rows.items():
        row["target_loss"] = target
        row["seconds_to_target"] = seconds_to(curves[name], target)
    for row in rows.values():
        row["speedup"] = rows[DENSE]["seconds_to_target"] / row["seconds_to_target"]
    yield from rows.values()


def make_config(folder: Path, architecture: str, device: str, budget: TwinBudget) -> TrainConfig:
    files = sorted(Path(torch.__file__).parent.rglob("*.py"))
    stride = max(1, len(files) // budget.files)
    return TrainConfig(
        output=str(folder),
        device=device,
        size=budget.size,
        steps=STEPS,
        model=ModelSection(architecture=architecture),
        data=DataSection(train=tuple(str(path) for path in files[::stride] if path.stat().st_size)),
        optimizer=OptimizerSection(schedule="constant", warmup=20),
        checkpoint=CheckpointSection(every=0),
    )


def train_for(parts: Parts, budget: TwinBudget) -> tuple[Curve, Row]:
    """Train for the seconds of a budget; held-out losses with their times, and figures of the run."""
    step = TrainStep(parts.loss_module, parts.model, parts.optimizer, parts.layout, parts.config)
    loader = make_loader(parts, 0)
    curve: Curve = []
    seconds, number = 0.0, 0
    started = time.perf_counter()
    try:
        while seconds < budget.seconds or len(curve) < 2:
            begin = time.perf_counter()
            step(number, [batch.to(parts.device) for batch in loader.step(number)])
            number += 1
            if number == COMPILE_STEPS:
                first = time.perf_counter() - started
            if number > COMPILE_STEPS:
                seconds += time.perf_counter() - begin
            if number > COMPILE_STEPS and number % budget.every == 0:
                curve.append((seconds, held_out_loss(parts, budget)))
    finally:
        loader.close()
    config, timed = parts.config, number - COMPILE_STEPS
    assert config.batch_size is not None and config.data.sequence_length is not None
    return curve, {
        "parameters": parts.flops.parameters,
        "active_parameters": parts.flops.active_parameters,
        "steps": number,
        "tokens_per_second": timed * config.batch_size * config.data.sequence_length / seconds,
        "best_loss": min(loss for _, loss in curve),
        "first_seconds": first,
    }


def held_out_loss(parts: Parts, budget: TwinBudget) -> float:
    assert parts.config.microbatch_size is not None, "the config is resolved"
    found = evaluate(
        parts.eager,
        parts.validation_data,
        parts.layout,
        batches=budget.batches,
        batch_size=parts.config.microbatch_size,
        device=parts.device,
    )
    return found.loss


def seconds_to(curve: Curve, target: float) -> float:
    """When a curve first is at the target, between its points."""
    before: tuple[float, float] | None = None
    for seconds, loss in curve:
        if loss <= target:
            if before is None or before[1] == loss:
                return seconds
            share = (before[1] - target) / (before[1] - loss)
            return before[0] + share * (seconds - before[0])
        before = seconds, loss
    raise AssertionError(f"no loss of the curve is {target}")


def format_twins(rows: list[Row]) -> str:
    lines = [["model", "parameters", "active", "tokens/s", "best loss", "to the same loss", "×"]]
    lines += [
        [
            row["model"],
            f"{row['parameters'] / 1e6:.1f}M",
            f"{row['active_parameters'] / 1e6:.1f}M",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['best_loss']:.3f}",
            f"{row['seconds_to_target']:.1f} s to {row['target_loss']:.3f}"
            if "speedup" in row
            else "",
            f"{row['speedup']:.2f}" if "speedup" in row else "",
        ]
        for row in rows
    ]
    return results.format_table(lines)
