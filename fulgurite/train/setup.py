"""Builds the parts of a run: a resolved config in; tokenizer, data, model, layout and optimizer out.

    resolve(config)  ─▶  build_parts(config)  ─▶  Parts  ─▶  Trainer

Everything that may be wrong with a config is found here, before the first step.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fulgurite.compile import Compiled
from fulgurite.compile import compile as compile_module
from fulgurite.errors import ArgumentError
from fulgurite.kernels.gemm.dense_linear import use_dense_kernels
from fulgurite.logs import LOG
from fulgurite.models.tokenizer import Tokenizer
from fulgurite.train.build import BuiltModel, build_training_model
from fulgurite.train.checks import check_device, check_length, check_precision
from fulgurite.train.config import TrainConfig
from fulgurite.train.config_file import check_choices
from fulgurite.train.data import open_dataset, prepare_tokenizer
from fulgurite.train.data.dataset import TRAIN, VALIDATION
from fulgurite.train.flops import ModelFlops, count_flops
from fulgurite.train.layout import Layout, ModelParallelLayout
from fulgurite.train.loss import LossModule
from fulgurite.train.optim import build_optimizer
from fulgurite.train.parallel import ShardedData, build_layout, resolve_degrees
from fulgurite.train.parallel.compiled import CompiledLayers, compile_layers
from fulgurite.train.precision import precision_transforms
from fulgurite.train.profile import parse_range
from fulgurite.train.remat import apply_remat, compiler_policy
from fulgurite.train.sizes import resolve_sizes
from fulgurite.train.tune.task import Data, TuneTask, is_tuning, prepare_tuning

VOCAB_MULTIPLE = 64  # rows of a new embedding: full tiles of GEMMs


@dataclass(frozen=True)
class Parts:
    """What a trainer works with.

    Attributes:
        model: as the layout sharded it.
        loss_module: compiled, if the config says so; `eager` is the same module without.
        compiled_layers: under model parallelism, where layers are compiled and not the loss.
        flops: of one token, counted before sharding.
        task: of fine-tuning; None: pretraining, also from a checkpoint.
    """

    config: TrainConfig
    output: Path
    device: torch.device
    tokenizer: Tokenizer
    train_data: Data
    validation_data: Data
    built: BuiltModel
    model: nn.Module
    eager: nn.Module
    loss_module: nn.Module
    layout: Layout
    optimizer: torch.optim.Optimizer
    flops: ModelFlops
    task: TuneTask | None = None
    compiled_layers: CompiledLayers | None = None

    @property
    def compiled(self) -> Compiled | None:
        """What was compiled: the loss or the layers; None: nothing."""
        if self.compiled_layers is not None:
            return self.compiled_layers.compiled
        step: Any = self.loss_module
        return None if step is self.eager else step

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and prints."""
        return self.layout.rank == 0


def resolve(config: TrainConfig, world: int | None = None) -> TrainConfig:
    """The config with every choice made, for `world` ranks; None: those of the environment."""
    check_choices(config)
    parse_range(config.log.profile)  # raises for what is no range of steps
    if config.tune.method != "none" and config.model.init_from is None:
        raise ArgumentError(
            f"tune.method={config.tune.method!r} on new weights: they would stay random and frozen",
            next="--model.init_from CHECKPOINT, or tune.method=none",
        )
    world = int(os.environ.get("WORLD_SIZE", "1")) if world is None else world
    return resolve_sizes(config, resolve_degrees(config.parallel, world).data)


