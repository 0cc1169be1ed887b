"""Linears of one input in one pass, with what a layer has before and behind them.

    linears      [module(norm(x)) for each module]
    gated        activation(gate(norm(x))) * up(norm(x))
    add_linear   residual + module(x)

In: x, the modules that read it, and the norm that comes first, if any. Out: their results. Where nothing
is differentiated or captured,

- a CPU with modules packed alike quantizes x once and runs the weights in one native call: query, key
  and value as one weight, gate and up as one gated product;
- a GPU with few rows and dense weights reads each weight once in one kernel that does the norm, the gate
  and the sum on its way (`triton/fused_linear.py`). Weights that lie one behind the other in memory
  (`lay_together`) are one weight, to the library too.

Everywhere else the formulas are what they say.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fulgurite import native
from fulgurite.kernels import registry
from fulgurite.kernels.elementwise import ops
from fulgurite.kernels.gemm.cpu_layout import Panels, join, panels
from fulgurite.kernels.gemm.cpu_layout_cache import version
from fulgurite.kernels.gemm.cpu_linear import GATES, INTEGER_ACTIVATIONS, TYPES, kept_panels, linear
from fulgurite.kernels.gemm.modules import QuantLinear
from fulgurite.quant import QuantTensor

FUSED = {"cuda": "fulgurite.kernels.gemm.triton_fused_linear:linear"}
MOST_FUSED = 128  # rows up to which those kernels are meant to beat the library and what follows it


class Norm(Protocol):
    """An RMS norm: x / sqrt(mean(x^2) + eps) * (offset + weight)."""

    weight: Any
    eps: float
    offset: float

    def __call__(self, x: Tensor) -> Tensor: ...


def linears(x: Tensor, modules: Sequence[nn.Module], norm: Norm | None = None) -> list[Tensor]:
    """[module(norm(x)) for module in modules]; the results may be views of one tensor."""
    dense = _dense(x, modules)
    out = None if dense is None else _fused(x, dense, norm)
    if out is None:
        x = x if norm is None else norm(x)
        if _one_pass(x, modules):
            packed = _joined(modules)
            if packed.weight is not None:
                out = linear(x, packed.weight, packed.bias, integer=True)
        elif dense is not None and len(modules) > 1:
            out = F.linear(x, dense.weight, dense.bias)
    if out is None:
        return [module(x) for module in modules]
    sizes = [int(module.out_features) for module in modules]  # type: ignore[arg-type]
    return list(out.split_with_sizes(sizes, dim=-1))


def gated(
    x: Tensor, gate: nn.Module, up: nn.Module, activation: str, norm: Norm | None = None
) -> Tensor:
    """activation(gate(norm(x))) * up(norm(x))."""
    both = _dense(x, (gate, up))
    first, second = both.parts if both else (_dense(x, (gate,)), _dense(x, (up,)))
    if first is not None and second is not None:
        out = _fused(x, first, norm, up=second, activation=activation)
        if out is not None:
            return out
    x = x if norm is None else norm(x)
    if both is not None:
        y = F.linear(x, both.weight, both.bias)
        y_gate, y_up = y.split_with_sizes([len(part.weight) for part in both.parts], dim=-1)
        return ops.gate(y_gate, y_up, activation)
    if activation in GATES and _one_pass(x, (gate, up)) and gate.bias is None and up.bias is None:
        parts = _panels(gate), _panels(up)
        if _alike(*parts) and parts[0].rows == parts[1].rows:
            return linear(x, parts[0], integer=True, up=parts[1], gate=activation)
    return ops.gate(gate(x), up(x), activation)


def add_linear(residual: Tensor, x: Tensor, module: nn.Module) -> Tensor:
    """residual + module(x)."""
    dense = _dense(x, (module,))
    out = None if dense is None else _fused(x, dense, residual=residual)
    if out is None and dense is not None and dense.bias is None:  # the library adds on its way
        if x.dim() == 2:
            return torch.addmm(residual, x, dense.turned)
        rows = x.reshape(-1, x.shape[-1])
        out = torch.addmm(residual.reshape(len(rows), -1), rows, dense.turned)
        out = out.view(residual.shape)
    return ops.add(residual, module(x)) if out is None else out


# ---- dense weights -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dense:
    """A plain weight [N, K] and its bias; `parts` are those it is made of, one behind the other."""

    weight: Tensor
    bias: Tensor | None
    turned: Tensor  # [K, N], a view
    parts: tuple[Dense, ...] = ()


class Part(NamedTuple):
    """A linear's parameters, where they lie, and how."""

    weight: Any
    address: int
    numbers: int
    strides: tuple[int, ...]
    bias: Any
    bias_address: int

    @classmethod
    def of(cls, module: nn.Module) -> Part:
        weight, bias = module._parameters["weight"], module._parameters["bias"]
        assert weight is not None, "a linear without a weight"
        place = weight.data_ptr(), weight.numel(), weight.stride()
        return cls(weight, *place, bias, 0 if bias is None else bias.data_ptr())


class Seen(NamedTuple):
    """What plain linears were found to be, good while they are plain and their parameters lie so."""

    parts: list[Part]
    dense: Dense | None

    def holds(self, modules: Sequence[nn.Module]) -> bool:
        for module, part in zip(modules, self.parts, strict=True):
            weight, address, numbers, strides, bias, bias_address = part
            now = module._parameters
            if now.get("weight") is not weight or now.get("bias") is not bias:
                return False
            if weight.data_ptr() != address or (
                bias is not None and bias.data_ptr() != bias_address
            ):
                return False
            if weight.numel() != numbers or weight.stride() != strides or not _is_linear(module):
                return False
        return True


