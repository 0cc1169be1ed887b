"""Expert parallelism of an `LLM`: its options and mesh in, dispatcher, placement and load counter out.

    setup = prepare_experts(options, mesh, model_config, device)
    plan_load(checkpoint, load_options, mesh, placement=setup.placement)
    counter = setup.finish(model, max_tokens)      once memory is planned: it allocates the buffers

A step has at most `max_tokens` tokens a replica; context and sequence parallelism share them among ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from fulgurite.errors import ArgumentError
from fulgurite.logs import LOG
from fulgurite.models.config import ModelConfig
from fulgurite.models.expert_load import ExpertLoadCounter, check_load_path
from fulgurite.models.layers import CausalLM
from fulgurite.parallel.dispatch.deterministic import DeterministicDispatcher
from fulgurite.parallel.experts.expert_parallel import ExpertParallel
from fulgurite.parallel.experts.placement import Placement, check_model_name, read_placement
from fulgurite.parallel.experts.transport import (
    ExpertOptions,
    TransportChoice,
    check_expert_axis,
    choose_transport,
    make_dispatcher,
)
from fulgurite.parallel.mesh import Mesh


@dataclass(frozen=True)
class ExpertSetupOptions:
    """The options of an `LLM` that are about experts; see `LLMConfig`."""

    experts: ExpertOptions
    placement: str | Path | None = None
    record_load: str | Path | None = None
    record_load_interval: float | None = None
    model: str = ""  # its name

    def check(self, is_moe: bool, has_expert_axis: bool) -> None:
        """Raise before anything is loaded."""
        is_given = self.experts != ExpertOptions() or self.placement is not None
        check_expert_axis(is_given, has_expert_axis)
        if self.record_load is not None:
            if not is_moe:
                raise ArgumentError("record_load needs a model with experts; this one is dense")
            check_load_path(Path(self.record_load))
        if self.record_load_interval is not None and (
            self.record_load is None or not self.record_load_interval > 0
        ):
            raise ArgumentError(
                f"record_load_interval={self.record_load_interval} with "
                f"record_load={self.record_load}",
                next="a number of seconds above 0, and the file that is saved so often",
            )


@dataclass(frozen=True, eq=False)
class ExpertSetup:
    """What one rank needs for its experts. `choice`: the transport; None without an expert axis."""

    options: ExpertSetupOptions
    mesh: Mesh | None
    choice: TransportChoice | None = None
    placement: Placement | None = None

    def finish(self, model: CausalLM, max_tokens: int) -> ExpertLoadCounter | None:
        """Give the loaded model its dispatcher; a collective call of all ranks.

        `max_tokens`: the most tokens of a step. Returns the counter of the expert load, if it is
        recorded.
        """
        self._set_dispatcher(model, max_tokens)
        if self.options.record_load is None:
            return None
        counter = ExpertLoadCounter(model)
        if self.mesh is None:
            return counter
        counter.token_axes = (self.mesh.context,)
        if is_sequence_parallel(self.mesh):
            counter.token_axes += (self.mesh.tensor,)
        elif self.mesh.tensor.index > 0:
            counter.close()  # the first tensor rank counts the same tokens
        return counter

    def _set_dispatcher(self, model: CausalLM, max_tokens: int) -> None:
        layers = [module for module in model.modules() if isinstance(module, ExpertParallel)]
        if self.mesh is None or not layers:
            return
        if isinstance(layers[0].dispatcher, DeterministicDispatcher):
            return
        max_tokens = self.mesh.shape.count_rank_tokens(max_tokens)
        moe, options = model.config.moe, self.options.experts
        assert moe is not None, "a model with experts"
        axis = self.mesh.expert
        slots = layers[0].num_slots // axis.size
        config = options.dispatch_config(
            model.config.hidden_size, moe.top_k, model.dtype, max_tokens, slots
        )
        dispatcher = make_dispatcher(options, axis, config, model.device)
        for layer in layers:
            layer.dispatcher = dispatcher
            layer.micro_batches = options.micro_batches


def prepare_experts(
    options: ExpertSetupOptions, mesh: Mesh | None, config: ModelConfig, device: torch.device
) -> ExpertSetup:
    """Check the options, choose the transport and read the placement, before anything is loaded."""
    has_axis = mesh is not None and mesh.expert.size > 1
    options.check(config.moe is not None, has_axis)
    if mesh is None or not has_axis:
        return ExpertSetup(options, mesh)
    choice = choose_transport(options.experts, mesh.expert, device)
    LOG.info("experts over %d ranks: %s (%s)", mesh.expert.size, choice.name, choice.reason)
    placement = None if options.placement is None else read_placement(Path(options.placement))
    if placement is not None:
        check_model_name(str(options.placement), placement.model, options.model)
    return ExpertSetup(options, mesh, choice, placement)


def is_sequence_parallel(mesh: Mesh) -> bool:
    """Whether each tensor rank has its share of the tokens (`parallel.tensor.parallelize`)."""
    return mesh.tensor.size > 1 and mesh.expert.size > 1
