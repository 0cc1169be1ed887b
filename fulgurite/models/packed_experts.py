"""Stacked experts that stay packed while loading: one tensor an expert, or all in one, into [E, N, K].

In: stored tensors one after the other, each with the rule by which it fills (part of) a stack. Out: the
stacks that were filled completely in one format, as `QuantTensor`s.

Rows are only chosen on the way in (`ON_PACKED`), so a rule's `put` finds the same place in the packed
data and in each level of scales as it does in the dense parameter. Where it doesn't (a half of the rows
ends inside a tile of 128), or where formats differ, the stack is unpacked as always. `grouped`: GGUF's
blocks become groups of integers on the way in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fulgurite.models import family
from fulgurite.models.config import ModelConfig
from fulgurite.models.family import Rule, Take
from fulgurite.models.filling import Filling
from fulgurite.models.stored import StoredTensor
from fulgurite.quant import QuantTensor, regroup, resolve
from fulgurite.quant.gguf_file import GGUF_TYPES
from fulgurite.quant.shapes import data_shape, scale_shape

# What a rule's `take` is on packed rows. gpt-oss' blocks lie along K in the file although its dense
# weights don't, so what turns those leaves blocks as they are.
ON_PACKED: dict[Take, Take] = {
    family.whole: family.whole,
    family.gate_before_up: family.gate_before_up,
}
ON_TURNED: dict[Take, Take] = {
    family.transposed: family.whole,
    family.transposed_gate_before_up: family.gate_before_up,
}
TURNED = "MXFP4"


class Stacks:
    """Packed stacks while they are filled."""

    def __init__(
        self,
        assignments: Mapping[str, Sequence[Filling]],
        config: ModelConfig,
        device: torch.device | str,
        grouped: bool = False,
    ) -> None:
        every: Iterable[Filling] = (one for several in assignments.values() for one in several)
        self.missing = Counter(one.parameter for one in every)
        self.config, self.device, self.grouped = config, device, grouped
        self.weights: dict[str, QuantTensor] = {}

    def add(self, stored: StoredTensor, filling: Filling, target: Tensor) -> None:
        """Put one stored tensor in its place, if it can stay packed."""
        found = packed_rows(stored, filling.rule, self.config)
        if found is None:
            return
        if self.grouped:
            found = regroup(found.to(self.device))
        name = filling.parameter
        weight = self.weights.get(name)
        if weight is None:
            weight = self.weights[name] = _room(found, target, self.device)
        if weight.format is not found.format:
            return
        pieces = _tensors(found)
        try:
            places = [
                filling.rule.put(part, self.config, filling.expert) for part in _tensors(weight)
            ]
        except IndexError:  # a half of one row of scales
            return
        if [place.shape for place in places] == [piece.shape for piece in pieces]:
            for place, piece in zip(places, pieces, strict=True):
                place.copy_(piece)
            self.missing[name] -= 1

    def complete(self) -> dict[str, QuantTensor]:
        """The stacks that nothing is missing of, by parameter."""
        return {name: w for name, w in self.weights.items() if self.missing[name] == 0}


def packed_rows(stored: StoredTensor, rule: Rule, config: ModelConfig) -> QuantTensor | None:
    """A stored tensor's packed rows as a rule chooses them, or None where it must not stay packed."""
    source = packed_source(stored, rule)
    if source is None:
        return None
    found, take = source
    return found if take is family.whole else found.map(lambda part: take(part, config))


def packed_source(stored: StoredTensor, rule: Rule) -> tuple[QuantTensor, Take] | None:
    """A stored tensor's packed rows, and how a rule chooses of them."""
    if isinstance(stored.data, QuantTensor):
        found = stored.data
    elif stored.format in GGUF_TYPES:
        found = QuantTensor(GGUF_TYPES[stored.format], stored.data, {}, torch.float32)
    else:
        return None
    take = (ON_TURNED if stored.format == TURNED else ON_PACKED).get(rule.take)
    if take is None:
        return None
    moves = take is not family.whole
    if moves and any(scale.block[0] != 1 for scale in found.format.stored_scales):
        return None
    return found, take


def _tensors(weight: QuantTensor) -> list[Tensor]:
    return [weight.packed, *weight.scales.values()]


def _room(found: QuantTensor, target: Tensor, device: torch.device | str) -> QuantTensor:
    """A stack of the target's shape in the format that was found, to be filled."""
    format = resolve(found.format)
    data = torch.empty(data_shape(format, target.shape), dtype=format.data_dtype, device=device)
    scales = {
        scale.name: torch.empty(scale_shape(scale, target.shape), dtype=scale.dtype, device=device)
        for scale in format.stored_scales
    }
    return QuantTensor(format, data, scales, target.dtype)
