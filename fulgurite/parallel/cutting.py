"""What is done to the weights of a model that is divided over an axis: ranges kept, modules replaced.

In: names of parameters and modules, and which of their rows or columns this rank keeps. Out: the model with smaller
parameters in their places, and of each which numbers of the whole one it has (`kept`) and a line of the report.
"""

from __future__ import annotations

from torch import Tensor, nn

from fulgurite.errors import ArgumentError
from fulgurite.kernels.gemm.modules import QuantLinear
from fulgurite.parallel.collectives import share
from fulgurite.parallel.mesh import Axis
from fulgurite.parallel.shares import Kept, Range, Share, Shares
from fulgurite.quant import QuantTensor
from fulgurite.quant.sharding import boundary


class Cutter:
    """A model whose weights are cut, one after the other."""

    def __init__(self, model: nn.Module, axis: Axis, shares: Shares) -> None:
        self.model, self.axis, self.shares = model, axis, shares
        # Modules are wrapped on the way, so parameters are known by themselves.
        self.kept = {p: Kept.all(n, p.shape) for n, p in model.named_parameters()}
        self.divided: set[nn.Parameter] = set()

    def cut_module(self, name: str, style: str, dim: int, units: int, kept: Range) -> None:
        for parameter in self.parameters(name):
            self.cut(parameter, style, dim, kept, units)

    def parameters(self, name: str) -> list[str]:
        """The weight and bias of a linear (of a sequence: its last), or a parameter by its own name."""
        if name in dict(self.model.named_parameters()):
            return [name]
        module = self.model.get_submodule(name)
        if isinstance(module, nn.Sequential):
            return self.parameters(f"{name}.{len(module) - 1}")
        return [f"{name}.{n}" for n, _ in module.named_parameters(recurse=False)]

    def cut(self, name: str, style: str, dim: int, kept: Range, units: int | None = None) -> None:
        """Keep a range of a parameter's dimension, counted in `units` that it divides into."""
        path, _, last = name.rpartition(".")
        module = self.model.get_submodule(path)
        parameter = module.get_parameter(last)
        size = parameter.shape[dim] // (units or parameter.shape[dim])
        start, stop = kept[0] * size, kept[1] * size
        where = (slice(None),) * dim + (slice(start, stop),)
        # A copy, so that the whole may be let go.
        part = nn.Parameter(parameter.detach()[where].clone(), parameter.requires_grad)
        setattr(module, last, part)
        _set_features(module, part)
        self.divided.add(part)
        self.kept[part] = self.kept[parameter].cut(dim, (start, stop))
        self.line(name, style, tuple(parameter.shape), tuple(part.shape))

    def replace(self, name: str, module: nn.Module) -> None:
        path, _, last = name.rpartition(".")
        setattr(self.model.get_submodule(path), last, module)

    def weight(self, name: str) -> Tensor:
        return self.model.get_submodule(name).get_parameter("weight")

    def share(self, total: int, step: int) -> Range:
        return share(total, self.axis.index, self.axis.size, step)

    def check_enough(self, name: str, total: int, step: int) -> None:
        """Every rank must get something: shares are equal, so the last ones may be left without."""
        ranks = self.axis.size
        if not _reaches_all(total, ranks, step):
            fewer = next(
                n for n in range(ranks - 1, 0, -1) if n == 1 or _reaches_all(total, n, step)
            )
            width = share(total, 0, ranks, step)[1]
            raise ArgumentError(
                f"{total} can't be shared by {ranks} ranks: {width} x {ranks - 1} = "
                f"{width * (ranks - 1)} leave nothing to the last one",
                where=f"{name}, cut at multiples of {step}" if step > 1 else name,
                next=f"choose a tensor axis of {fewer}",
            )

    def line(
        self, name: str, style: str, whole: tuple[int, ...], kept: tuple[int, ...], note: str = ""
    ) -> None:
        self.shares.lines.append(Share(name, style, whole, kept, note))


def _reaches_all(total: int, ranks: int, step: int) -> bool:
    start, stop = share(total, ranks - 1, ranks, step)
    return start < stop


def step_of(weight: Tensor, dim: int) -> int:
    """At multiples of how many a weight may be cut."""
    return boundary(weight.format, dim, weight.dim()) if isinstance(weight, QuantTensor) else 1


def _set_features(module: nn.Module, weight: Tensor) -> None:
    """What a linear says of itself follows its weight."""
    if weight.dim() == 2 and isinstance(module, (nn.Linear, QuantLinear)):
        module.out_features, module.in_features = weight.shape
    elif isinstance(module, nn.Embedding):
        module.num_embeddings = weight.shape[0]
