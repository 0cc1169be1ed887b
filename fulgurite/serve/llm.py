"""`LLM`: the name of a model in, text out. All of serve/ behind one class.

name ─ open_checkpoint ─▶ config, weights ─ meta model ─▶ MemoryPlan ─ load ─▶ Engine
"""

from __future__ import annotations

import atexit
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from fulgurite.device import cpu_info, resolve_device
from fulgurite.errors import ArgumentError, CapacityError
from fulgurite.models.layers import CausalLM
from fulgurite.models.loading import hub
from fulgurite.models.loading.checkpoint import Checkpoint, open_checkpoint
from fulgurite.models.loading.loader import (
    build_meta_model,
    build_sharded_model,
    load_checkpoint,
    load_shard,
)
from fulgurite.models.loading.quantized import needs_repacking
from fulgurite.models.tokenizer import Message, load_tokenizer
from fulgurite.parallel.mesh import DEFAULT_TIMEOUT, Mesh, MeshShape
from fulgurite.parallel.sharding import Sharding
from fulgurite.parallel.workers import EXIT_TIMEOUT, WorkerProcesses, is_single_process
from fulgurite.plan.limits import (
    BLOCK_SIZES,
    MAX_BATCHED_TOKENS,
    MAX_SEQUENCES,
    EngineLimits,
    make_engine_limits,
)
from fulgurite.plan.memory import MemoryPlan, available_bytes, plan_memory, weight_bytes
from fulgurite.quant import QuantTensor
from fulgurite.quantize import quantize, resolve_quant_config
from fulgurite.serve.engine.async_engine import AsyncEngine
from fulgurite.serve.engine.coordinator import Coordinator, agree_on_plan, open_mesh
from fulgurite.serve.engine.engine import Engine, Prompt
from fulgurite.serve.engine.request import Result, SamplingParams, Update
from fulgurite.serve.engine.worker import Worker

Params = SamplingParams | Sequence[SamplingParams] | None


@dataclass(frozen=True)
class LLMConfig:
    """The options of an `LLM`.

    Attributes:
        dtype: dtype of weights that are not quantized. None: the checkpoint's, or float32 on a CPU
            without instructions for it; bfloat16 for GGUF files on a GPU.
        device: `cpu` or `cuda`. None: `cuda` if there is a GPU.
        kv_dtype: dtype of the KV cache: `float32`, `bfloat16`, `float16`, `fp8` or `auto`. `auto`:
            the model's dtype; float16 for quantized weights on a CPU.
        context: maximum number of tokens of prompt and reply together. None: the model's maximum.
        max_sequences: maximum number of requests that run at once; others wait. None: 16, on a GPU 64.
        max_batched_tokens: maximum number of tokens of a step. None: 512, on a GPU 4096.
        cache_tokens: tokens that the KV cache holds. None: as many as can be used and fit.
        keep_quantized: keep quantized weights of the file (GGUF, FP8) quantized. CPUs then also
            quantize activations to 8 bits. False: dequantize weights while loading. None: True where
            there are kernels (GGUF: on CPUs, and on GPUs in 16 bits).
        quantize: a format or config name of `fulgurite.quantize`, for the linears of a dense model.
        prefix_caching: share KV-cache blocks between requests with the same prefix.
        data: data-parallel replicas, each with its own requests. None: all remaining ranks.
        tensor: tensor-parallel size: the number of ranks over which weights are sharded.
        expert: expert-parallel size: the number of ranks over which experts are distributed.
        timeout: seconds that ranks wait for each other within a step.
    """

    dtype: torch.dtype | None = None
    device: str | torch.device | None = None
    kv_dtype: str = "auto"
    context: int | None = None
    max_sequences: int | None = None
    max_batched_tokens: int | None = None
    cache_tokens: int | None = None
    keep_quantized: bool | None = None
    quantize: str | None = None
    prefix_caching: bool = True
    data: int | None = None
    tensor: int = 1
    expert: int = 1
    timeout: float = DEFAULT_TIMEOUT


