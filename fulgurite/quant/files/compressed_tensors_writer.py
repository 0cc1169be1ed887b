"""Writes quantized weights in the layout of compressed-tensors, which transformers and vLLM read.

In: a `QuantTensor` [N, K] and the module name of its linear. Out: the tensors of the checkpoint,
and the `quantization_config` of config.json.

    fp8, fp8_static, fp8_block   weight, weight_scale                      float-quantized
    mxfp8                        weight, weight_scale (e8m0 as uint8)      mxfp8-quantized
    int8                         weight, weight_scale                      int-quantized
    int8_w8a16, int4, int4_asym  weight_packed (int32 words), weight_scale, weight_shape,
                                 weight_zero_point (words along rows)      pack-quantized
    nvfp4, nvfp4_w4a4            weight_packed, weight_scale, weight_global_scale (a reciprocal)
                                                                           nvfp4-pack-quantized
    mxfp4                        weight_packed, weight_scale               mxfp4-pack-quantized

Static scales of inputs are `input_scale`, for NVFP4 `input_global_scale` (a reciprocal). Float
scales have the dtype of the model.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.quant.codecs.blocks import pack_nibbles
from fulgurite.quant.format import E2M1, E4M3, FORMATS, Format
from fulgurite.quant.shapes import data_shape, scale_shape
from fulgurite.quant.tensor import QuantTensor

Arguments = dict[str, object]
NVFP4_RANGE = E4M3.max_value * E2M1.max_value
GROUP_SIZES = (32, 64, 128)
WORD_BITS = 32


@dataclass(frozen=True)
class CompressionScheme:
    """How linears are stored and run.

    Attributes:
        name: the name of the command line.
        weights: number format of the weights.
        layout: compressed-tensors' name of the layout, its `format`.
        weight_args: the quantization arguments of the weights.
        input_args: those of the inputs. None: inputs are not quantized.
        inputs: number format of quantized inputs, to simulate them.
        input_scale: the name of the static input scale; "" if there is none.
        summary: one line for the command's help.
    """

    name: str
    weights: str
    layout: str
    weight_args: Arguments
    input_args: Arguments | None = None
    inputs: str | None = None
    input_scale: str = ""
    summary: str = ""

    @property
    def format(self) -> Format:
        return FORMATS[self.weights]


def _args(bits: int, type: str, strategy: str, **fields: object) -> Arguments:
    defaults: Arguments = {
        "num_bits": bits,
        "type": type,
        "symmetric": True,
        "group_size": None,
        "strategy": strategy,
        "dynamic": False,
    }
    return defaults | fields


def _mx_args(bits: int, dynamic: bool = False) -> Arguments:
    scale_type = {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    return _args(bits, "float", "group", group_size=32, dynamic=dynamic, **scale_type)


def _nvfp4_args(dynamic: bool | str) -> Arguments:
    scale_type = {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
    return _args(4, "float", "tensor_group", group_size=16, dynamic=dynamic, **scale_type)


PER_TOKEN = {"dynamic": True}
STATIC_TENSOR = _args(8, "float", "tensor")  # also of KV caches
_FP8_CHANNEL = _args(8, "float", "channel")
_SCHEMES = (
    CompressionScheme(
        "fp8", "fp8_e4m3_row", "float-quantized", _FP8_CHANNEL,
        _args(8, "float", "token", **PER_TOKEN), "fp8_e4m3_row",
        summary="FP8 weights per row, inputs per token, scaled on the fly",
    ),
    CompressionScheme(
        "fp8_static", "fp8_e4m3_row", "float-quantized", _FP8_CHANNEL,
        STATIC_TENSOR, "fp8_e4m3_tensor", "input_scale",
        summary="FP8 weights per row, inputs with a calibrated scale",
    ),
    CompressionScheme(
        "fp8_block", "fp8_e4m3_128x128", "float-quantized",
        _args(8, "float", "block", block_structure=[128, 128]),
        _args(8, "float", "group", group_size=128, **PER_TOKEN), "fp8_e4m3_1x128",
        summary="FP8 weights in 128x128 blocks, inputs in groups of 128",
    ),
    CompressionScheme(
        "nvfp4", "nvfp4", "nvfp4-pack-quantized", _nvfp4_args(False),
        summary="NVFP4 weights, 16-bit inputs",
    ),
    CompressionScheme(
        "nvfp4_w4a4", "nvfp4", "nvfp4-pack-quantized", _nvfp4_args(False),
        _nvfp4_args("local"), "nvfp4", "input_global_scale",
        summary="NVFP4 weights and inputs, with a calibrated scale per tensor",
    ),
    CompressionScheme(
        "mxfp4", "mxfp4", "mxfp4-pack-quantized", _mx_args(4),
        summary="MXFP4 weights, 16-bit inputs",
    ),
    CompressionScheme(
        "mxfp8", "mxfp8_e4m3", "mxfp8-quantized", _mx_args(8), _mx_args(8, dynamic=True),
        "mxfp8_e4m3", summary="MXFP8 weights and inputs",
    ),
    CompressionScheme(
        "int8", "int8", "int-quantized", _args(8, "int", "channel"),
        _args(8, "int", "token", **PER_TOKEN), "int8",
        summary="INT8 weights per row, inputs per token",
    ),
    CompressionScheme(
        "int8_w8a16", "int8", "pack-quantized", _args(8, "int", "channel"),
        summary="INT8 weights per row, 16-bit inputs",
    ),
    CompressionScheme(
        "int4", "int4_g128", "pack-quantized", _args(4, "int", "group", group_size=128),
        summary="INT4 weights in groups, 16-bit inputs",
    ),
    CompressionScheme(
        "int4_asym", "int4_g128_asym", "pack-quantized",
        _args(4, "int", "group", group_size=128, symmetric=False, zp_dtype="torch.int8"),
        summary="INT4 weights in groups with zero points, 16-bit inputs",
    ),
)  # fmt: skip
SCHEMES: dict[str, CompressionScheme] = {scheme.name: scheme for scheme in _SCHEMES}


def get_scheme(name: str, group_size: int | None = None) -> CompressionScheme:
    """The scheme of a name; `group_size` is for `int4` and `int4_asym`."""
    if name not in SCHEMES:
        near = difflib.get_close_matches(name, SCHEMES, n=3, cutoff=0.4)
        raise ArgumentError(
            f"--format {name!r} is unknown", next=f"one of {', '.join(near or SCHEMES)}"
        )
    scheme = SCHEMES[name]
    if group_size is None:
        return scheme
    if not scheme.weights.startswith("int4"):
        raise ArgumentError(
            f"--group-size does not apply to {name}, whose blocks are fixed",
            next="use --format int4 or int4_asym, or omit --group-size",
        )
    if group_size not in GROUP_SIZES:
        raise ArgumentError(f"--group-size {group_size} must be one of {GROUP_SIZES}")
    weights = scheme.weights.replace("g128", f"g{group_size}")
    return replace(
        scheme, weights=weights, weight_args=scheme.weight_args | {"group_size": group_size}
    )


# ---- tensors -------------------------------------------------------------------------------------


def encode_weight(
    base: str, weight: QuantTensor, scheme: CompressionScheme, scale_dtype: torch.dtype
) -> dict[str, Tensor]:
    """The checkpoint's tensors of one weight [N, K]; also works on the meta device."""
    scales, data = weight.scales, weight.packed
    scale = scales["scale"]
    if scheme.layout == "pack-quantized":
        tensors = _pack_integers(weight)
        tensors["weight_scale"] = scale.to(scale_dtype)
    elif scheme.layout == "nvfp4-pack-quantized":
        reciprocal = 1.0 / scales["tensor_scale"].float()
        tensors = {
            "weight_packed": data,
            "weight_scale": scale,
            "weight_global_scale": reciprocal.reshape(1),
        }
    elif scheme.format.family == "mx":
        name = "weight_packed" if scheme.format.element.bits == 4 else "weight"
        tensors = {name: data, "weight_scale": scale.view(torch.uint8)}
    else:
        tensors = {"weight": data, "weight_scale": scale.to(scale_dtype)}
    return {f"{base}.{name}": tensor for name, tensor in tensors.items()}


