"""Optimizer states in float32, bfloat16 or 8 bit: stored tensors in, float32 values out, and back.

    float32    the state itself
    bfloat16   rounded stochastically: a slow average would not move otherwise
    int8       blocks of 128 elements of a row share a float32 scale, the largest magnitude; each
               element is the index of one of 256 values between -1 and 1 (0 and 1)

**The 8-bit code** is dynamic: 7 decades, and the larger the decade the more values it has. An element
in the top decade of its block has an error of at most 0.8 % of the block's scale (averages, signed) or
0.4 % (unsigned). The second moment is stored as its root, and only 0 becomes 0: the step
m / sqrt(v) stays bounded for elements that are far below their block's largest.

Blocks lie in the last dimension, so shards of other dimensions hold whole blocks. States stay float32
for vectors, for tensors of fewer than 4096 elements, and where ranks split the last dimension.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.train.optim.rounding import round_stochastic
from fulgurite.train.optim.shards import read_local, sharded_dims, wrap_like

FLOAT32, BFLOAT16, INT8 = "float32", "bfloat16", "int8"
FORMATS = (FLOAT32, BFLOAT16, INT8)
BLOCK = 128
MIN_INT8_ELEMENTS = 4096
_DECADES = 7


def choose_format(parameter: Tensor, states: str) -> str:
    """The format of the states of one parameter."""
    if states != INT8:
        return states
    is_small = parameter.dim() < 2 or parameter.numel() < MIN_INT8_ELEMENTS
    splits_rows = parameter.dim() - 1 in sharded_dims(parameter)
    return FLOAT32 if is_small or splits_rows else INT8


def create_state(parameter: Tensor, name: str, state_format: str) -> dict[str, Tensor]:
    """Zeros, sharded as the parameter: `{name: ...}` and, for int8, `{name}_scale`."""
    local = read_local(parameter)
    if state_format == INT8:
        blocks = -(-parameter.shape[-1] // BLOCK)
        zero = int(make_code(name, torch.device("cpu")).abs().argmin())
        codes = torch.full(local.shape, zero, dtype=torch.uint8, device=local.device)
        scales = torch.zeros(*local.shape[:-1], blocks, device=local.device)
        scale_shape = (*parameter.shape[:-1], blocks)
        return {
            name: wrap_like(parameter, codes),
            f"{name}_scale": wrap_like(parameter, scales, scale_shape),
        }
    dtype = torch.bfloat16 if state_format == BFLOAT16 else torch.float32
    dtype = torch.float64 if parameter.dtype == torch.float64 else dtype
    return {name: wrap_like(parameter, torch.zeros(local.shape, dtype=dtype, device=local.device))}


def is_signed(name: str) -> bool:
    """The second moment alone is never negative."""
    return name != "exp_avg_sq"


@cache
def make_code(name: str, device: torch.device) -> Tensor:
    """The 256 values of the 8-bit code of a state, ascending, float32."""
    positive: list[float] = []
    signed = is_signed(name)
    for decade in range(_DECADES):
        count = 2**decade if signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1, count + 1, dtype=torch.float64)
        positive += ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - _DECADES + 1)).tolist()
    values = [0.0, 1.0, *positive] + ([-x for x in positive] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


@cache
def find_edges(name: str, device: torch.device) -> Tensor:
    """Values between two codes: below goes to the lower. For roots only 0 goes to 0."""
    code = make_code(name, torch.device("cpu")).double()
    edges = (code[1:] + code[:-1]) / 2
    if not is_signed(name):
        edges[0] = 0.0
    return edges.float().to(device)


def quantize_blocks(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Codes (uint8, the shape of x) and scales (a block's largest magnitude)."""
    size = x.shape[-1]
    blocks = F.pad(x, (0, -size % BLOCK)).unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1)
    relative = blocks / torch.where(scales > 0, scales, 1.0).unsqueeze(-1)
    codes = torch.bucketize(relative, find_edges(name, x.device), out_int32=True)
    return codes.to(torch.uint8).flatten(-2)[..., :size], scales


def dequantize_blocks(codes: Tensor, scales: Tensor, name: str) -> Tensor:
    values = make_code(name, codes.device)[codes.int()]
    size = codes.shape[-1]
    blocks = F.pad(values, (0, -size % BLOCK)).unflatten(-1, (-1, BLOCK))
    return (blocks * scales.unsqueeze(-1)).flatten(-2)[..., :size].contiguous()


def read_state(state: dict[str, Tensor], name: str) -> Tensor:
    """The values of this rank: the state itself if it is float32, else a float32 copy."""
    stored = read_local(state[name])
    if stored.dtype == torch.uint8:
        values = dequantize_blocks(stored, read_local(state[f"{name}_scale"]), name)
        return values if is_signed(name) else values.square()
    return stored if stored.dtype in (torch.float32, torch.float64) else stored.float()


def write_state(
    state: dict[str, Tensor], name: str, values: Tensor, bits: Tensor | None = None
) -> None:
    """Store values that `read_state` gave and an update changed; `bits` rounds bfloat16."""
    stored = read_local(state[name])
    if stored.dtype == torch.uint8:
        roots = values if is_signed(name) else values.sqrt()
        codes, scales = quantize_blocks(roots, name)
        stored.copy_(codes)
        read_local(state[f"{name}_scale"]).copy_(scales)
    elif stored.dtype == torch.bfloat16:
        assert bits is not None, "bfloat16 states are rounded stochastically"
        stored.copy_(round_stochastic(values, bits))
