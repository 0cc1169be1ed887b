"""Pipeline parallelism: stages of layers over ranks, by the schedules of torch.distributed.pipelining.

    parallel.pipeline_schedule    torch                     stages of rank r of n
    1f1b                          Schedule1F1B              r
    interleaved                   ScheduleInterleaved1F1B   r, n + r
    zero_bubble                   ScheduleZBVZeroBubble     r, 2n - 1 - r

Every rank of a pipeline has the same microbatches, so tokens, positions, documents and labels reach each
stage without communication; only hidden states and their gradients are sent. Losses are sums over
tokens: backward runs on them as they are, and gradients are divided by the tokens of the step at the end.

Tied embeddings are on the first and the last stage. Their gradients are summed over both, so both copies
stay equal. The gradient norm counts them once.

Zero bubble defers the weight gradients of plain linears (`deferred.py`).

`stages.py` says what a stage computes. Other dimensions (data, FSDP2, tensor, context) work inside a
stage as they do without a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor

from fulgurite.errors import ArgumentError
from fulgurite.models.config import ModelConfig
from fulgurite.models.families.registry import ARCHITECTURES
from fulgurite.models.layers import CausalLM
from fulgurite.models.loading.load_plan import build_model
from fulgurite.parallel.collectives import all_reduce, shard_range
from fulgurite.parallel.mesh import Axis
from fulgurite.train.accumulate import SumTree
from fulgurite.train.batch import Batch
from fulgurite.train.config import TrainConfig
from fulgurite.train.loss import LossModule, LossSums
from fulgurite.train.parallel.deferred import WeightGradients, defer_weight_gradients
from fulgurite.train.parallel.layout_base import Degrees, RankMesh
from fulgurite.train.parallel.reduction import local_tensor
from fulgurite.train.parallel.stages import Stage, StagedLM, StageModule, keep_stages, split_layers

STAGES_PER_RANK = {"1f1b": 1, "interleaved": 2, "zero_bubble": 2}


def check_pipeline(config: TrainConfig, model_config: ModelConfig, degrees: Degrees) -> None:
    """ArgumentError for layers, microbatches or layouts that a schedule can't run."""
    if degrees.pp == 1:
        return
    name = config.parallel.pipeline_schedule
    if name not in STAGES_PER_RANK:
        raise ArgumentError(
            f"parallel.pipeline_schedule={name!r}", next=f"one of {', '.join(STAGES_PER_RANK)}"
        )
    split_layers(len(model_config.layers), STAGES_PER_RANK[name] * degrees.pp)
    if name == "zero_bubble" and degrees.dp_shard > 1:
        raise ArgumentError(
            "parallel.pipeline_schedule='zero_bubble' computes gradients of weights later, which "
            "FSDP2 (parallel.data_shard above 1) does not wait for",
            next="pipeline_schedule='1f1b' or 'interleaved', or data_shard=1",
        )
    if config.batch_size is not None and config.microbatch_size is not None:
        check_microbatches(
            name, config.batch_size // (config.microbatch_size * degrees.data), degrees.pp
        )


