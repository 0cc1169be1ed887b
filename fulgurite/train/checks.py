"""`check_run`: a resolved config and a number of ranks in; an error for what can't run out.

Nothing is written, and no text and no weights are read: what is wrong with a config is said at once,
before a run has a folder and before ranks start. What only data or weights show is left to `build_parts`.
"""

from __future__ import annotations

import difflib
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from fulgurite.errors import ArgumentError, WeightsError
from fulgurite.logs import LOG
from fulgurite.models.config import ConfigFields, ModelConfig
from fulgurite.models.families.family import ModelFamily
from fulgurite.models.loading import hub
from fulgurite.models.loading.checkpoint import open_checkpoint
from fulgurite.models.loading.load_plan import build_model
from fulgurite.train.balance import choose_balance
from fulgurite.train.build import get_dtype, read_model_config
from fulgurite.train.config import TrainConfig
from fulgurite.train.data.sources import TOKENS, find_sources
from fulgurite.train.data.tokenizer import FOLDER, MIN_VOCAB_SIZE
from fulgurite.train.family_fields import build_fields
from fulgurite.train.parallel import resolve_degrees
from fulgurite.train.parallel.build import check_layout
from fulgurite.train.profile import parse_range
from fulgurite.train.sizes import SIZES
from fulgurite.train.tune.chat import find_record_files
from fulgurite.train.tune.rewards import load_rewards
from fulgurite.train.tune.rollouts import completions_of_rank
from fulgurite.train.tune.task import check_tuning

