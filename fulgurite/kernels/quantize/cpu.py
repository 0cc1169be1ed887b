"""`quantize` on the CPU: amax and packing in one pass of C++, bit for bit as the reference.

In: a float tensor [.., K] and a format. Out: packed data and its separate scales, or
`NotImplemented` for the K formats of GGUF, whose scales are found by search, and for plain casts.
"""

from __future__ import annotations

import functools
import math
import struct
from typing import Any

from torch import Tensor

from fulgurite import device, native, replay
from fulgurite.kernels.common.cpu_library import DTYPE_CODES, build_translation_unit
from fulgurite.quant import WHOLE_DIM, resolve_format
from fulgurite.quant.codecs.blocks import check_static_scale
from fulgurite.quant.format import Format, ScaleSpec, get_scale_spec
from fulgurite.quant.shapes import data_shape, scale_shape

HEADERS = ("vec16.h", "quantize.h", "quantize_blocks.h", "quantize_run.h")
BLOCK_128x128 = "128x128"
# format -> its number in quantize_run.h
FORMAT_CODES = {
    "fp8_e4m3": 0, "fp8_e5m2": 1, "int8": 2, "fp8_e4m3_128x128": 3, "fp8_e5m2_128x128": 4,
    "nvfp4": 5, "mxfp4": 6, "mxfp8_e4m3": 7, "mxfp8_e5m2": 8, "int4_g32": 9, "int4_g64": 10,
    "int4_g128": 11, "int4_g32_asym": 12, "int4_g64_asym": 13, "int4_g128_asym": 14,
    "q4_0": 15, "q4_1": 16, "q8_0": 17,
}  # fmt: skip
_pack = struct.Struct("13q").pack


def quantize(x: Tensor, format: str, static: Tensor | None = None) -> Any:
    """`fulgurite::quantize`."""
    entry = resolve_format(format)
    supports_static = entry.family in ("fp8", "nvfp4") or entry.name == "int8"
    if _format_code(entry) is None or x.numel() == 0:
        return NotImplemented
    if static is not None and not supports_static:
        return NotImplemented
    if native.find_compiler() is None:
        return NotImplemented
    data = replay.empty(data_shape(entry, x.shape), entry.data_dtype)
    scales = [_allocate_scale(scale, x, entry, static) for scale in entry.separate_scales]
    quantize_into(x, entry, data, scales, has_scales=static is not None)
    return [data, *scales]


def quantize_into(
    x: Tensor, format: Format, data: Tensor, scales: list[Tensor], *, has_scales: bool = False
) -> None:
    """Quantize x into `data` and `scales`. `has_scales`: the scales (NVFP4: the last) are
    static."""
    format_code = _format_code(format)
    assert format_code is not None, f"{format.name} has no kernel"
    rows, height = _as_rows(x), x.shape[-2] if x.dim() > 1 else 1
    addresses = [scale.data_ptr() for scale in scales] + [0, 0]
    packed = _pack(
        rows.data_ptr(), data.data_ptr(), *addresses[:2], rows.shape[0] // height, height,
        x.shape[-1], rows.stride(0), DTYPE_CODES[rows.dtype], format_code, has_scales,
        device.num_cpu_threads(), _scale_width(format, x.shape[-1]),
    )  # fmt: skip
    _kernel()(packed, (rows, data, *scales))


@functools.cache
def _kernel() -> replay.NativeKernel:
    text = build_translation_unit(*HEADERS, defines=["ROUND_EACH_STEP"], shared=["numbers.h"])
    return replay.NativeKernel(native.load(text), "quantize")


def _format_code(format: Format) -> int | None:
    is_128x128 = format.name.endswith(BLOCK_128x128)
    is_fp8_rows = format.family == "fp8" and not is_128x128
    return FORMAT_CODES.get(f"fp8_{format.element.name}" if is_fp8_rows else format.name)


def _scale_width(format: Format, columns: int) -> int:
    """Columns that share an FP8 scale; 0: the whole matrix."""
    rows, width = format.block
    if rows == WHOLE_DIM:
        return WHOLE_DIM
    return columns if width == WHOLE_DIM else width


def _as_rows(x: Tensor) -> Tensor:
    """x as contiguous rows of a dtype that the kernels read."""
    x = x.detach()
    x = x if x.dtype in DTYPE_CODES else x.float()
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()


def _allocate_scale(scale: ScaleSpec, x: Tensor, format: Format, static: Tensor | None) -> Tensor:
    """One level of scales: the static one, or memory for what the kernel computes."""
    out = replay.empty(scale_shape(scale, x.shape), scale.dtype)
    static_name = "tensor_scale" if format.family == "nvfp4" else "scale"
    if static is None or scale.name != static_name:
        return out
    return out.copy_(check_static_scale(static, get_scale_spec(format, static_name), x))
