"""The paged KV cache: keys and values of a step's tokens in, what they attend to out.

`PagedCache` is what a model gets as its cache (models/cache.py). A layer's keys lie in blocks of
`block_size` tokens; which block is whose the step's `Batch` says. Grouped-query layers keep K keys
and K values a token, latent ones a single compressed vector. Storage is the model's dtype, another
float dtype, or float8_e4m3fn, which halves 16-bit memory once more.

Shapes: X the tokens of the step, flat; N query heads; K key heads; H size of a key; V of a value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fulgurite.kernels.attention.ops import fresh_attention, paged_attention, store_pages
from fulgurite.kernels.elementwise.ops import Heads, Pages
from fulgurite.kernels.mla.ops import latent_attention, page_shape, write_latent
from fulgurite.models.cache import AttentionSpec
from fulgurite.models.latent import LatentStep
from fulgurite.serve.engine.batch import Batch
from fulgurite.serve.engine.block_tables import Group

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}


class PagedCache:
    """Blocks of keys and values for every layer; `blocks[g]` is the size of group g's pool."""

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        groups: Sequence[Group],
        blocks: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.group_of_layer = {
            layer: index for index, group in enumerate(groups) for layer in group.layers
        }
        counts = [blocks[self.group_of_layer[spec.layer]] + 1 for spec in specs]  # and block 0
        self.keys = [
            _latent_pages(spec, (count, block_size), dtype, device)
            if spec.latent
            else _pages((count, spec.kv_heads, block_size, spec.key_dim), dtype, device)
            for spec, count in zip(specs, counts, strict=True)
        ]
        self.values = [
            None
            if spec.latent
            else _pages((count, spec.kv_heads, block_size, spec.value_dim), dtype, device)
            for spec, count in zip(specs, counts, strict=True)
        ]
        self.batch: Batch | None = None

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in [*self.keys, *self.values] if tensor is not None)

    def begin(self, batch: Batch) -> None:
        """What the next call of the model is about."""
        self.batch = batch

    def pages(self, spec: AttentionSpec) -> Pages | None:
        """The layer's pages and the slots of the step's tokens; a latent layer has one vector only."""
        assert self.batch is not None, "begin() says what a step is about before the model runs"
        values = self.values[spec.layer]
        if values is None:
            return None
        slots_T = self.batch.slots_GT[self.group_of_layer[spec.layer]]
        return Pages(self.keys[spec.layer], values, slots_T)

    def attend_fresh(
        self, spec: AttentionSpec, heads: Heads, sinks_N: Tensor | None
    ) -> Tensor | None:
        batch = self.batch
        assert batch is not None, "begin() says what a step is about before the model runs"
        if batch.max_count != 1:
            return None
        pages, group = self.pages(spec), self.group_of_layer[spec.layer]
        if pages is None:
            return None
        return fresh_attention(
            heads,
            pages,
            batch.tables_GSB[group],
            batch.starts_S,
            batch.lengths_S,
            sinks_N=sinks_N,
            **_options(spec, batch),
        )

    def attend(
        self,
        spec: AttentionSpec,
        q_XNH: Tensor,
        k_XKH: Tensor | None,
        v_XKV: Tensor | None,
        positions_X: Tensor,
        sinks_N: Tensor | None,
    ) -> Tensor:
        batch, group = self.batch, self.group_of_layer[spec.layer]
        assert batch is not None, "begin() says what a step is about before the model runs"
        keys, values = self.keys[spec.layer], self.values[spec.layer]
        if k_XKH is not None:
            store_pages(k_XKH, v_XKV, keys, values, batch.slots_GT[group])
        return paged_attention(
            q_XNH,
            keys,
            values,
            batch.tables_GSB[group],
            batch.starts_S,
            batch.lengths_S,
            value_dim=spec.value_dim,
            sinks_N=sinks_N,
            **_options(spec, batch),
        )

    def attend_latent(self, spec: AttentionSpec, step: LatentStep, positions_X: Tensor) -> Tensor:
        batch, group = self.batch, self.group_of_layer[spec.layer]
        assert batch is not None, "begin() says what a step is about before the model runs"
        pages = self.keys[spec.layer]
        rotation = step.rotation.cos.squeeze(-2), step.rotation.sin.squeeze(-2)
        how = {"interleaved": step.interleaved}
        slots = batch.slots_GT[group]
        write_latent(step.latent_XL, step.norm_C, *rotation, pages, slots, eps=step.eps, **how)
        return latent_attention(
            step.q_XNH,
            step.up_NUC,
            *rotation,
            pages,
            batch.tables_GSB[group],
            batch.starts_S,
            batch.lengths_S,
            scale=spec.scale,
            max_query=batch.max_count,
            max_length=batch.max_length,
            query_counts=batch.query_counts,
            key_counts=batch.key_counts,
            **how,
        )

    def extent(self, positions_X: Tensor) -> Tensor:
        assert self.batch is not None and self.batch.extents_T is not None, "no extents were made"
        return self.batch.extents_T


def _options(spec: AttentionSpec, batch: Batch) -> dict[str, Any]:
    """What a layer's attention is, and how long this step's sequences are."""
    return {
        "scale": spec.scale,
        "window": spec.window,
        "chunk": spec.chunk,
        "softcap": spec.softcap,
        "max_query": batch.max_count,
        "max_length": batch.max_length,
    }


def _pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of [blocks, heads, block_size, H], seen as [blocks, block_size, heads, H].

    So one head's keys of a block lie side by side.
    """
    return _zeros(shape, dtype, device).transpose(1, 2)


def _latent_pages(
    spec: AttentionSpec, slots: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[blocks, block_size, numbers or bytes of a latent and its rotary key]."""
    width, kept = page_shape(spec.value_dim, spec.key_dim - spec.value_dim, dtype)
    return _zeros((*slots, width), kept, device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On the CPU memory that is never written is never taken (calloc)."""
    count = math.prod(shape) * dtype.itemsize
    if device.type == "cpu":
        memory = torch.from_numpy(np.zeros(count, dtype=np.uint8))
    else:
        memory = torch.zeros(count, dtype=torch.uint8, device=device)
    return memory.view(dtype).view(shape)
