"""`LLM`: the name of a model in, text out. All of serve/ behind one class.

name ─ open_checkpoint ─▶ config, headers ─ LoadPlan ─▶ MemoryPlan ─ load ─▶ Engine
"""

from __future__ import annotations

import atexit
import copy
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fulgurite.device import choose_compute_dtype, resolve_device, resolve_dtype
from fulgurite.errors import ArgumentError
from fulgurite.logs import LOG
from fulgurite.models.expert_load import ExpertLoadFile
from fulgurite.models.layers import CausalLM
from fulgurite.models.loading import hub
from fulgurite.models.loading.checkpoint import Checkpoint, open_checkpoint
from fulgurite.models.loading.load_plan import LoadOptions, LoadPlan, plan_load
from fulgurite.models.loading.loader import load_planned
from fulgurite.models.loading.quantized import needs_repacking
from fulgurite.models.tokenizer import Message, Tokenizer, find_tokenizer
from fulgurite.parallel.context import ContextParallel
from fulgurite.parallel.dispatch.dispatcher import TokenDispatcher
from fulgurite.parallel.experts.transport import ExpertOptions
from fulgurite.parallel.mesh import Mesh, MeshShape, check_timeout
from fulgurite.parallel.pipeline import Pipeline
from fulgurite.parallel.processes.workers import EXIT_TIMEOUT, WorkerProcesses, is_single_process
from fulgurite.parallel.topology import find_emulated_nodes
from fulgurite.plan.kv_cache import check_context_cache
from fulgurite.plan.limits import (
    BLOCK_SIZES,
    MAX_BATCHED_TOKENS,
    MAX_SEQUENCES,
    EngineLimits,
    make_engine_limits,
)
from fulgurite.plan.memory import RankShapes, available_bytes, plan_memory, shapes_of
from fulgurite.plan.meta_dispatch import MetaDeterministicDispatcher, use_micro_batches
from fulgurite.plan.rank_memory import plan_rank_dispatch, plan_rank_memory
from fulgurite.plan.shard import PlannedMesh
from fulgurite.quant import QuantTensor
from fulgurite.quantize import resolve_quant_config
from fulgurite.serve.embedding import EmbeddingModel, as_prompt_list
from fulgurite.serve.engine.async_engine import AsyncEngine
from fulgurite.serve.engine.coordinator import Coordinator, open_mesh
from fulgurite.serve.engine.engine import Engine, Prompt
from fulgurite.serve.engine.rank_restart import RankProcesses, RankRestarter, RestartPolicy
from fulgurite.serve.engine.request import Result, SamplingParams, Update
from fulgurite.serve.engine.stats import EngineStats
from fulgurite.serve.engine.worker import Worker
from fulgurite.serve.expert_setup import ExpertSetup, ExpertSetupOptions, prepare_experts
from fulgurite.serve.llm_config import LLMConfig
from fulgurite.serve.structured.compiler import GrammarCompiler


class RankPlan(NamedTuple):
    """What is planned before a rank loads its weights: its experts, its shard, its engine's limits.

    dispatcher         allocates as that of the mesh does; None: no expert axis
    dispatch_buffers   bytes that this dispatcher holds for good
    """

    experts: ExpertSetup
    load: LoadPlan
    limits: EngineLimits
    dispatcher: TokenDispatcher | None = None
    dispatch_buffers: int = 0


