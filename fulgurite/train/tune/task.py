"""`prepare_tuning`: a config, a model and a tokenizer in, what a trainer needs to tune it out.

task = prepare_tuning(config, model, tokenizer)      adapters added, data read
loss_module = task.build_loss(model, layout)         after the layout has sharded the model
loader = task.make_loader(layout)                    GRPO: samples; None: the trainer's own loader
task.save(folder)                                    adapters in PEFT's layout

tune.method   none: all weights    lora: adapters    qlora: adapters on quantized weights
tune.task     text: plain text     chat: answers     dpo: pairs     grpo: rewards
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fulgurite.determinism import deterministic
from fulgurite.errors import ArgumentError
from fulgurite.models.layers import CausalLM
from fulgurite.models.tokenizer import Tokenizer
from fulgurite.train.config import TrainConfig
from fulgurite.train.data.dataset import TRAIN, VALIDATION, open_dataset
from fulgurite.train.data.packing import PackedDataset
from fulgurite.train.layout import Layout
from fulgurite.train.loss import LossModule
from fulgurite.train.tune.chat import open_chat_dataset, require_length
from fulgurite.train.tune.dpo import DPOLoss, open_pair_dataset, precompute_reference
from fulgurite.train.tune.grpo import GRPOLoss, RolloutTable
from fulgurite.train.tune.lora import LoRAConfig, add_adapters
from fulgurite.train.tune.peft_files import save_adapters
from fulgurite.train.tune.qlora import quantize_frozen
from fulgurite.train.tune.reference import ReferenceModel, copy_model
from fulgurite.train.tune.rewards import load_rewards
from fulgurite.train.tune.rollouts import (
    PromptLine,
    RolloutLoader,
    Sampler,
    completions_of_rank,
    gather_weights,
    read_prompts,
)
from fulgurite.train.tune.rows import RowDataset, make_example

Data = PackedDataset | RowDataset
ADAPTER_FOLDER = "adapter"


def is_tuning(config: TrainConfig) -> bool:
    return config.tune.method != "none" or config.tune.task != "text"


@dataclass
class TuneTask:
    """What is tuned, and on what.

    Attributes:
        model: with its adapters.
        dataset, validation: samples. Of GRPO: prompts only, which the loader samples from.
        adapters: None: all weights are trained.
    """

    config: TrainConfig
    model: CausalLM
    tokenizer: Tokenizer
    dataset: Data
    validation: Data
    adapters: LoRAConfig | None = None
    prompts: Sequence[PromptLine] = ()
    loss_module: nn.Module | None = None
    loader: RolloutLoader | None = None
    reference_model: CausalLM | None = None
    sampling_model: CausalLM | None = None

    def copy_models(self, is_sharded: bool) -> None:
        """Copy the whole model where a task needs a second one; before the layout shards it.

        A reference of its own: DPO and GRPO of all weights. A model for the engine: GRPO whose weights
        ranks share.
        """
        section = self.config.tune
        has_reference = section.task == "dpo" and section.reference == "live"
        has_reference |= section.task == "grpo" and section.beta > 0
        if has_reference and self.adapters is None:
            self.reference_model = copy_model(self.model)
        if section.task == "grpo" and is_sharded:
            self.sampling_model = copy_model(self.model)

    def build_loss(self, model: CausalLM, layout: Layout) -> nn.Module:
        """The loss of the task on the model as the layout sharded it."""
        section, config = self.config.tune, self.config
        with deterministic(config.deterministic):
            if section.task == "dpo":
                self.loss_module = self._build_dpo(model, layout)
            elif section.task == "grpo":
                self.loss_module = self._build_grpo(model, layout)
            else:
                self.loss_module = LossModule(model, config.loss)
        reshard(layout)  # an optimizer made of gathered weights would update them, not the shards
        return self.loss_module

    def _make_reference(self, model: CausalLM, layout: Layout) -> ReferenceModel:
        if self.reference_model is None:
            return ReferenceModel(model)
        return ReferenceModel(model, layout.shard(self.reference_model))  # type: ignore[arg-type]

    def _build_dpo(self, model: CausalLM, layout: Layout) -> DPOLoss:
        section = self.config.tune
        if section.reference == "live":
            return DPOLoss(model, section.beta, reference=self._make_reference(model, layout))
        assert isinstance(self.dataset, RowDataset) and isinstance(self.validation, RowDataset)
        parts = [precompute_reference(model, data) for data in (self.dataset, self.validation)]
        return DPOLoss(model, section.beta, reference_N2=torch.cat(parts))

    def _build_grpo(self, model: CausalLM, layout: Layout) -> GRPOLoss:
        config, section = self.config, self.config.tune
        rows = completions_of_rank(config, layout.data_ranks)
        table = RolloutTable(rows, require_length(config), model.device)
        self.loader = RolloutLoader(
            config,
            self._make_sampler(model, layout),
            self.prompts,
            load_rewards(section.rewards),
            table,
            self._make_reference(model, layout) if section.beta else None,
            layout.data_rank,
            layout.data_ranks,
        )
        return GRPOLoss(
            model,
            table,
            clip_range=section.clip_range,
            beta=section.beta,
            temperature=section.temperature,
        )

    def _make_sampler(self, model: CausalLM, layout: Layout) -> Sampler:
        whole = self.sampling_model
        if whole is None:
            return Sampler(model, self.tokenizer, self.config)

        def sync() -> None:
            reshard(layout)
            gather_weights(model, whole)

        return Sampler(whole, self.tokenizer, self.config, sync)

    def make_loader(self) -> RolloutLoader | None:
        """The loader of GRPO; None: the samples of `dataset` are fixed."""
        return self.loader

    def metrics(self) -> dict[str, float]:
        """Figures of the last step besides its loss: rewards of GRPO."""
        return {} if self.loader is None else dict(self.loader.metrics)

    def select_state(self, weights: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint holds of the model: adapters alone, if it has them. The base is frozen."""
        if self.adapters is None:
            return weights
        trained = {name for name, p in self.model.named_parameters() if p.requires_grad}
        return {name: value for name, value in weights.items() if name in trained}

    def save(self, folder: str | Path) -> Path | None:
        """Write the adapters in PEFT's layout; None: there are none."""
        if self.adapters is None:
            return None
        save_adapters(self.model, self.adapters, folder, self.config.model.init_from)
        return Path(folder)


