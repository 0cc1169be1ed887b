"""What each rank does in test_tensor.py, test_pipeline.py and test_context.py: a run against one rank.

`train_alone` is the oracle: the same steps in one process, in this file's own few lines. `train_split`
runs them over ranks and gathers the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fulgurite.models import CausalLM, ModelConfig, build_random_model
from fulgurite.models.config import ConfigFields
from fulgurite.models.families.family import ModelFamily
from fulgurite.models.families.registry import ARCHITECTURES
from fulgurite.parallel.collectives import shard_range
from fulgurite.parallel.processes.launch import RankPool
from fulgurite.train.batch import IGNORED, Batch
from fulgurite.train.checkpoint import CheckpointManager
from fulgurite.train.config import (
    CheckpointSection,
    OptimizerSection,
    ParallelSection,
    TrainConfig,
)
from fulgurite.train.layout import ModelParallelLayout
from fulgurite.train.loss import CHUNK_BYTES, LossModule
from fulgurite.train.optim import build_optimizer
from fulgurite.train.parallel.build import select_layout
from fulgurite.train.parallel.compiled import CompiledLayers, compile_layers
from fulgurite.train.parallel.layout_base import Degrees, ParallelLayout, RankMesh
from fulgurite.train.parallel.tensor_layers import Region, VocabParallelLinear
from fulgurite.train.step import OneRank
from tests.ranks import open_once

COMMON = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
MOE = {
    "n_routed_experts": 8,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}
FAMILIES = {
    "qwen3": ("Qwen3ForCausalLM", {"attention_bias": True}),  # QK norm, biases, 2 key heads
    "tied": ("LlamaForCausalLM", {"tie_word_embeddings": True, "mlp_bias": True}),
    "dots1": ("Dots1ForCausalLM", MOE),  # experts, a shared one, a correction bias
    "qwen3_moe": ("Qwen3MoeForCausalLM", MOE),
    "gemma2": (
        "Gemma2ForCausalLM",
        {"sliding_window": 6, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 9.0},
    ),
    "olmo2": ("Olmo2ForCausalLM", {}),  # norms over the heads of all ranks, behind the blocks
    "gpt_oss": (
        "GptOssForCausalLM",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 7},
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        MOE
        | {
            "num_key_value_heads": 4,
            "kv_lora_rank": 12,
            "q_lora_rank": 10,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4,
            "v_head_dim": 5,
        },
    ),
}
ROWS, LENGTH = 2, 16


@dataclass(frozen=True)
class CompiledGraphs:
    """How many graphs of layers there are, the collectives in them, and where they break."""

    count: int
    collectives: dict[str, int]
    breaks: list[str]


@dataclass(frozen=True)
class Outcome:
    """Losses of all steps, and the weights of one rank's layout after the last."""

    losses: list[float]
    weights: dict[str, Tensor]
    load: Tensor | None = None
    norms: tuple[float, ...] = ()
    compiled: CompiledGraphs | None = None


def family_of(name: str, **changed: object) -> tuple[ModelFamily, ModelConfig]:
    architecture, fields = FAMILIES[name]
    values = COMMON | fields | changed | {"architectures": [architecture]}
    family = ARCHITECTURES[architecture]
    return family, family.read_config(ConfigFields(values, name))


def make_model(name: str, **changed: object) -> CausalLM:
    family, config = family_of(name, **changed)
    return build_random_model(config, family, dtype=torch.float32, std=0.1).train()


def make_batches(
    step: int, count: int, vocabulary: int, documents: bool = True, length: int = LENGTH
) -> list[Batch]:
    """Rows of two documents and padding, with other numbers of labels in each."""
    generator = torch.Generator().manual_seed(100 + step)
    return [
        _make_batch(number, vocabulary, documents, length, generator) for number in range(count)
    ]


def _make_batch(
    number: int, vocabulary: int, documents: bool, length: int, generator: torch.Generator
) -> Batch:
    tokens = torch.randint(0, vocabulary, (ROWS, length + 1), generator=generator)
    labels, positions = tokens[:, 1:].clone(), torch.arange(length).repeat(ROWS, 1)
    labels[:, : number % 3] = IGNORED
    if not documents:
        return Batch(tokens[:, :-1], labels, positions, None, number * ROWS)
    ids = torch.zeros(ROWS, length, dtype=torch.int64)
    for row in range(ROWS):
        cut, end = 5 + 3 * row + number % 2, length - 2 * row
        ids[row, cut:end], ids[row, end:] = 1, -1
        positions[row, cut:] -= cut
        positions[row, end:] = -1
        labels[row, cut - 1] = IGNORED
        labels[row, end:] = IGNORED
    return Batch(tokens[:, :-1], labels, positions, ids, number * ROWS)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, foreach=False)


