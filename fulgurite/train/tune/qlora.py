"""QLoRA: a dense model in, one with frozen quantized weights out, ready for adapters.

    quantize_frozen(model, "nf4")        linears and experts as `QuantTensor`s of any format
    add_adapters(model, LoRAConfig())    adapters in float32 on top

Kernels read the packed weights and dequantize them in registers; activations are not quantized. The
gradient of the input goes through the dequantized weight. Packed weights never change, to the bit.
Weights that a checkpoint stores quantized (`load_model(..., keep_quantized=True)`) stay as they are.
"""

from __future__ import annotations

from torch import nn

from fulgurite.errors import ArgumentError
from fulgurite.kernels.gemm.modules import QuantLinear
from fulgurite.kernels.gemm.reference import UNQUANTIZED
from fulgurite.models.moe import Experts
from fulgurite.quant import QuantTensor
from fulgurite.quant.config import QuantConfig
from fulgurite.quantize import DEFAULT_SKIP, quantize, resolve_quant_config


def quantize_frozen(
    model: nn.Module, format: str, skip: tuple[str, ...] = DEFAULT_SKIP
) -> dict[str, str]:
    """Quantize the linears and experts of a model in place and freeze it.

    Returns the name of each quantized weight and its format. A weight whose shape the format can't
    hold stays dense; if none can be quantized, that is an error.
    """
    weights = resolve_quant_config(format).weights
    report = quantize(model, QuantConfig(weights, UNQUANTIZED), skip=skip, progress=False)
    for module in model.modules():
        if isinstance(module, QuantLinear):
            assert isinstance(module.weight, QuantTensor), "a QuantLinear's weight was replaced"
            module.set_activations(module.weight, UNQUANTIZED)
        elif isinstance(module, Experts):
            module.activations = UNQUANTIZED
    model.requires_grad_(False)
    formats = quantized_formats(model)
    if not formats:
        reasons = sorted({f"{item.name}: {item.reason}" for item in report.skipped})
        raise ArgumentError(
            f"no weight can be quantized to {weights}",
            where="\n".join(reasons[:4]),
            next="choose another --tune.quantize, or --tune.method lora",
        )
    return formats


def quantized_formats(model: nn.Module) -> dict[str, str]:
    """Name of each quantized parameter -> its format."""
    return {
        name: parameter.format.name
        for name, parameter in model.named_parameters()
        if isinstance(parameter, QuantTensor)
    }
