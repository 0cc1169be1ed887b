"""Model FLOPs: a model and a sequence length in, operations of one token out; and a device's peak.

    forward   = 2 · matmul parameters that a token uses + attention
    attention = 2 · heads · (key size + value size) · mean context, in each layer
    training  = 3 · forward          (backward: one matmul for the inputs, one for the weights)

A token uses `top_k` of the routed experts, all shared experts and the head, whether or not its weights
are those of the embedding. Looking up an embedding is no matmul. The mean context of causal attention is
half of the sequence, less with a window. What backward recomputes is not counted (that would be HFU).

    MFU = tokens/s · training FLOPs of a token / (ranks · peak FLOP/s)
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from fulgurite.cache import digest, read_text, write_text
from fulgurite.device import cpu_name, num_cpu_threads
from fulgurite.models.layers import CausalLM
from fulgurite.models.moe import Experts, Router

# Dense peak FLOP/s as vendors publish them, in bfloat16 with float32 sums and in FP8; the first name that is
# part of the device's name counts.
PEAKS: tuple[tuple[str, float, float], ...] = (
    ("GB200", 2.5e15, 5.0e15),
    ("B200", 2.25e15, 4.5e15),
    ("H200", 989e12, 1979e12),
    ("GH200", 989e12, 1979e12),
    ("H100 PCIe", 756e12, 1513e12),
    ("H100 NVL", 835e12, 1671e12),
    ("H100", 989e12, 1979e12),
    ("H800", 989e12, 1979e12),
    ("A100", 312e12, 312e12),
    ("A800", 312e12, 312e12),
    ("L40S", 362e12, 733e12),
    ("L4", 121e12, 242e12),
    ("A10G", 70e12, 70e12),
    ("RTX 4090", 165e12, 330e12),
    ("RTX 3090", 71e12, 71e12),
)
MEASURED_SIZE = 768  # of the square GEMM that measures a device which is not in the table
MEASURED_RUNS = 12


@dataclass(frozen=True)
class ModelFlops:
    """What one token costs, and what the model has.

    Attributes:
        matmul: operations of all matmuls with weights, forward, of one token.
        attention: of queries, keys and values with each other, forward, of one token.
        parameters: of the whole model.
        active_parameters: that one token uses.
    """

    matmul: float
    attention: float
    parameters: int
    active_parameters: int

    @property
    def training(self) -> float:
        """Operations of one token in a training step."""
        return 3 * (self.matmul + self.attention)


def count_flops(model: CausalLM, sequence_length: int) -> ModelFlops:
    """Count a model before its parameters are sharded over ranks."""
    used = total = 0.0
    top_k = model.config.moe.top_k if model.config.moe is not None else 0
    for module in model.modules():
        if isinstance(module, Experts):
            weights = module.gate_up_proj.numel() + module.down_proj.numel()
            used += weights * top_k / module.gate_up_proj.shape[0]
        elif isinstance(module, (nn.Linear, Router)):
            used += module.weight.numel()
    if model.lm_head is None:
        used += model.embed_tokens.weight.numel()
    total = sum(parameter.numel() for parameter in model.parameters())
    unused = sum(_unused_parameters(module, top_k) for module in model.modules())
    return ModelFlops(
        matmul=2.0 * used,
        attention=_count_attention(model, sequence_length),
        parameters=int(total),
        active_parameters=int(total - unused),
    )


def _unused_parameters(module: nn.Module, top_k: int) -> float:
    """Parameters of the experts that a token is not sent to."""
    if not isinstance(module, Experts):
        return 0.0
    num_experts = module.gate_up_proj.shape[0]
    own = sum(parameter.numel() for parameter in module.parameters())
    return own * (num_experts - top_k) / num_experts


def _count_attention(model: CausalLM, sequence_length: int) -> float:
    flops = 0.0
    for spec in model.attention_specs:
        context = mean_context(sequence_length, spec.sliding_window, spec.chunk_size)
        mla = model.config.mla
        sizes = spec.key_dim + spec.value_dim
        if spec.is_mla and mla is not None:  # training expands the latent vector to heads
            sizes = mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim
        flops += 2.0 * spec.num_heads * sizes * context
    for state in model.state_specs:
        flops += 2.0 * math.prod((state.conv_shape[0] + 1, state.conv_shape[1]))
        if state.recurrent_shape is not None:  # read, update and query the state: three products
            flops += 6.0 * math.prod(state.recurrent_shape)
    return flops


def mean_context(length: int, window: int | None = None, chunk: int | None = None) -> float:
    """How many tokens a token attends to on average, itself included."""
    if chunk is not None and chunk < length:
        whole, rest = divmod(length, chunk)
        return (whole * chunk * (chunk + 1) / 2 + rest * (rest + 1) / 2) / length
    if window is not None and window < length:
        return (window * (window + 1) / 2 + (length - window) * window) / length
    return (length + 1) / 2


# ---- peaks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peak:
    """FLOP/s of one device, and whether they are published or measured with a GEMM."""

    flops: float
    is_measured: bool


def find_peak(device: torch.device | str, matmul: str = "none") -> Peak:
    """The peak for a `precision.matmul`: published for known GPUs, measured otherwise."""
    device = torch.device(device)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for part, bfloat16, float8 in PEAKS:
            if part in name:
                return Peak(float8 if matmul.startswith("fp8") else bfloat16, is_measured=False)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return Peak(_measured_peak(str(device), dtype), is_measured=True)


@cache
def _measured_peak(device: str, dtype: torch.dtype) -> float:
    """FLOP/s of a large GEMM: the most that this or an earlier process has measured.

    A busy machine measures too little. So every process measures again, and the cache has the best.
    """
    is_cpu = device == "cpu"
    name = cpu_name() if is_cpu else torch.cuda.get_device_name(device)
    threads = str(num_cpu_threads()) if is_cpu else ""
    key = digest("gemm peak", name, threads, str(dtype), torch.__version__)
    stored = read_text("device", key)
    best = 0.0 if stored is None else float(json.loads(stored))
    measured = _measure_gemm(device, dtype)
    if measured > best:
        write_text("device", key, json.dumps(measured))
    return max(measured, best)


def _measure_gemm(device: str, dtype: torch.dtype) -> float:
    size = MEASURED_SIZE if device == "cpu" else 8 * MEASURED_SIZE
    a = torch.ones(size, size, dtype=dtype, device=device)
    best = math.inf
    for _ in range(MEASURED_RUNS):
        start = time.perf_counter()
        a @ a
        if device != "cpu":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return float(2 * size**3 / best)
