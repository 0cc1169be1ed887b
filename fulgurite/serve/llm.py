"""`LLM`: a model's name in, text out. The whole of serve/ behind one class.

name ─ open_checkpoint ─▶ family, configuration ─ meta model ─▶ MemoryPlan ─ load ─▶ Engine
"""

from __future__ import annotations

import atexit
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from fulgurite.device import cpu
from fulgurite.errors import ArgumentError, CapacityError
from fulgurite.models import hub
from fulgurite.models.checkpoint import Checkpoint, open_checkpoint, plan
from fulgurite.models.layers import Decoder
from fulgurite.models.packed import keep_packed, reads_groups
from fulgurite.models.tokenizer import Message, load_tokenizer
from fulgurite.models.weights import build_model, divide, load_checkpoint, load_share
from fulgurite.parallel.mesh import AXES, TIMEOUT, Mesh, MeshShape
from fulgurite.parallel.others import GRACE, Others, started_alone
from fulgurite.parallel.shares import Shares
from fulgurite.plan.memory import Limits, MemoryPlan, available_bytes, make_plan, weight_bytes
from fulgurite.quant import QuantTensor
from fulgurite.quantize import quantize as pack_linears
from fulgurite.quantize import resolve_recipe
from fulgurite.serve.engine.async_engine import AsyncEngine
from fulgurite.serve.engine.engine import Engine, Prompt, choose_device
from fulgurite.serve.engine.kv_cache import DTYPES
from fulgurite.serve.engine.ranks import Link, agree, open_mesh
from fulgurite.serve.engine.request import Result, SamplingParams, Update
from fulgurite.serve.engine.worker import Follower

Params = SamplingParams | Sequence[SamplingParams] | None
BLOCK_SIZE = 16  # tokens of a block of the cache
BLOCK_SIZES = {"cpu": BLOCK_SIZE, "cuda": 64}  # a tile of keys then lies in one block
SEQUENCES = {"cpu": 16, "cuda": 64}
STEP_TOKENS = {"cpu": 512, "cuda": 4096}


