"""The one dial: a config in, the same with every open choice made out.

`--size` sets width, depth, experts, batch, learning rate and steps; a field that is set stays as it is.

| size | dense | mixture: active of all | tokens a step | tokens of a run |
|---|---|---|---|---|
| nano | 1M | 1M of 2M | 2k | 1.6M: minutes on two CPU cores |
| tiny | 7M | 6M of 13M | 16k | 100M |
| small | 34M | 27M of 62M | 64k | 0.5B |
| medium | 108M | 104M of 375M | 256k | 2B |
| large | 0.9B | 1.3B of 6.6B | 1M | 25B |

From tiny on, a run has about 20 tokens for each active parameter. Without an architecture it is a
mixture of experts of dots.llm1: grouped-query attention with QK norm, a sigmoid router with a
correction bias, a shared expert. `--model.architecture Qwen3ForCausalLM` is its dense twin.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from fulgurite.errors import ArgumentError
from fulgurite.train.config import (
    CheckpointSection,
    DataSection,
    EvaluateSection,
    LossSection,
    ModelSection,
    OptimizerSection,
    TrainConfig,
)
from fulgurite.train.config_limits import check_limits
from fulgurite.train.family_fields import Size, build_fields

DEFAULT_ARCHITECTURE = "Dots1ForCausalLM"
SIZES: dict[str, Size] = {
    "nano": Size(128, 4, 4, 2, 32, 384, 8, 2, 128, 2048, 256, 8, 800, 4e-3),
    "tiny": Size(256, 6, 8, 4, 32, 768, 8, 2, 256, 8192, 512, 32, 6000, 3e-3),
    "small": Size(512, 8, 8, 4, 64, 1536, 16, 2, 256, 16_384, 1024, 64, 7000, 2e-3),
    "medium": Size(768, 12, 12, 4, 64, 2304, 32, 4, 384, 32_768, 1024, 256, 8000, 1e-3),
    "large": Size(2048, 16, 16, 8, 128, 6144, 64, 8, 1024, 65_536, 2048, 512, 25_000, 4e-4),
}
FINE_TUNING_STEPS = 1000
FINE_TUNING_RATE = {"none": 2e-5, "lora": 2e-4, "qlora": 2e-4}  # full, and of adapters
MUON_RATE_FACTOR = 5.0  # Muon's peak over AdamW's; nano on the demo text: loss 3.8 against 4.7
SAVES = 10  # checkpoints and evaluations of a run, if not set
DETERMINISTIC_SHARES = 4  # microbatches of a step at least, so that 1, 2 and 4 ranks agree
BALANCE_RATES = (1e-3, 1e-2)  # DeepSeek-V3's, for long runs; short ones have fewer steps to move
BALANCE_PATH = (
    5.0  # how far a bias can move in a run: scores are sigmoids, so it may pass all of them
)
SAME_NAME = (
    0.92  # likeness of two names that differ by a slip; `intermediate_size` has 0.89 to `moe_...`
)
CPU_TOKENS = 1024  # of a microbatch on a CPU: activations stay in cache


def resolve_sizes(config: TrainConfig, data_ranks: int = 1) -> TrainConfig:
    """The config with every open choice made. `data_ranks` share each step."""
    if config.size not in SIZES:
        raise ArgumentError(f"size={config.size!r} is not known", next=f"one of {', '.join(SIZES)}")
    check_limits(config)
    size = SIZES[config.size]
    device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    config = replace(config, device=device)
    data = _resolve_data(config.data, size)
    steps = _resolve_steps(config, size)
    batch_size = config.batch_size if config.batch_size is not None else size.batch_size
    config = replace(
        config,
        steps=steps,
        batch_size=batch_size,
        data=data,
        model=_resolve_model(config, size, data),
        optimizer=_resolve_optimizer(config, size),
        loss=_resolve_loss(config.loss, steps),
        checkpoint=_resolve_checkpoint(config.checkpoint, steps),
        evaluate=_resolve_evaluate(config.evaluate, steps),
    )
    if config.microbatch_size is None:
        config = replace(config, microbatch_size=choose_microbatch(config, size, data_ranks))
    return config


def _resolve_data(section: DataSection, size: Size) -> DataSection:
    length = section.sequence_length
    return replace(
        section,
        sequence_length=size.sequence_length if length is None else length,
        vocab_size=size.vocab_size if section.vocab_size is None else section.vocab_size,
    )


def _resolve_model(config: TrainConfig, size: Size, data: DataSection) -> ModelSection:
    section = config.model
    dtype = section.dtype or ("float32" if config.device == "cpu" else "bfloat16")
    if section.init_from is not None:
        if section.architecture is not None or section.fields:
            raise ArgumentError(
                "model.init_from brings its own architecture and fields",
                next="leave out model.architecture and model.fields, or model.init_from",
            )
        return replace(section, dtype=dtype)
    assert data.sequence_length is not None, "resolved before"
    architecture = section.architecture or DEFAULT_ARCHITECTURE
    chosen = build_fields(architecture, size, data.sequence_length)
    _check_field_names(section.fields, chosen)
    fields = {**chosen, **section.fields}
    return replace(section, architecture=architecture, fields=fields, dtype=dtype)


def _check_field_names(given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise for a name that is nearly one of a size: nothing would read it."""
    for name in given:
        near = difflib.get_close_matches(name, known, n=1, cutoff=SAME_NAME)
        if near and name not in known:
            raise ArgumentError(
                f"model.fields.{name} is no field of the model",
                next=f"did you mean model.fields.{near[0]}?",
            )


