"""Fused projections: linears that read one input in one pass, with the ops before and after them.

    fused_linears      [module(norm(x)) for each module]             qkv_proj
    fused_gate_up      activation(gate(norm(x))) * up(norm(x))       gate_up_proj
    fused_linear_add   residual + module(x)                          o_proj, down_proj

In: x, the modules that read it, and the RMS norm before them, if any. Out: their results. Without
gradients and outside of graph capture,

- a CPU with QuantLinears of one layout quantizes x once and runs the weights in one native call:
  query, key and value as one weight, gate and up as one gated linear;
- a GPU with QuantLinears of one format runs them as one (`merged_linear.py`), and for few rows
  applies the gated activation or adds the residual in the same kernel;
- a GPU with few rows and dense weights reads each weight once, in one kernel with norm, gated
  activation and residual (`triton_fused_linear.py`). Weights that are adjacent in memory
  (`merge_weight_storage`) are one weight, for the GEMM library as well.

Everywhere else these are the plain formulas.
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
from fulgurite.determinism import is_deterministic
from fulgurite.kernels import registry
from fulgurite.kernels.elementwise.gated_activation import UNGATED, GatedActivation
from fulgurite.kernels.elementwise.ops import activation_and_mul, add
from fulgurite.kernels.gemm import triton_fused_linear, triton_quant_linear
from fulgurite.kernels.gemm.cpu_layout import PackedPanels, concat_panels, pack_panels
from fulgurite.kernels.gemm.cpu_layout_cache import version_of
from fulgurite.kernels.gemm.cpu_linear import (
    DTYPE_CODES,
    GATE_IDS,
    INT8_ACTIVATIONS,
    linear,
    panels_cache,
)
from fulgurite.kernels.gemm.dense_linear import DenseLinear, dense_linear
from fulgurite.kernels.gemm.merged_linear import find_merged_linear
from fulgurite.kernels.gemm.modules import QuantLinear
from fulgurite.kernels.tuning.heuristics import heuristics_for
from fulgurite.quant import QuantTensor


class ResidualLinear(nn.Module):
    """A linear that adds a residual itself, because of where its results come from."""

    def forward_add(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + self(x)."""
        raise NotImplementedError


FUSED_LINEAR_KERNELS: dict[str, registry.Kernel] = {"cuda": triton_fused_linear.fused_linear}
FUSED_QUANT_LINEAR_KERNELS: dict[str, registry.Kernel] = {
    "cuda": triton_quant_linear.fused_quant_linear
}


class RMSNormModule(Protocol):
    """An RMS norm module: x / sqrt(mean(x^2) + eps) * (offset + weight)."""

    weight: Any
    eps: float
    offset: float

    def __call__(self, x: Tensor) -> Tensor: ...


def fused_linears(
    x: Tensor, modules: Sequence[nn.Module], norm: RMSNormModule | None = None
) -> list[Tensor]:
    """[module(norm(x)) for module in modules]; the results may be views of one tensor."""
    dense = _find_dense_weight(x, modules)
    out = None if dense is None else _run_fused_kernel(x, dense, norm)
    if out is None:
        x = x if norm is None else norm(x)
        merged = find_merged_linear(x, modules)
        if merged is not None:
            out = merged(x)
        elif _can_fuse_quantized(x, modules):
            packed = _find_merged_panels(modules)
            if packed.weight is not None:
                out = linear(x, packed.weight, packed.bias, integer=True)
        elif dense is not None and len(modules) > 1:
            out = dense.multiply(x)
    if out is None:
        return [module(x) for module in modules]
    sizes = [int(module.out_features) for module in modules]  # type: ignore[arg-type]
    return list(out.split_with_sizes(sizes, dim=-1))


