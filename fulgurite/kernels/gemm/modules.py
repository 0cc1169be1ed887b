"""Modules with quantized weights: what `nn.Linear` and `nn.Embedding` are replaced by.

In: a `QuantTensor` parameter `weight` (and a dense `bias`). Out: what the dense module returns with
the dequantized weight, up to the rounding of its activations.

`activations` is the format that `quant_linear` quantizes x to. A module with an `input_scale`
quantizes its input with that static scale and calls `scaled_mm`. With default activations it does
so only on devices that multiply the weight's format; other devices don't need the scale. On a GPU a
few rows of x are not quantized by default: reading an 8-bit weight takes the time, and a cast before it
would only add to that. In deterministic mode they are, as all rows; but no rows are quantized to a
format with one scale for the whole batch (nvfp4 without an `input_scale`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fulgurite.determinism import is_deterministic
from fulgurite.errors import FormatError
from fulgurite.kernels.gemm.dense_linear import dense_linear
from fulgurite.kernels.gemm.quant_linear import quant_linear
from fulgurite.kernels.gemm.reference import UNQUANTIZED
from fulgurite.kernels.gemm.scaled_mm import scaled_mm_op
from fulgurite.kernels.quantize.ops import quantize_op
from fulgurite.kernels.tuning.heuristics import heuristics_for
from fulgurite.quant import (
    WHOLE_DIM,
    QuantTensor,
    get_device_features,
    is_native,
    resolve_format,
)

INTEGER_FAMILIES = ("int", "gguf", "nvfp4")
INTEGER_FORMATS = ("mxfp4",)
# weight format -> activation format that hardware multiplies it with
NATIVE_ACTIVATION_FORMATS = {
    "fp8_e4m3_tensor": "fp8_e4m3_row",
    "fp8_e4m3_row": "fp8_e4m3_row",
    "fp8_e4m3_128x128": "fp8_e4m3_1x128",
    "mxfp8_e4m3": "mxfp8_e4m3",
    "nvfp4": "nvfp4",
}
# weight format -> activation format with a static scale
STATIC_ACTIVATION_FORMATS = {
    "fp8_e4m3_tensor": "fp8_e4m3_tensor",
    "fp8_e4m3_row": "fp8_e4m3_tensor",
    "nvfp4": "nvfp4",
}
# weights of 8 bits that the small-M GEMM reads with x in 16 bits as fast as with x in 8
WEIGHT_ONLY_FORMATS = ("fp8_e4m3_tensor", "fp8_e4m3_row", "fp8_e4m3_128x128")
# devices where a linear is a cast and a GEMM anyway, and the casts that generated kernels can fuse
SEPARATE_CAST_DEVICES = ("cuda",)
FUSIBLE_CAST_FORMATS = ("fp8_e4m3_row", "fp8_e4m3_1x128", "int8")


def quantizable_parameters(module: nn.Module) -> tuple[str, ...]:
    """The parameters that may be quantized: a linear's weight, and what `quantizable` names."""
    if type(module) is nn.Linear:
        return ("weight",)
    names: tuple[str, ...] = getattr(module, "quantizable", ())
    return names


class QuantModule(nn.Module):
    """A module with a quantized `weight`. Default activations follow it to its device."""

    weight: nn.Parameter
    activations: str

    def set_activations(self, weight: QuantTensor, format: str | None) -> None:
        """Use `format`, or, with None, what multiplies fastest on the weight's device."""
        self.uses_default_activations = format is None
        self.activations = self._default_activations(weight) if format is None else format

    def _default_activations(self, weight: QuantTensor) -> str:
        return default_activation_format(weight)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        moved = super()._apply(fn, recurse)
        if self.uses_default_activations and isinstance(self.weight, QuantTensor):
            self.activations = self._default_activations(self.weight)
        return moved


