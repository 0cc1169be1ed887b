"""Weights that stay packed while loading: blocks of a GGUF file or of FP8.

In: a model on the meta device, the plan of which tensor fills what, the mapped tensors. Out: the same
model in which every linear and embedding whose weight the file keeps packed is a `QuantLinear` or
`QuantEmbedding`; the names of the parameters that are filled by that.

They stay as they lie in the file, but for GGUF's blocks on a GPU that computes in 16 bits: its kernels
read groups of integers (`quant/regroup.py`), the same numbers laid out anew. A weight stays packed where
its rows are only chosen or reordered on the way in (`BY_CHOICE`), it fills a whole parameter, and it has
two dimensions; stacked experts are `packed_experts.py`'s. Everything else is unpacked as always: norms,
biases.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from fulgurite.kernels.gemm.modules import QuantEmbedding, QuantLinear, packable
from fulgurite.models import family
from fulgurite.models.config import ModelConfig
from fulgurite.models.family import Rule, Take
from fulgurite.models.filling import Filling, meetings, place_of, taken
from fulgurite.models.packed_experts import Stacks, packed_source
from fulgurite.models.stored import Box, StoredTensor, dense, everything
from fulgurite.parallel.shares import Kept
from fulgurite.quant import QuantTensor, regroup
from fulgurite.quant.gguf_file import GGUF_TYPES

# What may happen to a tensor's rows without looking into them.
BY_CHOICE: tuple[Take, ...] = (
    family.whole,
    family.fused_query,
    family.fused_key,
    family.fused_value,
    family.first_half,
    family.second_half,
    family.half_from_interleaved,
)


GROUPED_DTYPES = (torch.bfloat16, torch.float16)


def keep_packed(
    model: nn.Module,
    tensors: Iterable[tuple[str, StoredTensor]],
    assignments: Mapping[str, Sequence[Filling]],
    config: ModelConfig,
    *,
    device: torch.device | str,
    activations: str | None = None,
    grouped: bool = False,
) -> set[str]:
    """Put packed weights where they belong; the parameters that are then filled.

    `grouped`: GGUF's blocks become groups of integers.
    """
    parameters = dict(model.named_parameters())
    stacks = Stacks(assignments, config, device, grouped)
    filled: set[str] = set()
    only_shapes = torch.device(device).type == "meta"
    for name, stored in tensors:
        if only_shapes:
            stored = replace(stored, data=stored.data.to("meta"))
        for assignment in assignments.get(name, ()):
            target = parameters[assignment.parameter]
            if target.dim() == 3:
                stacks.add(stored, assignment, target)
                continue
            weight = packed_weight(stored, assignment.rule, config, target.dtype)
            if weight is None or weight.shape != target.shape:
                continue
            if not only_shapes:
                weight.check(name)
            weight = regroup(weight.to(device)) if grouped else weight.to(device)
            if _place(model, assignment.parameter, weight, activations):
                filled.add(assignment.parameter)
    for name, weight in stacks.complete().items():
        if not only_shapes:
            weight.check(name)
        if _place_stack(model, name, weight, activations):
            filled.add(name)
    return filled


def reads_groups(device: torch.device | str, dtype: torch.dtype) -> bool:
    """Whether the kernels there want GGUF's blocks as groups of integers."""
    return torch.device(device).type == "cuda" and dtype in GROUPED_DTYPES


def fill_packed(
    parameter: QuantTensor,
    kept: Kept,
    stored: StoredTensor,
    filling: Filling,
    config: ModelConfig,
) -> None:
    """Copy the blocks that a rank keeps of a stored tensor into its packed parameter."""
    rule, stack = filling.rule, parameter.dim() == 3
    source = packed_source(stored, rule) if stack else weight_source(stored, rule, parameter.dtype)
    assert source is not None, f"{kept.name} was made of packed tensors, and {stored.name} is none"
    if source[0].format is not parameter.format:
        source = regroup(source[0]), source[1]
    place = place_of(rule.put, kept.shape, config, filling.expert)
    for box, target in meetings(place, kept.ranges):
        into = parameter[target]
        if stack and len(stored.shape) == 2:  # one expert
            into, box = into[0], box[1:]
        into.copy_(_chosen(*source, config, box))


def _chosen(weight: QuantTensor, take: Take, config: ModelConfig, box: Box) -> QuantTensor:
    """A box of what `take` chooses of packed rows: those of the data and of each level of scales."""
    if take is family.whole:
        return weight[box]
    *rows, columns = box
    chosen = weight.map(
        lambda part: taken(dense("", part), take, config, (*rows, slice(0, part.shape[-1])))
    )
    return chosen[(*everything(chosen.shape[:-1]), columns)]


def _place_stack(
    model: nn.Module, parameter: str, weight: QuantTensor, activations: str | None
) -> bool:
    """Put packed experts where the dense ones were; False where their module can't take them."""
    path, _, name = parameter.rpartition(".")
    module = model.get_submodule(path)
    if name not in packable(module):
        return False
    module.activations = activations
    setattr(module, name, nn.Parameter(weight, requires_grad=False))
    return True


def packed_weight(
    stored: StoredTensor, rule: Rule, config: ModelConfig, dtype: torch.dtype
) -> QuantTensor | None:
    """A stored tensor as the packed weight that a rule makes of it, or None where it must not stay."""
    source = weight_source(stored, rule, dtype)
    if source is None:
        return None
    weight, take = source
    return weight if take is family.whole else weight.map(lambda part: take(part, config))


def weight_source(
    stored: StoredTensor, rule: Rule, dtype: torch.dtype
) -> tuple[QuantTensor, Take] | None:
    """A stored tensor as a packed weight, and how a rule chooses of its rows."""
    if rule.put is not family.everything or len(stored.shape) != 2:
        return None
    if isinstance(stored.data, QuantTensor):
        return (stored.data.to(dtype), rule.take) if rule.take is family.whole else None
    if stored.format not in GGUF_TYPES or rule.take not in BY_CHOICE:
        return None
    return QuantTensor(GGUF_TYPES[stored.format], stored.data, {}, dtype), rule.take


def _place(model: nn.Module, parameter: str, weight: QuantTensor, activations: str | None) -> bool:
    """Replace the dense module that owns the parameter; False where it is of another kind."""
    path, _, name = parameter.rpartition(".")
    module = model.get_submodule(path)
    packed: nn.Module
    if name != "weight":
        return False
    if type(module) is nn.Linear:
        packed = QuantLinear(weight, None, activations)
        packed.bias = module.bias  # still on meta: filled like any other
    elif type(module) is nn.Embedding:
        packed = QuantEmbedding(weight, activations)
    else:
        return False
    above, _, last = path.rpartition(".")
    setattr(model.get_submodule(above), last, packed)
    return True
