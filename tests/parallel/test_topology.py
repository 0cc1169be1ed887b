"""Which node each rank is on: by names that ranks exchange, and as asked."""

from __future__ import annotations

import pytest

from fulgurite.errors import ArgumentError
from fulgurite.parallel import Axis, Mesh
from fulgurite.parallel.topology import (
    NODES_VARIABLE,
    divide_into_nodes,
    find_emulated_nodes,
    layout_nodes,
    node_name,
    number_nodes,
)
from tests.parallel import emulation_cases as cases


def test_nodes_are_numbered_by_their_first_rank():
    assert number_nodes(["b", "a", "b", "c", "a"]) == (0, 1, 0, 2, 1)
    assert number_nodes([]) == ()


def test_layout_has_local_ranks_in_order():
    layout = layout_nodes((0, 1, 0, 1, 2, 2))
    assert layout.ranks_NL == ((0, 2), (1, 3), (4, 5))
    assert (layout.num_nodes, layout.ranks_per_node) == (3, 2)
    assert [layout.position(rank) for rank in range(6)] == [
        (0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1),
    ]  # fmt: skip


def test_nodes_of_different_sizes_have_no_layout():
    with pytest.raises(ArgumentError, match="different numbers of ranks: node 0: 3, node 1: 1"):
        layout_nodes((0, 0, 1, 0))


def test_an_emulated_node_has_consecutive_ranks(monkeypatch):
    assert divide_into_nodes(8, 4) == (0, 0, 1, 1, 2, 2, 3, 3)
    with pytest.raises(ArgumentError, match=r"6 ranks can't be divided into 4(.|\n)*1, 2, 3, 6"):
        divide_into_nodes(6, 4)
    for text in ("two", "2.5"):
        monkeypatch.setenv(NODES_VARIABLE, text)
        with pytest.raises(ArgumentError, match="not a number of nodes"):
            find_emulated_nodes(4)
    monkeypatch.setenv(NODES_VARIABLE, "2")
    assert find_emulated_nodes(4) == (0, 0, 1, 1)
    assert find_emulated_nodes(4, nodes=4) == (0, 1, 2, 3)  # the option wins
    monkeypatch.delenv(NODES_VARIABLE)
    assert find_emulated_nodes(4) == ()


def test_ranks_of_two_agents_are_on_two_nodes(ranks):
    """torchrun has one agent a node, whose number is GROUP_RANK."""
    for found in ranks(4).run(cases.nodes_of_mesh, ["0", "0", "1", "1"], None):
        assert found == ((0, 0, 1, 1), True, False)
    for found in ranks(4).run(cases.nodes_of_mesh, ["0", "1", "0", "1"], None):
        assert found == ((0, 1, 0, 1), True, True)
    for found in ranks(4).run(cases.nodes_of_mesh, ["0"] * 4, None):
        assert found == ((0, 0, 0, 0), False, False)
    for found in ranks(4).run(cases.nodes_of_mesh, ["0"] * 4, 2):
        assert found == ((0, 0, 1, 1), True, False)


def test_a_single_rank_and_an_axis_without_nodes():
    with Mesh() as mesh:
        assert mesh.expert.nodes == (0,) and not mesh.expert.spans_nodes
    axis = Axis("expert", (0, 1, 2), 1)
    assert axis.nodes == (0, 0, 0) and not axis.spans_nodes
    assert node_name() == node_name() != ""
