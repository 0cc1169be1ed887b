"""`TrainingAttention`: attention of packed rows without a cache; queries, keys, values in, outputs out.

A row of a batch holds one document or several end to end. A token sees the tokens of its own document
before it, within its window or chunk. Padding comes last in a row and is a document of its own.

    one document a row    causal scaled-dot-product attention: no mask is built
    several               on a GPU flash attention of sequences of any lengths; otherwise a boolean
                          mask, built once for all layers of one kind
    deterministic mode    the kernel of the engine's paged cache: the bits of the engine

Layers with a state (linear attention, short convolutions) start every document from a zero state.

Shapes: B rows; T tokens of a row; N query heads; K KV heads; H size of a query or key; V size of a
value; C channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.determinism import is_deterministic
from fulgurite.kernels.attention.metadata import AttentionOptions
from fulgurite.kernels.attention.uncached import uncached_attention
from fulgurite.kernels.common.recompute import recompute_gradients
from fulgurite.kernels.linear_attention.metadata import DeltaRuleInputs
from fulgurite.models.attention_spec import AttentionSpec
from fulgurite.models.kv_cache import NoKVCache
from fulgurite.models.state_spec import StateSpec
from fulgurite.models.uncached_attention import masked_attention
from fulgurite.op import op

MAX_FLASH_SIZE = 256  # of a head
FORGET = 200.0  # a log decay: exp(-200) is zero in float32


class TrainingAttention(NoKVCache):
    """The cache of a training step: it stores nothing.

    documents_BT   which document of its row each token belongs to; None: a row is one document
    offsets_S      where documents begin, as `Batch.offsets_S`; None: not known
    """

    def __init__(self, documents_BT: Tensor | None = None, offsets_S: Tensor | None = None) -> None:
        super().__init__(documents_BT)
        self.documents_BT, self.offsets_S = documents_BT, offsets_S
        self._masks: dict[tuple[int | None, int | None], Tensor] = {}

    def attend(
        self,
        spec: AttentionSpec,
        q_XNH: Tensor,
        k_XKH: Tensor | None,
        v_XKV: Tensor | None,
        positions_X: Tensor,
        sinks_N: Tensor | None,
    ) -> Tensor:
        assert k_XKH is not None, "this cache has no slots that a kernel could have written to"
        values = k_XKH[..., : spec.value_dim] if v_XKV is None else v_XKV
        if is_deterministic():
            return _attend_deterministic(spec, q_XNH, k_XKH, values, self.documents_BT, sinks_N)
        if self.offsets_S is not None and can_use_flash(spec, q_XNH, values, sinks_N):
            return flash_attention(spec, q_XNH, k_XKH, values, self.offsets_S)
        mask_BTS = self._mask(spec, positions_X)
        if mask_BTS is None and spec.softcap is None and sinks_N is None:
            return causal_attention(spec, q_XNH, k_XKH, values)
        if mask_BTS is None:
            mask_BTS = _causal_mask(positions_X.shape[-1], positions_X.device)
        return masked_attention(spec, q_XNH, k_XKH, values, mask_BTS, sinks_N)

    def _mask(self, spec: AttentionSpec, positions_BT: Tensor) -> Tensor | None:
        """The mask of one kind of layer; None: plain causal attention."""
        length = positions_BT.shape[-1]
        window = spec.sliding_window
        window = None if window is None or window >= length else window
        if self.documents_BT is None and window is None and spec.chunk_size is None:
            return None
        key = (window, spec.chunk_size)
        if key not in self._masks:
            self._masks[key] = document_mask(positions_BT, self.documents_BT, *key)
        return self._masks[key]

    def gated_delta_rule(
        self, spec: StateSpec, inputs: DeltaRuleInputs, positions_X: Tensor
    ) -> Tensor:
        """The first token of a document decays the state of the one before it to zero."""
        if self.documents_BT is not None:
            changes_BT = self.documents_BT[:, 1:] != self.documents_BT[:, :-1]
            is_first_BT1 = F.pad(changes_BT, (1, 0))[..., None]
            with torch.no_grad():
                forget_N = FORGET * torch.exp(-inputs.A_log_N.float()) - inputs.dt_bias_N.float()
            a_BTN = torch.where(is_first_BT1, forget_N.to(inputs.a_TN.dtype), inputs.a_TN)
            inputs = inputs._replace(a_TN=a_BTN)
        return super().gated_delta_rule(spec, inputs, positions_X)

    def _same_sequence(self, positions_X: Tensor) -> Tensor:
        documents_BT = self.documents_BT
        if documents_BT is None:
            return torch.ones((), dtype=torch.bool, device=positions_X.device)
        return documents_BT[:, :, None] == documents_BT[:, None, :]


def causal_attention(spec: AttentionSpec, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKV: Tensor) -> Tensor:
    """Causal attention of rows that are one document each: [B, T, N, V]."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTNH, k_BTKH.to(q_BTNH.dtype), v_BTKV))
    grouped = spec.num_heads != spec.num_kv_heads
    out_BNTV = F.scaled_dot_product_attention(
        q, k, v.to(q.dtype), is_causal=True, scale=spec.scale, enable_gqa=grouped
    )
    return out_BNTV.transpose(1, 2)


