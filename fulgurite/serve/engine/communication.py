"""What the ranks of a model communicate through: a model and its mesh in, `Communication` out.

A decode step is captured in a CUDA graph if all of it runs on the device, between the messages of
pipeline stages. `no_capture_reason` names the first thing that doesn't. `check` raises what the device has recorded, for example a rank whose flag
never arrived. It waits for one step only, while the next one may run.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from fulgurite.models.layers import CausalLM
from fulgurite.parallel.dispatch.dispatcher import TokenDispatcher, is_sized
from fulgurite.parallel.experts.expert_parallel import ExpertParallel
from fulgurite.parallel.mesh import Mesh


class Communication:
    """The tensor and context axes and the token dispatchers of one model."""

    def __init__(self, model: CausalLM, mesh: Mesh) -> None:
        self.model, self.mesh = model, mesh
        # Errors are read on a stream of its own: the model's stream has later steps.
        self.check_stream: torch.cuda.Stream | None = None
        if model.device.type == "cuda":
            self.check_stream = torch.cuda.Stream(model.device)
        found = {
            name: module.dispatcher
            for name, module in model.named_modules()
            if isinstance(module, ExpertParallel)
        }
        self.dispatchers: dict[int, tuple[str, TokenDispatcher]] = {}
        for name, dispatcher in found.items():
            self.dispatchers.setdefault(id(dispatcher), (name, dispatcher))

    @property
    def no_capture_reason(self) -> str | None:
        """Why a step over these ranks can't be captured; the same on all ranks."""
        if self.model.device.type != "cuda":
            return f"ranks on a {self.model.device.type.upper()} communicate through the host"
        for axis in (self.mesh.tensor, self.mesh.context):
            if not axis.can_capture:
                return f"the {axis.name} axis communicates through the host (gloo)"
        for name, dispatcher in self.dispatchers.values():
            if not dispatcher.can_capture:
                return f"{name} communicates through the host ({type(dispatcher).__name__})"
        return None

    @property
    def is_on_device(self) -> bool:
        """Whether the host launches a step without waiting for other ranks inside of its layers."""
        axes = (self.mesh.tensor, self.mesh.context)
        return self.model.device.type == "cuda" and all(axis.can_capture for axis in axes)

    def begin_step(self, num_tokens: int, micro_batches: int = 1) -> bool:
        """Tell the dispatchers the size of the next step: the most tokens of a replica, on all ranks.
        Returns whether a step of this size can be captured.

        `micro_batches`: in which the stages run it, all of them equally large.
        """
        tokens = self.mesh.shape.count_rank_tokens(num_tokens, micro_batches)
        can_capture = True
        for _, dispatcher in self.dispatchers.values():
            if is_sized(dispatcher):
                dispatcher.set_step_tokens(tokens)
                can_capture = can_capture and dispatcher.can_capture_step
        return can_capture

    def mark_step(self) -> torch.cuda.Event | None:
        """An event after all of the step that was launched last; None on a CPU."""
        if self.check_stream is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def check(self, finished: torch.cuda.Event | None = None) -> None:
        """Wait for a step, and raise the errors that the device has recorded up to now."""
        if finished is not None:
            finished.synchronize()
        stream = self.check_stream
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for axis in (self.mesh.tensor, self.mesh.context):
                if axis.device_collectives is not None:
                    axis.device_collectives.check()
            for _, dispatcher in self.dispatchers.values():
                dispatcher.check()