Params = SamplingParams | Sequence[SamplingParams] | None


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

    engine: Engine
    coordinator: Coordinator | None
    experts: ExpertSetup | None
    load_file: ExpertLoadFile | None
    earlier_load: Tensor | None  # saved before ranks were restarted

    def __init__(self, name: str | Path, config: LLMConfig | None = None, **options: Any) -> None:
        config = LLMConfig(**options) if config is None else replace(config, **options)
        check_axes(config)
        self.config = config
        self.device = resolve_device(config.device)
        if config.quantize is not None:
            resolve_quant_config(config.quantize)  # raise before anything is loaded
        path = self.path = hub.resolve_model_path(name)
        self._embedding_model: EmbeddingModel | None = None  # made by the first call of `embed`
        checkpoint = open_checkpoint(path, config.implementation)
        self.architecture = checkpoint.family.name
        layouts = (config.tensor, config.expert, config.pipeline, config.context_parallel)
        if max(config.data or 1, *layouts) > 1:
            checkpoint.check_can_shard()
        self.tokenizer = find_tokenizer(path)
        if self.tokenizer is not None:
            self.tokenizer.check_vocab_size(checkpoint.config.vocab_size)
        self.mesh: Mesh | None = None
        self.load_file = self.earlier_load = None
        policy = RestartPolicy(config.on_rank_failure, config.max_restarts)
        self._start_ranks(checkpoint)
        if self.workers is not None:
            processes = RankProcesses(self._check_ranks, self._stop_ranks, self._restart_ranks)
            self.engine.restarter = RankRestarter(policy, processes)
        if self.coordinator is not None:
            atexit.register(self.close)  # a script that forgets to close leaves no worker waiting

    def _start_ranks(self, checkpoint: Checkpoint) -> None:
        """Start the workers, join the mesh and load the model."""
        config = self.config
        self.workers = self._start_workers(checkpoint)
        with ExitStack() as on_error:
            on_error.callback(self._shut_down, timeout=0.0)
            self.mesh = open_mesh(
                config.data,
                config.tensor,
                config.expert,
                config.timeout,
                pipeline=config.pipeline,
                context=config.context_parallel,
                nodes=config.nodes,
            )
            if self.mesh is not None and self.device.type == "cuda":
                self.device = self.mesh.device
            with checkpoint:
                self._load(checkpoint)
            on_error.pop_all()

    def _start_workers(self, checkpoint: Checkpoint) -> WorkerProcesses | None:
        """Start the other ranks, unless a launcher has started them or one rank is enough.

        What a rank plans before it loads is planned here first: a layout or option that can't work
        is an error before a process starts.
        """
        if not is_single_process():
            return None
        shape = choose_mesh_shape(self.config)
        if shape.world_size == 1:
            return None
        check_timeout(self.config.timeout)
        nodes = find_emulated_nodes(shape.world_size, self.config.nodes)
        mesh: Any = PlannedMesh(shape, nodes=nodes)
        self._plan_rank(checkpoint, mesh)
        arguments = pickle.dumps((self.path, self.config))
        module, timeout = "fulgurite.serve.worker_main", self.config.timeout
        return WorkerProcesses(shape.world_size, module, arguments, timeout)

    def _check_ranks(self) -> None:
        """RankError if a worker process has ended."""
        if self.workers is not None:
            self.workers.check()

    def _stop_ranks(self) -> None:
        """Kill the workers, leave the mesh, and free this rank's weights."""
        self._shut_down(timeout=0.0)
        if self.load_file is not None:
            self.earlier_load, self.load_file = self.load_file.total, None
        self.mesh = self.workers = self.coordinator = self.experts = None
        self.__dict__.pop("model", None)

    def _restart_ranks(self) -> Engine:
        """Start the ranks again; returns their new engine. `self.engine` stays, with its requests."""
        engine = self.engine
        # As many blocks as before: all queued requests fit.
        self.config = replace(self.config, cache_tokens=self.plan.cache_tokens)
        try:
            self._start_ranks(open_checkpoint(self.path, self.config.implementation))
            return self.engine
        finally:
            self.engine = engine

    @classmethod
    def from_model(
        cls,
        model: CausalLM,
        tokenizer: Tokenizer | None = None,
        config: LLMConfig | None = None,
        **options: Any,
    ) -> LLM:
        """An `LLM` on a model in memory, for one process: it shares the parameters and copies none.

        If they change, call `llm.engine.reset_prefix_cache()`: cached keys are those of old weights.
        Options that load weights (`dtype`, `device`, `quantize`) have no effect.
        """
        llm = cls.__new__(cls)
        llm.config = LLMConfig(**options) if config is None else replace(config, **options)
        llm.device, llm.model, llm.tokenizer = model.device, model, tokenizer
        llm.path = Path(model.config.family)
        llm.architecture = model.config.family
        llm._embedding_model = llm.mesh = llm.workers = llm.coordinator = llm.sharding = None
        llm.experts = llm.load_file = llm.earlier_load = None
        limits = choose_limits(llm.config, model, llm.device)
        shapes = copy_to_meta(model)
        weights = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
        llm.plan = plan_memory(shapes, limits, llm.device, available_bytes(llm.device) + weights)
        llm.engine = Engine(
            model,
            tokenizer,
            llm.plan,
            prefix_caching=llm.config.prefix_caching,
            deterministic=llm.config.deterministic,
            async_scheduling=llm.config.async_scheduling,
            grammar_compiler=llm._make_grammar_compiler(),
        )
        return llm

    def _plan_rank(self, checkpoint: Checkpoint, mesh: Mesh | None) -> RankPlan:
        """What a rank of the mesh will hold, and its engine allocate for; loads nothing."""
        config, device = self.config, self.device
        setup = replace(make_expert_setup_options(config), model=hub.name_model(self.path))
        experts = prepare_experts(setup, mesh, checkpoint.config, device)
        options = self._load_options(checkpoint)
        load = plan_load(checkpoint, options, mesh, **self._sharding_options(mesh, experts))
        limits = choose_limits(config, load.model, device, checkpoint.quantization.kv_cache)
        if mesh is None:
            return RankPlan(experts, load, limits)
        if config.context_parallel > 1:
            check_context_cache(load.model.attention_specs, limits.kv_dtype)
        dispatch = self._plan_dispatcher(mesh, experts, load.model, limits)
        return RankPlan(experts, load, limits, *dispatch)

    def _sharding_options(self, mesh: Mesh | None, experts: ExpertSetup) -> dict[str, Any]:
        """Options of `parallelize`. Only deterministic=True avoids sums over ranks: they cost less."""
        if mesh is None:
            return {}
        deterministic = self.config.deterministic is True
        return {"placement": experts.placement, "deterministic": deterministic}

    def _load_options(self, checkpoint: Checkpoint) -> LoadOptions:
        config, device = self.config, self.device
        is_gguf = self.path.suffix == ".gguf"
        dtype = resolve_dtype(config.dtype)
        if dtype is None and is_gguf and device.type == "cuda":
            dtype = torch.bfloat16
        if dtype is None:
            dtype = choose_compute_dtype(checkpoint.config.dtype, device)
        keep_quantized = config.keep_quantized
        if keep_quantized is None:
            keep_quantized = device.type == "cpu" or not is_gguf or needs_repacking(device, dtype)
        return LoadOptions(dtype, device, keep_quantized, quantize=config.quantize)

    def _load(self, checkpoint: Checkpoint) -> None:
        """Plan the memory, load the weights and build the engine."""
        config, device = self.config, self.device
        plan = self._plan_rank(checkpoint, self.mesh)
        self.experts, load_plan, limits = plan.experts, plan.load, plan.limits
        shapes = self._build_shapes(checkpoint, plan)
        loading = load_plan.temporary_bytes
        self.plan = plan_rank_memory(shapes, limits, device, self.mesh, loading)
        self.model = load_planned(load_plan)
        if self.mesh is not None and self.mesh.pipeline.size > 1:
            self.model.pipeline = Pipeline(self.mesh)
        if self.mesh is not None and self.mesh.context.size > 1:
            self.model.context = ContextParallel(self.mesh.context)
        self.sharding = load_plan.sharding
        counter = self.experts.finish(self.model, limits.max_batched_tokens)
        if config.compile:
            self.model.compile_decoder()
        self.coordinator = None if self.mesh is None else Coordinator(self.mesh)
        self.engine = Engine(
            self.model,
            self.tokenizer if self.is_driver else None,
            self.plan,
            prefix_caching=config.prefix_caching,
            deterministic=config.deterministic,
            coordinator=self.coordinator,
            async_scheduling=config.async_scheduling,
            grammar_compiler=self._make_grammar_compiler(),
        )
        if counter is not None and config.record_load is not None:
            path, earlier = Path(config.record_load), self.earlier_load
            name = hub.name_model(self.path)
            self.load_file = ExpertLoadFile(counter, path, self.mesh, earlier, name)
            self.engine.record_load(self.load_file, config.record_load_interval)

    def _build_shapes(self, checkpoint: Checkpoint, plan: RankPlan) -> RankShapes:
        """What this rank will hold and run, on the meta device, to plan its memory."""
        if self.mesh is None:
            model = plan.load.build_meta_model()
            if self.config.compile:
                model.compile_decoder(packs_linears=self.config.deterministic is False)
            return shapes_of(model, self.device)
        model = plan_load(
            checkpoint,
            plan.load.options,
            self.mesh,
            dispatcher=plan.dispatcher,
            **self._sharding_options(self.mesh, plan.experts),
        ).model.to("meta")
        use_micro_batches(model, self.config.micro_batches)
        return shapes_of(model, self.device, plan.dispatch_buffers)

    def _plan_dispatcher(
        self, mesh: Mesh, experts: ExpertSetup, model: CausalLM, limits: EngineLimits
    ) -> tuple[TokenDispatcher | None, int]:
        """What allocates as the dispatcher of a mesh does, and the bytes that it holds for good."""
        if mesh.expert.size == 1:
            return None, 0
        if self.config.deterministic is True:
            return MetaDeterministicDispatcher(mesh.expert), 0
        placement = experts.placement
        slots = None if placement is None else placement.slots_LS.shape[1]
        options = make_expert_options(self.config)
        dispatch = plan_rank_dispatch(options, model, limits, mesh, self.device, slots)
        return dispatch.make_meta_dispatcher(), dispatch.buffer_bytes

    def _make_grammar_compiler(self) -> GrammarCompiler | None:
        """Compiles the grammars of requests; None without a tokenizer and on ranks that don't sample."""
        samples = self.is_driver or (self.coordinator is not None and self.coordinator.samples)
        if self.tokenizer is None or not samples:
            return None
        ends = {*self.model.config.eos_token_ids, *self.tokenizer.stop_ids}
        return GrammarCompiler(self.tokenizer, self.model.config.vocab_size, ends)

    @property
    def is_driver(self) -> bool:
        """Whether this rank takes requests: rank 0, or the only one."""
        return self.mesh is None or self.mesh.rank == 0

    def close(self) -> None:
        """Shut down all ranks. The driver stops the workers; on a worker this runs steps until then.

        Saves the expert load, if it is recorded.
        """
        atexit.unregister(self.close)
        coordinator, self.coordinator = self.coordinator, None
        if coordinator is None or self.mesh is None:
            self._save_expert_load()
            return
        if coordinator.left_by:  # the other ranks wait in a step, and can't be told to stop
            LOG.warning("the ranks are ended: rank 0 has left a step by %s", coordinator.left_by)
            self._shut_down(timeout=0.0)
            return
        try:
            if self.is_driver:
                coordinator.stop()
            else:
                Worker(self.engine, coordinator).run()
            self._save_expert_load()
        finally:
            self._shut_down()

    def _save_expert_load(self) -> None:
        """Save what was counted since the ranks started; once, and on all ranks together."""
        file, self.load_file = self.load_file, None
        if file is not None:
            file.collect()
            file.write()

    def save_load(self) -> None:
        """Save the expert load now, as far as it was counted. On the driver, while others wait."""
        self.engine.save_load()

    def _shut_down(self, timeout: float = EXIT_TIMEOUT) -> None:
        """Leave the mesh and wait for the worker processes that were started for it."""
        if self.workers is not None and not timeout:
            self.workers.kill()  # first: collectives that wait for them fail, and none waits in close
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
        return self.engine.generate(as_prompt_list(prompts), params)

    def embed(self, prompts: Prompt | Sequence[Prompt], *, truncate: bool = False) -> Tensor:
        """One vector a prompt, [prompts, D] in float32 on the CPU.

        The hidden states are pooled as the folder's sentence-transformers modules say; without them, the
        vector is the hidden state of the last token. See `EmbeddingModel`.
        """
        if self.mesh is not None:
            raise ArgumentError("embeddings need a single rank", next="use data=1 and tensor=1")
        if self._embedding_model is None:
            self._embedding_model = EmbeddingModel.from_parts(
                self.path, self.model, self.tokenizer, self.plan.limits.max_batched_tokens
            )
        with self.engine.lock:
            return self._embedding_model.embed(prompts, truncate=truncate)

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Result:
        """The reply to a conversation, formatted by the model's chat template."""
        return self.engine.generate([self.encode_chat(messages)], params)[0]

    def stream(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None
    ) -> Iterator[Update]:
        """Generate a reply to one prompt or conversation, and yield `Update`s as its text grows."""
        return self.engine.stream(self.to_prompt(prompt), params)

    def stats(self) -> EngineStats:
        """What the engine has done so far, and what it is doing. On rank 0: of all replicas."""
        return self.engine.stats()

    def as_async(self) -> AsyncEngine:
        """The engine for asyncio. After this call, use the engine only through the returned object."""
        return AsyncEngine(self.engine)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation up to the beginning of the reply."""
        tokenizer = self.require_tokenizer()
        return tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)

    def require_tokenizer(self) -> Tokenizer:
        """The model's tokenizer; ArgumentError if its folder has none."""
        if self.tokenizer is None:
            raise ArgumentError(
                "this model's folder has no tokenizer.json, so it takes token ids only",
                next="llm.generate([[1, 2, 3]]), or put the tokenizer.json of the model beside its "
                "weights",
            )
        return self.tokenizer

    def to_prompt(self, prompt: Prompt | Sequence[Message]) -> Prompt:
        """A conversation as token ids; any other prompt as it is."""
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
            return self.encode_chat([message for message in prompt if isinstance(message, Mapping)])
        return prompt  # type: ignore[return-value]


