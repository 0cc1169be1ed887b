"""Optimizers, schedules and clipping: gradients in, new weights out.

model ─ build_groups ─▶ AdamW or Muon ◀─ set_learning_rate(step)
gradients ─ clip_gradients ─▶ optimizer.step() ─▶ weights

build.py      build_optimizer               adamw.py      AdamW
groups.py     weight decay, algorithm       muon.py       Muon
schedule.py   learning rates                states.py     float32, bfloat16, 8-bit states
clip.py       clipping on the device        rounding.py   master weights, stochastic rounding
shards.py     DTensors and their local shards
"""

from __future__ import annotations

from fulgurite.train.optim.adamw import AdamW
from fulgurite.train.optim.build import build_optimizer
from fulgurite.train.optim.clip import clip_gradients, local_gradient_norm
from fulgurite.train.optim.muon import Muon
from fulgurite.train.optim.schedule import learning_rate, set_learning_rate

__all__ = [
    "AdamW",
    "Muon",
    "build_optimizer",
    "clip_gradients",
    "learning_rate",
    "local_gradient_norm",
    "set_learning_rate",
]