def fused_gate_up(
    x: Tensor, gate: nn.Module, up: nn.Module, activation: str, norm: RMSNormModule | None = None
) -> Tensor:
    """activation(gate(norm(x))) * up(norm(x))."""
    both = _find_dense_weight(x, (gate, up))
    parts = (
        (_find_dense_weight(x, (gate,)), _find_dense_weight(x, (up,))) if not both else both.parts
    )
    dense_gate, dense_up = parts
    if dense_gate is not None and dense_up is not None:
        out = _run_fused_kernel(x, dense_gate, norm, up=dense_up, activation=activation)
        if out is not None:
            return out
    x = x if norm is None else norm(x)
    merged = find_merged_linear(x, (gate, up)) if both is None else None
    if merged is not None and gate.out_features == up.out_features:
        out = _run_fused_quantized(x, merged, gate=GatedActivation(activation))
        if out is not None:
            return out
    if both is not None or merged is not None:
        y = both.multiply(x) if both is not None else merged(x)  # type: ignore[misc]
        y_gate, y_up = y.split_with_sizes([gate.out_features, up.out_features], dim=-1)  # type: ignore[list-item]
        return activation_and_mul(y_gate, y_up, activation)
    has_bias = gate.bias is not None or up.bias is not None
    if activation in GATE_IDS and not has_bias and _can_fuse_quantized(x, (gate, up)):
        gate_panels, up_panels = _panels(gate), _panels(up)
        if _have_same_layout(gate_panels, up_panels) and gate_panels.rows == up_panels.rows:
            return linear(x, gate_panels, integer=True, up=up_panels, gate=activation)
    return activation_and_mul(gate(x), up(x), activation)


def fused_linear_add(residual: Tensor, x: Tensor, module: nn.Module) -> Tensor:
    """residual + module(x)."""
    if isinstance(module, ResidualLinear):
        return module.forward_add(residual, x)
    if is_deterministic() and _is_dense_linear(module):
        return dense_linear(x, module.weight, module.bias, residual)  # type: ignore[arg-type]
    if type(module) is QuantLinear:
        out = _run_fused_quantized(x, module, residual=residual)
        return add(residual, module(x)) if out is None else out
    dense = _find_dense_weight(x, (module,))
    out = None if dense is None else _run_fused_kernel(x, dense, residual=residual)
    if out is None and dense is not None and dense.bias is None:  # the library adds the residual
        if x.dim() == 2:
            return torch.addmm(residual, x, dense.transposed)
        rows = x.reshape(-1, x.shape[-1])
        out = torch.addmm(residual.reshape(-1, residual.shape[-1]), rows, dense.transposed).view(
            residual.shape
        )
    return add(residual, module(x)) if out is None else out


# ---- dense weights -------------------------------------------------------------------------------


@dataclass(frozen=True)
class DenseWeight:
    """A dense weight [N, K] and its bias; `parts` are the adjacent weights it consists of."""

    weight: Tensor
    bias: Tensor | None
    transposed: Tensor  # [K, N], a view
    parts: tuple[DenseWeight, ...] = ()

    def multiply(self, x: Tensor) -> Tensor:
        """x @ weight.T + bias."""
        if is_deterministic():
            return dense_linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)


class ParameterLocation(NamedTuple):
    """A linear's parameters, their addresses and strides."""

    weight: Any
    address: int
    numel: int
    strides: tuple[int, ...]
    bias: Any
    bias_address: int

    @classmethod
    def of(cls, module: nn.Module) -> ParameterLocation:
        weight, bias = module._parameters["weight"], module._parameters["bias"]
        assert weight is not None, "a linear without a weight"
        layout = weight.data_ptr(), weight.numel(), weight.stride()
        return cls(weight, *layout, bias, 0 if bias is None else bias.data_ptr())


class CachedWeight(NamedTuple):
    """A merged weight of plain linears, valid while modules and addresses are the same."""

    parts: list[ParameterLocation]
    dense: DenseWeight | None

    def is_valid(self, modules: Sequence[nn.Module]) -> bool:
        for module, part in zip(modules, self.parts, strict=True):
            weight, address, numel, strides, bias, bias_address = part
            current = module._parameters
            if current.get("weight") is not weight or current.get("bias") is not bias:
                return False
            if weight.data_ptr() != address or (
                bias is not None and bias.data_ptr() != bias_address
            ):
                return False
            if weight.numel() != numel or weight.stride() != strides:
                return False
            if not _is_unmodified_linear(module):
                return False
        return True