def can_use_flash(
    spec: AttentionSpec, q_BTNH: Tensor, v_BTKV: Tensor, sinks_N: Tensor | None
) -> bool:
    """Whether torch's flash attention computes these layers."""
    if q_BTNH.device.type != "cuda" or q_BTNH.dtype not in (torch.bfloat16, torch.float16):
        return False
    if spec.softcap is not None or spec.chunk_size is not None or sinks_N is not None:
        return False
    sizes = (q_BTNH.shape[-1], v_BTKV.shape[-1])
    return sizes[0] == sizes[1] <= MAX_FLASH_SIZE and sizes[0] % 8 == 0


def flash_attention(
    spec: AttentionSpec, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKV: Tensor, offsets_S: Tensor
) -> Tensor:
    """Causal attention of documents end to end; those of no tokens cost next to nothing."""
    batch, length = q_BTNH.shape[:2]
    q, k, v = (x.to(q_BTNH.dtype).flatten(0, 1) for x in (q_BTNH, k_BTKH, v_BTKV))
    window = None if spec.sliding_window is None else spec.sliding_window - 1
    out_TNV = torch.ops.aten._flash_attention_forward(
        q, k, v, offsets_S, offsets_S, length, length, 0.0, True, False, scale=spec.scale,
        window_size_left=window, window_size_right=None if window is None else 0,
    )[0]  # fmt: skip
    return out_TNV.unflatten(0, (batch, length))


def document_mask(
    positions_BT: Tensor, documents_BT: Tensor | None, window: int | None, chunk: int | None
) -> Tensor:
    """Whether each token sees each other token of its row: [T, T], or [B, T, T] if rows differ."""
    length, device = positions_BT.shape[-1], positions_BT.device
    mask = _causal_mask(length, device)
    if window is not None:
        index = torch.arange(length, device=device)
        mask = mask & (index[:, None] - index[None, :] < window)
    if chunk is not None:
        chunks_BT = positions_BT // chunk
        mask = mask & (chunks_BT[:, :, None] == chunks_BT[:, None, :])
    if documents_BT is not None:
        mask = mask & (documents_BT[:, :, None] == documents_BT[:, None, :])
    return mask


def _causal_mask(length: int, device: torch.device) -> Tensor:
    index = torch.arange(length, device=device)
    return index[None, :] <= index[:, None]


# ---- deterministic mode ----------------------------------------------------------------------------


def _attend_deterministic(
    spec: AttentionSpec,
    q_BTNH: Tensor,
    k_BTKH: Tensor,
    v_BTKV: Tensor,
    documents_BT: Tensor | None,
    sinks_N: Tensor | None,
) -> Tensor:
    out: Tensor = _document_attention_op(
        q_BTNH, k_BTKH, v_BTKV, documents_BT, sinks_N, spec.num_heads, spec.num_kv_heads,
        spec.scale, spec.sliding_window, spec.chunk_size, spec.softcap,
    )  # fmt: skip
    return out


@op("fulgurite::document_attention")
def _document_attention_op(
    q_BTNH: Tensor,
    k_BTKH: Tensor,
    v_BTKV: Tensor,
    documents_BT: Tensor | None,
    sinks_N: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
) -> Tensor:
    """Attention of packed rows by the kernel of the paged cache."""
    options = AttentionOptions(scale, v_BTKV.shape[-1], window, chunk, softcap, sinks_N)
    batch, length = q_BTNH.shape[:2]
    device = q_BTNH.device
    if documents_BT is None:
        positions = torch.arange(length, device=device).expand(batch, length)
        return uncached_attention(q_BTNH, k_BTKH, v_BTKV, positions, None, options)
    segments, positions = number_segments(documents_BT)
    q, k, v = (x.flatten(0, 1) for x in (q_BTNH, k_BTKH, v_BTKV))
    return uncached_attention(q, k, v, positions, segments, options).unflatten(0, (batch, length))


def number_segments(documents_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The documents of all rows end to end: the number of each token's, and its place in it."""
    batch, length = documents_BT.shape
    is_first = torch.ones(batch, length, dtype=torch.bool, device=documents_BT.device)
    is_first[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    is_first = is_first.flatten()
    index = torch.arange(batch * length, device=documents_BT.device)
    starts = torch.where(is_first, index, 0).cummax(0).values
    return is_first.cumsum(0), index - starts


@_document_attention_op.fake
def _(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKV: Tensor, *rest: Any) -> Tensor:
    return q_BTNH.new_empty((*q_BTNH.shape[:-1], v_BTKV.shape[-1]))


def _document_attention_reference(
    q_BTNH: Tensor,
    k_BTKH: Tensor,
    v_BTKV: Tensor,
    documents_BT: Tensor | None,
    sinks_N: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
) -> Tensor:
    """The same in plain torch ops, for the gradient."""
    batch, length = q_BTNH.shape[:2]
    if documents_BT is None:
        positions_BT = torch.arange(length, device=q_BTNH.device).expand(batch, length)
    else:
        positions_BT = number_segments(documents_BT)[1].view(batch, length)
    spec = AttentionSpec(
        0, num_heads, num_kv_heads, q_BTNH.shape[-1], v_BTKV.shape[-1], scale, softcap=softcap
    )
    mask = document_mask(positions_BT, documents_BT, window, chunk)
    return masked_attention(spec, q_BTNH, k_BTKH, v_BTKV, mask, sinks_N)


@_document_attention_op.backward
def _(inputs: tuple, output: Tensor, grad_out: Tensor) -> tuple:  # type: ignore[type-arg]
    return recompute_gradients(_document_attention_reference, inputs, grad_out)
