"""Training: text in, a checkpoint that the engine serves out.

    TrainConfig ─▶ data/ (documents, tokenizer, packed samples by number) ─┐
               ├─▶ build.py (a family's modules, initialized or loaded)    ├─▶ Trainer ─▶ checkpoints,
               ├─▶ parallel/ (a Layout: ranks, sharding, gradients)        │              safetensors,
               └─▶ optim/ (AdamW, Muon, schedule, clipping)               ─┘              metrics, report

config.py      every option, as typed dataclasses        batch.py      what a step computes on
layout.py      the interface between a step and ranks    tune/         LoRA, DPO, GRPO
"""

from __future__ import annotations
