"""What a rank holds while it generates, all tokens of all ranks routed to the experts of one of them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fulgurite.errors import CapacityError
from fulgurite.models.moe import Router
from fulgurite.plan import rank_memory
from fulgurite.plan.memory import MemoryPlan
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.llm import LLM
from tests.parallel.engine_cases import report_hang
from tests.parallel.model_cases import Shape
from tests.plan.held_memory import HostAllocationTracker, live_tensors, storage_bytes

OPTIONS = {
    "device": "cpu", "context": 96, "max_sequences": 4, "max_batched_tokens": 256, "timeout": 60.0,
}  # fmt: skip


class Measured(NamedTuple):
    """Bytes of a rank: held after loading, the most in addition while it generated, and the plan."""

    held: int
    peak: int
    plan: MemoryPlan

    @property
    def total(self) -> int:
        return self.held + self.peak


def route_to_rank(model: nn.Module, rank: int, num_ranks: int) -> None:
    """Give every router a bias by which all tokens prefer the experts of one rank."""
    for router in model.modules():
        if isinstance(router, Router):
            experts = router.weight.shape[0]
            local = -(-experts // num_ranks)
            bias_E = torch.full((experts,), -30.0, device=router.weight.device)
            chosen = range(rank * local, min(experts, (rank + 1) * local))
            for place, expert in enumerate(chosen):
                bias_E[expert] = 30.0 - place
            router.weight.data.zero_()
            router.bias = nn.Parameter(bias_E.to(router.weight.dtype), requires_grad=False)


@torch.no_grad()  # ranks go on to other tests
def measure(folder: Path, shape: Shape, busiest: int, options: dict[str, Any]) -> Measured:
    """Run full steps of prompts and then decode, with the experts of rank `busiest` for all tokens."""
    before = live_tensors()
    data, tensor, expert = shape
    llm = LLM(folder, data=data, tensor=tensor, expert=expert, **OPTIONS | options)
    known = storage_bytes(before)
    held = sum(count for id, count in storage_bytes(live_tensors()).items() if id not in known)
    route_to_rank(llm.model, busiest, expert)
    wait_for_gloo(llm)
    with HostAllocationTracker() as tracker:
        if llm.is_driver:
            generate_full_steps(llm, data)
        llm.close()
    return Measured(held, tracker.peak, llm.plan)


def wait_for_gloo(llm: LLM) -> None:
    """Give gloo's threads time after each collective: they release its tensors a moment after it ends."""
    health = llm.mesh.health if llm.mesh is not None else None
    assert health is not None, "several ranks have a health monitor"
    run_collective = health.run_collective

    def run(*arguments: Any, **options: Any) -> None:
        run_collective(*arguments, **options)
        time.sleep(0.003)

    health.run_collective = run  # type: ignore[method-assign]


def generate_full_steps(llm: LLM, replicas: int, first_token: int = 0) -> None:
    """Prompts that fill the first step of every replica."""
    limits = llm.plan.limits
    length = limits.max_batched_tokens // limits.max_sequences
    count = replicas * limits.max_sequences
    starts = range(first_token, first_token + count)
    prompts = [[start + 7] * (length - 1) + [start] for start in starts]
    llm.generate(prompts, SamplingParams(max_tokens=3, ignore_eos=True))


def open_with_little_memory(folder: Path, shape: Shape, victim: int, available: int) -> str:
    """The error of this rank, if one rank has only `available` bytes."""
    own = rank_memory.available_bytes
    if int(os.environ["RANK"]) == victim:
        rank_memory.available_bytes = lambda device: available * shape[0] * shape[1]
    data, tensor, expert = shape
    try:
        LLM(folder, data=data, tensor=tensor, expert=expert, **OPTIONS).close()
    except CapacityError as error:
        return str(error)
    finally:
        rank_memory.available_bytes = own
    return ""


@torch.no_grad()
def measure_on_gpu(folder: Path, shape: Shape, busiest: int, options: dict[str, Any]) -> Measured:
    """The same on a GPU that the ranks share; the buffers of the transport are no tensors of torch."""
    data, tensor, expert = shape
    with report_hang():
        return _measure_on_gpu(folder, data, tensor, expert, busiest, options)


def _measure_on_gpu(
    folder: Path, data: int, tensor: int, expert: int, busiest: int, options: dict[str, Any]
) -> Measured:
    llm = LLM(folder, data=data, tensor=tensor, expert=expert, **options)
    held = torch.cuda.memory_allocated() + llm.plan.dispatch_buffers
    route_to_rank(llm.model, busiest, expert)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    if llm.is_driver:
        for first_token in (0, 20):  # the second time, decode steps are captured and hold memory
            generate_full_steps(llm, data, first_token)
    llm.close()
    return Measured(held, torch.cuda.max_memory_allocated() - before, llm.plan)
