"""Decode steps over ranks, for the suite `host`: meshes in, the wall and host time of a step out.

The model has two small layers, so nearly all of a step is the host: messages of rank 0, agreements,
schedulers, and launches. With CUDA graphs the launches of all layers are one replay. On a CPU, and where
ranks communicate through the host, there are no graphs and no row for them. On a GPU the host prepares the
next step while one runs (`async_scheduling`), except in the row that says so.

Ranks that share a GPU need TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1. Their kernels take turns, so that
their wall time says little; host time is that of rank 0's thread alone.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from fulgurite.bench.generate.model import Workload, time_decode
from fulgurite.bench.generate.random_checkpoint import write_random_checkpoint
from fulgurite.models.config import ConfigFields
from fulgurite.serve.engine.engine import Engine
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.llm import LLM

REQUESTS = 4
WITHOUT_GRAPHS = "the benchmark measures steps without graphs"
FIELDS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}


class MeshCase(NamedTuple):
    name: str
    options: dict[str, int]  # of `LLM`


CASES = (
    MeshCase("decode step, one rank", {}),
    MeshCase("decode step, tensor 2", {"tensor": 2}),
    MeshCase("decode step, tensor 2, one at a time", {"tensor": 2, "async_scheduling": False}),
    MeshCase("decode step, tensor 2, expert 2", {"tensor": 2, "expert": 2}),
    MeshCase("decode step, data 2, expert 2", {"data": 2, "expert": 2}),
    MeshCase("decode step, pipeline 2", {"pipeline": 2}),
)


class StepTime(NamedTuple):
    """Seconds of a step; `host` is the part in which rank 0's thread does not wait."""

    is_captured: bool
    wall: float
    host: float


class HostClock:
    """CPU seconds of this thread, without those in which it waits for the device: torch spins there."""

    def __init__(self) -> None:
        self._waited = 0.0

    def __call__(self) -> float:
        return time.thread_time() - self._waited

    @contextmanager
    def count_waits(self) -> Iterator[None]:
        synchronize = torch.cuda.Event.synchronize

        def counted(event: torch.cuda.Event) -> None:
            start = time.thread_time()
            synchronize(event)
            self._waited += time.thread_time() - start

        with mock.patch.object(torch.cuda.Event, "synchronize", counted):
            yield


def measure_mesh(case: MeshCase, device: str, steps: int) -> Iterator[StepTime]:
    """A step without graphs, and with them if it can be captured."""
    workload = Workload(prompt=8, steps=steps, batches=(REQUESTS,))
    with tempfile.TemporaryDirectory(prefix="fulgurite-bench-") as folder:
        path = Path(folder) / "checkpoint"
        write_random_checkpoint(ConfigFields(FIELDS, "the suite host"), path, None)
        limits = {"context": workload.context, "max_sequences": REQUESTS}
        with LLM(path, device=device, **limits, **case.options) as llm:  # type: ignore[arg-type]
            runner = llm.engine.runner
            reason, runner.no_capture_reason = runner.no_capture_reason, WITHOUT_GRAPHS
            yield _time_step(llm.engine, workload, False)
            if reason is None and device.startswith("cuda"):
                runner.no_capture_reason = None
                yield _time_step(llm.engine, workload, True)


def _time_step(engine: Engine, workload: Workload, is_captured: bool) -> StepTime:
    (wall,) = time_decode(engine, REQUESTS, workload, SamplingParams())
    clock = HostClock()
    with clock.count_waits():
        (host,) = time_decode(engine, REQUESTS, workload, SamplingParams(), clock=clock)
    return StepTime(is_captured, wall, host)