def _resolve_steps(config: TrainConfig, size: Size) -> int:
    if config.steps is not None:
        return config.steps
    return size.steps if config.model.init_from is None else FINE_TUNING_STEPS


def _resolve_optimizer(config: TrainConfig, size: Size) -> OptimizerSection:
    section = config.optimizer
    if section.name is None:
        section = replace(section, name="muon" if config.model.init_from is None else "adamw")
    base = size.learning_rate
    if config.model.init_from is not None:
        base = FINE_TUNING_RATE.get(config.tune.method, FINE_TUNING_RATE["none"])
    rate = section.learning_rate
    if rate is None:
        rate = base * MUON_RATE_FACTOR if section.name == "muon" else base
    adam_rate = section.adam_learning_rate
    if adam_rate is None:
        adam_rate = base if section.name == "muon" else rate
    return replace(section, learning_rate=rate, adam_learning_rate=adam_rate)


def _resolve_loss(section: LossSection, steps: int) -> LossSection:
    low, high = BALANCE_RATES
    chosen = min(max(BALANCE_PATH / steps, low), high)
    rate = section.balance_rate
    return replace(section, balance_rate=chosen if rate is None else rate)


def _resolve_checkpoint(section: CheckpointSection, steps: int) -> CheckpointSection:
    every = max(1, steps // SAVES) if section.every is None else section.every
    return replace(section, every=every)


def _resolve_evaluate(section: EvaluateSection, steps: int) -> EvaluateSection:
    every = max(1, steps // SAVES) if section.every is None else section.every
    return replace(section, every=every)


def choose_microbatch(config: TrainConfig, size: Size, data_ranks: int) -> int:
    """Sequences of one forward and backward: the most that fit, and that divide the step."""
    assert config.batch_size is not None and config.data.sequence_length is not None
    if data_ranks < 1 or config.batch_size % data_ranks:
        raise ArgumentError(
            f"batch_size={config.batch_size} can't be shared by {data_ranks} data ranks",
            next=f"use a multiple of {max(1, data_ranks)}",
        )
    share = config.batch_size // data_ranks
    if config.deterministic:  # the same for any number of ranks up to this one
        share = math.gcd(config.batch_size, config.batch_size // DETERMINISTIC_SHARES or 1)
        share = math.gcd(share, config.batch_size // data_ranks)
    tokens = CPU_TOKENS if config.device == "cpu" else size.device_tokens
    limit = max(1, tokens // config.data.sequence_length)
    return max(part for part in range(1, share + 1) if share % part == 0 and part <= limit)