def check_microbatches(name: str, count: int, stages: int) -> None:
    """ArgumentError if a schedule needs another number of microbatches."""
    rounds = max(1, count // stages)
    if count >= stages and (name != "interleaved" or count % rounds == 0):
        return
    raise ArgumentError(
        f"{count} microbatches on each data rank, and pipeline_schedule {name!r} with "
        f"{stages} ranks needs at least {stages}"
        + (" and a multiple of the rounds" if name == "interleaved" else ""),
        next=f"a batch_size that makes {-(-count // stages) * stages} of them, or a smaller "
        "microbatch_size",
    )


def rank_of_stage(name: str, stage: int, ranks: int) -> int:
    """Which rank of the pipeline has a stage."""
    if name == "zero_bubble" and stage >= ranks:
        return 2 * ranks - 1 - stage
    return stage % ranks


class Pipeline:
    """The stages of this rank, and the schedule that runs them."""

    def __init__(self, config: TrainConfig, ranks: RankMesh) -> None:
        self.name = config.parallel.pipeline_schedule
        self.sequence_parallel = config.parallel.sequence and ranks.degrees.tp > 1
        self.ranks, self.axis = ranks, ranks.axis("pp")
        self.num_stages = STAGES_PER_RANK[self.name] * self.axis.size
        self.owners = [rank_of_stage(self.name, s, self.axis.size) for s in range(self.num_stages)]
        self.num_layers = 0
        self.stages: list[Stage] = []
        self.modules: list[StageModule] = []
        self._schedules: dict[tuple[int, ...], Any] = {}
        self._ends = self._make_ends_group()

    def _make_ends_group(self) -> Axis:
        """The first and the last stage's rank; every rank creates the groups of all pipelines."""
        own = Axis("pipeline ends", (self.ranks.rank,), 0)
        columns = self.ranks.mesh.mesh.flatten(1).t().tolist()
        for column in columns:
            ends = sorted({column[self.owners[0]], column[self.owners[-1]]})
            group = dist.new_group(ends) if len(ends) > 1 else None
            if self.ranks.rank in ends:
                own = Axis("pipeline ends", tuple(ends), ends.index(self.ranks.rank), group)
        return own

    @property
    def has_first(self) -> bool:
        return self.owners[0] == self.axis.index

    @property
    def has_last(self) -> bool:
        return self.owners[-1] == self.axis.index

    def keep_stages(self, model: nn.Module) -> None:
        """Drop the layers of other ranks."""
        assert isinstance(model, CausalLM), f"{type(model).__name__} has no layers to split"
        self.num_layers = len(model.layers)
        own = [s for s, owner in enumerate(self.owners) if owner == self.axis.index]
        self.stages = keep_stages(model, own, self.num_stages)
        assert isinstance(model, StagedLM), "keep_stages changes the class"
        model.has_split_tokens = self.sequence_parallel
        # update_balance reads the rows of this rank's routers
        model.router_rows = [r for stage in self.stages for r in stage.routers]  # type: ignore[assignment]

    # ---- a step ------------------------------------------------------------------------------------

    def run(self, loss_module: nn.Module, batches: Sequence[Batch]) -> LossSums:
        """Forward and backward of all microbatches; the sums of all stages on every rank."""
        check_microbatches(self.name, len(batches), self.axis.size)
        modules = self._prepare(loss_module, batches)
        schedule = self._schedule(loss_module, batches)
        numbers = torch.arange(len(batches))
        arguments = (numbers,) if self.has_first else ()
        target = numbers if self.has_last else None
        schedule.step(*arguments, target=target, number=numbers, return_outputs=False)
        return self._collect(modules)

    @torch.no_grad()
    def evaluate(self, loss_module: nn.Module, batches: Sequence[Batch]) -> LossSums:
        """Forward of all microbatches, one after the other."""
        modules = self._prepare(loss_module, batches)
        by_stage = {module.stage.index: module for module in modules}
        for number in range(len(batches)):
            x = torch.zeros(1)
            for stage, owner in enumerate(self.owners):
                if owner != self.axis.index:
                    continue
                if stage and self.owners[stage - 1] != owner:
                    x = self._hidden_like(loss_module, batches[number])
                    dist.recv(x, self.axis.ranks[self.owners[stage - 1]], self.axis.group)
                x = by_stage[stage](x, torch.tensor(number))
                if stage + 1 < self.num_stages and self.owners[stage + 1] != owner:
                    dist.send(x, self.axis.ranks[self.owners[stage + 1]], self.axis.group)
        return self._collect(modules)

    def _prepare(self, loss_module: nn.Module, batches: Sequence[Batch]) -> list[StageModule]:
        if not isinstance(loss_module, LossModule):
            raise ArgumentError(
                f"{type(loss_module).__name__} can't be split into pipeline stages",
                next="parallel.pipeline=1, and compile=false with a pipeline",
            )
        if not self.modules or self.modules[0].loss_module is not loss_module:
            self.modules = [StageModule(loss_module, stage) for stage in self.stages]
            self._schedules.clear()
        for module in self.modules:
            module.batches, module.sums = batches, []
        return self.modules

    def _schedule(self, loss_module: nn.Module, batches: Sequence[Batch]) -> Any:
        """The schedule for this number and shape of microbatches."""
        key = (len(batches), *batches[0].tokens_BT.shape)
        if any(batch.tokens_BT.shape != batches[0].tokens_BT.shape for batch in batches):
            raise ArgumentError(
                "microbatches of a pipeline must have one shape", next="pad them to one length"
            )
        if key not in self._schedules:
            hidden = self._hidden_like(loss_module, batches[0])
            stages = [self._make_stage(module, hidden) for module in self.modules]
            options: dict[str, Any] = {"loss_fn": _take_loss, "scale_grads": False}
            count = len(batches)
            if self.name == "1f1b":
                self._schedules[key] = Schedule1F1B(stages[0], count, **options)
            elif self.name == "interleaved":
                self._schedules[key] = ScheduleInterleaved1F1B(list(stages), count, **options)
            else:
                self._schedules[key] = ScheduleZBVZeroBubble(list(stages), count, **options)
        return self._schedules[key]

    def _make_stage(self, module: StageModule, hidden: Tensor) -> PipelineStage:
        stage = module.stage
        number = torch.zeros(1, dtype=torch.int64)
        loss = hidden.new_zeros((), dtype=torch.float32).requires_grad_()
        hidden = hidden.detach().requires_grad_()  # gradients are sent back
        return PipelineStage(
            module,
            stage.index,
            self.num_stages,
            hidden.device,
            input_args=number if stage.is_first else hidden,
            output_args=loss if stage.is_last else hidden,
            group=self.axis.group,
            dw_builder=self._defer_gradients(module) if self.name == "zero_bubble" else None,
        )

    def _defer_gradients(self, module: StageModule) -> Callable[[], Callable[..., None]]:
        """Queue the weight gradients of a stage's linears; a schedule takes them from the queue."""
        layers = module.loss_module.model.layers
        if module.weight_gradients is None:
            module.weight_gradients = WeightGradients()
            for number in range(module.stage.start, module.stage.stop):
                defer_weight_gradients(layers[number], module.weight_gradients)
        return module.weight_gradients.take

    def _hidden_like(self, loss_module: nn.Module, batch: Batch) -> Tensor:
        """Memory for what a stage sends: the hidden states of a microbatch, flat."""
        model = loss_module.model
        assert isinstance(model, StagedLM), "keep_stages changes the class"
        tokens = batch.tokens_BT.numel()
        if self.sequence_parallel:
            axis = self.ranks.axis("tp")
            start, stop = shard_range(tokens, axis.index, axis.size)
            tokens = stop - start
        size = model.config.hidden_size
        return torch.empty(tokens, size, dtype=model.dtype, device=batch.tokens_BT.device)

    def _collect(self, modules: Sequence[StageModule]) -> LossSums:
        """The sums of all microbatches: losses of the last stage, expert loads of all."""
        tree, loads = SumTree(), None
        for module in modules:
            if module.stage.is_last:
                for sums in module.sums:
                    tree.push([sums.total, sums.loss, sums.z_loss, sums.tokens])
            loads = self._add_loads(loads, module)
        device = modules[0].sums[0].loss.device
        values = tree.total() or [torch.zeros((), device=device) for _ in range(4)]
        flat = torch.stack([value.double() for value in values if value is not None])
        total, loss, z, tokens = all_reduce(flat, self.axis, "all-reduce of losses").unbind(0)
        if loads is not None:
            loads = all_reduce(loads, self.axis, "all-reduce of expert loads")
        return LossSums(total.float(), loss.float(), z.float(), tokens.long(), loads)

    def _add_loads(self, loads: Tensor | None, module: StageModule) -> Tensor | None:
        """Add the loads of a stage's routers to those of all routers of the model."""
        stage, model = module.stage, module.loss_module.model
        if not stage.total_routers:
            return None
        assert model.config.moe is not None, "a model with routers"
        device = module.sums[0].loss.device
        shape = stage.total_routers, model.config.moe.num_experts
        loads = torch.zeros(shape, dtype=torch.int64, device=device) if loads is None else loads
        for sums in module.sums:
            if sums.load_LE is not None:
                loads[list(stage.routers)] += sums.load_LE
        return loads

    # ---- tied embeddings ---------------------------------------------------------------------------

    def tied_weight(self, model: nn.Module) -> nn.Parameter | None:
        """The embedding, if it is tied to the head of another rank."""
        assert isinstance(model, StagedLM), "keep_stages changes the class"
        if not model.config.tie_word_embeddings or self._ends.size == 1:
            return None
        return dict(model.named_parameters()).get("embed_tokens.weight")

    def sum_tied_gradients(self, model: nn.Module) -> None:
        weight = self.tied_weight(model)
        if weight is None or not weight.requires_grad:
            return
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        gradient = local_tensor(weight.grad)
        gradient.copy_(all_reduce(gradient, self._ends, "all-reduce of tied embeddings"))

    def counted_once(
        self, model: nn.Module, parameters: Iterable[nn.Parameter]
    ) -> list[nn.Parameter]:
        """The parameters without the second copy of a tied embedding."""
        tied = None if self.has_first else self.tied_weight(model)
        return [parameter for parameter in parameters if parameter is not tied]

    # ---- export ------------------------------------------------------------------------------------

    def whole_model(self, model: nn.Module) -> nn.Module:
        """A model with the parameters of this rank, and empty ones for those of other stages."""
        assert isinstance(model, StagedLM), "keep_stages changes the class"
        family = next(f for f in ARCHITECTURES.values() if f.name == model.config.family)
        whole = build_model(model.config, family, model.dtype)
        for name, parameter in model.named_parameters():
            path, _, last = name.rpartition(".")
            setattr(whole.get_submodule(path), last, parameter)
        return whole

    def gather_parameter(self, name: str, parameter: Tensor) -> Tensor:
        """A whole parameter on every rank: its stage gathers it, then sends it to the others."""
        owner = self.axis.ranks[self._owner_of(name)]
        if parameter.is_meta:
            whole = torch.empty_like(parameter, device=self.ranks.device)
        else:
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        whole = whole.contiguous()
        dist.broadcast(whole, owner, self.axis.group)
        return whole

    def _owner_of(self, name: str) -> int:
        """The rank of the pipeline that has a parameter; of a tied embedding, the first."""
        if name.startswith("embed_tokens."):
            return self.owners[0]
        if not name.startswith("layers."):
            return self.owners[-1]
        number = int(name.split(".")[1])
        split = split_layers(self.num_layers, self.num_stages)
        stage = next(s for s, (start, stop) in enumerate(split) if start <= number < stop)
        return self.owners[stage]


def _take_loss(output: Tensor, target: Tensor) -> Tensor:
    """The loss function of a schedule: the last stage computed it."""
    return output
