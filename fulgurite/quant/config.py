"""`QuantConfig`: how `fulgurite.quantize` quantizes a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QuantConfig:
    """The formats of weights and activations.

    Attributes:
        weights: number format of the weights.
        activations: None: the fastest format of the device. `"none"`: not quantized. A number
            format: activations are quantized to it on the fly.
        static_activations: use scales that `quantize(..., calibrate=batches)` measures, instead of
            scales computed on the fly.
    """

    weights: str
    activations: str | None = None
    static_activations: bool = False


QUANT_CONFIGS: dict[str, QuantConfig] = {
    "fp8": QuantConfig("fp8_e4m3_row"),
    "fp8_static": QuantConfig("fp8_e4m3_row", "fp8_e4m3_tensor", static_activations=True),
    "nvfp4": QuantConfig("nvfp4"),
    "mxfp4": QuantConfig("mxfp4"),
    "mxfp8": QuantConfig("mxfp8_e4m3"),
    "int8": QuantConfig("int8"),
    "int4": QuantConfig("int4_g128"),
}
