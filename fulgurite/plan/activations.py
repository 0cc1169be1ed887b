"""What a step needs beside weights and cache: a model on the meta device in, bytes out.

The largest step runs where tensors have shapes and no memory, and a dispatch mode watches which of them
are alive at once. Attention through a cache is a stand-in that gives a result of the right size.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fulgurite.kernels.mla import ops
from fulgurite.models.cache import AttentionSpec, Unpaged
from fulgurite.models.latent import LatentStep
from fulgurite.models.layers import Decoder


def activation_bytes(model: Decoder, tokens: int, rows: int) -> int:
    """The most that lives at once in a step of `tokens` tokens with logits of `rows` of them."""
    assert model.norm.weight.is_meta, "a step is tried on the meta device"
    rows, model = min(rows, tokens), _one_of_each_layer(model)
    with torch.inference_mode(), allocations() as watch, torch.device("meta"):
        ids = torch.zeros(tokens, dtype=torch.long)
        hidden = model.hidden(ids, torch.zeros(tokens, dtype=torch.long), _Nowhere())
        picked = hidden[torch.zeros(rows, dtype=torch.long)]
        logits = model.logits(picked).float()
        del hidden
        logits.clone()  # what penalties and drawing work on
    return watch.most


def _one_of_each_layer(model: Decoder) -> Decoder:
    """The model with one layer of each kind: layers run one after the other, so it peaks as high."""
    kinds: dict[object, int] = {}
    for index, layer in enumerate(model.layers):
        shapes = tuple((name, value.shape) for name, value in layer.named_parameters())
        kinds.setdefault((str(layer), shapes), index)
    small = copy.copy(model)
    small._modules = dict(model._modules)
    small.layers = torch.nn.ModuleList(model.layers[index] for index in kinds.values())
    small.rotary_of_layer = tuple(model.rotary_of_layer[index] for index in kinds.values())
    return small


class _Nowhere(Unpaged):
    """A cache that keeps nothing and attends to nothing: only what comes out has a size."""

    def attend(
        self,
        spec: AttentionSpec,
        q_XNH: Tensor,
        k_XKH: Tensor | None,
        v_XKV: Tensor | None,
        positions_X: Tensor,
        sinks_N: Tensor | None,
    ) -> Tensor:
        return q_XNH.new_empty(*q_XNH.shape[:-1], spec.value_dim)

    def attend_latent(self, spec: AttentionSpec, step: LatentStep, positions_X: Tensor) -> Tensor:
        return ops.largest_step(step.q_XNH, step.up_NUC, step.value_dim)

    def extent(self, positions_X: Tensor) -> Tensor:
        return positions_X


class Allocations(TorchDispatchMode):
    """Counts the bytes of new tensors that are alive: `now`, and the `most` there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_meta:
                self._count(leaf.untyped_storage())
        self.most = max(self.most, self.now)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, bytes = storage._cdata, storage.nbytes()
        if key in self.alive:
            return

        def gone(_: Any) -> None:
            del self.alive[key]
            self.now -= bytes

        self.alive[key] = weakref.ref(storage, gone)
        self.now += bytes


@contextmanager
def allocations() -> Iterator[Allocations]:
    watch = Allocations()
    with watch:
        yield watch
