"""Quantized weights as other projects publish them, read into `QuantTensor`s without requantizing.

In: a checkpoint's tensors by name and the base name of one weight. Out: a `PublishedWeight`: the
packed weight and, where the checkpoint has one, the static scale of the layer's input.

    base.weight  base.weight_scale                      FP8 per tensor, row or block; MXFP8; INT8
    base.weight  base.weight_scale_inv                  DeepSeek-V3: FP8 in 128x128 blocks. Despite
                                                        its name the scale is multiplied by
    base.weight  base.weight_scale  base.weight_scale_2         ModelOpt NVFP4
    base.weight_packed  base.weight_scale  base.weight_global_scale   compressed-tensors NVFP4;
                                                        the global scale is 448 * 6 / amax, the
                                                        reciprocal of ours
    base.weight_packed  base.weight_scale               compressed-tensors MXFP4
    base.weight_packed  base.weight_scale  base.weight_shape    compressed-tensors INT4
    base_blocks  base_scales   (or base.blocks  base.scales)    gpt-oss MXFP4, [..., K / 32, 16]

The static input scale is `base.input_scale`, or `base.input_global_scale`, again a reciprocal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fulgurite.errors import FormatError, WeightsError
from fulgurite.quant.blocks import Packed
from fulgurite.quant.format import FORMATS, Format
from fulgurite.quant.shapes import logical_shape, scale_shape
from fulgurite.quant.tensor import QuantTensor

Tensors = Mapping[str, Tensor]
GROUPS = (128, 64, 32)


@dataclass(frozen=True)
class PublishedWeight:
    """A weight read from a checkpoint: which layout it was in, and its input's scale, if static."""

    layout: str
    weight: QuantTensor
    input_scale: Tensor | None = None


@dataclass(frozen=True)
class Layout:
    """One way of naming: the endings that mark it, and the function that reads it."""

    name: str
    endings: tuple[str, ...]
    read: Callable[[Tensors, str], tuple[Format, Packed]]


def read_weight(
    tensors: Tensors, base: str, dtype: torch.dtype = torch.bfloat16, check: bool = True
) -> PublishedWeight:
    """The weight called `base` (without `.weight`), whichever layout it is in.

    `check` refuses scales that are NaN, infinite, or zero over data that isn't.
    """
    for layout in LAYOUTS:
        if all(base + ending in tensors for ending in layout.endings):
            format, packed = layout.read(tensors, base)
            weight = QuantTensor(format, packed.data, packed.scales, dtype)
            if check:
                weight.check(f"{base} ({layout.name})")
            return PublishedWeight(layout.name, weight, _input_scale(tensors, base))
    endings = sorted({ending for layout in LAYOUTS for ending in layout.endings})
    found = [base + ending for ending in endings if base + ending in tensors]
    known = "; ".join(" + ".join(layout.endings) for layout in LAYOUTS)
    raise WeightsError(
        f"{base!r} is in no quantized layout that is known",
        where=f"found {', '.join(found)}" if found else f"no tensor is named {base}.* or {base}_*",
        next=f"a layout needs all of its endings: {known}",
    )


def weight_names(names: Iterable[str]) -> dict[str, str]:
    """The base names of all quantized weights among a checkpoint's names, each with its layout."""
    present = set(names)
    found: dict[str, str] = {}
    for layout in LAYOUTS:
        first = layout.endings[0]
        for name in sorted(name for name in present if name.endswith(first)):
            base = name.removesuffix(first)
            if base not in found and all(base + ending in present for ending in layout.endings):
                found[base] = layout.name
    return found


def _input_scale(tensors: Tensors, base: str) -> Tensor | None:
    if f"{base}.input_scale" in tensors:
        return tensors[f"{base}.input_scale"].float().reshape(())
    if f"{base}.input_global_scale" in tensors:
        return 1.0 / tensors[f"{base}.input_global_scale"].float().reshape(())
    return None


