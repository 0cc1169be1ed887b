"""Reads quantized weights in the layouts of other projects, without requantizing.

In: a checkpoint's tensors by name, and the base name of one weight. Out: a `CheckpointWeight`: the
quantized weight and the static scale of the layer's input, if the checkpoint has one.

    base.weight  base.weight_scale                      FP8 per tensor, row or block; MXFP8; INT8
    base.weight  base.weight_scale_inv                  DeepSeek-V3: FP8 in 128x128 blocks. Despite
                                                        its name it is multiplied by, not divided
    base.weight  base.weight_scale  base.weight_scale_2         ModelOpt NVFP4
    base.weight_packed  base.weight_scale  base.weight_global_scale   compressed-tensors NVFP4;
                                                        the global scale is 448 * 6 / amax, the
                                                        reciprocal of our tensor scale
    base.weight_packed  base.weight_scale               compressed-tensors MXFP4
    base.weight_packed  base.weight_scale  base.weight_shape    compressed-tensors INT4
    base_blocks  base_scales   (or base.blocks  base.scales)    gpt-oss MXFP4, [..., K / 32, 16]

The static input scale is `base.input_scale`, or `base.input_global_scale`, which is a reciprocal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fulgurite.errors import FormatError, WeightsError
from fulgurite.quant.codecs.blocks import PackedData
from fulgurite.quant.format import FORMATS, Format
from fulgurite.quant.shapes import logical_shape, scale_shape
from fulgurite.quant.tensor import QuantTensor

Tensors = Mapping[str, Tensor]
INT4_GROUP_SIZES = (128, 64, 32)


@dataclass(frozen=True)
class CheckpointWeight:
    """A weight of a checkpoint, its layout and its static input scale, if any."""

    layout: str
    weight: QuantTensor
    input_scale: Tensor | None = None


@dataclass(frozen=True)
class CheckpointLayout:
    """A layout: the name suffixes that identify it, and its reader."""

    name: str
    suffixes: tuple[str, ...]
    read: Callable[[Tensors, str], tuple[Format, PackedData]]


def read_quantized_weight(
    tensors: Tensors, base: str, dtype: torch.dtype = torch.bfloat16, check: bool = True
) -> CheckpointWeight:
    """Read the weight `base` (without `.weight`) in any supported layout.

    `check` raises for scales that are NaN, infinite, or zero over nonzero data.
    """
    for layout in CHECKPOINT_LAYOUTS:
        if all(base + suffix in tensors for suffix in layout.suffixes):
            format, packed = layout.read(tensors, base)
            weight = QuantTensor(format, packed.data, packed.scales, dtype)
            if check:
                weight.check_scales(f"{base} ({layout.name})")
            return CheckpointWeight(layout.name, weight, _read_input_scale(tensors, base))
    suffixes = sorted({suffix for layout in CHECKPOINT_LAYOUTS for suffix in layout.suffixes})
    found = [base + suffix for suffix in suffixes if base + suffix in tensors]
    supported = "; ".join(" + ".join(layout.suffixes) for layout in CHECKPOINT_LAYOUTS)
    raise WeightsError(
        f"{base!r} has no supported quantized layout",
        where=f"found {', '.join(found)}" if found else f"no tensor is named {base}.* or {base}_*",
        next=f"a layout needs all of its tensors: {supported}",
    )


def find_quantized_weights(names: Iterable[str]) -> dict[str, str]:
    """The base names of all quantized weights in a checkpoint, each with its layout."""
    present = set(names)
    found: dict[str, str] = {}
    for layout in CHECKPOINT_LAYOUTS:
        first = layout.suffixes[0]
        for name in sorted(name for name in present if name.endswith(first)):
            base = name.removesuffix(first)
            if base not in found and all(base + suffix in present for suffix in layout.suffixes):
                found[base] = layout.name
    return found


def _read_input_scale(tensors: Tensors, base: str) -> Tensor | None:
    if f"{base}.input_scale" in tensors:
        return tensors[f"{base}.input_scale"].float().reshape(())
    if f"{base}.input_global_scale" in tensors:
        return 1.0 / tensors[f"{base}.input_global_scale"].float().reshape(())
    return None


def _read_fp8_or_int8(tensors: Tensors, base: str) -> tuple[Format, PackedData]:
    """`weight` in FP8 or INT8 with `weight_scale`, whose shape and dtype determine the format."""
    weight, scale = tensors[f"{base}.weight"], tensors[f"{base}.weight_scale"]
    element = {
        torch.float8_e4m3fn: "e4m3",
        torch.float8_e5m2: "e5m2",
        torch.int8: "int8",
    }.get(weight.dtype)
    if element is None:
        raise FormatError(
            f"weights of {weight.dtype} with a weight_scale are not supported",
            where=f"{base}.weight",
            next="convert the checkpoint to float8_e4m3fn, float8_e5m2 or int8",
        )
    if element == "int8":
        _reject_zero_point(tensors, base)
        rows = _expand_to_rows(scale.float(), weight, base)
        return FORMATS["int8"], PackedData(weight, {"scale": rows})
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu) and scale.dim() == weight.dim():
        format = FORMATS[f"mxfp8_{element}"]
        return format, PackedData(weight, {"scale": scale.view(torch.float8_e8m0fnu)})
    return _match_fp8_blocks(weight, scale.float(), element, base)


def _match_fp8_blocks(
    weight: Tensor, scale: Tensor, element: str, base: str
) -> tuple[Format, PackedData]:
    """Find the FP8 format (tensor, row, 1x128 or 128x128) that matches the shape of the scale."""
    names = [f"fp8_{element}_{suffix}" for suffix in ("tensor", "row", "1x128", "128x128")]
    shapes = {name: scale_shape(FORMATS[name].scales[0], weight.shape) for name in names}
    per_matrix, per_row = shapes[names[0]], shapes[names[1]]
    if tuple(scale.shape) in (weight.shape[:-2], (1,), ()) and scale.numel() == _numel(per_matrix):
        scale = scale.reshape(per_matrix)
    elif tuple(scale.shape) == tuple(weight.shape[:-1]):
        scale = scale.reshape(per_row)
    for name, shape in shapes.items():
        if tuple(scale.shape) == shape:
            return FORMATS[name], PackedData(weight, {"scale": scale})
    raise FormatError(
        f"weight_scale {list(scale.shape)} matches no FP8 format of a weight {list(weight.shape)}",
        where=f"{base}.weight_scale",
        next="supported shapes: "
        + ", ".join(f"{list(shape)} ({name})" for name, shape in shapes.items()),
    )


def _read_deepseek_fp8(tensors: Tensors, base: str) -> tuple[Format, PackedData]:
    weight, scale = tensors[f"{base}.weight"], tensors[f"{base}.weight_scale_inv"].float()
    format = FORMATS["fp8_e4m3_128x128"]
    expected = scale_shape(format.scales[0], weight.shape)
    if tuple(scale.shape) != expected:
        raise FormatError(
            f"weight_scale_inv has shape {list(scale.shape)}; 128x128 blocks of a weight "
            f"{list(weight.shape)} need {list(expected)}",
            where=f"{base}.weight_scale_inv",
            next="check weight_block_size in config.json: only [128, 128] is supported",
        )
    return format, PackedData(weight, {"scale": scale})


def _read_modelopt_nvfp4(tensors: Tensors, base: str) -> tuple[Format, PackedData]:
    tensor_scale = tensors[f"{base}.weight_scale_2"].float()
    return _build_nvfp4(tensors, f"{base}.weight", base, tensor_scale)


def _read_compressed_nvfp4(tensors: Tensors, base: str) -> tuple[Format, PackedData]:
    reciprocal = tensors[f"{base}.weight_global_scale"].float()
    return _build_nvfp4(tensors, f"{base}.weight_packed", base, 1.0 / reciprocal)


def _build_nvfp4(
    tensors: Tensors, packed: str, base: str, tensor_scale: Tensor
) -> tuple[Format, PackedData]:
    format = FORMATS["nvfp4"]
    data = tensors[packed].view(torch.uint8)
    shape = scale_shape(format.scales[1], logical_shape(format, data.shape))
    if tensor_scale.numel() != _numel(shape):
        raise FormatError(
            f"got {tensor_scale.numel()} tensor scales for {_numel(shape)} matrices",
            where=base,
            next="a weight needs one tensor scale, stacked experts one each",
        )
    scales = {"scale": tensors[f"{base}.weight_scale"], "tensor_scale": tensor_scale.reshape(shape)}
    return format, PackedData(data, scales)


def _read_compressed_mxfp4(tensors: Tensors, base: str) -> tuple[Format, PackedData]:
    scale = tensors[f"{base}.weight_scale"].view(torch.float8_e8m0fnu)
    return FORMATS["mxfp4"], PackedData(tensors[f"{base}.weight_packed"], {"scale": scale})


def _read_compressed_int4(tensors: Tensors, base: str) -> tuple[Format, PackedData]:
    """int32 words of eight codes plus 8, first code in the lowest bits: in memory, low nibble
    first.
    """
    words, scale = tensors[f"{base}.weight_packed"], tensors[f"{base}.weight_scale"].float()
    rows, columns = (int(size) for size in tensors[f"{base}.weight_shape"])
    if (
        tuple(words.shape) != (rows, columns // 8)
        or columns % 32
        or f"{base}.weight_g_idx" in tensors
    ):
        raise FormatError(
            f"packed words {list(words.shape)} of [{rows}, {columns}] are not plain INT4",
            where=f"{base}.weight_packed",
            next="8-bit codes, K not divisible by 32 and activation order are not supported: "
            "quantize the model without them",
        )
    width = columns // max(scale.shape[-1], 1)
    group = next((size for size in INT4_GROUP_SIZES if width % size == 0), None)
    if group is None:
        raise FormatError(
            f"the group size {width} along K is not a multiple of 32",
            where=f"{base}.weight_scale",
            next=f"quantize with a group size of {', '.join(map(str, INT4_GROUP_SIZES))}",
        )
    scales = {"scale": scale.repeat_interleave(width // group, dim=-1)}
    data = words.contiguous().view(torch.uint8)
    if f"{base}.weight_zero_point" not in tensors:
        return FORMATS[f"int4_g{group}"], PackedData(data, scales)
    packed_zero = tensors[f"{base}.weight_zero_point"]
    shifts = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32)
    zero = (packed_zero.unsqueeze(1) >> shifts[:, None] & 0xF).flatten(0, 1)[:rows]
    scales["zero_point"] = zero.to(torch.uint8).repeat_interleave(width // group, dim=-1)
    return FORMATS[f"int4_g{group}_asym"], PackedData(data, scales)


def _read_gpt_oss(tensors: Tensors, base: str) -> tuple[Format, PackedData]:
    return _build_mxfp4(tensors[f"{base}_blocks"], tensors[f"{base}_scales"], base)


def _read_gpt_oss_original(tensors: Tensors, base: str) -> tuple[Format, PackedData]:
    return _build_mxfp4(tensors[f"{base}.blocks"], tensors[f"{base}.scales"], base)


def _build_mxfp4(blocks: Tensor, scales: Tensor, base: str) -> tuple[Format, PackedData]:
    if blocks.dim() < 2 or blocks.shape[-1] != 16 or blocks.shape[:-1] != scales.shape:
        raise FormatError(
            f"blocks {list(blocks.shape)} and scales {list(scales.shape)} do not match",
            where=base,
            next="blocks must be [..., K / 32, 16] bytes and scales [..., K / 32]",
        )
    scale = scales.view(torch.float8_e8m0fnu)
    return FORMATS["mxfp4"], PackedData(blocks.flatten(-2), {"scale": scale})


def _expand_to_rows(scale: Tensor, weight: Tensor, base: str) -> Tensor:
    """Expand a scale per tensor or per row to one scale per row, [..., R, 1]."""
    shape = (*weight.shape[:-1], 1)
    if scale.numel() not in (1, _numel(shape)):
        raise FormatError(
            f"weight_scale of shape {list(scale.shape)} is neither per tensor nor per row",
            where=f"{base}.weight_scale, weight {list(weight.shape)}",
            next="int8 weights need one scale per tensor or per row",
        )
    return scale.reshape(shape) if scale.numel() == _numel(shape) else scale.expand(shape).clone()


def _reject_zero_point(tensors: Tensors, base: str) -> None:
    name = f"{base}.weight_zero_point"
    if name in tensors and bool((tensors[name] != 0).any()):
        raise FormatError(
            "int8 weights with zero points are not supported",
            where=name,
            next="quantize the weights symmetrically",
        )


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


# In order of specificity: a layout with more suffixes comes before one with fewer.
CHECKPOINT_LAYOUTS: tuple[CheckpointLayout, ...] = (
    CheckpointLayout(
        "compressed-tensors nvfp4",
        (".weight_packed", ".weight_scale", ".weight_global_scale"),
        _read_compressed_nvfp4,
    ),
    CheckpointLayout(
        "compressed-tensors int4",
        (".weight_packed", ".weight_scale", ".weight_shape"),
        _read_compressed_int4,
    ),
    CheckpointLayout(
        "compressed-tensors mxfp4", (".weight_packed", ".weight_scale"), _read_compressed_mxfp4
    ),
    CheckpointLayout(
        "modelopt nvfp4", (".weight", ".weight_scale", ".weight_scale_2"), _read_modelopt_nvfp4
    ),
    CheckpointLayout("deepseek fp8", (".weight", ".weight_scale_inv"), _read_deepseek_fp8),
    CheckpointLayout("weight_scale", (".weight", ".weight_scale"), _read_fp8_or_int8),
    CheckpointLayout("gpt-oss mxfp4", ("_blocks", "_scales"), _read_gpt_oss),
    CheckpointLayout(
        "gpt-oss mxfp4, original names", (".blocks", ".scales"), _read_gpt_oss_original
    ),
)