# Fields of a published config.json that say nothing about the modules, or are read elsewhere.
OTHER_FIELDS = frozenset(
    ["architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "vocab_size"]
    + ["bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "initializer_range"]
    + ["qk_head_dim"]  # DeepSeek: the sum of two others
)

NEAR_NAME = (
    0.7  # likeness of two names for one thing: `num_experts` and `n_routed_experts` have 0.74
)


def check_run(config: TrainConfig, world: int | None = None) -> None:
    """Raise for what can't run on `world` ranks; None: those of the environment."""
    world = int(os.environ.get("WORLD_SIZE", "1")) if world is None else world
    degrees = resolve_degrees(config.parallel, world)
    check_device(config)
    check_precision(config)
    check_log(config)
    check_tuning(config)
    model_config = check_model(config)
    check_balance(config, model_config)
    check_layout(config, model_config, degrees)
    check_length(model_config, config.data.sequence_length or 1)
    check_data(config)
    if config.tune.task == "grpo":
        load_rewards(config.tune.rewards)
        completions_of_rank(config, degrees.data)


def check_device(config: TrainConfig) -> None:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("device = 'cuda', and there is no GPU", next="use --device cpu")


def check_precision(config: TrainConfig) -> None:
    if config.precision.matmul != "none" and not config.compile:
        raise ArgumentError(
            f"precision.matmul = {config.precision.matmul!r} needs compile = true",
            next="leave out --compile false, or set precision.matmul to none",
        )


def check_log(config: TrainConfig) -> None:
    """Packages that write metrics, and the steps that are recorded."""
    section = config.log
    for name, package in (("tensorboard", "tensorboard"), ("wandb", "wandb")):
        if getattr(section, name) and find_spec(package) is None:
            raise ArgumentError(
                f"log.{name} needs the {package} package", next=f"pip install {package}"
            )
    if section.explain and not config.compile:
        raise ArgumentError("log.explain = true needs compile = true", next="leave out log.explain")
    first, _ = parse_range(section.profile)
    assert config.steps is not None, "the config is resolved"
    if section.profile is not None and first >= config.steps:
        raise ArgumentError(
            f"log.profile = {section.profile!r} begins after the {config.steps} steps of the run",
            next=f"begin at {config.steps - 1} or before",
        )


def check_length(model_config: ModelConfig, sequence_length: int) -> None:
    if sequence_length > model_config.max_positions:
        raise ArgumentError(
            f"data.sequence_length={sequence_length} is more than the "
            f"{model_config.max_positions} positions of the model",
            next=f"use at most {model_config.max_positions}",
        )


# ---- the model -------------------------------------------------------------------------------------


def check_model(config: TrainConfig) -> ModelConfig:
    """The config of the model; ArgumentError if it can't be built."""
    section = config.model
    if section.init_from is not None:
        with open_checkpoint(hub.resolve_model_path(section.init_from)) as checkpoint:
            return checkpoint.config
    rows = section.fields.get("vocab_size", config.data.vocab_size)
    fields = {**section.fields, "vocab_size": rows}
    family, model_config = read_model_config(fields, section.architecture or "")
    check_fields(config, family, model_config, fields)
    model = build_model(model_config, family, get_dtype(section.dtype))
    choose_balance(model, config.loss)
    return model_config


def check_balance(config: TrainConfig, model_config: ModelConfig) -> None:
    """`choose_balance` sees the layers of a rank: a pipeline stage may have no experts."""
    if config.loss.balance in ("bias", "aux") and model_config.moe is None:
        raise ArgumentError(
            f"loss.balance={config.loss.balance!r}, and the model has no experts",
            next="leave out loss.balance",
        )


def check_fields(
    config: TrainConfig, family: ModelFamily, model_config: ModelConfig, fields: dict[str, Any]
) -> None:
    """Fields that the family does not read have no effect: an error if one nearly has the name of a
    field that it reads, else a warning."""
    architecture, length = config.model.architecture or "", config.data.sequence_length or 1
    known = build_fields(architecture, SIZES[config.size], length)
    for name in fields.keys() - known.keys() - OTHER_FIELDS:
        if is_read(fields, name, family, model_config):
            continue
        what = f"model.fields.{name} has no effect: {architecture} does not read it"
        near = difflib.get_close_matches(name, known, n=1, cutoff=NEAR_NAME)
        if near:
            raise ArgumentError(what, next=f"did you mean model.fields.{near[0]}?")
        LOG.warning("%s", what)


def is_read(
    fields: dict[str, Any], name: str, family: ModelFamily, model_config: ModelConfig
) -> bool:
    """Whether a family reads a field: a value that no field can have changes its config, or is an
    error."""
    try:
        other = family.read_config(ConfigFields({**fields, name: object()}, "model.fields"))
    except (WeightsError, TypeError, ValueError, AttributeError):
        return True
    return other != model_config


# ---- data ------------------------------------------------------------------------------------------


def check_data(config: TrainConfig) -> None:
    """Files that exist and are of the kind that the task reads; a tokenizer that can be had."""
    data = config.data
    if config.tune.task == "text":
        kinds = {source.kind for source in find_sources(data.train)}
        if data.validation:
            find_sources(data.validation)
    else:
        kinds = {kind for _, kind in find_record_files(data.train)}
        if data.validation:
            find_record_files(data.validation)
    given = data.tokenizer or config.model.init_from
    if given is not None:
        hub.resolve_model_path(given)
        return
    if config.output is not None and (Path(config.output) / FOLDER).is_dir():
        return  # of the run that goes on
    if config.tune.task != "text":
        raise ArgumentError(
            f"tune.task={config.tune.task!r} without a tokenizer: one is trained on plain text only",
            next="--model.init_from CHECKPOINT, or set data.tokenizer",
        )
    if kinds == {TOKENS}:
        raise ArgumentError(
            "data.train has token files only, and no tokenizer belongs to them",
            next="set data.tokenizer to the tokenizer that wrote them",
        )
    if data.vocab_size is not None and data.vocab_size < MIN_VOCAB_SIZE:
        raise ArgumentError(
            f"data.vocab_size={data.vocab_size} is too small: 256 bytes and the special tokens need "
            f"{MIN_VOCAB_SIZE}",
            next=f"set it to at least {MIN_VOCAB_SIZE}",
        )
