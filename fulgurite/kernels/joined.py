"""Linears of one input, in one pass: what a layer asks for side by side.

In: x and the modules that read it. Out: their results. Where the modules are packed alike on a CPU, and
nothing is differentiated or captured, x is quantized once and the weights run in one native call: query,
key and value as one weight, gate and up as one gated product. Everywhere else each module is called.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fulgurite import native
from fulgurite.kernels import glue
from fulgurite.kernels.cpu.layout import Panels, join, panels
from fulgurite.kernels.cpu.linear import GATES, INTEGER_ACTIVATIONS, TYPES, kept_panels, linear
from fulgurite.kernels.modules import QuantLinear
from fulgurite.quant import QuantTensor


def linears(x: Tensor, modules: Sequence[nn.Module]) -> list[Tensor]:
    """[module(x) for module in modules]; the results may be views of one tensor."""
    if _one_pass(x, modules):
        joined = _joined(modules)
        if joined is not None:
            sizes = [int(module.out_features) for module in modules]  # type: ignore[arg-type]
            out = linear(x, joined.weight, joined.bias, integer=True)
            return list(out.split(sizes, dim=-1))
    return [module(x) for module in modules]


def gated(x: Tensor, gate: nn.Module, up: nn.Module, activation: str) -> Tensor:
    """activation(gate(x)) * up(x)."""
    if activation in GATES and _one_pass(x, (gate, up)) and gate.bias is None and up.bias is None:
        first, second = (_panels(module) for module in (gate, up))
        if _alike(first, second) and first.rows == second.rows:
            return linear(x, first, integer=True, up=second, gate=activation)
    return glue.gate(gate(x), up(x), activation)


def _one_pass(x: Tensor, modules: Sequence[nn.Module]) -> bool:
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    if x.device.type != "cpu" or x.dtype not in TYPES or native.compiler() is None:
        return False
    return all(
        type(module) is QuantLinear
        and module.activations == INTEGER_ACTIVATIONS
        and module.input_scale is None
        for module in modules
    )


def _panels(module: nn.Module) -> Panels:
    weight = module.weight
    assert isinstance(weight, QuantTensor), "a QuantLinear's weight was replaced"
    return kept_panels(weight.packed, list(weight.scales.values()), weight.format.name)


def _alike(first: Panels, second: Panels) -> bool:
    same = ("columns", "group", "kind", "offset", "table")
    return first.integer and all(getattr(first, n) == getattr(second, n) for n in same)


@dataclass(frozen=True)
class Joined:
    """Several weights as one, good while the packed ones are the same."""

    packed: tuple[Tensor, ...]
    weight: Panels
    bias: Tensor | None


_kept: weakref.WeakKeyDictionary[nn.Module, Joined | None] = weakref.WeakKeyDictionary()


def _joined(modules: Sequence[nn.Module]) -> Joined | None:
    """The modules' weights above each other; None where they can't be."""
    weights = [module.weight for module in modules]
    packed = tuple(weight.packed for weight in weights)  # type: ignore[union-attr]
    found = _kept.get(modules[0])
    if found is not None and all(a is b for a, b in zip(found.packed, packed, strict=True)):
        return found
    if found is None and modules[0] in _kept:
        return None
    parts = [panels(weight) for weight in weights]  # type: ignore[arg-type]
    biases = [module.bias for module in modules]
    fits = all(_alike(parts[0], part) for part in parts)
    fits = fits and not any(part.rows % 16 for part in parts)
    if not fits or (None in biases and any(bias is not None for bias in biases)):
        _kept[modules[0]] = None
        return None
    bias = None if biases[0] is None else torch.cat(list(biases))  # type: ignore[arg-type]
    _kept[modules[0]] = Joined(packed, join(parts), bias)
    return _kept[modules[0]]
