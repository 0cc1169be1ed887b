"""What lies between the linears and the attention of a layer: norms, rotations, gates, sums.

    rms_norm   x / sqrt(mean(x^2) + eps) * (weight + offset)
    rotate     (a, b) -> (a cos - b sin, b cos + a sin)
    gate       activation(x) * y
    add        x + y
    heads      query and key normed and turned, key and value stored: from the linears to the attention

In: tensors. Out: new tensors. Where nothing is differentiated and no graph is captured, a CPU runs each
as one native kernel, so that a step of a model made of them can be recorded (`fulgurite.replay`), and a
GPU as one Triton kernel. Everywhere else they are the plain torch formulas, which capture hands to the
fuser.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.kernels import registry

NORMS = {
    "cpu": "fulgurite.kernels.elementwise.cpu:rms_norm",
    "cuda": "fulgurite.kernels.elementwise.triton_elementwise:rms_norm",
}
ROTATIONS = {
    "cpu": "fulgurite.kernels.elementwise.cpu:rotate",
    "cuda": "fulgurite.kernels.elementwise.triton_elementwise:rotate",
}
COMBINATIONS = {
    "cpu": "fulgurite.kernels.elementwise.cpu:combine",
    "cuda": "fulgurite.kernels.elementwise.triton_elementwise:combine",
}
HEADS = {"cuda": "fulgurite.kernels.elementwise.triton_elementwise:heads"}

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class HeadNorms(NamedTuple):
    """The norms of query heads and key heads."""

    query: Tensor
    key: Tensor
    eps: float
    offset: float


class Pages(NamedTuple):
    """Where the keys and values of new tokens go; see `kernels/attention.py`."""

    keys_PBKH: Tensor
    values_PBKV: Tensor
    slots_T: Tensor


class Heads(NamedTuple):
    """Query, key and value as the linears left them, and what is to be done to them."""

    q_XNH: Tensor
    k_XKH: Tensor
    v_XKV: Tensor
    norms: HeadNorms | None
    cos: Tensor | None
    sin: Tensor | None
    interleaved: bool


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """In float32, rounded once to x's dtype."""
    if _plain():
        return plain_rms_norm(x, weight, eps, offset)
    out: Tensor = registry.run(NORMS, x.device, plain_rms_norm, x, weight, eps, offset)
    return out


def rotate(x_XNH: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Turn the first dimensions of each head, in float32; the others pass through.

    cos, sin   [X, 1, pairs]; a pair is (x[i], x[i + pairs]), or (x[2i], x[2i + 1]) if interleaved
    """
    if _plain():
        return plain_rotate(x_XNH, cos, sin, interleaved)
    out: Tensor = registry.run(ROTATIONS, x_XNH.device, plain_rotate, x_XNH, cos, sin, interleaved)
    return out


def gate(x: Tensor, y: Tensor, activation: str) -> Tensor:
    """activation(x) * y."""
    if _plain():
        return plain_combine(x, y, activation)
    out: Tensor = registry.run(COMBINATIONS, x.device, plain_combine, x, y, activation)
    return out


def add(x: Tensor, y: Tensor) -> Tensor:
    if _plain():
        return x + y
    out: Tensor = registry.run(COMBINATIONS, x.device, plain_combine, x, y, "add")
    return out


def heads(
    q_XNH: Tensor,
    k_XKH: Tensor,
    v_XKV: Tensor,
    norms: HeadNorms | None,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    pages: Pages | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What attention reads: query and key with their norms and rotation, and the value.

    A device that can writes key and value into `pages` in the same pass; then both are None.
    """
    if not _plain():
        function = registry.find(HEADS, q_XNH.device)
        given = (q_XNH, k_XKH, v_XKV, norms, cos, sin, interleaved, pages)
        found = NotImplemented if function is None else function(*given)
        if found is not NotImplemented:
            q, k, v = found
            return q, k, v
    if norms is not None:
        q_XNH = rms_norm(q_XNH, norms.query, norms.eps, norms.offset)
        k_XKH = rms_norm(k_XKH, norms.key, norms.eps, norms.offset)
    if cos is not None and sin is not None:
        q_XNH, k_XKH = (rotate(x, cos, sin, interleaved) for x in (q_XNH, k_XKH))
    return q_XNH, k_XKH, v_XKV


def _plain() -> bool:
    return torch.is_grad_enabled() or torch.compiler.is_compiling()


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    weight = weight.float()
    if offset:
        weight = weight + offset
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def plain_rotate(x_XNH: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    size = 2 * cos.shape[-1]
    turned, rest = x_XNH[..., :size].float(), x_XNH[..., size:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b = turned.chunk(2, dim=-1)
    first, second = a * cos - b * sin, b * cos + a * sin
    if interleaved:
        turned = torch.stack((first, second), dim=-1).flatten(-2)
    else:
        turned = torch.cat((first, second), dim=-1)
    return torch.cat((turned.to(x_XNH.dtype), rest), dim=-1)


def plain_combine(x: Tensor, y: Tensor, how: str) -> Tensor:
    return x + y if how == "add" else ACTIVATIONS[how](x) * y
