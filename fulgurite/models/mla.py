"""Multi-head latent attention (MLA): projections of new tokens in, attention outputs out.

The keys and values of all heads are linear in one compressed vector c of size C (kv_lora_rank),
plus one rotary key r that all heads share. With U_k and U_v the key and value rows of kv_b_proj:

    score = q_nope . (U_k c) + q_rope . r  =  (U_k^T q_nope, q_rope) . (c, r)
    out   = sum of p * (U_v c)             =  U_v (sum of p * c)

`MLAInputs` holds the raw projections. Norm, RoPE and the up-projection are applied here:

    attend_absorbed   one key head of size C + R whose value is the first C elements of the key.
                      For caches, which store only (c, r).
    attend_expanded   keys and values of every head. For attention without a cache.

The engine's paged cache has its own kernel, which picks the cheaper form (`kernels/mla/`).

Shapes: X token layout; N heads; D query size without RoPE (qk_nope_head_dim); R query size with
RoPE; H = D + R; C kv_lora_rank; V value size; U = D + V; L = C + R.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fulgurite.kernels.elementwise import ops as elementwise
from fulgurite.models.attention_spec import AttentionSpec
from fulgurite.models.rope import RotaryCosSin, apply_rope

Attend = Callable[..., Tensor]


class MLAInputs(NamedTuple):
    """The projections of one layer's new tokens, before norm and RoPE."""

    q_XNH: Tensor
    kv_a_XL: Tensor
    kv_a_norm_C: Tensor
    eps: float
    kv_b_NUC: Tensor
    cos_sin: RotaryCosSin
    interleaved: bool

    @property
    def nope_dim(self) -> int:
        """D: the size of a query without RoPE."""
        return self.q_XNH.shape[-1] - 2 * self.cos_sin.cos.shape[-1]

    @property
    def value_dim(self) -> int:
        return self.kv_b_NUC.shape[1] - self.nope_dim

    def rotate_queries(self) -> tuple[Tensor, Tensor]:
        """The part of the queries without RoPE, and the rotated part."""
        q_XND, q_XNR = self.q_XNH.split(
            (self.nope_dim, self.q_XNH.shape[-1] - self.nope_dim), dim=-1
        )
        return q_XND, apply_rope(q_XNR, self.cos_sin, self.interleaved)

    def norm_and_rotate_keys(self) -> tuple[Tensor, Tensor]:
        """The normalized compressed vector and the rotated key, each as one head."""
        rank = self.kv_a_norm_C.shape[0]
        c_XC, r_XR = self.kv_a_XL.split((rank, self.kv_a_XL.shape[-1] - rank), dim=-1)
        c_XC = elementwise.rms_norm(c_XC, self.kv_a_norm_C, self.eps)
        return c_XC[..., None, :], apply_rope(r_XR[..., None, :], self.cos_sin, self.interleaved)


def attend_absorbed(
    attend: Attend, spec: AttentionSpec, inputs: MLAInputs, positions_X: Tensor
) -> Tensor:
    """Attend with one key head, with kv_b_proj absorbed into queries and outputs; returns [X, N,
    V].
    """
    (q_XND, q_XNR), (c_X1C, r_X1R) = inputs.rotate_queries(), inputs.norm_and_rotate_keys()
    kv_b_key_NDC, kv_b_value_NVC = inputs.kv_b_NUC.split((inputs.nope_dim, inputs.value_dim), dim=1)
    q_XNC = torch.einsum("...nd,ndc->...nc", q_XND, kv_b_key_NDC)
    q_XNL, k_X1L = torch.cat((q_XNC, q_XNR), dim=-1), torch.cat((c_X1C, r_X1R), dim=-1)
    out_XNC = attend(spec, q_XNL, k_X1L, None, positions_X, None)
    return torch.einsum("...nc,nvc->...nv", out_XNC, kv_b_value_NVC)


def attend_expanded(
    attend: Attend, spec: AttentionSpec, inputs: MLAInputs, positions_X: Tensor
) -> Tensor:
    """Attend with the keys and values of every head; returns [X, N, V]."""
    (q_XND, q_XNR), (c_X1C, r_X1R) = inputs.rotate_queries(), inputs.norm_and_rotate_keys()
    num_heads, key_dim = inputs.kv_b_NUC.shape[0], inputs.q_XNH.shape[-1]
    kv_XNU = (c_X1C.squeeze(-2) @ inputs.kv_b_NUC.flatten(0, 1).t()).unflatten(-1, (num_heads, -1))
    k_XND, v_XNV = kv_XNU.split((inputs.nope_dim, inputs.value_dim), dim=-1)
    k_XNH = torch.cat((k_XND, r_X1R.expand(*k_XND.shape[:-1], -1)), dim=-1)
    q_XNH = torch.cat((q_XND, q_XNR), dim=-1)
    expanded_spec = replace(
        spec, num_kv_heads=num_heads, key_dim=key_dim, value_dim=inputs.value_dim, is_mla=False
    )
    return attend(expanded_spec, q_XNH, k_XNH, v_XNV, positions_X, None)