def train_alone(
    name: str,
    steps: int,
    count: int,
    *,
    documents: bool = True,
    length: int = LENGTH,
    **changed: object,
) -> Outcome:
    """All microbatches of each step, one after the other: the mean loss of a token."""
    model = make_model(name, **changed)
    loss_module, optimizer = LossModule(model), make_optimizer(model)
    losses, norms, loads = [], [], []
    for step in range(steps):
        loads.clear()
        batches = make_batches(step, count, model.config.vocab_size, documents, length)
        tokens = torch.stack([batch.num_tokens for batch in batches]).sum()
        total = torch.zeros(())
        for batch in batches:
            sums = loss_module(
                batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT
            )
            (sums.total / tokens).backward()
            total = total + sums.loss.detach() / tokens
            loads += [] if sums.load_LE is None else [sums.load_LE]
        norms.append(
            float(
                nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            )
        )
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
    load = torch.stack(loads).sum(0) if loads else None
    return Outcome(losses, gather(model), load, tuple(norms))


def gather(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def largest_errors(ranks: Sequence[Outcome], wanted: Outcome) -> dict[str, float]:
    """By name: the largest difference of losses, norms and each weight, on any rank.

    Ranks have all weights together; one rank of a pipeline has some.
    """
    errors = dict.fromkeys(("loss", "norm", *wanted.weights), 0.0)
    assert {name for ours in ranks for name in ours.weights} == wanted.weights.keys()
    for ours in ranks:
        for a, b in zip(ours.losses, wanted.losses, strict=True):
            errors["loss"] = max(errors["loss"], abs(a - b))
        for a, b in zip(ours.norms, wanted.norms, strict=True):
            errors["norm"] = max(errors["norm"], abs(a - b) / b)
        for name, weight in ours.weights.items():
            difference = float((weight - wanted.weights[name]).abs().max())
            errors[name] = max(errors[name], difference)
    return errors


# ---- over ranks ------------------------------------------------------------------------------------


def mesh_of(degrees: Degrees) -> RankMesh:
    """The mesh with these degrees, made once."""
    return open_once(degrees, lambda: RankMesh(degrees, timeout=240))


@dataclass(frozen=True)
class Case:
    """A run: which model, how many steps and microbatches, over which ranks."""

    name: str
    degrees: Degrees
    steps: int = 20
    count: int = 4
    documents: bool = True
    length: int = LENGTH
    section: ParallelSection = field(default_factory=ParallelSection)
    changed: dict[str, object] = field(default_factory=dict)
    compile: bool = False


def make_layout(case: Case) -> ParallelLayout:
    config = TrainConfig(parallel=case.section)
    return select_layout(case.degrees)(config, mesh_of(case.degrees))


def train_split(case: Case) -> Outcome:
    """The steps of `train_alone` over ranks; every rank has its own share of the microbatches."""
    layout = make_layout(case)
    model = layout.shard(make_model(case.name, **case.changed))
    loss_module, optimizer = LossModule(model), make_optimizer(model)
    layers = compile_layers(model, {}) if case.compile else None
    losses, norms, load = [], [], None
    share = case.count // layout.data_ranks
    for step in range(case.steps):
        batches = make_batches(
            step, case.count, model.config.vocab_size, case.documents, case.length
        )
        mine = batches[layout.data_rank * share : (layout.data_rank + 1) * share]
        totals = layout.run_microbatches(loss_module, mine)
        norms.append(float(layout.gradient_norm(model.parameters())))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(totals.loss))
        load = totals.load_LE
    outcome = Outcome(losses, gather(model), load, tuple(norms))
    return outcome if layers is None else replace(outcome, compiled=describe_graphs(layers))


def describe_graphs(layers: CompiledLayers) -> CompiledGraphs:
    compiled = layers.compiled
    texts = [str(compiled.last_trace(graph=number)) for number in range(len(compiled.graphs))]
    names = ("axis_all_reduce", "axis_all_gather", "axis_reduce_scatter")
    collectives = {name: sum(text.count(name) for text in texts) for name in names}
    return CompiledGraphs(len(compiled.graphs), collectives, [str(b) for b in compiled.breaks])


def check(pool: RankPool, case: Case) -> list[Outcome]:
    """float32: sums are taken in another order; SGD keeps differences of gradients small.

    Gemma's logits are some ten times larger.
    """
    wanted = train_alone(
        case.name,
        case.steps,
        case.count,
        documents=case.documents,
        length=case.length,
        **case.changed,
    )
    found = pool.run(train_split, case)
    errors = largest_errors(found, wanted)
    worst = max(errors, key=lambda name: errors[name])
    limit = 1e-4 if case.name == "gemma2" else 1e-5
    assert errors[worst] < limit, f"{case.degrees}: {worst} differs by {errors[worst]}"
    if wanted.load is not None:
        assert all(torch.equal(ours.load, wanted.load) for ours in found)
    return found


def evaluate_alone(name: str, **changed: object) -> list[float]:
    loss_module = LossModule(make_model(name, **changed))
    with torch.no_grad():
        return [
            float(loss_module(b.tokens_BT, b.labels_BT, b.positions_BT, b.documents_BT).loss)
            for b in make_batches(0, 2, COMMON["vocab_size"])  # type: ignore[arg-type]
        ]