class QuantLinear(QuantModule):
    """x @ weight.T + bias with a quantized weight."""

    input_scale: Tensor | None

    def __init__(
        self,
        weight: QuantTensor,
        bias: Tensor | None = None,
        activations: str | None = None,
        input_scale: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.register_buffer("input_scale", input_scale)
        self.set_activations(weight, activations)

    @property
    def static_scale(self) -> Tensor | None:
        """The scale that x is quantized with; None: computed on the fly, or x is not quantized."""
        return self.input_scale if self.uses_static_scale else None

    def set_activations(self, weight: QuantTensor, format: str | None) -> None:
        is_static = format not in (None, UNQUANTIZED)
        self.uses_static_scale = self.input_scale is not None and is_static
        super().set_activations(weight, format)

    def _default_activations(self, weight: QuantTensor) -> str:
        """The checkpoint's static scale is used where the device multiplies the weight's format."""
        dynamic = default_activation_format(weight)
        static = STATIC_ACTIVATION_FORMATS.get(weight.format.name)
        is_native = dynamic in NATIVE_ACTIVATION_FORMATS.values()
        self.uses_static_scale = self.input_scale is not None and is_native and static is not None
        return static if self.uses_static_scale and static is not None else dynamic

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        assert isinstance(weight, QuantTensor), "a QuantLinear's weight was replaced"
        if self.leaves_unquantized(x):
            return quant_linear(x, weight, self.bias, UNQUANTIZED)
        static_scale = self.static_scale
        if static_scale is None and not self._has_separate_cast(x):
            activations = without_batch_scale(self.activations)
            return quant_linear(x, weight, self.bias, activations)
        # tensors, not a QuantTensor: a captured graph can't construct one
        rows, *scales = quantize_op(x.flatten(0, -2), self.activations, static_scale)
        packed, levels = weight.packed, list(weight.scales.values())
        y: Tensor = scaled_mm_op(
            rows, scales, self.activations, packed, levels, weight.format.name, self.bias, x.dtype
        )
        return y.view(*x.shape[:-1], self.out_features)

    def leaves_unquantized(self, x: Tensor) -> bool:
        """Whether x is multiplied as it is: always, or because it has few rows (on a GPU)."""
        if self.activations == UNQUANTIZED:
            return True
        if not x.is_cuda or not self.uses_default_activations:
            return False
        if torch.compiler.is_compiling() or is_deterministic() or x.dtype == torch.float32:
            return False
        is_8bit = self.weight.format.name in WEIGHT_ONLY_FORMATS  # type: ignore[attr-defined]
        max_rows = heuristics_for(x.device).max_unquantized_m
        return is_8bit and x.numel() <= max_rows * self.in_features

    def _has_separate_cast(self, x: Tensor) -> bool:
        """Whether x is cast by an op of its own, which compilation fuses with the producer of x."""
        if not torch.compiler.is_compiling() or x.device.type not in SEPARATE_CAST_DEVICES:
            return False
        needs_gradient = torch.is_grad_enabled() and x.requires_grad
        return self.activations in FUSIBLE_CAST_FORMATS and x.dim() > 1 and not needs_gradient

    def extra_repr(self) -> str:
        format = self.weight.format.name if isinstance(self.weight, QuantTensor) else "?"
        return (
            f"{self.in_features}, {self.out_features}, {format}, activations={self.activations}, "
            f"bias={self.bias is not None}"
        )


class QuantEmbedding(QuantModule):
    """Rows of a quantized table, dequantized as they are looked up.

    `activations` is for an LM head that shares the table (`compute_logits`).
    """

    def __init__(self, weight: QuantTensor, activations: str | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.set_activations(weight, activations)

    def forward(self, ids: Tensor) -> Tensor:
        weight = self.weight
        assert isinstance(weight, QuantTensor), "a QuantEmbedding's weight was replaced"
        return lookup_embedding(weight, ids)

    def extra_repr(self) -> str:
        weight = self.weight
        format = weight.format.name if isinstance(weight, QuantTensor) else "?"
        return f"{weight.shape[0]}, {weight.shape[1]}, {format}"


def lookup_embedding(table: QuantTensor, ids: Tensor) -> Tensor:
    """The rows `ids` of a quantized table, in its dtype: [.., K]."""
    if any(scale.block[0] not in (0, 1) for scale in table.format.separate_scales):
        raise FormatError(
            f"rows of a {table.format.name} table can't be looked up: its scales span several rows",
            where=f"table {list(table.shape)}",
            next="keep the embedding dense, or use a format with scales along K only",
        )
    flat = ids.flatten()
    scales = {
        scale.name: table.scales[scale.name] if scale.block[0] == WHOLE_DIM
        else table.scales[scale.name][flat]
        for scale in table.format.separate_scales
    }  # fmt: skip
    packed = QuantTensor(table.format, table.packed[flat], scales, table.dtype)
    return packed.dequantize().view(*ids.shape, table.shape[1])


class VocabTable(nn.Module, ABC):
    """A vocabulary table that computes logits itself: one that is sharded over ranks."""

    @abstractmethod
    def compute_logits(self, x: Tensor) -> Tensor:
        """x @ weight.T, all columns."""


def compute_logits(x: Tensor, table: nn.Module) -> Tensor:
    """x @ weight.T + bias for a linear or an embedding (without a bias), dense or quantized."""
    if isinstance(table, VocabTable):
        return table.compute_logits(x)
    if isinstance(table, QuantLinear):
        logits: Tensor = table(x)
        return logits
    weight, bias = table.weight, getattr(table, "bias", None)
    if isinstance(table, QuantEmbedding):
        assert isinstance(weight, QuantTensor), "a QuantEmbedding's weight was replaced"
        return quant_linear(x, weight, bias, without_batch_scale(table.activations))
    assert isinstance(weight, Tensor), "a module without a weight"
    if is_deterministic():
        return dense_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def without_batch_scale(activations: str) -> str:
    """The activation format; in deterministic mode "none" for one with a scale of the whole batch."""
    if activations == UNQUANTIZED or not is_deterministic():
        return activations
    scales = resolve_format(activations).separate_scales
    return UNQUANTIZED if any(scale.block[0] == WHOLE_DIM for scale in scales) else activations


def default_activation_format(weight: QuantTensor) -> str:
    """The activation format that multiplies fastest on the weight's device.

    CPUs: int8 in blocks of 32 if the weight's codes are integers. GPUs with MMAs of the weight's
    format: the activation format that goes with it. Otherwise activations are not quantized.
    """
    format, device = weight.format, weight.device
    if device.type == "cpu":
        is_integer = format.family in INTEGER_FAMILIES or format.name in INTEGER_FORMATS
        return "q8_0" if is_integer and weight.shape[-1] % 32 == 0 else UNQUANTIZED
    if format.name in NATIVE_ACTIVATION_FORMATS and is_native(format, get_device_features(device)):
        return NATIVE_ACTIVATION_FORMATS[format.name]
    return UNQUANTIZED
