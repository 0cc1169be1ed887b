"""Weights that stay packed while loading: blocks of a GGUF file or of FP8 as they lie in the file.

In: a model on the meta device, the plan of which tensor fills what, the mapped tensors. Out: the same
model in which every linear and embedding whose weight the file keeps packed is a `QuantLinear` or
`QuantEmbedding`; the names of the parameters that are filled by that.

A weight stays packed where its rows are only chosen or reordered on the way in (`BY_CHOICE`), it
fills a whole parameter, and it has two dimensions; stacked experts are `packed_experts.py`'s. Everything
else is unpacked as always: norms, biases.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fulgurite.kernels.modules import QuantEmbedding, QuantLinear, packable
from fulgurite.models import family
from fulgurite.models.config import ModelConfig
from fulgurite.models.family import Rule, Take
from fulgurite.models.packed_experts import Filling, Stacks
from fulgurite.models.stored import StoredTensor
from fulgurite.quant import QuantTensor
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


def keep_packed(
    model: nn.Module,
    tensors: Iterable[tuple[str, StoredTensor]],
    assignments: Mapping[str, Sequence[Filling]],
    config: ModelConfig,
    *,
    device: torch.device | str,
    activations: str | None = None,
) -> set[str]:
    """Put packed weights where they belong; the parameters that are then filled."""
    parameters = dict(model.named_parameters())
    stacks = Stacks(assignments, config, device)
    filled: set[str] = set()
    for name, stored in tensors:
        for assignment in assignments.get(name, ()):
            target = parameters[assignment.parameter]
            if target.dim() == 3:
                stacks.add(stored, assignment, target)
                continue
            weight = packed_weight(stored, assignment.rule, config, target.dtype)
            if weight is None or weight.shape != target.shape:
                continue
            if torch.device(device).type != "meta":  # there only shapes are asked for
                weight.check(name)
            if _place(model, assignment.parameter, weight.to(device), activations):
                filled.add(assignment.parameter)
    for name, weight in stacks.complete().items():
        if torch.device(device).type != "meta":
            weight.check(name)
        if _place_stack(model, name, weight, activations):
            filled.add(name)
    return filled


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
    if rule.put is not family.everything or len(stored.shape) != 2:
        return None
    if isinstance(stored.data, QuantTensor):
        return stored.data.to(dtype) if rule.take is family.whole else None
    if stored.format not in GGUF_TYPES or rule.take not in BY_CHOICE:
        return None
    rows: Tensor = rule.take(stored.data, config)
    return QuantTensor(GGUF_TYPES[stored.format], rows, {}, dtype)


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
