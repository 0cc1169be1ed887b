"""Number formats in plain PyTorch: the reference for all quantized kernels.

In: float tensors, or quantized tensors from safetensors and GGUF files. Out: `QuantTensor`s, and
float tensors back.

    format.py     FORMATS, the table of number formats    tensor.py     QuantTensor, quantize
    shapes.py     shapes of packed data and scales        sharding.py   slices at block boundaries
    codecs/       quantize, dequantize, pack, unpack      checks.py     detects invalid scales
    files/        GGUF, safetensors, other layouts        hardware.py   native formats of a device
    repack.py     GGUF blocks -> grouped integers         sqnr.py       quantization error in dB
    config.py     QuantConfig of a model                  report.py     QuantReport
    rounding.py   nearest and second order (GPTQ)         scale_search.py   scales of small error
    optional_package.py   imports of optional packages
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fulgurite.lazy import make_lazy

if TYPE_CHECKING:
    from fulgurite.quant.codecs.blocks import Codes, PackedData
    from fulgurite.quant.codecs.codec import dequantize_codes, pack, quantize_to_codes, unpack
    from fulgurite.quant.files.checkpoint_layouts import (
        CheckpointWeight,
        WeightDescription,
        describe_quantized_weight,
        find_quantized_weights,
        read_quantized_weight,
    )
    from fulgurite.quant.files.gguf import read_gguf
    from fulgurite.quant.files.layouts.kv_scales import (
        KVScales,
        find_kv_scales,
        is_unused_attention_scale,
    )
    from fulgurite.quant.files.layouts.stored import StoredTensor
    from fulgurite.quant.files.safetensors_io import load_quantized, save_quantized
    from fulgurite.quant.format import (
        ALIASES,
        FORMATS,
        WHOLE_DIM,
        ElementType,
        Format,
        ScaleSpec,
        describe_formats,
        resolve_format,
    )
    from fulgurite.quant.hardware import get_device_features, is_native, require_native
    from fulgurite.quant.repack import repack_gguf
    from fulgurite.quant.sqnr import compute_sqnr
    from fulgurite.quant.tensor import QuantTensor, quantize

__all__ = [
    "ALIASES",
    "FORMATS",
    "WHOLE_DIM",
    "CheckpointWeight",
    "Codes",
    "ElementType",
    "Format",
    "KVScales",
    "PackedData",
    "QuantTensor",
    "ScaleSpec",
    "StoredTensor",
    "WeightDescription",
    "compute_sqnr",
    "dequantize_codes",
    "describe_formats",
    "describe_quantized_weight",
    "find_kv_scales",
    "find_quantized_weights",
    "get_device_features",
    "is_native",
    "is_unused_attention_scale",
    "load_quantized",
    "pack",
    "quantize",
    "quantize_to_codes",
    "read_gguf",
    "read_quantized_weight",
    "repack_gguf",
    "require_native",
    "resolve_format",
    "save_quantized",
    "unpack",
]

__getattr__, __dir__ = make_lazy(__name__)
