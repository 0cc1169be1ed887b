"""Merged linears: several `QuantLinear`s that read one input, as one with all their rows.

    merge_quant_storage(modules)     once, when an engine starts: packed data and scales become adjacent
    find_merged_linear(x, modules)   the merged linear; None where the modules must be called

One GEMM of all rows reads x and quantizes it once, and keeps more of the GPU busy than several small
ones. Weights merge if they have one format and one way to quantize x. A scale of a whole tensor
(NVFP4's global scale, FP8 per tensor) must then be the same number in all of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fulgurite.kernels.gemm.modules import QuantLinear
from fulgurite.kernels.integer_math import cdiv
from fulgurite.quant import QuantTensor
from fulgurite.quant.format import WHOLE_DIM


class MergedLinear(NamedTuple):
    """The merged linear of some modules, valid while their weights are where they were."""

    linear: QuantLinear
    weights: list[Tensor]
    addresses: list[int]

    def is_valid(self, modules: Sequence[nn.Module]) -> bool:
        for module, weight, address in zip(modules, self.weights, self.addresses, strict=True):
            current = module._parameters["weight"]
            if current is not weight or current.packed.data_ptr() != address:  # type: ignore[union-attr]
                return False
        return not any(module._forward_hooks or module._forward_pre_hooks for module in modules)


_merged: weakref.WeakKeyDictionary[nn.Module, MergedLinear] = weakref.WeakKeyDictionary()


def merge_quant_storage(modules: Sequence[nn.Module]) -> None:
    """Make packed data and scales adjacent in memory; nothing where the linears can't merge."""
    linears = [module for module in modules if type(module) is QuantLinear]
    if len(linears) < max(len(modules), 2) or not _can_merge(linears):
        return
    weights = [_weight_of(linear) for linear in linears]
    packed = torch.cat([weight.packed for weight in weights])
    scales = {name: _merge_scale(weights, name) for name in weights[0].scales}
    start = 0
    for weight in weights:  # views: nothing is held twice
        _move_into(weight, packed, scales, start)
        start += len(weight)
    whole = QuantTensor(weights[0].format, packed, scales, weights[0].dtype)
    biases = [linear.bias for linear in linears]
    bias = None if biases[0] is None else torch.cat([b.data for b in biases if b is not None])
    first = linears[0]
    merged = QuantLinear(whole, bias, first.activations, first.input_scale)
    merged.uses_static_scale = first.uses_static_scale
    merged.uses_default_activations = first.uses_default_activations
    _merged[first] = MergedLinear(
        merged, [m.weight for m in linears], [w.packed.data_ptr() for w in weights]
    )


def find_merged_linear(x: Tensor, modules: Sequence[nn.Module]) -> QuantLinear | None:
    """The linear that `merge_quant_storage` made of these modules; None: call the modules."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    merged = _merged.get(modules[0])
    if merged is None or len(merged.weights) != len(modules) or not merged.is_valid(modules):
        return None
    return merged.linear


def _can_merge(linears: Sequence[QuantLinear]) -> bool:
    first = linears[0]
    for linear in linears:
        weight, expected = _weight_of(linear), _weight_of(first)
        if weight.device != expected.device or weight.format.name != expected.format.name:
            return False
        if len(weight.packed) != len(weight) or weight.shape[1] != expected.shape[1]:
            return False
        if linear.activations != first.activations or (linear.bias is None) != (first.bias is None):
            return False
        if not _is_same(linear.static_scale, first.static_scale):
            return False
        for spec in weight.format.separate_scales:
            scale = weight.scales[spec.name]
            if spec.block[0] == WHOLE_DIM:
                if not _is_same(scale, expected.scales[spec.name]):
                    return False
            elif len(weight) % spec.block[0] and linear is not linears[-1]:
                return False  # only the last one may end within a block of scales
            elif len(scale) != cdiv(len(weight), spec.block[0]):
                return False
    return True


def _merge_scale(weights: Sequence[QuantTensor], name: str) -> Tensor:
    (spec,) = [spec for spec in weights[0].format.separate_scales if spec.name == name]
    parts = [weight.scales[name] for weight in weights]
    return parts[0] if spec.block[0] == WHOLE_DIM else torch.cat(parts)


def _move_into(weight: QuantTensor, packed: Tensor, scales: dict[str, Tensor], start: int) -> None:
    """Make a weight's tensors views of rows of the merged ones."""
    end = start + len(weight)
    weight.packed = packed[start:end]
    for spec in weight.format.separate_scales:
        block = spec.block[0]
        if block != WHOLE_DIM:
            setattr(weight, spec.name, scales[spec.name][start // block : cdiv(end, block)])


def _is_same(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first.float(), second.float())  # float8 scales can't be compared as they are


def _weight_of(linear: QuantLinear) -> QuantTensor:
    weight = linear.weight
    assert isinstance(weight, QuantTensor), "a QuantLinear's weight was replaced"
    return weight
