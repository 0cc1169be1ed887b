"""Fused elementwise operators of a transformer layer: tensors in, new tensors out.

    rms_norm            x / sqrt(mean(x^2) + eps) * (weight + offset)
    apply_rope          (a, b) -> (a cos - b sin, b cos + a sin)
    activation_and_mul  activation(x) * y
    add                 x + scale * y
    qk_norm_rope        query and key: norm and RoPE; key and value: optionally into the KV cache

Without gradients and outside of graph capture each is one native kernel on the CPU, so that a step
of a model can be recorded (`fulgurite.replay`), and one Triton kernel on a GPU. Otherwise they are
plain torch ops, which capture gives to the fuser; in deterministic mode they are operators of the
same kernels, whose gradients are those of the plain torch ops.

Shapes: X tokens; N query heads; K key heads; H size of a head; V size of a value; P cache blocks of
B slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.determinism import is_deterministic
from fulgurite.kernels import registry
from fulgurite.kernels.common.recompute import recompute_gradients
from fulgurite.kernels.elementwise import cpu, triton_elementwise
from fulgurite.op import op

RMS_NORM_KERNELS: dict[str, registry.Kernel] = {
    "cpu": cpu.rms_norm,
    "cuda": triton_elementwise.rms_norm,
}
ROPE_KERNELS: dict[str, registry.Kernel] = {
    "cpu": cpu.apply_rope,
    "cuda": triton_elementwise.apply_rope,
}
BINARY_KERNELS: dict[str, registry.Kernel] = {
    "cpu": cpu.elementwise_binary,
    "cuda": triton_elementwise.elementwise_binary,
}
QK_NORM_ROPE_KERNELS: dict[str, registry.Kernel] = {"cuda": triton_elementwise.qk_norm_rope}
NORM_ROPE_KERNELS: dict[str, registry.Kernel] = {"cuda": triton_elementwise.norm_rope}

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,  # output gates
    "identity": lambda x: x,  # products
    "tanh": torch.tanh,  # soft caps of logits
}


class QKNorm(NamedTuple):
    """The RMS norms of query heads and key heads."""

    query: Tensor
    key: Tensor
    eps: float
    offset: float


class KVCacheSlots(NamedTuple):
    """A layer's KV cache and the slots of new tokens in it; see `kernels/attention/ops.py`."""

    key_cache_PBKH: Tensor
    value_cache_PBKV: Tensor
    slot_mapping_T: Tensor


class ProjectedQKV(NamedTuple):
    """Query, key and value as projected, with the norm and RoPE to apply to them."""

    q_XNH: Tensor
    k_XKH: Tensor
    v_XKV: Tensor
    norms: QKNorm | None
    cos: Tensor | None
    sin: Tensor | None
    interleaved: bool


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """In float32, rounded once to x's dtype."""
    if _needs_torch_ops():
        if is_deterministic():
            return rms_norm_op(x, weight, eps, offset)  # type: ignore[no-any-return]
        return rms_norm_reference(x, weight, eps, offset)
    return _dispatch_rms_norm(x, weight, eps, offset)


def _dispatch_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """Run the kernel of this device; in deterministic mode over heads of flat tokens."""
    rows = x.flatten(0, -3) if x.dim() > 3 and x.numel() and is_deterministic() else x
    out: Tensor = registry.dispatch(
        RMS_NORM_KERNELS, x.device, rms_norm_reference, rows, weight, eps, offset
    )
    return out.view(x.shape)


