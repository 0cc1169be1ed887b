"""16-bit weights: how they take updates that are smaller than their own step.

    master       The float32 weight is the bfloat16 weight and 16 more bits, kept as int16.
                 weight_bits = (master_bits + 0x8000) >> 16; low = master_bits - (weight_bits << 16)
    stochastic   Round up with the probability of the dropped part: unbiased, and no state.

`low` is 2 bytes a weight, half of a float32 copy, and the two together are that copy to the bit. A
weight that something else writes stays written: only the low bits are then those of the old weight.

Random bits are a hash of a key and the index of the element in the whole tensor. The key is made of
the parameter's name and its step. So a restart repeats them, and so does another sharding.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

MASTER, STOCHASTIC = "master", "stochastic"
ROUNDINGS = (MASTER, STOCHASTIC)
_HALF = 0x8000
_GOLDEN = -0x61C88647  # 2**32 / golden ratio, as int32


def join_master(weight: Tensor, low: Tensor) -> Tensor:
    """The float32 master weight of a bfloat16 weight and its low bits (int16)."""
    high = weight.view(torch.int16).to(torch.int32) << 16
    return (high + low).view(torch.float32)


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """The bfloat16 weight, rounded to nearest, and the low bits that it lacks.

    Infinities and NaNs keep their kind; their low bits are 0.
    """
    bits = master.view(torch.int32)
    high = (bits + _HALF) >> 16
    low = (bits - (high << 16)).to(torch.int16)
    weight = high.to(torch.int16).view(torch.bfloat16)
    is_finite = master.isfinite()
    plain = master.to(torch.bfloat16)
    return torch.where(is_finite, weight, plain), torch.where(is_finite, low, 0)


def round_stochastic(x: Tensor, random_bits: Tensor) -> Tensor:
    """float32 -> bfloat16, up with the probability of the dropped part; `random_bits` int32."""
    bits = x.view(torch.int32) + (random_bits & 0xFFFF)
    rounded = (bits >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(x.isfinite(), rounded, x.to(torch.bfloat16))


def make_key(name: str, step: int, purpose: int = 0) -> int:
    """An int32 key of a parameter, its step, and what the bits are for."""
    key = zlib.crc32(f"{name}/{step}/{purpose}".encode())
    return key - (1 << 32) if key >= 1 << 31 else key


def random_bits(
    shape: torch.Size, offset: tuple[int, ...], key: int, device: torch.device
) -> Tensor:
    """int32 bits for a shard of this shape that starts at `offset` in the whole tensor.

    Each dimension's global index is mixed in, one after the other, so bits depend on nothing else.
    """
    bits = torch.full((), key, dtype=torch.int32, device=device)
    for dim, (size, start) in enumerate(zip(shape, offset, strict=True)):
        index = torch.arange(start, start + size, device=device, dtype=torch.int64).to(torch.int32)
        index = index.view(-1, *[1] * (len(shape) - dim - 1))
        bits = _mix(bits + index * _GOLDEN)
    return bits.expand(shape) if shape else _mix(bits)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32 bits in which every input bit changes each output bit half of the time."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7B935975
    return x ^ ((x >> 16) & 0xFFFF)