class LLM:
    """A model to generate text with.

    name            a folder, a file, `smollm2`, or a name on the hub (see models/hub.py)
    dtype           of the weights that are not packed; None: the checkpoint's (GGUF files name none: on
                    a GPU bfloat16), or float32 on a CPU that can't compute in it
    kv_dtype        of cached keys and values: float32, bfloat16, float16, fp8, or auto: float16 beside
                    packed weights on a CPU, else the model's
    context         the most tokens prompt and reply may have together; None: the model's
    max_sequences   how many requests run at once, more wait; None: 16, on a GPU 64
    step_tokens     how many tokens one step computes, prompts among them; None: 512, on a GPU 4096
    cache_tokens    how many tokens the cache holds; None: as many as could be needed and fit
    packed          whether weights that the file has packed (GGUF, FP8) stay so: less memory and, on
                    CPUs, inputs rounded to 8 bits for it; False computes with the unpacked weights;
                    None: where there are kernels for it (GGUF: on CPUs, and on GPUs in 16 bits)
    quantize        a format or recipe of `fulgurite.quantize` to pack a dense model's linears in
    reuse           whether requests that begin with the same tokens share their keys
    tensor, expert  over how many ranks weights, and experts, are divided; `data`: how many groups of ranks
                    have requests of their own (None: as many as there are). A process on its own starts
                    the other ranks on this machine. Under torchrun every rank makes the same LLM; rank 0
                    `leads`, and all others `close()` when it does
    timeout         seconds that ranks wait for each other inside a step
    """

    def __init__(
        self,
        name: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        kv_dtype: str = "auto",
        context: int | None = None,
        max_sequences: int | None = None,
        step_tokens: int | None = None,
        cache_tokens: int | None = None,
        packed: bool | None = None,
        quantize: str | None = None,
        reuse: bool = True,
        data: int | None = None,
        tensor: int = 1,
        expert: int = 1,
        timeout: float = TIMEOUT,
    ) -> None:
        options = {key: value for key, value in locals().items() if key not in ("self", "name")}
        place = self.device = choose_device(device)
        if quantize is not None:
            resolve_recipe(quantize)  # a wrong name is said before anything is loaded
        path = hub.resolve(name)
        checkpoint = open_checkpoint(path)
        self.tokenizer = load_tokenizer(path)
        self.tokenizer.check_fits(checkpoint.config.vocabulary)
        self.mesh: Mesh | None = None
        self.others = start_others(path, options)
        with ExitStack() as failed:
            failed.callback(self._part, grace=0.0)
            self.mesh = open_mesh(data, tensor, expert, timeout)
            if self.mesh is not None and place.type == "cuda":
                place = self.device = self.mesh.device
            gguf = path.suffix == ".gguf"
            if dtype is None and gguf and place.type == "cuda":
                dtype = torch.bfloat16
            if dtype is None:
                dtype = natural_dtype(checkpoint.config.dtype, place)
            if packed is None:
                packed = place.type == "cpu" or not gguf or reads_groups(place, dtype)
            keep = "packed" if packed else "dense"
            planned = shapes_of(checkpoint, dtype, packed, place)
            share = planned
            if self.mesh is not None:
                share = divide(checkpoint, self.mesh, dtype, keep, device=place)[0]
            if kv_dtype == "auto" and place.type == "cpu" and is_packed(planned):
                kv_dtype = "float16"
            limits = make_limits(
                planned.config.max_positions,
                planned.norm.weight.dtype,
                kv_dtype=kv_dtype,
                context=context,
                max_sequences=SEQUENCES[place.type] if max_sequences is None else max_sequences,
                step_tokens=STEP_TOKENS[place.type] if step_tokens is None else step_tokens,
                cache_tokens=cache_tokens,
                block_size=BLOCK_SIZES[place.type],
            )
            self.plan: MemoryPlan = plan_memory(planned, share, limits, place, self.mesh)
            self.shares: Shares | None = None  # what this rank of many has of each weight
            if self.mesh is None:
                self.model = load_checkpoint(checkpoint, dtype=dtype, device=place, keep=keep)
            else:
                self.model, self.shares = load_share(
                    checkpoint, self.mesh, dtype=dtype, device=place, keep=keep
                )
            if quantize is not None:
                pack_linears(self.model, quantize, progress=False)
                self.plan = replace(self.plan, weights=weight_bytes(self.model, place))
            self.link = None if self.mesh is None else Link(self.mesh)
            tokenizer = self.tokenizer if self.leads else None
            self.engine = Engine(self.model, tokenizer, self.plan, reuse=reuse, link=self.link)
            failed.pop_all()
        if self.link is not None:
            atexit.register(self.close)  # a script that forgets it leaves nobody waiting

    @property
    def leads(self) -> bool:
        """Whether this rank takes requests: the only one, or the first of many."""
        return self.mesh is None or self.mesh.rank == 0

    def close(self) -> None:
        """The end for all ranks: rank 0 sends the others home, and they work until it does."""
        link, self.link = self.link, None
        if link is None or self.mesh is None:
            return
        atexit.unregister(self.close)
        try:
            if self.leads:
                link.stop()
            else:
                Follower(self.engine, link).run()
        finally:
            self._part()

    def _part(self, grace: float = GRACE) -> None:
        """Leave the mesh, and let the processes that were started for it end."""
        if self.mesh is not None:
            self.mesh.close()
        if self.others is not None:
            self.others.close(grace)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def generate(self, prompts: Prompt | Sequence[Prompt], params: Params = None) -> list[Result]:
        """A result for each prompt, in their order; a single prompt gives a list of one."""
        return self.engine.generate(_several(prompts), params)

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Result:
        """The model's reply to a conversation, written by its own template."""
        return self.engine.generate([self.conversation(messages)], params)[0]

    def stream(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None
    ) -> Iterator[Update]:
        """The updates of one prompt or conversation as they come."""
        return self.engine.stream(self.as_prompt(prompt), params)

    def as_async(self) -> AsyncEngine:
        """The same engine for asyncio, from now on used only through it."""
        return AsyncEngine(self.engine)

    def conversation(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation up to where the reply begins."""
        return self.tokenizer.encode(self.tokenizer.chat(messages), special=False)

    def as_prompt(self, prompt: Prompt | Sequence[Message]) -> Prompt:
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
            return self.conversation([one for one in prompt if isinstance(one, Mapping)])
        return prompt  # type: ignore[return-value]


def start_others(name: str | Path, options: Mapping[str, Any]) -> Others | None:
    """The other ranks that were asked for, where there are none yet."""
    data, tensor, expert = (options[axis] for axis in AXES)
    if tensor < 1:
        raise ArgumentError(f"tensor={tensor} must be 1 or more")
    count = tensor * (max(1, expert // tensor) if data is None else data)
    if count == 1 or not started_alone():
        return None
    MeshShape.for_world(
        count, data, tensor, expert
    )  # what doesn't add up is said before any starts
    return Others(count, "fulgurite.serve.worker_main", pickle.dumps((name, options)))


def plan_memory(
    whole: Decoder, share: Decoder, limits: Limits, place: torch.device, mesh: Mesh | None
) -> MemoryPlan:
    """What fits beside this rank's share: of many ranks, what fits on every one.

    A step's activations are planned as those of the whole model, which no share of it exceeds.
    """
    if mesh is None:
        return make_plan(whole, limits, place, available_bytes(place))
    plan: MemoryPlan | CapacityError
    try:
        available = available_bytes(place) // mesh.neighbours
        plan = make_plan(whole, limits, place, available, share)
    except CapacityError as error:
        plan = error
    return agree(plan, share.attention_specs, mesh)


def natural_dtype(stored: torch.dtype, place: torch.device) -> torch.dtype:
    """The dtype to compute in: the checkpoint's where the device has instructions for it."""
    if place.type != "cpu" or stored == torch.float32:
        return stored
    return stored if stored in cpu().native_dtypes else torch.float32


def is_packed(model: Decoder) -> bool:
    return any(isinstance(weight, QuantTensor) for weight in model.parameters())


def shapes_of(
    checkpoint: Checkpoint, dtype: torch.dtype, packed: bool, place: torch.device | str = "cpu"
) -> Decoder:
    """The model on the meta device, its packed weights too: all shapes and no memory.

    `place` is where it will be.
    """
    model = build_model(checkpoint.config, checkpoint.family, dtype)
    if packed:
        assigned, tensors, config = plan(checkpoint, model), checkpoint.tensors(), checkpoint.config
        grouped = reads_groups(place, dtype)
        keep_packed(model, tensors, assigned, config, device="meta", grouped=grouped)
    return model.to("meta")


def make_limits(
    max_positions: int,
    dtype: torch.dtype,
    *,
    kv_dtype: str = "auto",
    context: int | None = None,
    max_sequences: int = 16,
    step_tokens: int = 512,
    cache_tokens: int | None = None,
    block_size: int = BLOCK_SIZE,
) -> Limits:
    """What an engine is built for, checked."""
    if kv_dtype != "auto" and kv_dtype not in DTYPES:
        raise ArgumentError(
            f"kv_dtype={kv_dtype!r} is not known", next=f"one of auto, {', '.join(DTYPES)}"
        )
    if context is not None and not 2 <= context <= max_positions:
        raise ArgumentError(
            f"a context of {context} tokens is not possible",
            next=f"this model takes 2 to {max_positions}",
        )
    for name, value in (("max_sequences", max_sequences), ("step_tokens", step_tokens)):
        if value < 1:
            raise ArgumentError(f"{name}={value} must be 1 or more")
    if cache_tokens is not None and cache_tokens < block_size:
        raise ArgumentError(f"cache_tokens={cache_tokens} must be {block_size} or more")
    return Limits(
        context=context or max_positions,
        max_sequences=max_sequences,
        step_tokens=max(step_tokens, max_sequences),
        block_size=block_size,
        kv_dtype=dtype if kv_dtype == "auto" else DTYPES[kv_dtype],
        cache_tokens=cache_tokens,
    )


def _several(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One text or one list of token ids is one prompt, and so is anything that is no list."""
    single = isinstance(prompts, str) or not isinstance(prompts, Sequence)
    if single or (prompts and isinstance(prompts[0], Integral)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]