def check_axes(config: LLMConfig) -> None:
    """ArgumentError for a size of an axis that is not a number of ranks."""
    for name in ("data", "tensor", "expert", "pipeline", "context_parallel"):
        size = getattr(config, name)
        if name == "data" and size is None:
            continue
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ArgumentError(f"{name}={size!r} must be 1 or more", next="a number of ranks")


def choose_mesh_shape(config: LLMConfig) -> MeshShape:
    """The axes of these options, where no launcher has started the ranks."""
    replica = config.context_parallel * config.tensor  # ranks of a stage of one replica
    data = max(1, config.expert // replica) if config.data is None else config.data
    return MeshShape(data, config.tensor, config.expert, config.pipeline, config.context_parallel)


def choose_limits(
    config: LLMConfig, model: CausalLM, device: torch.device, kv_cache: str | None = None
) -> EngineLimits:
    """The engine limits of these options; defaults depend on the device.

    `kv_cache` is the KV-cache format that the checkpoint declares. GPUs follow it. CPUs don't: FP8
    is slower there than float16, and less exact.
    """
    kv_dtype = config.kv_dtype
    if kv_dtype == "auto" and device.type == "cpu" and has_quantized_weights(model):
        kv_dtype = "float16"
    elif kv_dtype == "auto" and device.type == "cuda" and kv_cache is not None:
        kv_dtype = kv_cache
    max_sequences, max_batched_tokens = config.max_sequences, config.max_batched_tokens
    if max_sequences is None:
        max_sequences = MAX_SEQUENCES[device.type]
    if max_batched_tokens is None:
        max_batched_tokens = MAX_BATCHED_TOKENS[device.type]
    limits = make_engine_limits(
        model.config.max_positions,
        model.dtype,
        kv_dtype=kv_dtype,
        context=config.context,
        max_sequences=max_sequences,
        max_batched_tokens=max_batched_tokens,
        max_mixed_tokens=config.max_mixed_tokens,
        cache_tokens=config.cache_tokens,
        block_size=BLOCK_SIZES[device.type] * config.context_parallel,
    )
    return replace(limits, context_parallel=config.context_parallel)


def make_expert_options(config: LLMConfig) -> ExpertOptions:
    """How tokens go to experts on other ranks."""
    options = ExpertOptions(
        transport=config.transport,
        wire=config.wire,
        capacity=config.expert_capacity,
        micro_batches=config.micro_batches,
    )
    if config.deterministic and config.expert > 1 and options != ExpertOptions():
        raise ArgumentError(
            "deterministic=True has a dispatcher of its own, without transport, wire, expert_capacity "
            "and micro_batches",
            next="leave them out, or leave out deterministic=True",
        )
    return options


def make_expert_setup_options(config: LLMConfig) -> ExpertSetupOptions:
    """The same, with the files of placement and recorded load."""
    return ExpertSetupOptions(
        make_expert_options(config),
        config.placement,
        config.record_load,
        config.record_load_interval,
    )


def copy_to_meta(model: CausalLM) -> CausalLM:
    """A copy of the modules on the meta device; no weight is copied."""
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        meta = tensor.detach().to("meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(meta, requires_grad=False) if is_parameter else meta
    return copy.deepcopy(model, memo)


def has_quantized_weights(model: CausalLM) -> bool:
    return any(isinstance(weight, QuantTensor) for weight in model.parameters())