def choose_device(config: TrainConfig) -> torch.device:
    """The device of this rank; a GPU becomes the current one."""
    if config.device != "cuda":
        return torch.device("cpu")
    check_device(config)
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def build_parts(config: TrainConfig) -> Parts:
    """The parts of a run whose config is resolved and names its folder."""
    assert config.output is not None and config.steps is not None, "the config is resolved"
    output, device = Path(config.output), choose_device(config)
    if config.deterministic and device.type == "cpu":
        torch.set_num_threads(1)  # libraries add in another order with another number of threads
    torch.manual_seed(config.seed)
    tokenizer = prepare_tokenizer(config, output)
    built = build_training_model(config, choose_vocab_size(config, tokenizer), device)
    built = add_token_fields(built, tokenizer)
    assert config.data.sequence_length is not None, "the config is resolved"
    check_length(built.model.config, config.data.sequence_length)
    flops = count_flops(built.model, config.data.sequence_length)
    layout = build_layout(config, built.model.config, device)
    task = prepare_tuning(config, built.model, tokenizer) if is_tuning(config) else None
    train_data, validation_data = (
        (task.dataset, task.validation)
        if task is not None
        else (open_dataset(config, tokenizer, split) for split in (TRAIN, VALIDATION))
    )
    if task is not None:
        config = task.config  # a frozen base keeps the selection biases of its routers
    assert config.steps is not None, "the config is resolved"
    if config.deterministic:
        use_dense_kernels(built.model)
    if task is not None:
        task.copy_models(is_sharded=isinstance(layout, ShardedData))
    model = layout.shard(apply_remat(built.model, config.parallel.remat))
    eager = build_loss(model, config, layout, task)
    loss_module, layers = compile_step(eager, model, config, device, layout)
    return Parts(
        config=config,
        output=output,
        device=device,
        tokenizer=tokenizer,
        train_data=train_data,
        validation_data=validation_data,
        built=built,
        model=model,
        eager=eager,
        loss_module=loss_module,
        compiled_layers=layers,
        layout=layout,
        optimizer=build_optimizer(model, config.optimizer, config.steps, config.deterministic),
        flops=flops,
        task=task,
    )


def build_loss(
    model: nn.Module, config: TrainConfig, layout: Layout, task: TuneTask | None
) -> nn.Module:
    """The loss of pretraining, or that of a task."""
    if task is not None:
        return task.build_loss(model, layout)  # type: ignore[arg-type]
    return LossModule(model, config.loss)  # type: ignore[arg-type]


def compile_step(
    eager: nn.Module, model: nn.Module, config: TrainConfig, device: torch.device, layout: Layout
) -> tuple[nn.Module, CompiledLayers | None]:
    """The loss to run, and the compiled layers of a model that ranks share.

    Under model parallelism the layers are compiled, in place; evaluation still runs them eagerly.
    """
    options = compile_options(config, device)
    if options is None:
        return eager, None
    if isinstance(layout, ModelParallelLayout):
        if config.parallel.tensor > 1 and config.parallel.remat == "full":
            # AOTAutograd would save the DeviceMesh of a DTensor for backward: it saves tensors only.
            LOG.info("layers run eagerly: parallel.tensor with parallel.remat=full")
            return eager, None
        return eager, compile_layers(model, options)
    return compile_module(eager, **options), None


def compile_options(config: TrainConfig, device: torch.device) -> dict[str, Any] | None:
    """Options of `fulgurite.compile`, with the number formats of matmuls; None: not compiled.

    In deterministic mode nothing is chosen by timing: another choice would have other bits.
    """
    check_precision(config)
    transforms = precision_transforms(config.precision, device)
    if not config.compile:
        return None
    options: dict[str, Any] = {
        "remat": compiler_policy(config.parallel.remat),
        "transforms": transforms,
    }
    if config.deterministic:
        options["autotune"] = False
    return options


def choose_vocab_size(config: TrainConfig, tokenizer: Tokenizer) -> int:
    """Rows of the embedding: those of the tokenizer, for a new model rounded up or as it says."""
    if config.model.init_from is not None:
        return tokenizer.vocab_size
    rows = config.model.fields.get("vocab_size")
    if isinstance(rows, int) and rows >= tokenizer.vocab_size:
        return rows
    if rows is not None:
        raise ArgumentError(
            f"model.fields.vocab_size={rows!r}, but the tokenizer has {tokenizer.vocab_size} tokens",
            next=f"leave it out, or use at least {tokenizer.vocab_size}",
        )
    return -(-tokenizer.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def add_token_fields(built: BuiltModel, tokenizer: Tokenizer) -> BuiltModel:
    """Fields of config.json that the tokenizer decides, where the model has none."""
    stops, special = list(tokenizer.stop_ids), tokenizer.special_tokens
    ids = {name: tokenizer.token_id(token) for name, token in special.items() if token is not None}
    end = ids.get("eos_token", stops[0] if stops else None)
    found: Mapping[str, Any] = {
        "bos_token_id": end if tokenizer.bos_id is None else tokenizer.bos_id,  # after a document
        "eos_token_id": stops[0] if len(stops) == 1 else stops or None,
        "pad_token_id": ids.get("pad_token"),
    }
    return BuiltModel(built.model, built.family, {**found, **built.fields})
