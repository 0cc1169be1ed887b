"""`QuantTensor`: a packed tensor that torch can hold, move, cut and save like any other.

In: a format, packed data and scales (or a float tensor, through `quantize`). Out: a tensor with the
logical shape, and `dequantize(dtype)`.

It is a wrapper subclass of `torch.Tensor`, not a plain container, because a weight has to live
where torch keeps weights: in an `nn.Parameter`, a `state_dict`, `module.to(device)`,
`copy.deepcopy`, and in graphs that `torch.compile` captures, which sees through it by
`__tensor_flatten__`. What it does not do is compute: arithmetic on it raises an error instead of
dequantizing behind your back. Multiplying by packed weights is the work of the quantized kernels.

Its `dtype` is the one it dequantizes to. `.to(torch.bfloat16)` changes that and leaves the packed
bytes alone; `.to(device)` moves them. Slices and shards must fall on block boundaries, and share
memory with the whole as torch's own views do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fulgurite.errors import FormatError
from fulgurite.quant import codec, sharding
from fulgurite.quant.blocks import Codes, Packed
from fulgurite.quant.checks import check_scales
from fulgurite.quant.format import Format, block_text, resolve
from fulgurite.quant.shapes import check_shape, logical_shape, scale_shape

aten = torch.ops.aten
PREVIEW = 6


def quantize(
    x: Tensor, format: str | Format, dtype: torch.dtype | None = None, **given: Tensor | float
) -> QuantTensor:
    """A float tensor in a format of the table; `given` brings static scales by name.

    `quantize(w, "nvfp4")`, `quantize(x, "fp8_e4m3_tensor", scale=0.02)`.
    """
    entry = resolve(format)
    packed = codec.pack(codec.encode(x, entry, **given), entry)
    return QuantTensor(entry, packed.data, packed.scales, dtype or x.dtype)


class QuantTensor(Tensor):
    """A tensor in one of the formats of `FORMATS`. See the module's text for what it can do."""

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
        shape = logical_shape(resolve(format), data.shape)
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
        self.format = resolve(format)
        self.packed = data
        _check_parts(self.format, data, scales or {})
        for name, scale in (scales or {}).items():
            setattr(self, name, scale)

    @property
    def scales(self) -> dict[str, Tensor]:
        """The scales stored beside the packed data, by name."""
        return {scale.name: getattr(self, scale.name) for scale in self.format.stored_scales}

    @property
    def parts(self) -> Packed:
        """Packed data and scales, as the codecs take them."""
        return Packed(self.packed, self.scales)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of storage: packed data and scales."""
        return sum(part.numel() * part.element_size() for part in self._tensors())

    def codes(self) -> Codes:
        """One code an element, and every level of scales."""
        return codec.unpack(self.parts, self.format)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values, computed in float32 and rounded once to `dtype` (by default `self.dtype`)."""
        return codec.decode(self.codes(), self.format).to(dtype or self.dtype)

    def shard(self, dim: int, index: int, count: int) -> QuantTensor:
        """The `index`-th of `count` equal parts along `dim`, cut at block boundaries."""
        dim = _positive(dim, self.dim())
        start, stop = sharding.shard_range(self.format, self.shape, dim, index, count)
        return _slice(self, dim, start, stop)

    def check(self, where: str = "this tensor") -> QuantTensor:
        """Itself, or an error where a scale is NaN, infinite, or zero over data that isn't."""
        check_scales(self.parts, self.format, where)
        return self

    def replace(self, parts: Packed, dtype: torch.dtype | None = None) -> QuantTensor:
        """Other parts in the same format."""
        return QuantTensor(self.format, parts.data, parts.scales, dtype or self.dtype)

    def map(self, function: Callable[[Tensor], Tensor]) -> QuantTensor:
        """A function applied to the packed data and to every scale."""
        scales = {name: function(scale) for name, scale in self.scales.items()}
        return self.replace(Packed(function(self.packed), scales))

    def _tensors(self) -> tuple[Tensor, ...]:
        return (self.packed, *self.scales.values())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        size = f"{self.nbytes / 2**20:.1f} MiB" if self.nbytes >= 2**20 else f"{self.nbytes} bytes"
        lines = [
            f"QuantTensor {self.format.name} {list(self.shape)} as {_short(self.dtype)} on "
            f"{self.device}, {size}, {self.format.bits_per_element:.4g} bits an element",
            f"  packed: {_short(self.packed.dtype)}{list(self.packed.shape)}",
        ]
        for scale in self.format.stored_scales:
            values = getattr(self, scale.name)
            text = f"{_short(values.dtype)}{list(values.shape)} a {block_text(scale.block)}"
            lines.append(f"  {scale.name}: {text}")
        if type(self.packed) is Tensor and not self.packed.is_meta and self.numel():
            row = self
            while row.dim() > 1:
                row = _select(row, 0, 0)
            numbers = [f"{value:.4g}" for value in row.dequantize(torch.float32)[:PREVIEW].tolist()]
            lines.append(f"  values: {', '.join(numbers)}{', …' if self.numel() > PREVIEW else ''}")
        return "\n".join(lines)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Format, torch.dtype]]:
        names = [scale.name for scale in self.format.stored_scales]
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
        if op in _OPERATIONS:
            return _OPERATIONS[op](*args, **(kwargs or {}))
        owner = next((arg for arg in args if isinstance(arg, QuantTensor)), None)
        raise FormatError(
            f"{op} is not defined on a QuantTensor",
            where=repr(owner).splitlines()[0] if owner is not None else None,
            next="compute with .dequantize(), or with a quantized kernel that takes packed weights",
        )


