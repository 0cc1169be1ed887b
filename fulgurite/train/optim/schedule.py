"""Learning rates: a step number in, the learning rate of that step out.

    rate(step) = peak * min(warmup(step), decay(step))

    warmup     rises linearly; the first step has 1 / warmup steps of the peak, so none is lost
    wsd        1, then linear to `final_ratio` over the last `decay` share of the steps
    cosine     half a cosine from the end of the warmup to `final_ratio`
    linear     a line from the end of the warmup to `final_ratio`
    constant   1

`final_ratio` is reached at the end of the last step. The minimum of both makes every combination
continuous: also a warmup that is longer than the run.
"""

from __future__ import annotations

import math

import torch

from fulgurite.errors import ArgumentError
from fulgurite.train.config import OptimizerSection

SCHEDULES = ("wsd", "cosine", "linear", "constant")


def learning_rate(section: OptimizerSection, step: int, steps: int) -> float:
    """The learning rate of step `step` (from 0) of `steps`."""
    return peak_learning_rate(section) * learning_rate_factor(section, step, steps)


def set_learning_rate(
    optimizer: torch.optim.Optimizer, section: OptimizerSection, step: int, steps: int
) -> None:
    """Set the learning rate of every parameter group for step `step`."""
    factor = learning_rate_factor(section, step, steps)
    for group in optimizer.param_groups:
        group["lr"] = group_peak(section, group.get("algorithm", "adamw")) * factor


def peak_learning_rate(section: OptimizerSection) -> float:
    if section.learning_rate is None:
        raise ArgumentError(
            "optimizer.learning_rate is not set", next="set it, or let resolve_sizes choose it"
        )
    if not (math.isfinite(section.learning_rate) and section.learning_rate >= 0):
        raise ArgumentError(
            f"optimizer.learning_rate={section.learning_rate}", next="use a number of at least 0"
        )
    return section.learning_rate


def group_peak(section: OptimizerSection, algorithm: str) -> float:
    """The peak of a parameter group: what Muon leaves to AdamW may have one of its own."""
    if section.name == "muon" and algorithm == "adamw" and section.adam_learning_rate is not None:
        return section.adam_learning_rate
    return peak_learning_rate(section)


def learning_rate_factor(section: OptimizerSection, step: int, steps: int) -> float:
    """The share of the peak, from 0 to 1."""
    _check(section)
    step = max(step, 0)
    warmup = count_warmup_steps(section, steps)
    rise = min(1.0, (step + 1) / warmup) if warmup else 1.0
    return min(rise, _decay_factor(section, step, steps, warmup))


def count_warmup_steps(section: OptimizerSection, steps: int) -> int:
    """`warmup` in steps: a value below 1 is a fraction of all steps."""
    return round(section.warmup * steps if section.warmup < 1 else section.warmup)


def _decay_factor(section: OptimizerSection, step: int, steps: int, warmup: int) -> float:
    if section.schedule == "constant":
        return 1.0
    length = max(steps - warmup, 0)
    if section.schedule == "wsd":
        length = round(section.decay * steps)
    done = (step - (steps - length)) / length if length > 0 else float(step >= steps)
    done = min(max(done, 0.0), 1.0)
    left = (1 + math.cos(math.pi * done)) / 2 if section.schedule == "cosine" else 1 - done
    return section.final_ratio + (1 - section.final_ratio) * left


def _check(section: OptimizerSection) -> None:
    if section.schedule not in SCHEDULES:
        raise ArgumentError(
            f"optimizer.schedule={section.schedule!r}", next=f"use one of {', '.join(SCHEDULES)}"
        )
    for name, low, high in (("warmup", 0.0, math.inf), ("decay", 0, 1), ("final_ratio", 0, 1)):
        value = getattr(section, name)
        if not low <= value <= high or value == math.inf:
            allowed = "at least 0" if high == math.inf else f"{low:g} to {high:g}"
            raise ArgumentError(f"optimizer.{name}={value}", next=f"use a number of {allowed}")
