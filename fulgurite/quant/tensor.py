"""`QuantTensor`: a quantized tensor that torch can hold, move, slice and save like any other.

In: a format, packed data and scales (or a float tensor, through `quantize`). Out: a tensor with the
logical shape, and `dequantize(dtype)`.

It is a wrapper subclass of `torch.Tensor`, because weights must work wherever torch keeps weights:
in an `nn.Parameter`, a `state_dict`, `module.to(device)` and `copy.deepcopy`. `torch.compile`
traces through it by `__tensor_flatten__`. It does not compute: arithmetic raises an error instead
of dequantizing implicitly. Quantized kernels multiply by quantized weights.

Its `dtype` is the dtype it dequantizes to. `.to(torch.bfloat16)` changes that dtype and leaves the
packed data unchanged; `.to(device)` moves the data. Slices and shards must be at block boundaries.
They share memory with the whole tensor, like torch's views.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fulgurite.errors import FormatError
from fulgurite.quant import sharding
from fulgurite.quant.checks import check_scales
from fulgurite.quant.codecs import codec
from fulgurite.quant.codecs.blocks import Codes, PackedData
from fulgurite.quant.format import Format, format_block, resolve_format
from fulgurite.quant.shapes import check_shape, logical_shape, scale_shape

aten = torch.ops.aten
PREVIEW_VALUES = 6


def quantize(
    x: Tensor,
    format: str | Format,
    dtype: torch.dtype | None = None,
    **static_scales: Tensor | float,
) -> QuantTensor:
    """Quantize a float tensor; `static_scales` are calibrated scales by name.

    `quantize(w, "nvfp4")`, `quantize(x, "fp8_e4m3_tensor", scale=0.02)`.
    """
    entry = resolve_format(format)
    packed = codec.pack(codec.quantize_to_codes(x, entry, **static_scales), entry)
    return QuantTensor(entry, packed.data, packed.scales, dtype or x.dtype)


class QuantTensor(Tensor):
    """A tensor in one of the formats of `FORMATS`; see the module docstring."""

    format: Format
    packed: Tensor

    @staticmethod
    def __new__(
        cls: type[QuantTensor],
        format: str | Format,
        data: Tensor,
        scales: Mapping[str, Tensor] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> QuantTensor:
        shape = logical_shape(resolve_format(format), data.shape)
        wrapper: QuantTensor = Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=data.device, requires_grad=False
        )
        return wrapper

    def __init__(
        self,
        format: str | Format,
        data: Tensor,
        scales: Mapping[str, Tensor] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.format = resolve_format(format)
        self.packed = data
        _check_packed_data(self.format, data, scales or {})
        for name, scale in (scales or {}).items():
            setattr(self, name, scale)

    @property
    def scales(self) -> dict[str, Tensor]:
        """The separately stored scales, by name."""
        return {scale.name: getattr(self, scale.name) for scale in self.format.separate_scales}

    @property
    def packed_data(self) -> PackedData:
        """Packed data and scales, the input of the codecs."""
        return PackedData(self.packed, self.scales)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Storage bytes of packed data and scales."""
        return sum(part.numel() * part.element_size() for part in self._tensors())

    def unpack(self) -> Codes:
        """Unpack to one code per element and all scales."""
        return codec.unpack(self.packed_data, self.format)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Dequantize in float32 and round once to `dtype` (default: `self.dtype`)."""
        return codec.dequantize_codes(self.unpack(), self.format).to(dtype or self.dtype)

    def shard(self, dim: int, index: int, count: int) -> QuantTensor:
        """Shard `index` of `count` equal shards along `dim`, at block boundaries."""
        dim = _normalize_dim(dim, self.dim())
        start, stop = sharding.shard_range(self.format, self.shape, dim, index, count)
        return _slice(self, dim, start, stop)

    def check_scales(self, where: str = "this tensor") -> QuantTensor:
        """Raise if a scale is NaN, infinite, or zero over nonzero data; returns self."""
        check_scales(self.packed_data, self.format, where)
        return self

    def with_packed_data(self, packed: PackedData, dtype: torch.dtype | None = None) -> QuantTensor:
        """A tensor of the same format with other packed data."""
        return QuantTensor(self.format, packed.data, packed.scales, dtype or self.dtype)

    def map(self, function: Callable[[Tensor], Tensor]) -> QuantTensor:
        """Apply a function to the packed data and to every scale."""
        scales = {name: function(scale) for name, scale in self.scales.items()}
        return self.with_packed_data(PackedData(function(self.packed), scales))

    def _tensors(self) -> tuple[Tensor, ...]:
        return (self.packed, *self.scales.values())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        count, bits = self.nbytes, self.format.bits_per_element
        if isinstance(count, torch.SymInt) or isinstance(bits, torch.SymFloat):
            return f"QuantTensor {self.format.name} {list(self.shape)}"  # during capture
        size = f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count} bytes"
        lines = [
            f"QuantTensor {self.format.name} {list(self.shape)} as {_dtype_name(self.dtype)} on "
            f"{self.device}, {size}, {bits:.4g} bits per element",
            f"  packed: {_dtype_name(self.packed.dtype)}{list(self.packed.shape)}",
        ]
        for scale in self.format.separate_scales:
            values = getattr(self, scale.name)
            text = (
                f"{_dtype_name(values.dtype)}{list(values.shape)} per {format_block(scale.block)}"
            )
            lines.append(f"  {scale.name}: {text}")
        if type(self.packed) is Tensor and not self.packed.is_meta and self.numel():
            row = self
            while row.dim() > 1:
                row = _select(row, 0, 0)
            numbers = [
                f"{value:.4g}" for value in row.dequantize(torch.float32)[:PREVIEW_VALUES].tolist()
            ]
            lines.append(
                f"  values: {', '.join(numbers)}{', …' if self.numel() > PREVIEW_VALUES else ''}"
            )
        return "\n".join(lines)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Format, torch.dtype]]:
        names = [scale.name for scale in self.format.separate_scales]
        return ["packed", *names], (self.format, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor],
        context: tuple[Format, torch.dtype],
        outer_size: Sequence[int],
        outer_stride: Sequence[int],
    ) -> QuantTensor:
        format, dtype = context
        scales = {name: value for name, value in inner.items() if name != "packed"}
        return QuantTensor(format, inner["packed"], scales, dtype)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        op: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if op in _OP_TABLE:
            return _OP_TABLE[op](*args, **(kwargs or {}))
        owner = next((arg for arg in args if isinstance(arg, QuantTensor)), None)
        raise FormatError(
            f"{op} is not supported on a QuantTensor",
            where=repr(owner).splitlines()[0] if owner is not None else None,
            next="call .dequantize() first, or use a quantized kernel",
        )


def _check_packed_data(format: Format, data: Tensor, scales: Mapping[str, Tensor]) -> None:
    shape = logical_shape(format, data.shape)
    check_shape(format, shape)
    if data.dtype != format.data_dtype:
        raise FormatError(
            f"{format.name} data must be {_dtype_name(format.data_dtype)}, "
            f"not {_dtype_name(data.dtype)}",
            next=f"use .view({format.data_dtype}) if only the dtype differs",
        )
    expected = {scale.name: scale for scale in format.separate_scales}
    if set(scales) != set(expected):
        raise FormatError(
            f"{format.name} needs the scales ({', '.join(expected) or 'none'}), "
            f"got ({', '.join(scales) or 'none'})",
            next="fulgurite.quant.quantize creates them; read_quantized_weight reads checkpoints",
        )
    for name, scale in expected.items():
        expected_shape = scale_shape(scale, shape)
        values = scales[name]
        if tuple(values.shape) != expected_shape or values.dtype != scale.dtype:
            raise FormatError(
                f"{format.name}'s {name} must be {_dtype_name(scale.dtype)}{list(expected_shape)}, "
                f"not {_dtype_name(values.dtype)}{list(values.shape)}",
                where=f"tensor of shape {list(shape)}, one scale per {format_block(scale.block)}",
                next="reshape or convert it, and check that rows and K are not swapped",
            )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _normalize_dim(dim: int, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise FormatError(
            f"dimension {dim} is out of range for {ndim} dimensions", next=f"use 0 to {ndim - 1}"
        )
    return dim % ndim


def _slice(
    x: QuantTensor, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1
) -> QuantTensor:
    dim = _normalize_dim(dim, x.dim())
    if step != 1:
        raise FormatError(
            f"cannot slice a {x.format.name} tensor with step {step}",
            next="slice with step 1, or dequantize first",
        )
    start, stop, _ = slice(start, stop).indices(x.shape[dim])
    return x.with_packed_data(
        sharding.slice_packed(x.format, x.packed_data, x.shape, dim, start, stop)
    )


def _select(x: QuantTensor, dim: int, index: int) -> QuantTensor:
    dim = _normalize_dim(dim, x.dim())
    index = index % x.shape[dim] if -x.shape[dim] <= index < x.shape[dim] else index
    return x.with_packed_data(sharding.select_packed(x.format, x.packed_data, x.shape, dim, index))


def _view(x: QuantTensor, size: Sequence[int]) -> QuantTensor:
    """Only a view of the same shape, which DTensor needs."""
    if tuple(size) != tuple(x.shape):
        raise FormatError(
            f"cannot view a {x.format.name} tensor of shape {list(x.shape)} as {list(size)}",
            next="slice it at block boundaries, or dequantize first",
        )
    return x.map(aten.alias.default)


def _split_sizes(x: QuantTensor, sizes: Sequence[int], dim: int = 0) -> list[QuantTensor]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [_slice(x, dim, end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _split(x: QuantTensor, size: int, dim: int = 0) -> list[QuantTensor]:
    total = x.shape[dim]
    return [_slice(x, dim, start, min(start + size, total)) for start in range(0, total, size)]


def _to_copy(
    x: QuantTensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **_: object,
) -> QuantTensor:
    moved = x.map(lambda part: part.to(device=device, non_blocking=non_blocking, copy=True))
    return moved.with_packed_data(moved.packed_data, dtype)


def _to(
    x: QuantTensor,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: torch.memory_format | None = None,
    **_: object,
) -> QuantTensor:
    """`.to` under inference_mode, where it is not decomposed; returns x if nothing changes."""
    if dtype in (None, x.dtype) and device in (None, x.device) and not copy:
        return x
    return _to_copy(x, dtype=dtype, device=device, non_blocking=non_blocking)


def _copy_(x: QuantTensor, source: Tensor, non_blocking: bool = False) -> QuantTensor:
    if not isinstance(source, QuantTensor) or source.format != x.format or source.shape != x.shape:
        found = source.format.name if isinstance(source, QuantTensor) else _dtype_name(source.dtype)
        raise FormatError(
            f"cannot copy a {found} tensor of shape {list(source.shape)} into a "
            f"{x.format.name} tensor of shape {list(x.shape)}",
            next="quantize the source to that format first, or assign it as a new parameter "
            "(load_state_dict(..., assign=True))",
        )
    for target, part in zip(x._tensors(), source._tensors(), strict=True):
        target.copy_(part, non_blocking)
    return x


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> QuantTensor:
    parts = [x for x in tensors if isinstance(x, QuantTensor)]
    first = parts[0]
    if len(parts) != len(tensors) or any(x.format != first.format for x in parts):
        raise FormatError(
            "cannot concatenate tensors of different formats",
            next="dequantize them, concatenate them and quantize again",
        )
    dim = _normalize_dim(dim, first.dim())
    shapes = [x.shape for x in parts]
    return first.with_packed_data(
        sharding.concat_packed(first.format, [x.packed_data for x in parts], shapes, dim)
    )


def _empty_like(
    x: QuantTensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: object,
) -> QuantTensor:
    empty = x.map(lambda part: torch.empty_like(part, device=device))
    return empty.with_packed_data(empty.packed_data, dtype)


def _equal(x: Tensor, y: Tensor) -> bool:
    """Whether format, shape and bits are equal."""
    if not isinstance(x, QuantTensor) or not isinstance(y, QuantTensor):
        return False
    if x.format != y.format or x.shape != y.shape:
        return False
    pairs = zip(x._tensors(), y._tensors(), strict=True)
    return all(torch.equal(_view_as_bytes(a), _view_as_bytes(b)) for a, b in pairs)


def _view_as_bytes(part: Tensor) -> Tensor:
    return part.contiguous().flatten().view(torch.uint8)


_OP_TABLE: dict[Any, Callable[..., Any]] = {
    aten.detach.default: lambda x: x.map(Tensor.detach),
    aten.alias.default: lambda x: x.map(aten.alias.default),
    aten.clone.default: lambda x, **_: x.map(torch.clone),
    aten._to_copy.default: _to_copy,
    aten.to.dtype_layout: _to,
    aten.to.dtype: lambda x, dtype, *args, **kwargs: _to(x, None, dtype, *args, **kwargs),
    aten.to.device: _to,
    aten.copy_.default: _copy_,
    aten.view.default: _view,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_sizes,
    aten.cat.default: _cat,
    aten.empty_like.default: _empty_like,
    aten._pin_memory.default: lambda x, device=None: x.map(Tensor.pin_memory),
    aten.dequantize.self: lambda x: x.dequantize(),
    aten.equal.default: _equal,
}