def _pack_integers(weight: QuantTensor) -> dict[str, Tensor]:
    """Codes in int32 words, the first code in the lowest bits, signed codes plus half the range."""
    rows, columns = weight.shape
    if weight.format.element.bits == 8:
        data = (weight.packed.view(torch.uint8) ^ 0x80).contiguous()  # adds 128
    else:
        data = weight.packed
    tensors = {
        "weight_packed": _pad_last(data, WORD_BITS // 8).view(torch.int32),
        "weight_shape": torch.tensor([rows, columns], dtype=torch.int64),
    }
    if "zero_point" in weight.scales:
        zero_GN = _pad_last(weight.scales["zero_point"].t().contiguous(), WORD_BITS // 4)
        words_GN = pack_nibbles(zero_GN).contiguous().view(torch.int32)
        tensors["weight_zero_point"] = words_GN.t().contiguous()
    return tensors


def _pad_last(data: Tensor, multiple: int) -> Tensor:
    return F.pad(data, (0, -data.shape[-1] % multiple))


def encode_input_scale(
    base: str, amax: Tensor, scheme: CompressionScheme, scale_dtype: torch.dtype
) -> dict[str, Tensor]:
    """The static scale of a linear's input, from the largest |x| of the calibration."""
    amax = amax.float().reshape(1)
    if scheme.input_scale == "input_global_scale":
        return {f"{base}.input_global_scale": NVFP4_RANGE / amax}
    return {f"{base}.{scheme.input_scale}": (amax / E4M3.max_value).to(scale_dtype)}


def encode_kv_scales(
    base: str, key_amax: Tensor, value_amax: Tensor, scale_dtype: torch.dtype
) -> dict[str, Tensor]:
    """The scales of an FP8 KV cache; `base` is the attention module."""
    return {
        f"{base}.{name}": (amax.float().reshape(1) / E4M3.max_value).to(scale_dtype)
        for name, amax in (("k_scale", key_amax), ("v_scale", value_amax))
    }


def make_meta_weight(shape: Sequence[int], format: Format) -> QuantTensor:
    """A quantized weight on the meta device: shapes and dtypes without memory."""
    data = torch.empty(data_shape(format, shape), dtype=format.data_dtype, device="meta")
    scales = {
        scale.name: torch.empty(scale_shape(scale, shape), dtype=scale.dtype, device="meta")
        for scale in format.separate_scales
    }
    return QuantTensor(format, data, scales, torch.float32)


# ---- config.json ---------------------------------------------------------------------------------


def build_quantization_config(
    scheme: CompressionScheme, ignore: Sequence[str], kv_cache: bool
) -> dict[str, object]:
    """The `quantization_config` of config.json; `ignore` lists linears that stay dense."""
    group = {
        "targets": ["Linear"],
        "weights": scheme.weight_args,
        "input_activations": scheme.input_args,
        "output_activations": None,
        "format": scheme.layout,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": scheme.layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": STATIC_TENSOR if kv_cache else None,
        "global_compression_ratio": None,
    }
