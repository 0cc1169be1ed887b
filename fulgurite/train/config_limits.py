"""Limits of the numbers of a config: a `TrainConfig` in, an error for the first number out of range out.

Every number is checked before a run has a folder or reads a file. NaN and infinity are never in range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fulgurite.errors import ArgumentError
from fulgurite.train.config import TrainConfig


@dataclass(frozen=True)
class Limit:
    """From `least` to `most`.

    Attributes:
        has_least, has_most: whether the limit itself is allowed.
    """

    least: float
    most: float = math.inf
    has_least: bool = True
    has_most: bool = True

    def contains(self, value: float) -> bool:
        is_above = value >= self.least if self.has_least else value > self.least
        is_below = value <= self.most if self.has_most else value < self.most
        return math.isfinite(value) and is_above and is_below

    def __str__(self) -> str:
        text = f"{'at least' if self.has_least else 'above'} {self.least:g}"
        if self.most == math.inf:
            return text
        most = "2**63" if self.most == 2**63 else f"{self.most:g}"
        return f"{text} and {'at most' if self.has_most else 'below'} {most}"


AT_LEAST_0, AT_LEAST_1 = Limit(0), Limit(1)
ABOVE_0 = Limit(0, has_least=False)
SHARE, BELOW_1 = Limit(0, 1), Limit(0, 1, has_most=False)
LIMITS: dict[str, Limit] = {
    "steps": AT_LEAST_1,
    "batch_size": AT_LEAST_1,
    "microbatch_size": AT_LEAST_1,
    "seed": Limit(0, 2**63, has_most=False),  # torch.manual_seed takes 64 bits, with a sign
    "data.holdout": Limit(2),  # one document in two at most: the others are trained on
    "data.vocab_size": AT_LEAST_1,
    "data.sequence_length": AT_LEAST_1,
    "data.max_bad_samples": AT_LEAST_0,
    "data.workers": AT_LEAST_0,
    "optimizer.learning_rate": AT_LEAST_0,
    "optimizer.adam_learning_rate": AT_LEAST_0,
    "optimizer.warmup": AT_LEAST_0,
    "optimizer.decay": SHARE,
    "optimizer.final_ratio": SHARE,
    "optimizer.weight_decay": AT_LEAST_0,
    "optimizer.betas": BELOW_1,
    "optimizer.epsilon": AT_LEAST_0,
    "optimizer.momentum": BELOW_1,
    "optimizer.clip_norm": AT_LEAST_0,
    "loss.z_loss": AT_LEAST_0,
    "loss.balance_rate": AT_LEAST_0,
    "loss.aux_loss": AT_LEAST_0,
    "parallel.timeout": ABOVE_0,
    "checkpoint.every": AT_LEAST_0,
    "checkpoint.keep": AT_LEAST_1,
    "checkpoint.max_restarts": AT_LEAST_0,
    "evaluate.every": AT_LEAST_0,
    "evaluate.batches": AT_LEAST_1,
    "evaluate.sample_tokens": AT_LEAST_0,
    "log.every": AT_LEAST_1,
    "log.max_nonfinite": AT_LEAST_0,
    "tune.rank": AT_LEAST_1,
    "tune.alpha": ABOVE_0,
    "tune.dropout": BELOW_1,
    "tune.beta": AT_LEAST_0,
    "tune.group_size": Limit(2),  # a group has a mean and a deviation
    "tune.updates": AT_LEAST_1,
    "tune.clip_range": ABOVE_0,
    "tune.max_tokens": AT_LEAST_1,
    "tune.temperature": ABOVE_0,
}


def check_limits(config: TrainConfig) -> None:
    """Raise for a number that is out of range; None is a choice that is still open."""
    for name, limit in LIMITS.items():
        value: Any = config
        for part in name.split("."):
            value = getattr(value, part)
        numbers = value if isinstance(value, tuple) else (value,)
        if any(number is not None and not limit.contains(number) for number in numbers):
            raise ArgumentError(f"{name}={value}", next=f"{name} must be {limit}")