class LLM:
    """A model to generate text with.

    A single process starts the other ranks of `data`, `tensor` and `expert` on this machine. Under
    torchrun every rank creates the same `LLM`. Rank 0 is the driver and takes requests. All other
    ranks call `close()`, which runs their steps until the driver closes, too.

    Args:
        name: a folder, a `.safetensors` or `.gguf` file, `smollm2`, or a model on the Hugging Face
            Hub (`owner/model`).
        config: the options. None: the defaults of `LLMConfig`.
        **options: fields of `LLMConfig`, which override `config`. `LLM(name, context=4096)` is
            `LLM(name, LLMConfig(context=4096))`.
    """

    def __init__(self, name: str | Path, config: LLMConfig | None = None, **options: Any) -> None:
        config = LLMConfig(**options) if config is None else replace(config, **options)
        self.config = config
        self.device = resolve_device(config.device)
        if config.quantize is not None:
            resolve_quant_config(config.quantize)  # raise before anything is loaded
        path = hub.resolve_model_path(name)
        checkpoint = open_checkpoint(path)
        self.tokenizer = load_tokenizer(path)
        self.tokenizer.check_vocab_size(checkpoint.config.vocab_size)
        self.mesh: Mesh | None = None
        self.workers = start_workers(path, config)
        with ExitStack() as on_error:
            on_error.callback(self._shut_down, timeout=0.0)
            self.mesh = open_mesh(config.data, config.tensor, config.expert, config.timeout)
            if self.mesh is not None and self.device.type == "cuda":
                self.device = self.mesh.device
            self._load(checkpoint, is_gguf=path.suffix == ".gguf")
            on_error.pop_all()
        if self.coordinator is not None:
            atexit.register(self.close)  # a script that forgets to close leaves no worker waiting

    def _load(self, checkpoint: Checkpoint, is_gguf: bool) -> None:
        """Plan the memory, load the weights and build the engine."""
        config, device = self.config, self.device
        dtype = config.dtype
        if dtype is None and is_gguf and device.type == "cuda":
            dtype = torch.bfloat16
        if dtype is None:
            dtype = choose_compute_dtype(checkpoint.config.dtype, device)
        keep_quantized = config.keep_quantized
        if keep_quantized is None:
            keep_quantized = device.type == "cpu" or not is_gguf or needs_repacking(device, dtype)
        meta_model = meta_shard = build_meta_model(checkpoint, dtype, keep_quantized, device)
        if self.mesh is not None:
            meta_shard = build_sharded_model(
                checkpoint, self.mesh, dtype, keep_quantized, device=device
            )[0]
        limits = choose_limits(config, meta_model, device)
        self.plan = plan_rank_memory(meta_model, meta_shard, limits, device, self.mesh)
        self.sharding: Sharding | None = None
        if self.mesh is None:
            self.model = load_checkpoint(
                checkpoint, dtype=dtype, device=device, keep_quantized=keep_quantized
            )
        else:
            self.model, self.sharding = load_shard(
                checkpoint, self.mesh, dtype=dtype, device=device, keep_quantized=keep_quantized
            )
        if config.quantize is not None:
            quantize(self.model, config.quantize, progress=False)
            self.plan = replace(self.plan, weights=weight_bytes(self.model, device))
        self.coordinator = None if self.mesh is None else Coordinator(self.mesh)
        self.engine = Engine(
            self.model,
            self.tokenizer if self.is_driver else None,
            self.plan,
            prefix_caching=config.prefix_caching,
            coordinator=self.coordinator,
        )

    @property
    def is_driver(self) -> bool:
        """Whether this rank takes requests: rank 0, or the only one."""
        return self.mesh is None or self.mesh.rank == 0

    def close(self) -> None:
        """Shut down all ranks. The driver stops the workers; on a worker this runs steps until then."""
        coordinator, self.coordinator = self.coordinator, None
        if coordinator is None or self.mesh is None:
            return
        atexit.unregister(self.close)
        try:
            if self.is_driver:
                coordinator.stop()
            else:
                Worker(self.engine, coordinator).run()
        finally:
            self._shut_down()

    def _shut_down(self, timeout: float = EXIT_TIMEOUT) -> None:
        """Leave the mesh and wait for the worker processes that were started for it."""
        if self.mesh is not None:
            self.mesh.close()
        if self.workers is not None:
            self.workers.close(timeout)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def generate(self, prompts: Prompt | Sequence[Prompt], params: Params = None) -> list[Result]:
        """Generate replies to all prompts. Results are in order; a single prompt gives a list of one."""
        return self.engine.generate(_as_prompt_list(prompts), params)

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Result:
        """The reply to a conversation, formatted by the model's chat template."""
        return self.engine.generate([self.encode_chat(messages)], params)[0]

    def stream(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None
    ) -> Iterator[Update]:
        """Generate a reply to one prompt or conversation, and yield `Update`s as its text grows."""
        return self.engine.stream(self.to_prompt(prompt), params)

    def as_async(self) -> AsyncEngine:
        """The engine for asyncio. After this call, use the engine only through the returned object."""
        return AsyncEngine(self.engine)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation up to the beginning of the reply."""
        return self.tokenizer.encode(
            self.tokenizer.apply_chat_template(messages), add_special_tokens=False
        )

    def to_prompt(self, prompt: Prompt | Sequence[Message]) -> Prompt:
        """A conversation as token ids; any other prompt as it is."""
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
            return self.encode_chat([message for message in prompt if isinstance(message, Mapping)])
        return prompt  # type: ignore[return-value]


def start_workers(path: str | Path, config: LLMConfig) -> WorkerProcesses | None:
    """Start the worker processes, unless a launcher has started the ranks or one rank is enough."""
    data, tensor, expert = config.data, config.tensor, config.expert
    if tensor < 1:
        raise ArgumentError(f"tensor={tensor} must be 1 or more")
    world_size = tensor * (max(1, expert // tensor) if data is None else data)
    if world_size == 1 or not is_single_process():
        return None
    MeshShape.for_world(world_size, data, tensor, expert)  # raise before a process starts
    arguments = pickle.dumps((path, config))
    return WorkerProcesses(world_size, "fulgurite.serve.worker_main", arguments)


def choose_limits(config: LLMConfig, model: CausalLM, device: torch.device) -> EngineLimits:
    """The engine limits of these options; defaults depend on the device."""
    kv_dtype = config.kv_dtype
    if kv_dtype == "auto" and device.type == "cpu" and has_quantized_weights(model):
        kv_dtype = "float16"
    max_sequences, max_batched_tokens = config.max_sequences, config.max_batched_tokens
    if max_sequences is None:
        max_sequences = MAX_SEQUENCES[device.type]
    if max_batched_tokens is None:
        max_batched_tokens = MAX_BATCHED_TOKENS[device.type]
    return make_engine_limits(
        model.config.max_positions,
        model.norm.weight.dtype,
        kv_dtype=kv_dtype,
        context=config.context,
        max_sequences=max_sequences,
        max_batched_tokens=max_batched_tokens,
        cache_tokens=config.cache_tokens,
        block_size=BLOCK_SIZES[device.type],
    )


def plan_rank_memory(
    model: CausalLM,
    shard: CausalLM,
    limits: EngineLimits,
    device: torch.device,
    mesh: Mesh | None,
) -> MemoryPlan:
    """The memory plan of this rank's shard; with many ranks one that fits on every rank.

    Activations are planned as those of the whole model, which no shard exceeds.
    """
    if mesh is None:
        return plan_memory(model, limits, device, available_bytes(device))
    plan: MemoryPlan | CapacityError
    try:
        available = available_bytes(device) // mesh.ranks_per_device
        plan = plan_memory(model, limits, device, available, shard)
    except CapacityError as error:
        plan = error
    return agree_on_plan(plan, shard.attention_specs, mesh)


def choose_compute_dtype(stored: torch.dtype, device: torch.device) -> torch.dtype:
    """The checkpoint's dtype; float32 on a CPU without instructions for it."""
    if device.type != "cpu" or stored == torch.float32:
        return stored
    return stored if stored in cpu_info().native_dtypes else torch.float32


def has_quantized_weights(model: CausalLM) -> bool:
    return any(isinstance(weight, QuantTensor) for weight in model.parameters())


def _as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A single string or list of token ids becomes a list of one prompt."""
    is_single = isinstance(prompts, str) or not isinstance(prompts, Sequence)
    if is_single or (prompts and isinstance(prompts[0], Integral)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]
