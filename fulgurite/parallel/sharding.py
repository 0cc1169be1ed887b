"""Sharded parameters: full parameters and ranges in, each rank's shard and a report out.

`Sharder` replaces parameters by slices and modules by parallel ones. `Sharding` is the result of
`parallelize`: a report, the slice that each parameter is of the full one, and the reductions that
its gradients need.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from fulgurite.errors import ArgumentError
from fulgurite.kernels.gemm.modules import QuantLinear
from fulgurite.parallel.collectives import shard_range
from fulgurite.parallel.gradients import GradientReduction
from fulgurite.parallel.mesh import Axis, Mesh
from fulgurite.quant import QuantTensor
from fulgurite.quant.sharding import shard_alignment

Range = tuple[int, int]
LAYER = re.compile(r"^(.*?\.)(\d+)(\..*)$")


@dataclass(frozen=True)
class ShardEntry:
    """One line of the report: a rank's shard of a weight, or why the weight is not sharded."""

    name: str
    style: str
    full_shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    note: str = ""


@dataclass(frozen=True)
class ShardSlice:
    """Which elements of the full parameter `name` a rank has: ranges of each dimension, in order."""

    name: str
    shape: tuple[int, ...]
    ranges: tuple[tuple[Range, ...], ...]

    @staticmethod
    def full(name: str, shape: Sequence[int]) -> ShardSlice:
        return ShardSlice(name, tuple(shape), tuple(((0, size),) for size in shape))

    def narrow(self, dim: int, *ranges: Range) -> ShardSlice:
        """The slice with only these ranges of a dimension, which must be full so far."""
        result = [*self.ranges]
        is_full = result[dim] == ((0, self.shape[dim]),)
        assert is_full, f"dimension {dim} of {self.name} is sharded twice"
        result[dim] = ranges
        return replace(self, ranges=tuple(result))


@dataclass
class Sharding:
    """The result of `parallelize`: a report, slices by parameter, and gradient reductions."""

    mesh: Mesh
    entries: list[ShardEntry] = field(default_factory=list)
    slices: dict[str, ShardSlice] = field(default_factory=dict)  # by the parameter's current name
    gradients: GradientReduction = field(default_factory=GradientReduction)

    def reduce_gradients(self) -> None:
        """Reduce all gradients over the ranks that share them.

        They then equal those of one rank with all tokens of the data axis, where losses are summed
        over that axis.
        """
        self.gradients.reduce(self.mesh)

    def __str__(self) -> str:
        rows = [("weight", "style", "full", "this rank", "")]
        rows += [
            (name, e.style, _format_shape(e.full_shape), _format_shape(e.shard_shape), e.note)
            for name, e in self._merge_layers()
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[4]]).rstrip()
            for row in rows
        ]
        return "\n".join([str(self.mesh.shape), *lines])

    def _merge_layers(self) -> list[tuple[str, ShardEntry]]:
        """Layers that are sharded alike become one line: layers.0-31.attention.q_proj.weight."""
        merged: dict[tuple[object, ...], tuple[ShardEntry, list[int]]] = {}
        for entry in self.entries:
            match = LAYER.match(entry.name)
            name = (match[1], match[3]) if match else (entry.name, "")
            key = (name, entry.style, entry.full_shape, entry.shard_shape, entry.note)
            layers = merged.setdefault(key, (entry, []))[1]
            layers += [int(match[2])] if match else []
        return [(_name_with_layers(entry, layers), entry) for entry, layers in merged.values()]


def _name_with_layers(entry: ShardEntry, layers: list[int]) -> str:
    if len(layers) < 2:
        return entry.name
    first, last = layers[0], layers[-1]
    is_consecutive = layers == list(range(first, last + 1))
    text = f"{first}-{last}" if is_consecutive else ",".join(map(str, layers))
    return LAYER.sub(rf"\g<1>{text}\g<3>", entry.name)


def _format_shape(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes))