_dense_weights: weakref.WeakKeyDictionary[nn.Module, dict[int, CachedWeight]] = (
    weakref.WeakKeyDictionary()
)


def merge_weight_storage(modules: Sequence[nn.Module]) -> None:
    """Make the weights of plain linears, and their biases, adjacent in memory."""
    if not all(_is_dense_linear(module) for module in modules):
        return
    for name in ("weight", "bias"):
        tensors = [getattr(module, name) for module in modules]
        if any(tensor is None for tensor in tensors) or _adjacent_view(tensors) is not None:
            continue
        parts = torch.cat([tensor.data for tensor in tensors]).split([len(t) for t in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.data = part


def _find_dense_weight(x: Tensor, modules: Sequence[nn.Module]) -> DenseWeight | None:
    """The modules as one dense linear; None where they must be called as modules."""
    if x.device.type not in FUSED_LINEAR_KERNELS:
        return None
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    by_count = _dense_weights.get(modules[0])
    cached = None if by_count is None else by_count.get(len(modules))
    if cached is not None and cached.is_valid(modules):
        return cached.dense
    if not all(_is_dense_linear(module) for module in modules):
        return None
    parts = [ParameterLocation.of(module) for module in modules]
    cached = CachedWeight(parts, _merge_dense(modules))
    _dense_weights.setdefault(modules[0], {})[len(modules)] = cached
    return cached.dense


def _merge_dense(modules: Sequence[nn.Module]) -> DenseWeight | None:
    """Adjacent plain linears as one; None where they are not adjacent."""
    weight = _adjacent_view([module.weight for module in modules])
    biases = [module.bias for module in modules]
    if weight is None or (None in biases and any(bias is not None for bias in biases)):
        return None
    bias = None if biases[0] is None else _adjacent_view(biases)
    if bias is None and biases[0] is not None:
        return None
    parts: list[Any] = [] if len(modules) == 1 else [_merge_dense((module,)) for module in modules]
    return DenseWeight(weight, bias, weight.detach().t(), tuple(parts))


def _is_dense_linear(module: nn.Module) -> bool:
    """Whether a module is a plain linear with a plain tensor as its weight."""
    return (
        _is_unmodified_linear(module)
        and type(module.weight) is nn.Parameter
        and type(module.weight.data) is Tensor
    )


def _is_unmodified_linear(module: nn.Module) -> bool:
    """Whether a module is torch's own linear, without hooks and with its own `forward`."""
    return (
        type(module) in (nn.Linear, DenseLinear)
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and "forward" not in module.__dict__
    )


def _adjacent_view(tensors: Sequence[Any]) -> Tensor | None:
    """One view of tensors that are adjacent in memory; None where they are not."""
    first = tensors[0]
    if len(tensors) == 1:
        return first  # type: ignore[no-any-return]
    storage, offset = first.untyped_storage().data_ptr(), first.storage_offset()
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.untyped_storage().data_ptr() != storage:
            return None
        if tensor.storage_offset() != offset or tensor.shape[1:] != first.shape[1:]:
            return None
        offset += tensor.numel()
    rows = sum(tensor.shape[0] for tensor in tensors)
    merged: Tensor = first.detach().as_strided((rows, *first.shape[1:]), first.stride())
    return merged


def _run_fused_kernel(
    x: Tensor,
    dense: DenseWeight,
    norm: RMSNormModule | None = None,
    *,
    up: DenseWeight | None = None,
    activation: str = "",
    residual: Tensor | None = None,
) -> Tensor | None:
    """Run the fused kernel; None where it does not support the call."""
    max_rows = heuristics_for(x.device).fused_linear_max_rows
    if x.numel() == 0 or x.numel() > max_rows * x.shape[-1]:
        return None
    kernel = registry.find_kernel(FUSED_LINEAR_KERNELS, x.device)
    if kernel is None or (up is not None and (dense.bias is None) != (up.bias is None)):
        return None
    rows = x.reshape(-1, x.shape[-1])
    options: dict[str, Any] = {"bias": dense.bias}
    if norm is not None:
        options |= {"norm": norm.weight, "eps": norm.eps, "offset": norm.offset}
    if up is not None:
        options |= {"up": up.weight, "up_bias": up.bias, "activation": activation}
    if residual is not None:
        options["residual"] = residual.reshape(-1, residual.shape[-1])
    out = kernel(rows, dense.weight, **options)
    return None if out is NotImplemented else out.view(*x.shape[:-1], out.shape[-1])


# ---- quantized weights ---------------------------------------------------------------------------


def _run_fused_quantized(
    x: Tensor,
    linear: QuantLinear,
    *,
    gate: GatedActivation = UNGATED,
    residual: Tensor | None = None,
) -> Tensor | None:
    """gate(linear(x)) + residual in one kernel; None where there is none for this call."""
    kernel = registry.find_kernel(FUSED_QUANT_LINEAR_KERNELS, x.device)
    if kernel is None or not registry.can_skip_dispatcher(x, linear.bias, residual):
        return None
    if not gate.is_in_kernels or linear._forward_hooks or linear._forward_pre_hooks:
        return None
    if not linear.leaves_unquantized(x):
        return None
    out = kernel(x, linear.weight, linear.bias, gate=gate, residual=residual)
    return None if out is NotImplemented else out


def _can_fuse_quantized(x: Tensor, modules: Sequence[nn.Module]) -> bool:
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    if x.device.type != "cpu" or x.dtype not in DTYPE_CODES or native.find_compiler() is None:
        return False
    return all(
        type(module) is QuantLinear
        and module.activations == INT8_ACTIVATIONS
        and module.static_scale is None
        for module in modules
    )


def _panels(module: nn.Module) -> PackedPanels:
    weight = module.weight
    assert isinstance(weight, QuantTensor), "a QuantLinear's weight was replaced"
    return panels_cache(weight.packed, list(weight.scales.values()), weight.format.name)


def _have_same_layout(first: PackedPanels, second: PackedPanels) -> bool:
    layouts = [(p.columns, p.group, p.kind, p.offset, p.table) for p in (first, second)]
    return first.integer and layouts[0] == layouts[1]


@dataclass(frozen=True)
class MergedPanels:
    """Several weights as one (None: their layouts differ), valid while the tensors don't change."""

    tensors: tuple[Tensor, ...]
    versions: tuple[tuple[int, int], ...]  # address and version of each tensor
    weight: PackedPanels | None
    bias: Tensor | None = None


_merged_panels: weakref.WeakKeyDictionary[nn.Module, MergedPanels] = weakref.WeakKeyDictionary()


def _find_merged_panels(modules: Sequence[nn.Module]) -> MergedPanels:
    """The modules' weights concatenated along their rows; cached."""
    tensors = _parameters_of(modules)
    versions = tuple((tensor.data_ptr(), version_of(tensor)) for tensor in tensors)
    merged = _merged_panels.get(modules[0])
    is_valid = merged is not None and merged.versions == versions
    if merged is None or not is_valid or not all(map(operator.is_, merged.tensors, tensors)):
        merged = MergedPanels(tensors, versions, *_merge_panels(modules))
        _merged_panels[modules[0]] = merged
    return merged


def _parameters_of(modules: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """Packed data, scales and biases."""
    parts: list[Tensor] = []
    for module in modules:
        weight, bias = module.weight, module.bias
        assert isinstance(weight, QuantTensor), "a QuantLinear's weight was replaced"
        parts += [weight.packed, *weight.scales.values()]
        if isinstance(bias, Tensor):
            parts.append(bias)
    return tuple(parts)


def _merge_panels(modules: Sequence[nn.Module]) -> tuple[PackedPanels | None, Tensor | None]:
    parts = [pack_panels(module.weight) for module in modules]  # type: ignore[arg-type]
    biases = [module.bias for module in modules]
    can_merge = all(_have_same_layout(parts[0], part) for part in parts)
    can_merge = can_merge and not any(part.rows % 16 for part in parts)
    if not can_merge or (None in biases and any(bias is not None for bias in biases)):
        return None, None
    bias = None if biases[0] is None else torch.cat(list(biases))  # type: ignore[arg-type]
    return concat_panels(parts), bias
