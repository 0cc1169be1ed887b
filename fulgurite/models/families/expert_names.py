"""Names of experts in checkpoints: the mappings of a family in, the ones that fit a file out.

Libraries that quantize a model don't all keep the names of the family's own checkpoints:

    experts.{expert}.gate_proj.weight, up_proj, down_proj    one linear an expert: llm-compressor
    experts.{expert}.w1.weight, w3, w2                       Mixtral's names for the same
    experts.gate_up_proj, experts.down_proj                  [E, 2I, D] and [E, D, I]: transformers 5

A file uses one of them. Its tensor names say which.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from functools import partial

from fulgurite.models.weight_mapping import (
    WeightMapping,
    view_expert,
    view_expert_gate,
    view_expert_up,
)

EXPERTS = "layers.{layer}.feed_forward.experts."
LINEAR_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


def select_experts(
    weights: tuple[WeightMapping, ...], names: Collection[str]
) -> tuple[WeightMapping, ...]:
    """The mappings of a family, with the names that the experts have in a file."""
    experts = [mapping for mapping in weights if mapping.target.startswith(EXPERTS)]
    if not experts:
        return weights
    patterns = {replace_numbers(name) for name in names}
    is_in_file = partial(is_stored, patterns=patterns)
    if any(is_in_file(mapping) for mapping in experts):
        return weights
    others = tuple(mapping for mapping in weights if mapping not in experts)
    for layout in list_layouts(experts):
        if any(is_in_file(mapping) for mapping in layout):
            return others + layout
    return weights


def replace_numbers(name: str) -> str:
    """The name of a tensor with placeholders for its layer and its expert."""
    name = re.sub(r"\blayers\.\d+\.", "layers.{layer}.", name, count=1)
    return re.sub(r"\bexperts\.\d+\.", "experts.{expert}.", name, count=1)


def is_stored(mapping: WeightMapping, patterns: Collection[str]) -> bool:
    return mapping.source in patterns


def list_layouts(experts: list[WeightMapping]) -> Iterator[tuple[WeightMapping, ...]]:
    """Every set of names that a file may have for these experts."""
    (prefix,) = {read_prefix(mapping.source) for mapping in experts}
    has_bias = any(mapping.target == EXPERTS + "gate_up_proj_bias" for mapping in experts)
    for linears in LINEAR_NAMES:
        yield map_linears(prefix, linears, has_bias)
    if not has_bias:  # gpt-oss: its stacks interleave gate and up
        yield tuple(
            WeightMapping(prefix + name, EXPERTS + name) for name in ("gate_up_proj", "down_proj")
        )


def read_prefix(source: str) -> str:
    """Where the experts of a layer are: `model.layers.{layer}.mlp.experts.`."""
    source = re.sub(r"(input|output)_linear\.weight$", "experts.", source)  # Granite
    return source.partition("experts.")[0] + "experts."


def map_linears(
    prefix: str, names: tuple[str, str, str], has_bias: bool
) -> tuple[WeightMapping, ...]:
    """One linear an expert and projection; gate before up."""
    targets = ("gate_up_proj", "gate_up_proj", "down_proj")
    views = (view_expert_gate, view_expert_up, view_expert)
    kinds = (("weight", ""), ("bias", "_bias")) if has_bias else (("weight", ""),)
    return tuple(
        WeightMapping(
            f"{prefix}{{expert}}.{name}.{kind}", f"{EXPERTS}{target}{suffix}", target_view=view
        )
        for kind, suffix in kinds
        for name, target, view in zip(names, targets, views, strict=True)
    )