def _read_scaled(tensors: Tensors, base: str) -> tuple[Format, Packed]:
    """`weight` in FP8 or INT8 with `weight_scale`; the scale's shape and dtype say which format."""
    weight, scale = tensors[f"{base}.weight"], tensors[f"{base}.weight_scale"]
    kind = {
        torch.float8_e4m3fn: "e4m3",
        torch.float8_e5m2: "e5m2",
        torch.int8: "int8",
    }.get(weight.dtype)
    if kind is None:
        raise FormatError(
            f"a weight of {weight.dtype} with a weight_scale is in no known format",
            where=f"{base}.weight",
            next="float8_e4m3fn, float8_e5m2 and int8 are; convert the checkpoint to one of them",
        )
    if kind == "int8":
        _refuse_zero_point(tensors, base)
        rows = _rows(scale.float(), weight, base)
        return FORMATS["int8"], Packed(weight, {"scale": rows})
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu) and scale.dim() == weight.dim():
        format = FORMATS[f"mxfp8_{kind}"]
        return format, Packed(weight, {"scale": scale.view(torch.float8_e8m0fnu)})
    return _match_blocks(weight, scale.float(), kind, base)


def _match_blocks(weight: Tensor, scale: Tensor, kind: str, base: str) -> tuple[Format, Packed]:
    """Which of per tensor, row, 1x128 and 128x128 a float scale's shape is."""
    names = [f"fp8_{kind}_{suffix}" for suffix in ("tensor", "row", "1x128", "128x128")]
    shapes = {name: scale_shape(FORMATS[name].scales[0], weight.shape) for name in names}
    per_matrix, per_row = shapes[names[0]], shapes[names[1]]
    if tuple(scale.shape) in (weight.shape[:-2], (1,), ()) and scale.numel() == _count(per_matrix):
        scale = scale.reshape(per_matrix)
    elif tuple(scale.shape) == tuple(weight.shape[:-1]):
        scale = scale.reshape(per_row)
    for name, shape in shapes.items():
        if tuple(scale.shape) == shape:
            return FORMATS[name], Packed(weight, {"scale": scale})
    raise FormatError(
        f"weight_scale {list(scale.shape)} fits no blocks of a weight {list(weight.shape)}",
        where=f"{base}.weight_scale",
        next="it may be " + ", ".join(f"{list(shape)} ({name})" for name, shape in shapes.items()),
    )


def _read_deepseek(tensors: Tensors, base: str) -> tuple[Format, Packed]:
    weight, scale = tensors[f"{base}.weight"], tensors[f"{base}.weight_scale_inv"].float()
    format = FORMATS["fp8_e4m3_128x128"]
    expected = scale_shape(format.scales[0], weight.shape)
    if tuple(scale.shape) != expected:
        raise FormatError(
            f"weight_scale_inv is {list(scale.shape)}, and 128x128 blocks of a weight "
            f"{list(weight.shape)} are {list(expected)}",
            where=f"{base}.weight_scale_inv",
            next="check weight_block_size in the checkpoint's config: only [128, 128] is read",
        )
    return format, Packed(weight, {"scale": scale})


def _read_modelopt_nvfp4(tensors: Tensors, base: str) -> tuple[Format, Packed]:
    tensor_scale = tensors[f"{base}.weight_scale_2"].float()
    return _nvfp4(tensors, f"{base}.weight", base, tensor_scale)


def _read_compressed_nvfp4(tensors: Tensors, base: str) -> tuple[Format, Packed]:
    reciprocal = tensors[f"{base}.weight_global_scale"].float()
    return _nvfp4(tensors, f"{base}.weight_packed", base, 1.0 / reciprocal)


def _nvfp4(tensors: Tensors, packed: str, base: str, tensor_scale: Tensor) -> tuple[Format, Packed]:
    format = FORMATS["nvfp4"]
    data = tensors[packed].view(torch.uint8)
    shape = scale_shape(format.scales[1], logical_shape(format, data.shape))
    if tensor_scale.numel() != _count(shape):
        raise FormatError(
            f"{tensor_scale.numel()} tensor scales for {_count(shape)} matrices",
            where=base,
            next="a weight has one tensor scale, a stack of experts one each",
        )
    scales = {"scale": tensors[f"{base}.weight_scale"], "tensor_scale": tensor_scale.reshape(shape)}
    return format, Packed(data, scales)


def _read_compressed_mxfp4(tensors: Tensors, base: str) -> tuple[Format, Packed]:
    scale = tensors[f"{base}.weight_scale"].view(torch.float8_e8m0fnu)
    return FORMATS["mxfp4"], Packed(tensors[f"{base}.weight_packed"], {"scale": scale})


