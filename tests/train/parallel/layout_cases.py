"""What ranks run in the tests of layouts: a tiny model, a few steps, and what they leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fulgurite
from fulgurite.models import ARCHITECTURES
from fulgurite.models.config import ConfigFields, ModelConfig
from fulgurite.models.loading.loader import build_random_model
from fulgurite.train.batch import IGNORED, Batch
from fulgurite.train.config import LossSection, OptimizerSection, ParallelSection, TrainConfig
from fulgurite.train.loss import LossModule
from fulgurite.train.optim.build import build_optimizer
from fulgurite.train.parallel import build_layout
from fulgurite.train.step import StepResult, TrainStep

COMMON = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Qwen3ForCausalLM", COMMON),
    "tied": ("Qwen3ForCausalLM", COMMON | {"tie_word_embeddings": True}),
    "moe": ("Dots1ForCausalLM", COMMON | EXPERTS),
    "moe, no shared expert": (
        "Qwen3MoeForCausalLM",
        COMMON | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
}


@dataclass(frozen=True)
class Case:
    """A run. `change` alters the model or the microbatches, by name in `CHANGES`."""

    model: str = "dense"
    parallel: dict[str, Any] = field(default_factory=dict)
    steps: int = 3
    batch_size: int = 8
    microbatch_size: int = 1
    length: int = 12
    deterministic: bool = False
    dtype: torch.dtype = torch.float32
    change: str = ""
    compile: bool = False
    optimizer: str = "adamw"
    evaluates: bool = False

    @property
    def config(self) -> TrainConfig:
        return TrainConfig(
            steps=self.steps,
            loss=LossSection(z_loss=1e-4, balance_rate=1e-3),
            batch_size=self.batch_size,
            microbatch_size=self.microbatch_size,
            deterministic=self.deterministic,
            optimizer=OptimizerSection(
                self.optimizer, learning_rate=3e-3, warmup=0.0, schedule="constant"
            ),
            parallel=replace(ParallelSection(timeout=60.0), **self.parallel),
        )


@dataclass(frozen=True)
class Result:
    """What one rank saw: by step losses, norms, tokens and loads; full weights at the end."""

    losses: list[float]
    norms: list[float]
    tokens: list[int]
    loads: list[Tensor | None]
    weights: dict[str, Tensor]
    local_shapes: dict[str, tuple[int, ...]]
    extra: dict[str, Any] = field(default_factory=dict)


def model_config(name: str) -> ModelConfig:
    architecture, fields = MODELS[name]
    return ARCHITECTURES[architecture].read_config(ConfigFields(fields, "a test"))


def build_model(name: str, dtype: torch.dtype) -> nn.Module:
    config, family = model_config(name), ARCHITECTURES[MODELS[name][0]]
    model = build_random_model(config, family, dtype=dtype, std=0.15).train()
    for path, parameter in model.named_parameters():
        if path.endswith("correction_bias"):
            parameter.requires_grad_(False)
    return model


def make_batch(case: Case, step: int, sample: int) -> Batch:
    """One microbatch by its number: padding at the end of some rows."""
    generator = torch.Generator().manual_seed(1000 * step + sample)
    shape = (case.microbatch_size, case.length)
    tokens = torch.randint(0, COMMON["vocab_size"], shape, generator=generator)
    labels = torch.randint(0, COMMON["vocab_size"] // 4, shape, generator=generator)
    labels[:, : sample % 5] = IGNORED
    return Batch(tokens, labels, torch.arange(case.length).expand(shape), None, sample)


def run_case(case: Case) -> Result:
    """Train and close; the same function for one rank and many."""
    model = build_model(case.model, case.dtype)
    change: Callable[..., Any] = CHANGES.get(case.change, keep)
    change(model, None)
    config = case.config
    layout: Any = build_layout(config, model_config(case.model), "cpu")
    loss_module: nn.Module = LossModule(layout.shard(model), config.loss)
    if case.compile:
        loss_module = fulgurite.compile(loss_module)
    optimizer = build_optimizer(model, config.optimizer, case.steps)
    train_step = TrainStep(loss_module, model, optimizer, layout, config)
    results = []
    for step in range(case.steps):
        batches = [change(None, batch) for batch in local_batches(case, layout, step)]
        results.append(train_step(step, batches))
        if case.evaluates:
            evaluate(loss_module, layout, batches[0])
    result = collect(results, model, loss_module, case)
    layout.barrier()
    layout.close()
    return result


@torch.no_grad()
def evaluate(loss_module: nn.Module, layout: Any, batch: Batch) -> None:
    """A forward without a backward, as `train.evaluate` does it."""
    loss_module(batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT)
    layout.sum_over_data(torch.ones(1))


def local_batches(case: Case, layout: Any, step: int) -> list[Batch]:
    """A contiguous share of the step's microbatches."""
    count = case.batch_size // case.microbatch_size // layout.data_ranks
    first = layout.data_rank * count
    return [make_batch(case, step, sample) for sample in range(first, first + count)]


def collect(
    results: list[StepResult], model: nn.Module, loss_module: nn.Module, case: Case
) -> Result:
    weights, shapes = {}, {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        shapes[name] = tuple((value.to_local() if isinstance(value, DTensor) else value).shape)
        weights[name] = (value.full_tensor() if isinstance(value, DTensor) else value).clone()
    extra = {}
    if case.compile:
        compiled: Any = loss_module
        extra = {"graphs": len(compiled.graphs), "units": len(compiled.compiled.units)}
    return Result(
        [result.loss for result in results],
        [result.gradient_norm for result in results],
        [result.tokens for result in results],
        [result.load_LE for result in results],
        weights,
        shapes,
        extra,
    )


# ---- odd models and microbatches: change(model, None), or change(None, batch) ----------------------


def keep(model: nn.Module | None, batch: Batch | None) -> Batch | None:
    return batch


def one_expert(model: nn.Module | None, batch: Batch | None) -> Batch | None:
    """All tokens go to the first two experts."""
    for name, parameter in model.named_parameters() if model is not None else ():
        if name.endswith("correction_bias"):
            parameter.data.zero_()
            parameter.data[:2] = 100.0
    return batch


def frozen(model: nn.Module | None, batch: Batch | None) -> Batch | None:
    for name, parameter in model.named_parameters() if model is not None else ():
        if "embed_tokens" in name or "layers.0.attention" in name or "down_proj" in name:
            parameter.requires_grad_(False)
    return batch


def no_labels_on_rank_0(model: nn.Module | None, batch: Batch | None) -> Batch | None:
    """The first half of the samples has no tokens with a loss."""
    if batch is not None and batch.first_sample < 4:
        return replace(batch, labels_BT=torch.full_like(batch.labels_BT, IGNORED))
    return batch


def no_rows_on_rank_0(model: nn.Module | None, batch: Batch | None) -> Batch | None:
    """The first half of the microbatches has no rows at all."""
    if batch is not None and batch.first_sample < 4:
        return replace(
            batch,
            tokens_BT=batch.tokens_BT[:0],
            labels_BT=batch.labels_BT[:0],
            positions_BT=batch.positions_BT[:0],
        )
    return batch


CHANGES: dict[str, Callable[..., Any]] = {
    "one expert": one_expert,
    "frozen": frozen,
    "no labels": no_labels_on_rank_0,
    "no rows": no_rows_on_rank_0,
}
