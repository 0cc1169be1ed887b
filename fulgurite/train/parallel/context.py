"""Context parallelism: one sequence over several ranks; a batch in, this rank's part of its tokens out.

    split_batch(batch, axis)          tokens, labels, positions, documents of this rank
    split_attention(model, axis)      attention layers all-gather keys and values, in place

**Zig-zag.** A row of T tokens is cut into 2 x cp chunks. Rank r has chunks r and 2 cp - 1 - r, so every
rank has early tokens, which see few keys, and late ones, which see many: the work is equal.

    cp 2, T 8:   rank 0  tokens 0 1 6 7     rank 1  tokens 2 3 4 5

**Attention.** Keys and values of all ranks are all-gathered and put in order; backward reduce-scatters
their gradients. A chunk of queries reads the keys up to its own end only. The mask follows places in
the row, documents, windows and attention chunks, as `TrainingAttention` does on one rank.

Everything else of a model works on each token by itself. Gradients and losses are sums over tokens, so
ranks of this dimension reduce them as data ranks do.

Shapes: B rows; T tokens of a row; L = T / cp local tokens; S keys; K KV heads; N query heads; H, V sizes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from fulgurite.errors import ArgumentError
from fulgurite.models.attention_spec import AttentionSpec
from fulgurite.models.kv_cache import NoKVCache
from fulgurite.models.layers import CausalLM
from fulgurite.models.uncached_attention import masked_attention
from fulgurite.parallel.collectives import (
    all_gather,
    all_gather_tokens,
    sum_inside_parallel_region,
)
from fulgurite.parallel.mesh import Axis
from fulgurite.train.batch import Batch


def check_context_degree(sequence_length: int, degree: int) -> None:
    """ArgumentError if a row can't be cut into equal chunks."""
    if degree > 1 and (sequence_length % (2 * degree) or not sequence_length):
        fit = max(1, round(sequence_length / (2 * degree))) * 2 * degree
        raise ArgumentError(
            f"a sequence of {sequence_length} tokens does not divide into 2 x parallel.context "
            f"{degree} = {2 * degree} chunks",
            next=f"data.sequence_length={fit}, or another parallel.context",
        )


def local_places(length: int, index: int, count: int) -> Tensor:
    """The places in a row of the tokens of rank `index`: chunks `index` and `2 count - 1 - index`."""
    chunks = torch.arange(length).view(2 * count, -1)
    return torch.cat((chunks[index], chunks[2 * count - 1 - index]))


@functools.cache
def _gathered_order(length: int, count: int) -> Tensor:
    """For each place in a row: where it is when the tokens of all ranks are concatenated."""
    places = torch.cat([local_places(length, rank, count) for rank in range(count)])
    return places.argsort()


def split_batch(batch: Batch, axis: Axis) -> Batch:
    """This rank's tokens of a microbatch."""
    length = batch.tokens_BT.shape[1]
    check_context_degree(length, axis.size)
    places = local_places(length, axis.index, axis.size).to(batch.tokens_BT.device)
    documents = batch.documents_BT
    return Batch(
        batch.tokens_BT[:, places],
        batch.labels_BT[:, places],
        batch.positions_BT[:, places],
        None if documents is None else documents[:, places],
        batch.first_sample,
    )


def check_context_model(model: CausalLM) -> None:
    """ArgumentError for layers that need the tokens of other ranks outside of attention."""
    if model.state_specs:
        raise ArgumentError(
            "layers with a state (linear attention, convolutions) read a sequence in order, and "
            "parallel.context splits it",
            next="parallel.context=1",
        )
    if model.needs_sequence_lengths:
        raise ArgumentError(
            "the RoPE of this model depends on the length of a sequence, and parallel.context "
            "splits it",
            next="parallel.context=1",
        )


def split_attention(model: CausalLM, axis: Axis) -> None:
    """Make every attention layer read the keys and values of all ranks, in place."""
    check_context_model(model)
    hook = functools.partial(_use_context, axis=axis)
    for layer in model.layers:
        if hasattr(layer, "attention"):  # not a layer of another pipeline stage
            layer.register_forward_pre_hook(hook, with_kwargs=True)
    # For the auxiliary loss of experts, a product of sums over tokens (balance.py).
    model.sum_over_context = functools.partial(sum_inside_parallel_region, axis=axis)  # type: ignore[assignment]