def _check_parts(format: Format, data: Tensor, scales: Mapping[str, Tensor]) -> None:
    shape = logical_shape(format, data.shape)
    check_shape(format, shape)
    if data.dtype != format.data_dtype:
        raise FormatError(
            f"{format.name} data is {_short(format.data_dtype)}, and this is {_short(data.dtype)}",
            next=f"use .view({format.data_dtype}) if only the type's name differs",
        )
    wanted = {scale.name: scale for scale in format.stored_scales}
    if set(scales) != set(wanted):
        raise FormatError(
            f"{format.name} has scales ({', '.join(wanted) or 'none'}), "
            f"and ({', '.join(scales) or 'none'}) were given",
            next="fulgurite.quant.quantize makes all parts; read_weight reads published ones",
        )
    for name, scale in wanted.items():
        expected = scale_shape(scale, shape)
        given = scales[name]
        if tuple(given.shape) != expected or given.dtype != scale.dtype:
            raise FormatError(
                f"{format.name}'s {name} must be {_short(scale.dtype)}{list(expected)}, "
                f"and is {_short(given.dtype)}{list(given.shape)}",
                where=f"tensor of shape {list(shape)}, a scale a {block_text(scale.block)}",
                next="reshape or convert it; check rows and K if they were swapped",
            )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _positive(dim: int, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise FormatError(f"there is no dimension {dim} in {ndim}", next=f"0 to {ndim - 1}")
    return dim % ndim


def _slice(
    x: QuantTensor, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1
) -> QuantTensor:
    dim = _positive(dim, x.dim())
    if step != 1:
        raise FormatError(
            f"a {x.format.name} tensor can't be sliced with step {step}",
            next="slice with step 1, or dequantize first",
        )
    start, stop, _ = slice(start, stop).indices(x.shape[dim])
    return x.replace(sharding.slice_parts(x.format, x.parts, x.shape, dim, start, stop))


def _select(x: QuantTensor, dim: int, index: int) -> QuantTensor:
    dim = _positive(dim, x.dim())
    index = index % x.shape[dim] if -x.shape[dim] <= index < x.shape[dim] else index
    return x.replace(sharding.select_parts(x.format, x.parts, x.shape, dim, index))


def _view(x: QuantTensor, size: Sequence[int]) -> QuantTensor:
    """`view_as` itself, which is how DTensor takes a tensor in."""
    if tuple(size) != tuple(x.shape):
        raise FormatError(
            f"a {x.format.name} tensor of shape {list(x.shape)} can't be viewed as {list(size)}",
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
    return moved.replace(moved.parts, dtype)


def _to(
    x: QuantTensor,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: torch.memory_format | None = None,
    **_: object,
) -> QuantTensor:
    """`.to` as it arrives under inference_mode: itself where nothing changes."""
    if dtype in (None, x.dtype) and device in (None, x.device) and not copy:
        return x
    return _to_copy(x, dtype=dtype, device=device, non_blocking=non_blocking)


def _copy_into(x: QuantTensor, source: Tensor, non_blocking: bool = False) -> QuantTensor:
    if not isinstance(source, QuantTensor) or source.format != x.format or source.shape != x.shape:
        found = source.format.name if isinstance(source, QuantTensor) else _short(source.dtype)
        raise FormatError(
            f"a {found} tensor of shape {list(source.shape)} can't be copied into a "
            f"{x.format.name} one of {list(x.shape)}",
            next="quantize the source to that format first, or assign it as a new parameter "
            "(load_state_dict(..., assign=True))",
        )
    for into, part in zip(x._tensors(), source._tensors(), strict=True):
        into.copy_(part, non_blocking)
    return x


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> QuantTensor:
    parts = [x for x in tensors if isinstance(x, QuantTensor)]
    first = parts[0]
    if len(parts) != len(tensors) or any(x.format != first.format for x in parts):
        raise FormatError(
            "only QuantTensors of one format can be joined",
            next="dequantize the parts, join them and quantize again",
        )
    dim = _positive(dim, first.dim())
    shapes = [x.shape for x in parts]
    return first.replace(sharding.join_parts(first.format, [x.parts for x in parts], shapes, dim))


def _empty_like(
    x: QuantTensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: object,
) -> QuantTensor:
    empty = x.map(lambda part: torch.empty_like(part, device=device))
    return empty.replace(empty.parts, dtype)


def _equal(x: Tensor, y: Tensor) -> bool:
    """The same format, shape and bits."""
    if not isinstance(x, QuantTensor) or not isinstance(y, QuantTensor):
        return False
    if x.format != y.format or x.shape != y.shape:
        return False
    pairs = zip(x._tensors(), y._tensors(), strict=True)
    return all(torch.equal(_bits(a), _bits(b)) for a, b in pairs)


def _bits(part: Tensor) -> Tensor:
    return part.contiguous().flatten().view(torch.uint8)


_OPERATIONS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: lambda x: x.map(Tensor.detach),
    aten.alias.default: lambda x: x.map(aten.alias.default),
    aten.clone.default: lambda x, **_: x.map(torch.clone),
    aten._to_copy.default: _to_copy,
    aten.to.dtype_layout: _to,
    aten.to.dtype: lambda x, dtype, *how, **kwargs: _to(x, None, dtype, *how, **kwargs),
    aten.to.device: _to,
    aten.copy_.default: _copy_into,
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
