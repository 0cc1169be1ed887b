"""An axis that spans nodes, as two: `Axis` in, the axes inside the node and between the nodes out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fulgurite.parallel.mesh import Axis, make_group
from fulgurite.parallel.topology import NodeLayout, layout_nodes


@dataclass(frozen=True, eq=False)
class NodeAxes:
    """An axis that spans nodes, as two: the ranks of this node, and this local index on all nodes."""

    axis: Axis
    node: Axis
    network: Axis
    layout: NodeLayout

    @property
    def node_of_rank(self) -> Tensor:
        """[W]: the index on the network axis of each rank of the axis."""
        return self._positions(0)

    @property
    def local_of_rank(self) -> Tensor:
        """[W]: the index on the node axis of each rank of the axis."""
        return self._positions(1)

    def _positions(self, part: int) -> Tensor:
        return torch.tensor([self.layout.position(rank)[part] for rank in range(self.axis.size)])


def split_by_node(axis: Axis) -> NodeAxes:
    """Create the two axes; a collective call of the ranks of the axis."""
    layout = layout_nodes(axis.nodes)
    node, local = layout.position(axis.index)
    own_node = layout.ranks_NL[node]
    own_network = tuple(ranks[local] for ranks in layout.ranks_NL)
    # The node group first on every rank: groups of one kind are disjoint, so nobody waits in a circle.
    return NodeAxes(
        axis,
        _make_axis(axis, f"{axis.name} node", own_node, local),
        _make_axis(axis, f"{axis.name} network", own_network, node),
        layout,
    )


def _make_axis(axis: Axis, name: str, indices: tuple[int, ...], index: int) -> Axis:
    ranks = tuple(axis.ranks[i] for i in indices)
    group = None
    if len(ranks) > 1 and axis.group is not None:
        assert axis.health is not None, "several ranks have a health monitor"
        group = make_group(ranks, axis.health, name, only_members=True)
    nodes = tuple(axis.nodes[i] for i in indices)
    return Axis(name, ranks, index, group, axis.health, nodes, axis.network)