def reshard(layout: Layout) -> None:
    """Free weights that a forward without a backward, as of a reference, has left gathered."""
    free = getattr(layout, "reshard", None)  # of `parallel.fsdp.ShardedData`
    if free is not None:
        free()


def prepare_tuning(config: TrainConfig, model: CausalLM, tokenizer: Tokenizer) -> TuneTask:
    """Add adapters to the model, in place, and open the data. `config` is resolved."""
    check_tuning(config)
    dataset, validation, prompts = open_tuning_data(config, tokenizer)
    section = config.tune
    adapters = None
    if section.method != "none":
        # the base stays as it is, and so do the biases of its routers
        config = replace(config, loss=replace(config.loss, balance="none"))
        if section.method == "qlora":
            quantize_frozen(model, section.quantize)
        adapters = LoRAConfig(
            section.rank,
            section.alpha,
            section.dropout,
            section.targets,
            section.use_rslora,
            seed=config.seed,
        )
        add_adapters(model, adapters)
    return TuneTask(config, model, tokenizer, dataset, validation, adapters, prompts)


def check_tuning(config: TrainConfig) -> None:
    """ArgumentError for options that don't go together."""
    section, parallel = config.tune, config.parallel
    if section.method != "none":
        for name in ("tensor", "expert", "pipeline"):
            if getattr(parallel, name) > 1:
                raise ArgumentError(
                    f"tune.method={section.method!r} does not run with parallel.{name}="
                    f"{getattr(parallel, name)}: adapters are not sharded",
                    next="use data ranks: --parallel.data, --parallel.data_shard",
                )
    if section.task in ("dpo", "grpo"):
        for name in ("tensor", "expert", "pipeline", "context"):
            if getattr(parallel, name) > 1:
                raise ArgumentError(
                    f"tune.task={section.task!r} does not run with parallel.{name}="
                    f"{getattr(parallel, name)}",
                    next="use data ranks: --parallel.data, --parallel.data_shard",
                )
    if section.task == "grpo" and section.dropout:
        raise ArgumentError("GRPO samples and trains the same model, so it takes no dropout")
    if config.deterministic and section.method != "none" and section.dropout:
        raise ArgumentError(
            f"deterministic=true with tune.dropout={section.dropout}: what is dropped depends on "
            "restarts and on the number of ranks",
            next="tune.dropout=0, or deterministic=false",
        )


def open_tuning_data(
    config: TrainConfig, tokenizer: Tokenizer
) -> tuple[Data, Data, list[PromptLine]]:
    """Samples of both splits, and the prompts of GRPO."""
    task = config.tune.task
    if task == "chat":
        chats = [open_chat_dataset(config, tokenizer, split) for split in (TRAIN, VALIDATION)]
        return chats[0], chats[1], []
    if task == "dpo":
        train = open_pair_dataset(config, tokenizer, TRAIN)
        first = len(train.examples)
        return train, open_pair_dataset(config, tokenizer, VALIDATION, first), []
    if task == "grpo":
        train_prompts, hashes = read_prompts(config, tokenizer, TRAIN)
        held_out, _ = read_prompts(config, tokenizer, VALIDATION)
        data = [as_dataset(config, lines, hashes) for lines in (train_prompts, held_out)]
        return data[0], data[1], train_prompts
    texts = [open_dataset(config, tokenizer, split) for split in (TRAIN, VALIDATION)]
    return texts[0], texts[1], []


def as_dataset(
    config: TrainConfig,
    prompts: Sequence[PromptLine],
    hashes: dict[str, str],
) -> RowDataset:
    """Prompts as rows, for what counts or hashes the data of a run."""
    length = require_length(config)
    ids = [line.token_ids[: length + 1] for line in prompts]
    padded = [one if len(one) > 1 else [*one, *one] for one in ids]
    examples = [make_example(one, [True] * len(one)) for one in padded]
    rows = [[index] for index in range(len(examples))]
    return RowDataset(examples, rows, length, 0, hashes)


def open_data(config: TrainConfig, tokenizer: Tokenizer, split: str) -> Data:
    """The samples of one split, for any task."""
    if not is_tuning(config):
        return open_dataset(config, tokenizer, split)
    train, validation, _ = open_tuning_data(config, tokenizer)
    return train if split == TRAIN else validation
