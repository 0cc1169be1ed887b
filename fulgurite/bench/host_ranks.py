"""Decode steps over ranks, for the suite `host`: meshes in, the wall time of a step out.

The model has two small layers, so nearly all of a step is the host: messages of rank 0, agreements,
schedulers, and launches. With CUDA graphs the launches of all layers are one replay. On a CPU, and where
ranks communicate through the host, there are no graphs and no row for them. On a GPU the host prepares the
next step while one runs (`async_scheduling`), except in the row that says so.

Ranks that share a GPU need TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1; their kernels take turns.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fulgurite.bench.generate.model import Workload, time_decode
from fulgurite.bench.generate.random_checkpoint import write_random_checkpoint
from fulgurite.models.config import ConfigFields
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


def measure_mesh(case: MeshCase, device: str, steps: int) -> Iterator[tuple[bool, float]]:
    """Whether steps are captured, and the seconds of one: without graphs, and with them if it can."""
    workload = Workload(prompt=8, steps=steps, batches=(REQUESTS,))
    with tempfile.TemporaryDirectory(prefix="fulgurite-bench-") as folder:
        path = Path(folder) / "checkpoint"
        write_random_checkpoint(ConfigFields(FIELDS, "the suite host"), path, None)
        limits = {"context": workload.context, "max_sequences": REQUESTS}
        with LLM(path, device=device, **limits, **case.options) as llm:  # type: ignore[arg-type]
            runner = llm.engine.runner
            reason, runner.no_capture_reason = runner.no_capture_reason, WITHOUT_GRAPHS
            yield False, time_decode(llm.engine, REQUESTS, workload, SamplingParams())[0]
            if reason is None and device.startswith("cuda"):
                runner.no_capture_reason = None
                yield True, time_decode(llm.engine, REQUESTS, workload, SamplingParams())[0]