class Sharder:
    """Shards the parameters of a model over an axis, one after the other."""

    def __init__(self, model: nn.Module, axis: Axis, sharding: Sharding) -> None:
        self.model, self.axis, self.sharding = model, axis, sharding
        # Keyed by parameter, since names change when modules are wrapped.
        self.slices = {p: ShardSlice.full(n, p.shape) for n, p in model.named_parameters()}
        self.sharded: set[nn.Parameter] = set()

    def shard_module(self, name: str, style: str, dim: int, units: int, kept: Range) -> None:
        """Shard the weight and bias of a linear; arguments as in `shard_parameter`."""
        for parameter in self.parameter_names(name):
            self.shard_parameter(parameter, style, dim, kept, units)

    def parameter_names(self, name: str) -> list[str]:
        """The parameters of a linear (of the last one in a sequence), or the parameter itself."""
        if name in dict(self.model.named_parameters()):
            return [name]
        module = self.model.get_submodule(name)
        if isinstance(module, nn.Sequential):
            return self.parameter_names(f"{name}.{len(module) - 1}")
        return [f"{name}.{n}" for n, _ in module.named_parameters(recurse=False)]

    def shard_parameter(
        self, name: str, style: str, dim: int, kept: Range, units: int | None = None
    ) -> None:
        """Keep a range of a dimension. The range counts units; the dimension has `units` of them."""
        path, _, last = name.rpartition(".")
        module = self.model.get_submodule(path)
        parameter = module.get_parameter(last)
        size = parameter.shape[dim] // (units or parameter.shape[dim])
        start, stop = kept[0] * size, kept[1] * size
        self._check_blocks(name, parameter, dim, (start, stop))
        index = (slice(None),) * dim + (slice(start, stop),)
        # A copy, so that the full parameter can be freed.
        shard = nn.Parameter(parameter.detach()[index].clone(), parameter.requires_grad)
        setattr(module, last, shard)
        _update_features(module, shard)
        self.sharded.add(shard)
        self.slices[shard] = self.slices[parameter].narrow(dim, (start, stop))
        self.add_entry(name, style, tuple(parameter.shape), tuple(shard.shape))

    def _check_blocks(self, name: str, parameter: Tensor, dim: int, kept: Range) -> None:
        """ArgumentError if a shard of a quantized parameter would end inside a block."""
        align, size = weight_alignment(parameter, dim), parameter.shape[dim]
        if isinstance(parameter, QuantTensor) and any(end % align and end != size for end in kept):
            raise ArgumentError(
                f"{name} can't be sharded over {self.axis.size} ranks: a shard of {kept[1] - kept[0]} "
                f"ends inside a {parameter.format.name} block of {align}",
                where=f"dimension {dim} of {list(parameter.shape)}",
                next="use a smaller tensor axis, or keep_quantized=False, which dequantizes the "
                "weights while loading",
            )

    def replace_module(self, name: str, module: nn.Module) -> None:
        path, _, last = name.rpartition(".")
        setattr(self.model.get_submodule(path), last, module)

    def get_weight(self, name: str) -> Tensor:
        return self.model.get_submodule(name).get_parameter("weight")

    def local_range(self, total: int, alignment: int) -> Range:
        """This rank's range of `total` items."""
        return shard_range(total, self.axis.index, self.axis.size, alignment)

    def check_divisible(self, name: str, total: int, alignment: int) -> None:
        """ArgumentError if some rank would get an empty shard."""
        ranks = self.axis.size
        if _reaches_all_ranks(total, ranks, alignment):
            return
        fewer = next(
            n for n in range(ranks - 1, 0, -1) if n == 1 or _reaches_all_ranks(total, n, alignment)
        )
        width = shard_range(total, 0, ranks, alignment)[1]
        raise ArgumentError(
            f"{total} can't be sharded over {ranks} ranks: {width} x {ranks - 1} = "
            f"{width * (ranks - 1)} leave nothing for the last rank",
            where=f"{name}, sharded at multiples of {alignment}" if alignment > 1 else name,
            next=f"use a tensor axis of {fewer}",
        )

    def add_entry(
        self,
        name: str,
        style: str,
        full_shape: tuple[int, ...],
        shard_shape: tuple[int, ...],
        note: str = "",
    ) -> None:
        self.sharding.entries.append(ShardEntry(name, style, full_shape, shard_shape, note))


def _reaches_all_ranks(total: int, ranks: int, alignment: int) -> bool:
    start, stop = shard_range(total, ranks - 1, ranks, alignment)
    return start < stop


def weight_alignment(weight: Tensor, dim: int) -> int:
    """A weight can be sharded along a dimension at multiples of this."""
    if isinstance(weight, QuantTensor):
        return shard_alignment(weight.format, dim, weight.dim())
    return 1


def _update_features(module: nn.Module, weight: Tensor) -> None:
    """Set a module's sizes to those of its weight."""
    if weight.dim() == 2 and isinstance(module, (nn.Linear, QuantLinear)):
        module.out_features, module.in_features = weight.shape
    elif isinstance(module, nn.Embedding):
        module.num_embeddings = weight.shape[0]