_seen: weakref.WeakKeyDictionary[nn.Module, dict[int, Seen]] = weakref.WeakKeyDictionary()


def lay_together(modules: Sequence[nn.Module]) -> None:
    """Move the weights of plain linears, and their biases, one behind the other."""
    if not all(_is_plain(module) for module in modules):
        return
    for name in ("weight", "bias"):
        tensors = [getattr(module, name) for module in modules]
        if any(tensor is None for tensor in tensors) or _behind(tensors) is not None:
            continue
        parts = torch.cat([tensor.data for tensor in tensors]).split([len(t) for t in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.data = part


def _dense(x: Tensor, modules: Sequence[nn.Module]) -> Dense | None:
    """The modules as one dense linear; None where they are not, or must be called as modules."""
    if x.device.type not in FUSED or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    by_count = _seen.get(modules[0])
    seen = None if by_count is None else by_count.get(len(modules))
    if seen is not None and seen.holds(modules):
        return seen.dense
    if not all(_is_plain(module) for module in modules):
        return None
    seen = Seen([Part.of(module) for module in modules], _as_one(modules))
    _seen.setdefault(modules[0], {})[len(modules)] = seen
    return seen.dense


def _as_one(modules: Sequence[nn.Module]) -> Dense | None:
    """Plain linears one behind the other as one; None where they lie apart."""
    weight, biases = _behind([module.weight for module in modules]), [m.bias for m in modules]
    if weight is None or (None in biases and any(bias is not None for bias in biases)):
        return None
    bias = None if biases[0] is None else _behind(biases)
    if bias is None and biases[0] is not None:
        return None
    parts: list[Any] = [] if len(modules) == 1 else [_as_one((module,)) for module in modules]
    return Dense(weight, bias, weight.detach().t(), tuple(parts))


def _is_plain(module: nn.Module) -> bool:
    """A linear whose weight is a tensor like any other."""
    return (
        _is_linear(module)
        and type(module.weight) is nn.Parameter
        and type(module.weight.data) is Tensor
    )


def _is_linear(module: nn.Module) -> bool:
    """Torch's own, with nobody listening and no `forward` put in its place."""
    return (
        type(module) is nn.Linear
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and "forward" not in module.__dict__
    )


def _behind(tensors: Sequence[Any]) -> Tensor | None:
    """Tensors that follow each other in memory, as one."""
    first = tensors[0]
    if len(tensors) == 1:
        return first  # type: ignore[no-any-return]
    storage, at = first.untyped_storage().data_ptr(), first.storage_offset()
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.untyped_storage().data_ptr() != storage:
            return None
        if tensor.storage_offset() != at or tensor.shape[1:] != first.shape[1:]:
            return None
        at += tensor.numel()
    rows = sum(tensor.shape[0] for tensor in tensors)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())  # type: ignore[no-any-return]


def _fused(
    x: Tensor,
    dense: Dense,
    norm: Norm | None = None,
    *,
    up: Dense | None = None,
    activation: str = "",
    residual: Tensor | None = None,
) -> Tensor | None:
    """One kernel for all of it; None where there is none."""
    if x.numel() > MOST_FUSED * x.shape[-1]:
        return None
    function = registry.find(FUSED, x.device)
    if function is None or (up is not None and (dense.bias is None) != (up.bias is None)):
        return None
    rows = x.reshape(-1, x.shape[-1])
    options: dict[str, Any] = {"bias": dense.bias}
    if norm is not None:
        options |= {"norm": norm.weight, "eps": norm.eps, "offset": norm.offset}
    if up is not None:
        options |= {"up": up.weight, "up_bias": up.bias, "activation": activation}
    if residual is not None:
        options["residual"] = residual.reshape(len(rows), -1)
    out = function(rows, dense.weight, **options)
    return None if out is NotImplemented else out.view(*x.shape[:-1], -1)


# ---- packed weights ------------------------------------------------------------------------------


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
    """Several weights as one (None: they can't be), good while the parts are the same and not written to."""

    parts: tuple[Tensor, ...]
    marks: tuple[tuple[int, int], ...]
    weight: Panels | None
    bias: Tensor | None = None


_kept: weakref.WeakKeyDictionary[nn.Module, Joined] = weakref.WeakKeyDictionary()


def _joined(modules: Sequence[nn.Module]) -> Joined:
    """The modules' weights above each other."""
    parts = _parts(modules)
    marks = tuple((part.data_ptr(), version(part)) for part in parts)
    found = _kept.get(modules[0])
    if found is None or found.marks != marks or not all(map(operator.is_, found.parts, parts)):
        found = _kept[modules[0]] = Joined(parts, marks, *_join(modules))
    return found


def _parts(modules: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """Packed data, scales and biases."""
    parts: list[Tensor] = []
    for module in modules:
        weight, bias = module.weight, module.bias
        assert isinstance(weight, QuantTensor), "a QuantLinear's weight was replaced"
        parts += [weight.packed, *weight.scales.values()]
        if isinstance(bias, Tensor):
            parts.append(bias)
    return tuple(parts)


def _join(modules: Sequence[nn.Module]) -> tuple[Panels | None, Tensor | None]:
    parts = [panels(module.weight) for module in modules]  # type: ignore[arg-type]
    biases = [module.bias for module in modules]
    fits = all(_alike(parts[0], part) for part in parts)
    fits = fits and not any(part.rows % 16 for part in parts)
    if not fits or (None in biases and any(bias is not None for bias in biases)):
        return None, None
    return join(parts), None if biases[0] is None else torch.cat(list(biases))  # type: ignore[arg-type]