def evaluate_split(case: Case) -> list[float]:
    layout = make_layout(case)
    loss_module = LossModule(layout.shard(make_model(case.name, **case.changed)))  # type: ignore[arg-type]
    assert isinstance(layout, ModelParallelLayout)
    batches = make_batches(0, 2, COMMON["vocab_size"])  # type: ignore[arg-type]
    return [float(layout.evaluate_batch(loss_module, batch).loss) for batch in batches]


def describe_parameters(case: Case) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """The global and the local shape of each parameter."""
    model = make_layout(case).shard(make_model(case.name, **case.changed))
    return {
        name: (tuple(p.shape), tuple(p.to_local().shape)) for name, p in model.named_parameters()
    }


def loss_of_uneven_columns() -> tuple[float, float, Tensor]:
    """129 columns on two ranks: by its own columns one would cut 200 rows into four chunks, one into two."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator) for n in (200, 129))
    labels = torch.randint(129, (200,), generator=generator)
    axis = mesh_of(Degrees(tp=2)).axis("tp")
    start, stop = shard_range(129, axis.index, axis.size)
    head: Any = VocabParallelLinear(8, stop - start, bias=False)
    head.region, head.start, head.stop, head.total = Region(axis), start, stop, 129
    head.weight = nn.Parameter(weight[start:stop].clone())
    before, CHUNK_BYTES["cpu"] = CHUNK_BYTES["cpu"], 64 * 4 * 128
    try:
        total, _, _ = head.sum_cross_entropy(hidden, labels, 0.0, 1.0, None)
        total.backward()
    finally:
        CHUNK_BYTES["cpu"] = before
    weight.requires_grad_()
    expected = nn.functional.cross_entropy(hidden @ weight.t(), labels, reduction="sum")
    expected.backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    return float(total), float(expected), head.weight.grad - weight.grad[start:stop]


class _WidestOutput(TorchDispatchMode):
    """The largest last dimension of a matrix with a row for each token."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens, self.widest = tokens, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        outputs = function(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(outputs):
            if isinstance(x, Tensor) and x.dim() > 1 and x.shape[:-1].numel() == self.tokens:
                if x.shape[-1] not in (COMMON["hidden_size"], COMMON["intermediate_size"], LENGTH):
                    self.widest = max(self.widest, x.shape[-1])
        return outputs


def widest_logits(case: Case) -> int:
    layout = make_layout(case)
    loss_module = LossModule(layout.shard(make_model(case.name)))  # type: ignore[arg-type]
    with _WidestOutput(ROWS * LENGTH) as mode:
        layout.run_microbatches(loss_module, make_batches(0, 1, COMMON["vocab_size"]))  # type: ignore[arg-type]
    return mode.widest


def gather_for_export(case: Case) -> dict[str, Tensor]:
    layout = make_layout(case)
    model = layout.shard(make_model(case.name, **case.changed))
    assert isinstance(layout, ModelParallelLayout)
    whole, gather_one = layout.prepare_export(model)
    assert gather_one is not None
    return {name: gather_one(name, p.detach()).clone() for name, p in whole.named_parameters()}


def save_checkpoint(case: Case, folder: str) -> None:
    """Some steps over ranks, then a checkpoint of the weights."""
    layout = make_layout(case)
    model = layout.shard(make_model(case.name, **case.changed))
    loss_module, optimizer = LossModule(model), make_optimizer(model)  # type: ignore[arg-type]
    for step in range(case.steps):
        batches = make_batches(step, case.count, COMMON["vocab_size"])  # type: ignore[arg-type]
        layout.run_microbatches(loss_module, batches)
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    before = gather(model)
    with CheckpointManager(folder, CheckpointSection(is_async=False), layout) as manager:
        manager.save(case.steps, {"model": weights})
        manager.wait()
        for weight in weights.values():
            weight.zero_()
        path = manager.latest()
        assert path is not None
        manager.load(path, {"model": weights})  # on the same ranks
    after = gather(model)
    assert all(torch.equal(after[name], before[name]) for name in before)


def check_loaded(folder: Path, name: str, steps: int, **changed: object) -> None:
    """One rank that loads the checkpoint has the weights of one that trained."""
    wanted = train_alone(name, steps, 4, **changed)
    model = make_model(name, **changed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with CheckpointManager(folder, CheckpointSection()) as manager:
        path = manager.latest()
        assert path is not None
        manager.load(path, {"model": {n: p.detach() for n, p in model.named_parameters()}})
    for key, weight in gather(model).items():
        torch.testing.assert_close(weight, wanted.weights[key], rtol=0, atol=1e-5)


def step_with_muon(case: Case | None, name: str) -> dict[str, Tensor]:
    """The change of each weight in one step of the run's own optimizer; None: on one rank."""
    layout = OneRank() if case is None else make_layout(case)
    model = layout.shard(make_model(name))
    optimizer = build_optimizer(model, OptimizerSection("muon", learning_rate=0.02), 4, False)
    before = gather(model)
    layout.run_microbatches(LossModule(model), make_batches(0, 2, 61))  # type: ignore[arg-type]
    optimizer.step()
    return {key: value - before[key] for key, value in gather(model).items()}