def _use_context(
    module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], *, axis: Axis
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A pre-hook of a layer: hidden states, positions, cos and sin, and the cache of the step."""
    *rest, cache = arguments
    positions_BL = rest[1]
    if not isinstance(cache, ContextAttention):
        shared = getattr(cache, "context_attention", None)
        if shared is None:
            documents = getattr(cache, "documents_BT", None)
            shared = ContextAttention(axis, documents, positions_BL)
            cache.context_attention = shared
        cache = shared
    return (*rest, cache), named


class ContextAttention(NoKVCache):
    """Attention of this rank's queries to the keys of all ranks; it stores nothing.

    documents_BL   of this rank's tokens; None: a row is one document
    positions_BL   of this rank's tokens
    """

    def __init__(self, axis: Axis, documents_BL: Tensor | None, positions_BL: Tensor) -> None:
        super().__init__()
        self.axis = axis
        length = positions_BL.shape[1] * axis.size
        self.order_T = _gathered_order(length, axis.size).to(positions_BL.device)
        self.documents_BT = None if documents_BL is None else self._gather_numbers(documents_BL)
        self._positions_BT: Tensor | None = None

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
        v_BLKV = k_XKH[..., : spec.value_dim] if v_XKV is None else v_XKV
        k_BTKH, v_BTKV = self._gather_keys(k_XKH, v_BLKV)
        if spec.chunk_size is not None and self._positions_BT is None:
            self._positions_BT = self._gather_numbers(positions_X)
        half, count = q_XNH.shape[1] // 2, self.axis.size
        parts = []
        for number, q_BCNH in enumerate(q_XNH.split(half, dim=1)):
            chunk = self.axis.index if number == 0 else 2 * count - 1 - self.axis.index
            start, stop = chunk * half, (chunk + 1) * half
            mask_BCS = self._mask(spec, start, stop, q_XNH.device)
            keys, values = k_BTKH[:, :stop], v_BTKV[:, :stop]
            parts.append(masked_attention(spec, q_BCNH, keys, values, mask_BCS, sinks_N))
        return torch.cat(parts, dim=1)

    def _mask(self, spec: AttentionSpec, start: int, stop: int, device: torch.device) -> Tensor:
        """Whether the queries at places `start` to `stop` - 1 of a row see the keys before `stop`."""
        key = torch.arange(stop, device=device)
        query = key[start:, None]
        mask = key[None] <= query
        if spec.sliding_window is not None:
            mask = mask & (query - key[None] < spec.sliding_window)
        if spec.chunk_size is not None:
            assert self._positions_BT is not None, "gathered before"
            chunks_BS = self._positions_BT[:, :stop] // spec.chunk_size
            mask = mask & (chunks_BS[:, start:, None] == chunks_BS[:, None, :])
        if self.documents_BT is not None:
            documents_BS = self.documents_BT[:, :stop]
            mask = mask & (documents_BS[:, start:, None] == documents_BS[:, None, :])
        return mask

    def _gather_keys(self, k_BLKH: Tensor, v_BLKV: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of whole rows, in order: one all-gather, whose backward is a reduce-scatter."""
        sizes = k_BLKH.shape[-1], v_BLKV.shape[-1]
        both_LBKW = torch.cat((k_BLKH, v_BLKV.to(k_BLKH.dtype)), dim=-1).transpose(0, 1)
        length = both_LBKW.shape[0] * self.axis.size
        both_TBKW = all_gather_tokens(both_LBKW, self.axis, length)
        k_BTKH, v_BTKV = both_TBKW[self.order_T].transpose(0, 1).split(sizes, dim=-1)
        return k_BTKH, v_BTKV

    def _gather_numbers(self, x_BL: Tensor) -> Tensor:
        """Documents or positions of whole rows, in order."""
        x_TB = all_gather(x_BL.t().contiguous(), self.axis, "all-gather of documents")
        return x_TB[self.order_T].t()