def _read_compressed_int4(tensors: Tensors, base: str) -> tuple[Format, Packed]:
    """int32 words of eight codes plus 8, first code lowest: in memory, nibbles low first."""
    words, scale = tensors[f"{base}.weight_packed"], tensors[f"{base}.weight_scale"].float()
    rows, columns = (int(size) for size in tensors[f"{base}.weight_shape"])
    if (
        tuple(words.shape) != (rows, columns // 8)
        or columns % 32
        or f"{base}.weight_g_idx" in tensors
    ):
        raise FormatError(
            f"packed words {list(words.shape)} for [{rows}, {columns}] are not plain 4 bit",
            where=f"{base}.weight_packed",
            next="8-bit words, K that 32 doesn't divide and activation order are not read: publish "
            "or quantize the model without them",
        )
    width = columns // max(scale.shape[-1], 1)
    group = next((size for size in GROUPS if width % size == 0), None)
    if group is None:
        raise FormatError(
            f"groups of {width} along K are no multiple of 32",
            where=f"{base}.weight_scale",
            next=f"quantize with a group of {', '.join(map(str, GROUPS))}",
        )
    scales = {"scale": scale.repeat_interleave(width // group, dim=-1)}
    data = words.contiguous().view(torch.uint8)
    if f"{base}.weight_zero_point" not in tensors:
        return FORMATS[f"int4_g{group}"], Packed(data, scales)
    packed_zero = tensors[f"{base}.weight_zero_point"]
    shifts = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32)
    zero = (packed_zero.unsqueeze(1) >> shifts[:, None] & 0xF).flatten(0, 1)[:rows]
    scales["zero_point"] = zero.to(torch.uint8).repeat_interleave(width // group, dim=-1)
    return FORMATS[f"int4_g{group}_asym"], Packed(data, scales)


def _read_gpt_oss(tensors: Tensors, base: str) -> tuple[Format, Packed]:
    return _mx_blocks(tensors[f"{base}_blocks"], tensors[f"{base}_scales"], base)


def _read_gpt_oss_original(tensors: Tensors, base: str) -> tuple[Format, Packed]:
    return _mx_blocks(tensors[f"{base}.blocks"], tensors[f"{base}.scales"], base)


def _mx_blocks(blocks: Tensor, scales: Tensor, base: str) -> tuple[Format, Packed]:
    if blocks.dim() < 2 or blocks.shape[-1] != 16 or blocks.shape[:-1] != scales.shape:
        raise FormatError(
            f"blocks {list(blocks.shape)} and scales {list(scales.shape)} don't belong together",
            where=base,
            next="blocks are [..., K / 32, 16] bytes and scales [..., K / 32]",
        )
    scale = scales.view(torch.float8_e8m0fnu)
    return FORMATS["mxfp4"], Packed(blocks.flatten(-2), {"scale": scale})


def _rows(scale: Tensor, weight: Tensor, base: str) -> Tensor:
    """One scale a row, [..., R, 1], out of one a row or one a tensor."""
    shape = (*weight.shape[:-1], 1)
    if scale.numel() not in (1, _count(shape)):
        raise FormatError(
            f"weight_scale of shape {list(scale.shape)} is neither one nor one a row",
            where=f"{base}.weight_scale, weight {list(weight.shape)}",
            next="int8 weights are read with a scale per tensor or per row",
        )
    return scale.reshape(shape) if scale.numel() == _count(shape) else scale.expand(shape).clone()


def _refuse_zero_point(tensors: Tensors, base: str) -> None:
    name = f"{base}.weight_zero_point"
    if name in tensors and bool((tensors[name] != 0).any()):
        raise FormatError(
            "int8 weights with zero points are not read",
            where=name,
            next="quantize the weights symmetrically",
        )


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


# In order of how much they ask for: a layout with more endings comes before one with fewer.
LAYOUTS: tuple[Layout, ...] = (
    Layout(
        "compressed-tensors nvfp4",
        (".weight_packed", ".weight_scale", ".weight_global_scale"),
        _read_compressed_nvfp4,
    ),
    Layout(
        "compressed-tensors int4",
        (".weight_packed", ".weight_scale", ".weight_shape"),
        _read_compressed_int4,
    ),
    Layout("compressed-tensors mxfp4", (".weight_packed", ".weight_scale"), _read_compressed_mxfp4),
    Layout("modelopt nvfp4", (".weight", ".weight_scale", ".weight_scale_2"), _read_modelopt_nvfp4),
    Layout("deepseek fp8", (".weight", ".weight_scale_inv"), _read_deepseek),
    Layout("weight_scale", (".weight", ".weight_scale"), _read_scaled),
    Layout("gpt-oss mxfp4", ("_blocks", "_scales"), _read_gpt_oss),
    Layout("gpt-oss mxfp4, original names", (".blocks", ".scales"), _read_gpt_oss_original),
)