def apply_rope(x_XNH: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first dimensions of each head, in float32; the others pass through.

    cos, sin   [X, 1, pairs]; a pair is (x[i], x[i + pairs]), or (x[2i], x[2i + 1]) if interleaved
    """
    if _needs_torch_ops():
        if is_deterministic():
            return apply_rope_op(x_XNH, cos, sin, interleaved)  # type: ignore[no-any-return]
        return apply_rope_reference(x_XNH, cos, sin, interleaved)
    if x_XNH.dim() > 3 and is_deterministic():
        return _apply_rope_flat(x_XNH, cos, sin, interleaved)
    out: Tensor = registry.dispatch(
        ROPE_KERNELS, x_XNH.device, apply_rope_reference, x_XNH, cos, sin, interleaved
    )
    return out


def _apply_rope_flat(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The kernel of flat tokens for any token layout."""
    flat = x.flatten(0, -3) if x.dim() > 3 else x
    angles = [angle.expand(*x.shape[:-2], 1, -1).flatten(0, -3) for angle in (cos, sin)]
    rotated: Tensor = registry.dispatch(
        ROPE_KERNELS, x.device, apply_rope_reference, flat,
        *(angle.contiguous() for angle in angles), interleaved,
    )  # fmt: skip
    return rotated.view(x.shape)


def activation_and_mul(x: Tensor, y: Tensor, activation: str) -> Tensor:
    """activation(x) * y. x has the shape of y, or one number a row."""
    if _needs_torch_ops():
        if is_deterministic():
            return elementwise_binary_op(x, y, activation, 1.0)  # type: ignore[no-any-return]
        return elementwise_binary_reference(x, y, activation)
    return _dispatch_binary(x, y, activation, 1.0)


def activate(x: Tensor, activation: str) -> Tensor:
    """activation(x). On CPUs our kernel computes each row alike; torch's differ at a tensor's end."""
    if x.is_cuda or (_needs_torch_ops() and not is_deterministic()):
        return ACTIVATIONS[activation](x)
    rows = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
    ones = x.new_ones(1, x.shape[-1]).expand(rows.shape)  # one row for all
    return activation_and_mul(rows, ones, activation).view(x.shape)


def add(x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
    """x + scale * y."""
    if _needs_torch_ops():
        if is_deterministic():
            return elementwise_binary_op(x, y, "add", scale)  # type: ignore[no-any-return]
        return elementwise_binary_reference(x, y, "add", scale)
    return _dispatch_binary(x, y, "add", scale)


def _dispatch_binary(x: Tensor, y: Tensor, operation: str, scale: float) -> Tensor:
    """Run the kernel of this device; in deterministic mode over rows, whatever the token layout."""
    if y.dim() > 2 and x.shape[:-1] == y.shape[:-1] and y.numel() and is_deterministic():
        rows = _dispatch_binary(x.flatten(0, -2), y.flatten(0, -2), operation, scale)
        return rows.view(y.shape)
    out: Tensor = registry.dispatch(
        BINARY_KERNELS, x.device, elementwise_binary_reference, x, y, operation, scale
    )
    return out


def qk_norm_rope(
    q_XNH: Tensor,
    k_XKH: Tensor,
    v_XKV: Tensor,
    norms: QKNorm | None,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    cache: KVCacheSlots | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What attention reads: query and key with their norms and RoPE, and the value.

    A kernel that can also stores key and value into `cache`; then both are returned as None.
    """
    if not _needs_torch_ops():
        kernel = registry.find_kernel(QK_NORM_ROPE_KERNELS, q_XNH.device)
        arguments = (q_XNH, k_XKH, v_XKV, norms, cos, sin, interleaved, cache)
        result = NotImplemented if kernel is None else kernel(*arguments)
        if result is not NotImplemented:
            q, k, v = result
            return q, k, v
    if norms is not None and is_deterministic():
        run = norm_rope_op if _needs_torch_ops() else _norm_rope
        q_XNH = run(q_XNH, norms.query, norms.eps, norms.offset, cos, sin, interleaved)
        k_XKH = run(k_XKH, norms.key, norms.eps, norms.offset, cos, sin, interleaved)
        return q_XNH, k_XKH, v_XKV
    if norms is not None:
        q_XNH = rms_norm(q_XNH, norms.query, norms.eps, norms.offset)
        k_XKH = rms_norm(k_XKH, norms.key, norms.eps, norms.offset)
    if cos is not None and sin is not None:
        q_XNH, k_XKH = (apply_rope(x, cos, sin, interleaved) for x in (q_XNH, k_XKH))
    return q_XNH, k_XKH, v_XKV


def _norm_rope(
    x_XNH: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
) -> Tensor:
    """Norm and RoPE of heads with the bits of `qk_norm_rope`'s kernel, for any token layout.

    That kernel rounds once; norm and RoPE one after the other would round twice.
    """
    kernel = registry.find_kernel(NORM_ROPE_KERNELS, x_XNH.device)
    if kernel is not None and x_XNH.dim() >= 3:
        flat, angles = x_XNH.flatten(0, -3), (cos, sin)
        if cos is not None and sin is not None:
            layout = x_XNH.shape[:-2]
            angles = tuple(a.expand(*layout, 1, -1).flatten(0, -3).contiguous() for a in (cos, sin))
        result = kernel(flat, weight, eps, offset, *angles, interleaved)
        if result is not NotImplemented:
            out: Tensor = result.view(x_XNH.shape)
            return out
    x_XNH = _dispatch_rms_norm(x_XNH, weight, eps, offset)
    if cos is None or sin is None:
        return x_XNH
    return _apply_rope_flat(x_XNH, cos, sin, interleaved)


def norm_rope_reference(
    x_XNH: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
) -> Tensor:
    """The same in plain torch."""
    x_XNH = rms_norm_reference(x_XNH, weight, eps, offset)
    if cos is None or sin is None:
        return x_XNH
    return apply_rope_reference(x_XNH, cos, sin, interleaved)


def _needs_torch_ops() -> bool:
    """Whether autograd or graph capture must see plain torch ops."""
    return torch.is_grad_enabled() or torch.compiler.is_compiling()


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """`rms_norm` in plain torch."""
    weight = weight.float()
    if offset:
        weight = weight + offset
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def apply_rope_reference(x_XNH: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """`apply_rope` in plain torch."""
    size = 2 * cos.shape[-1]
    rotated, rest = x_XNH[..., :size].float(), x_XNH[..., size:]
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
    else:
        a, b = rotated.chunk(2, dim=-1)
    first, second = a * cos - b * sin, b * cos + a * sin
    if interleaved:
        rotated = torch.stack((first, second), dim=-1).flatten(-2)
    else:
        rotated = torch.cat((first, second), dim=-1)
    return torch.cat((rotated.to(x_XNH.dtype), rest), dim=-1)


def elementwise_binary_reference(
    x: Tensor, y: Tensor, operation: str, scale: float = 1.0
) -> Tensor:
    """x + scale * y ("add"), or activation(x) * y, in plain torch."""
    if operation == "add":
        return x + y if scale == 1.0 else torch.add(x, y, alpha=scale)
    return ACTIVATIONS[operation](x) * y


# ---- operators of deterministic mode -------------------------------------------------------------


@op("fulgurite::rms_norm")
def rms_norm_op(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """`rms_norm` with autograd or in a captured graph."""
    return _dispatch_rms_norm(x, weight, eps, offset)


@rms_norm_op.fake
def _(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    return x.new_empty(x.shape)


@rms_norm_op.backward
def _(inputs: tuple, output: Tensor, grad_out: Tensor) -> tuple:  # type: ignore[type-arg]
    return recompute_gradients(rms_norm_reference, inputs, grad_out)


@op("fulgurite::apply_rope")
def apply_rope_op(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """`apply_rope` with autograd or in a captured graph, for any token layout."""
    return _apply_rope_flat(x, cos, sin, interleaved)


@apply_rope_op.fake
def _(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return x.new_empty(x.shape)


@apply_rope_op.backward
def _(inputs: tuple, output: Tensor, grad_out: Tensor) -> tuple:  # type: ignore[type-arg]
    x, cos, sin, interleaved = inputs
    return recompute_gradients(apply_rope_reference, (x, cos, sin, interleaved), grad_out)


@op("fulgurite::norm_rope")
def norm_rope_op(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
) -> Tensor:
    """Query or key of `qk_norm_rope` with autograd or in a captured graph."""
    return _norm_rope(x, weight, eps, offset, cos, sin, interleaved)


@norm_rope_op.fake
def _(x: Tensor, weight: Tensor, *rest: object) -> Tensor:
    return x.new_empty(x.shape)


@norm_rope_op.backward
def _(inputs: tuple, output: Tensor, grad_out: Tensor) -> tuple:  # type: ignore[type-arg]
    return recompute_gradients(norm_rope_reference, inputs, grad_out)


@op("fulgurite::elementwise_binary")
def elementwise_binary_op(x: Tensor, y: Tensor, operation: str, scale: float) -> Tensor:
    """`add` and `activation_and_mul` with autograd or in a captured graph."""
    return _dispatch_binary(x, y, operation, scale)


@elementwise_binary_op.fake
def _(x: Tensor, y: Tensor, operation: str, scale: float) -> Tensor:
    return y.new_empty(torch.broadcast_shapes(x.shape, y.shape))


@elementwise_binary_op.backward
def _(inputs: tuple, output: Tensor, grad_out: Tensor) -> tuple:  # type: ignore[type-arg]
    return recompute_gradients(elementwise_binary_reference, inputs, grad_out)
