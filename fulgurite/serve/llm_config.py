"""`LLMConfig`: the options of an `LLM`. Imports no torch: the server checks names of options only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fulgurite.option_values import DEFAULT_TIMEOUT

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LLMConfig:
    """The options of an `LLM`.

    Attributes:
        dtype: dtype of weights that are not quantized, or its name. None: the checkpoint's, or
            float32 on a CPU without instructions for it; bfloat16 for GGUF files on a GPU.
        device: `cpu` or `cuda`. None: `cuda` if there is a GPU.
        kv_dtype: dtype of the KV cache: `float32`, `bfloat16`, `float16`, `fp8` or `auto`. `auto`:
            the model's dtype; float16 for quantized weights on a CPU; `fp8` on a GPU if the
            checkpoint was calibrated for it. Its scales are used by every FP8 cache.
        context: maximum number of tokens of prompt and reply together. None: the model's maximum.
        max_sequences: maximum number of requests that run at once; others wait. None: 16, on a GPU 64.
        max_batched_tokens: maximum number of tokens of a step. None: 512, on a GPU 4096.
        max_mixed_tokens: the same for steps in which other requests decode: smaller steps delay their
            tokens less while a prompt is computed. None: no other limit.
        cache_tokens: tokens that the KV cache holds. None: as many as can be used and fit.
        keep_quantized: keep quantized weights of the file quantized. CPUs then also quantize
            activations to 8 bits. False: dequantize weights while loading. None: True where there
            are kernels (GGUF: on CPUs, and on GPUs in 16 bits).
        quantize: a format or config name of `fulgurite.quantize`, for the linears of a dense model.
        implementation: whose modules run: `fulgurite`, `transformers`, or `auto`: fulgurite's if it has
            the architecture. Modules of transformers run on one rank.
        compile: run modules of transformers under `fulgurite.compile`. The other models need none: their
            layers are kernels.
        prefix_caching: share KV-cache blocks between requests with the same prefix.
        deterministic: a request's tokens and log-probabilities don't depend on what else is in its
            batch, on chunks of its prompt, cached prefixes or preemption, to the bit. True: nor on the
            number of ranks, but for context parallelism; that costs messages and memory. None: on a CPU,
            but for sums over ranks.
        async_scheduling: launch the next step before the tokens of this one are read. None: on a GPU,
            unless ranks communicate through the host.
        data: data-parallel replicas, each with its own requests. None: all remaining ranks.
        tensor: tensor-parallel size: the number of ranks over which weights are sharded.
        expert: expert-parallel size: the number of ranks over which experts are distributed.
        pipeline: pipeline-parallel stages: the number of ranks over which layers are distributed.
        context_parallel: the number of ranks over which the tokens and the KV cache of a sequence are
            distributed.
        transport: how tokens go to experts of other ranks: `symmetric` (kernels write into their
            memory), `all_to_all` (collectives), `hierarchical` (across nodes), or `auto`.
        wire: wire format of these tokens: `bf16`, `f16`, `f32`, `fp8`, `nvfp4`, or `auto`: the model's
            dtype.
        expert_capacity: most tokens that one rank sends to another in a step; more are an error. It
            bounds the memory of a rank. None: no limit but the tokens of a step.
        placement: file of expert slots, with replicas of busy experts (`fulgurite plan --placement`).
        record_load: file for the number of tokens of each expert, saved by `close`, for
            `fulgurite plan --expert-load`. Its name ends in .json, .npy or .csv.
        record_load_interval: seconds after which `record_load` is saved again while the engine runs.
            None: `save_load` and `close` save it.
        micro_batches: 2: the experts of large steps run in two halves, so that one half's transfer
            overlaps with the other's experts.
        nodes: divide consecutive ranks into so many emulated nodes. None: as they are (host names).
        timeout: seconds that ranks wait for each other within a step.
        on_rank_failure: what happens to running requests when a rank is lost: `fail` ends them with an
            error that names the rank; `retry` continues them once the ranks have restarted. Requests
            that wait are kept. Only for ranks that this process has started.
        max_restarts: restarts of the ranks within ten minutes; after that every request fails.
    """

    dtype: torch.dtype | str | None = None
    device: str | torch.device | None = None
    kv_dtype: str = "auto"
    context: int | None = None
    max_sequences: int | None = None
    max_batched_tokens: int | None = None
    max_mixed_tokens: int | None = None
    cache_tokens: int | None = None
    keep_quantized: bool | None = None
    quantize: str | None = None
    implementation: str = "auto"
    compile: bool = True
    prefix_caching: bool = True
    deterministic: bool | None = None
    async_scheduling: bool | None = None
    data: int | None = None
    tensor: int = 1
    expert: int = 1
    pipeline: int = 1
    context_parallel: int = 1
    nodes: int | None = None
    timeout: float = DEFAULT_TIMEOUT
    transport: str = "auto"
    wire: str = "auto"
    expert_capacity: int | None = None
    placement: str | Path | None = None
    record_load: str | Path | None = None
    record_load_interval: float | None = None
    micro_batches: int = 1
    on_rank_failure: str = "fail"
    max_restarts: int = 3
