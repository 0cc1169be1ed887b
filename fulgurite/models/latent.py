"""What latent attention hands to a cache, and how one that has no kernel for it attends.

Keys and values of all heads are linear in one latent c of C numbers a token, plus one rotary key r
that the heads share. With U_k and U_v the two parts of `up`,

    score = q_plain . (U_k c) + q_rope . r  =  (U_k^T q_plain, q_rope) . (c, r)
    out   = sum of weight * (U_v c)         =  U_v (sum of weight * c)

A `LatentStep` is the raw material of both: nothing in it is normed, turned, absorbed or expanded yet.
`absorbed` is attention with a single key head of size C + R whose value is the first C numbers of its
key, for caches that keep keys; `expanded` makes every head's keys, for where all of them are used at
once. The engine's cache has a kernel of its own, which does whichever is less work (kernels/mla.py).

Shapes: X the layout of the tokens; N heads; D size of a query without rope; R size with rope;
H = D + R; C latent rank; V value size; U = D + V; L = C + R.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fulgurite.kernels.elementwise import ops
from fulgurite.models.rope import Rotation, rotate

if TYPE_CHECKING:
    from fulgurite.models.cache import AttentionSpec

Attend = Callable[..., Tensor]


class LatentStep(NamedTuple):
    """New tokens of one layer, as their projections come out."""

    q_XNH: Tensor
    latent_XL: Tensor
    norm_C: Tensor
    eps: float
    up_NUC: Tensor
    rotation: Rotation
    interleaved: bool

    @property
    def plain(self) -> int:
        """D: how many numbers of a query are not turned."""
        return self.q_XNH.shape[-1] - 2 * self.rotation.cos.shape[-1]

    @property
    def value_dim(self) -> int:
        return self.up_NUC.shape[1] - self.plain

    def queries(self) -> tuple[Tensor, Tensor]:
        """The plain part, and the rotary part turned."""
        q_XND, q_XNR = self.q_XNH.split((self.plain, self.q_XNH.shape[-1] - self.plain), dim=-1)
        return q_XND, rotate(q_XNR, self.rotation, self.interleaved)

    def kept(self) -> tuple[Tensor, Tensor]:
        """The latent normed, and the rotary key turned, each as one head."""
        rank = self.norm_C.shape[0]
        c_XC, r_XR = self.latent_XL.split((rank, self.latent_XL.shape[-1] - rank), dim=-1)
        c_XC = ops.rms_norm(c_XC, self.norm_C, self.eps)
        return c_XC[..., None, :], rotate(r_XR[..., None, :], self.rotation, self.interleaved)


def absorbed(attend: Attend, spec: AttentionSpec, step: LatentStep, positions_X: Tensor) -> Tensor:
    """Through a cache's `attend`, as one key head; [X, N, V]."""
    (q_XND, q_XNR), (c_X1C, r_X1R) = step.queries(), step.kept()
    up_key_NDC, up_value_NVC = step.up_NUC.split((step.plain, step.value_dim), dim=1)
    q_XNC = torch.einsum("...nd,ndc->...nc", q_XND, up_key_NDC)
    q_XNL, k_X1L = torch.cat((q_XNC, q_XNR), dim=-1), torch.cat((c_X1C, r_X1R), dim=-1)
    out_XNC = attend(spec, q_XNL, k_X1L, None, positions_X, None)
    return torch.einsum("...nc,nvc->...nv", out_XNC, up_value_NVC)


def expanded(attend: Attend, spec: AttentionSpec, step: LatentStep, positions_X: Tensor) -> Tensor:
    """Through a cache's `attend`, with keys and values of every head; [X, N, V]."""
    (q_XND, q_XNR), (c_X1C, r_X1R) = step.queries(), step.kept()
    heads, size = step.up_NUC.shape[0], step.q_XNH.shape[-1]
    up_XNU = (c_X1C.squeeze(-2) @ step.up_NUC.flatten(0, 1).t()).unflatten(-1, (heads, -1))
    k_XND, v_XNV = up_XNU.split((step.plain, step.value_dim), dim=-1)
    k_XNH = torch.cat((k_XND, r_X1R.expand(*k_XND.shape[:-1], -1)), dim=-1)
    q_XNH = torch.cat((q_XND, q_XNR), dim=-1)
    whole = replace(spec, kv_heads=heads, key_dim=size, value_dim=step.value_dim, latent=False)
    return attend(whole, q_XNH, k_XNH, v_XNV, positions_X, None)
