"""One stored tensor into its place in a parameter, or in a rank's share of one.

In: a stored tensor, the rule by which it fills a parameter, and what of the parameter is kept. Out: the
parameter filled, by reading no more of the file than that, in pieces so that little lies beside it.

A rule is two functions of whole tensors: what `take` makes of the stored tensor is what `put` finds in
the parameter. Both are followed backwards here. `put` of whole positions says which box of the parameter
is meant; where it meets what is kept, `taken` asks the stored tensor for just that, each kind of
`take` in its own way (`WAYS`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fulgurite.errors import WeightsError
from fulgurite.models import family
from fulgurite.models.config import ModelConfig
from fulgurite.models.family import Put, Rule, Take
from fulgurite.models.stored import Box, StoredTensor
from fulgurite.parallel.shares import Kept, Range

COPY_BYTES = 32 * 2**20  # of float32 that may lie beside a tensor while it is converted
BY_HEAD: tuple[Put, ...] = (family.key_rows, family.value_rows)


class Filling(Protocol):
    """An assignment of weights.py: one tensor of the checkpoint, by one rule, into one parameter."""

    @property
    def rule(self) -> Rule: ...

    @property
    def parameter(self) -> str: ...

    @property
    def expert(self) -> int: ...


def fill(
    parameter: Tensor, kept: Kept, stored: StoredTensor, filling: Filling, config: ModelConfig
) -> None:
    """Copy what a parameter keeps of a stored tensor into it."""
    rule = filling.rule
    if stored.format == "dense" and not stored.data.dtype.is_floating_point:
        raise WeightsError(
            f"the tensor {stored.name} holds {stored.data.dtype}, which are no weights",
            next="a packed checkpoint has scales beside them, and names its packing in config.json",
        )
    if rule.put in BY_HEAD:
        _fill_heads(parameter, kept, stored, rule, config)
        return
    place = place_of(rule.put, kept.shape, config, filling.expert)
    missing = len(kept.shape) - len(stored_shape(stored, rule, config))
    for source, target in meetings(place, kept.ranges):
        _copy(parameter[target], stored, rule, config, source, missing)


def _fill_heads(
    parameter: Tensor, kept: Kept, stored: StoredTensor, rule: Rule, config: ModelConfig
) -> None:
    """Rows of every head that lie between rows of others: [heads, some of a head's rows, columns]."""
    (rows, *others), a_head = kept.ranges, kept.shape[0] // config.heads
    assert len(rows) == 1 and others == [((0, kept.shape[1]),)], f"{kept.name} is cut by heads"
    first, last = rows[0][0] // a_head, rows[0][1] // a_head
    target = rule.put(parameter, replace(config, heads=last - first), 0)
    source = (slice(first, last), *(slice(0, size) for size in target.shape[1:]))
    _copy(target, stored, rule, config, source, 0)


def _copy(
    target: Tensor,
    stored: StoredTensor,
    rule: Rule,
    config: ModelConfig,
    source: Box,
    missing: int,
) -> None:
    """A box of what a rule takes into a target of its size, a few rows at a time.

    `missing`: dimensions of the target that a stored tensor of one expert does not have.
    """
    for _ in range(missing):
        assert target.shape[0] == 1, f"{stored.name} is one expert's"
        target = target[0]
    rows, *others = source[missing:]
    step = max(1, COPY_BYTES // max(1, 4 * target[:1].numel()))
    for start in range(rows.start, rows.stop, step):
        stop = min(start + step, rows.stop)
        piece = taken(stored, rule.take, config, (slice(start, stop), *others))
        target[start - rows.start : stop - rows.start].copy_(piece)


# ---- where a tensor goes -------------------------------------------------------------------------


def stored_shape(stored: StoredTensor, rule: Rule, config: ModelConfig) -> torch.Size:
    """The shape of what a rule takes."""
    return rule.take(torch.empty(stored.shape, device="meta"), config).shape


def place_of(put: Put, shape: tuple[int, ...], config: ModelConfig, expert: int) -> list[Range]:
    """The box of a parameter that a rule fills: a range of each of the parameter's dimensions."""
    ranges = []
    for dim, size in enumerate(shape):
        around = [1] * len(shape)
        around[dim] = size
        # positions along one dimension; an expanded tensor takes no memory for the others
        positions = put(torch.arange(size).view(around).expand(shape), config, expert)
        if positions.numel() == 0:
            return [(0, 0)] * len(shape)
        ends = positions[(0,) * positions.dim()], positions[(-1,) * positions.dim()]
        ranges.append((int(ends[0]), int(ends[1]) + 1))
    return ranges


class Meeting(NamedTuple):
    """A box of what a rule takes, and where it lies in the share."""

    source: Box
    target: Box


def meetings(place: list[Range], kept: tuple[tuple[Range, ...], ...]) -> Iterator[Meeting]:
    """Where the box that a tensor fills meets what is kept, by dimension: each combination is a box."""
    found: list[list[tuple[slice, slice]]] = []
    for (first, last), ranges in zip(place, kept, strict=True):
        pairs, at = [], 0  # `at`: where a kept range lies in the share
        for start, stop in ranges:
            low, high = max(first, start), min(last, stop)
            if low < high:
                source = slice(low - first, high - first)
                pairs.append((source, slice(at + low - start, at + high - start)))
            at += stop - start
        found.append(pairs)
    for box in itertools.product(*found):
        yield Meeting(tuple(source for source, _ in box), tuple(target for _, target in box))


# ---- what is read of it --------------------------------------------------------------------------


def taken(stored: StoredTensor, take: Take, config: ModelConfig, box: Box) -> Tensor:
    """A box of what `take` makes of a stored tensor, asking it for no more."""
    return WAYS[take](stored, take, config, box)


def _same(stored: StoredTensor, take: Take, config: ModelConfig, box: Box) -> Tensor:
    """Numbers change and places don't."""
    return take(stored.part(box), config)


def _turned(stored: StoredTensor, take: Take, config: ModelConfig, box: Box) -> Tensor:
    *experts, rows, columns = box
    return stored.part((*experts, columns, rows)).transpose(-1, -2)


def _rows(stored: StoredTensor, take: Take, config: ModelConfig, box: Box) -> Tensor:
    """Rows in their order, from some row on."""
    first = int(take(torch.arange(stored.shape[0]), config)[0])
    return stored.part((slice(first + box[0].start, first + box[0].stop), *box[1:]))


def _heads(stored: StoredTensor, take: Take, config: ModelConfig, box: Box) -> Tensor:
    """Rows change places inside their head."""
    size, (start, stop) = config.head_dim, (box[0].start, box[0].stop)
    first, last = start // size * size, -(-stop // size) * size
    return take(stored.part((slice(first, last), *box[1:])), config)[start - first : stop - first]


def _gates(stored: StoredTensor, take: Take, config: ModelConfig, box: Box) -> Tensor:
    """Every second row or column is a gate; all gates come before all ups."""
    turned = take is family.transposed_gate_before_up
    half = stored.shape[2 if turned else 1] // 2
    parts = []
    for odd in (0, 1):  # gates, ups
        start, stop = box[1].start - odd * half, box[1].stop - odd * half
        start, stop = max(start, 0), min(stop, half)
        if start < stop:
            every_second = slice(2 * start + odd, 2 * stop, 2)
            one = (box[0], every_second, *box[2:])
            parts.append(_turned(stored, take, config, one) if turned else stored.part(one))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


Way = Callable[[StoredTensor, Take, ModelConfig, Box], Tensor]
WAYS: dict[Take, Way] = {
    family.whole: _same,
    family.minus_one: _same,
    family.transposed: _turned,
    family.gate_before_up: _gates,
    family.transposed_gate_before_up: _gates,
    family.fused_query: _rows,
    family.fused_key: _rows,
    family.fused_value: _rows,
    family.first_half: _rows,
    family.second_half: _rows,
    family.half_from_interleaved: _heads,
}
