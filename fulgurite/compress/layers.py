"""Runs texts through a model with one layer in memory at a time.

In: token ids, and modules on the meta device whose weights are loaded layer by layer. Out: the
hidden states of every text after each layer, and at the end its perplexity.

    LayerRunner.embed ─▶ TextStates ─ load layer i ─ run ─ unload ─▶ … ─ compute_perplexity
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fulgurite.compress.source import Source
from fulgurite.errors import WeightsError
from fulgurite.models.kv_cache import KVCache, NoKVCache
from fulgurite.models.layers import CausalLM
from fulgurite.models.loading.loader import allocate_parameters
from fulgurite.models.rope import RotaryCosSin

MAX_BATCH_TOKENS = 2048  # tokens that run at once


@dataclass
class TextStates:
    """A text in batches: token ids, and hidden states at the layer that was reached."""

    ids: list[Tensor]
    hidden: list[Tensor]

    def copy(self) -> TextStates:
        """A text at the same layer; running one does not change the other."""
        return TextStates(self.ids, list(self.hidden))

    @property
    def num_tokens(self) -> int:
        return sum(ids.numel() for ids in self.ids)


class LayerRunner:
    """Runs layers of a model; only the layer within `loaded` has memory."""

    def __init__(self, source: Source, model: CausalLM, device: torch.device) -> None:
        self.source, self.model, self.device = source, model, device
        model.rotary_embeddings.to(device)
        self.tensors: dict[str, list[str]] = {}
        for tensor in source.tensors.values():
            for assignment in tensor.assignments:
                self.tensors.setdefault(assignment.parameter, []).append(tensor.name)

    @contextmanager
    def loaded(self, path: str) -> Iterator[nn.Module]:
        """The submodule with its weights; they are freed at the end of the block."""
        module = self.model.get_submodule(path)
        allocate_parameters(module, self.device)
        names = [f"{path}.{name}" for name, _ in module.named_parameters()]
        for name in dict.fromkeys(n for parameter in names for n in self.tensors[parameter]):
            tensor = self.source.tensors[name]
            tensor.fill(self.model, tensor.read().to(self.device), self.source.config)
        try:
            yield module
        finally:
            module.to("meta")

    def embed(self, ids_BT: Tensor) -> TextStates:
        """The embedded tokens of a text. `embed_tokens` must be loaded."""
        batch = max(1, MAX_BATCH_TOKENS // ids_BT.shape[1])
        parts = list(ids_BT.to(self.device).split(batch))
        hidden = [self.model.embed(ids, _positions(ids), NoKVCache())[0] for ids in parts]
        return TextStates(parts, hidden)

    def run(self, index: int, states: TextStates, cache: KVCache | None = None) -> None:
        """Run one layer, which must be loaded, over a text."""
        layer, cache = self.model.layers[index], NoKVCache() if cache is None else cache
        for number, (ids, x_BTD) in enumerate(zip(states.ids, states.hidden, strict=True)):
            positions = _positions(ids)
            states.hidden[number] = layer(x_BTD, positions, self._cos_sin(index, positions), cache)

    def _cos_sin(self, index: int, positions_BT: Tensor) -> RotaryCosSin | None:
        rotary_index = self.model.rotary_index[index]
        if rotary_index is None:
            return None
        lengths = None
        if self.model.needs_sequence_lengths:
            lengths = NoKVCache().sequence_lengths(positions_BT)
        found: RotaryCosSin = self.model.rotary_embeddings[rotary_index](positions_BT, lengths)
        return found

    def compute_perplexity(self, states: TextStates) -> float:
        """exp of the mean negative log-likelihood of each next token. Norm and head are loaded."""
        total, count = 0.0, 0
        for ids_BT, x_BTD in zip(states.ids, states.hidden, strict=True):
            for ids_T, x_TD in zip(ids_BT, x_BTD, strict=True):
                logits_TO = self.model.compute_logits(self.model.norm(x_TD[:-1]))
                total += F.cross_entropy(logits_TO.float(), ids_T[1:], reduction="sum").item()
                count += len(ids_T) - 1
        if math.isnan(total):
            raise WeightsError(
                "the model computes NaN on the text of --eval",
                where=str(self.source.path),
                next="check the checkpoint: fulgurite generate --model …",
            )
        return math.exp(min(total / count, 700.0))  # exp(710) overflows


def _positions(ids_BT: Tensor) -> Tensor:
    return torch.arange(ids_BT.shape[1], device=ids_BT.device).expand(ids_BT.shape)
