"""What each rank keeps of a model: a table to read, which numbers they are, and the sums that gradients
still need."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fulgurite.parallel.gradients import Gradients
from fulgurite.parallel.mesh import Mesh

Range = tuple[int, int]
LAYER = re.compile(r"^(.*?\.)(\d+)(\..*)$")


@dataclass(frozen=True)
class Share:
    """One line of the report: what a rank keeps of a weight, or why it keeps all of it."""

    name: str
    style: str
    whole: tuple[int, ...]
    kept: tuple[int, ...]
    note: str = ""


@dataclass(frozen=True)
class Kept:
    """Which numbers of the whole model's parameter `name` a rank has: ranges of each dimension, one
    behind the other in the order they are kept."""

    name: str
    shape: tuple[int, ...]
    ranges: tuple[tuple[Range, ...], ...]

    @staticmethod
    def all(name: str, shape: Sequence[int]) -> Kept:
        return Kept(name, tuple(shape), tuple(((0, size),) for size in shape))

    def cut(self, dim: int, *ranges: Range) -> Kept:
        """The same with only these ranges of a dimension that was whole."""
        found = [*self.ranges]
        assert found[dim] == ((0, self.shape[dim]),), f"dimension {dim} of {self.name} is cut twice"
        found[dim] = ranges
        return replace(self, ranges=tuple(found))


@dataclass
class Shares:
    """What `parallelize` did: a report, what is kept, and the sums that gradients still need."""

    mesh: Mesh
    lines: list[Share] = field(default_factory=list)
    kept: dict[str, Kept] = field(default_factory=dict)  # by the name a parameter has now
    gradients: Gradients = field(default_factory=Gradients)

    def reduce_gradients(self) -> None:
        """Sum what each rank has of every gradient: then they are those of one rank with all tokens
        of the data axis, where losses are summed over it."""
        self.gradients.reduce(self.mesh)

    def __str__(self) -> str:
        rows = [("weight", "style", "whole", "this rank", "")]
        rows += [
            (name, s.style, _shape(s.whole), _shape(s.kept), s.note) for name, s in self._kinds()
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[4]]).rstrip()
            for row in rows
        ]
        return "\n".join([str(self.mesh.shape), *lines])

    def _kinds(self) -> list[tuple[str, Share]]:
        """Layers that are divided alike are one line: layers.0-31.attention.query.weight."""
        found: dict[tuple[object, ...], tuple[Share, list[int]]] = {}
        for share in self.lines:
            match = LAYER.match(share.name)
            around = (match[1], match[3]) if match else (share.name, "")
            key = (around, share.style, share.whole, share.kept, share.note)
            layers = found.setdefault(key, (share, []))[1]
            layers += [int(match[2])] if match else []
        return [(_named(share, layers), share) for share, layers in found.values()]


def _named(share: Share, layers: list[int]) -> str:
    if len(layers) < 2:
        return share.name
    first, last = layers[0], layers[-1]
    in_a_row = layers == list(range(first, last + 1))
    text = f"{first}-{last}" if in_a_row else ",".join(map(str, layers))
    return LAYER.sub(rf"\g<1>{text}\g<3>", share.name)


def _shape(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes))
