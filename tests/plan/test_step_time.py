"""Predicted steps by hand: bytes over bandwidths, latencies, one row a node."""

from __future__ import annotations

import pytest

from fulgurite.plan.cluster import LinkSpeeds
from fulgurite.plan.step_time import (
    DispatchShape,
    LayerWork,
    Traffic,
    chance_of_any,
    count_dispatch_traffic,
    predict_all_gather_seconds,
    predict_all_reduce_seconds,
    predict_dispatch_seconds,
    predict_send_seconds,
    time_layers,
)

# 100 bytes/s inside a node, 10 bytes/s between nodes.
LINKS = LinkSpeeds(link=100.0, network=10.0, link_latency=1.0, network_latency=2.0)
# Four nodes of two ranks; one expert a rank, of which a token selects all: every rank gets every row.
EVERY = DispatchShape(tokens=5, top_k=8, num_experts=8, row_bytes=20, num_ranks=8, ranks_per_node=2)


def test_all_to_all_sends_a_row_to_every_rank() -> None:
    traffic = count_dispatch_traffic(EVERY, "all_to_all")
    assert traffic == Traffic(5 * 20 * 1, 5 * 20 * 6)
    assert predict_dispatch_seconds(traffic, LINKS) == pytest.approx(600 / 10 + 2)
    assert count_dispatch_traffic(EVERY, "symmetric") == traffic


def test_hierarchical_sends_one_row_a_node() -> None:
    traffic = count_dispatch_traffic(EVERY, "hierarchical")
    # Three other nodes; then every rank passes the rows of four nodes on to one neighbour.
    assert traffic == Traffic(5 * 20 * 4, 5 * 20 * 3, is_phased=True)
    assert predict_dispatch_seconds(traffic, LINKS) == pytest.approx(300 / 10 + 2 + 400 / 100 + 1)


def test_one_node_has_no_network() -> None:
    shape = DispatchShape(5, 8, 8, 20, num_ranks=8, ranks_per_node=8)
    for transport in ("symmetric", "all_to_all", "hierarchical"):
        traffic = count_dispatch_traffic(shape, transport)
        assert traffic == Traffic(5 * 20 * 7)
        assert predict_dispatch_seconds(traffic, LINKS) == pytest.approx(7 + 1)


def test_expected_ranks_of_a_token() -> None:
    """Two of four experts, two a rank: of six pairs, five have an expert of the other rank."""
    assert chance_of_any(4, 2, 2) == pytest.approx(5 / 6)
    shape = DispatchShape(6, 2, 4, 10, num_ranks=2, ranks_per_node=2)
    assert count_dispatch_traffic(shape, "all_to_all").link_bytes == pytest.approx(6 * 10 * 5 / 6)
    assert chance_of_any(8, 8, 1) == 1.0 and chance_of_any(8, 1, 8) == 1.0
    assert chance_of_any(8, 2, 0) == 0.0


def test_no_tokens_take_a_latency() -> None:
    shape = DispatchShape(0, 2, 4, 10, num_ranks=2, ranks_per_node=2)
    traffic = count_dispatch_traffic(shape, "all_to_all")
    assert predict_dispatch_seconds(traffic, LINKS) == 1.0


def test_all_reduce_inside_and_between_nodes() -> None:
    assert predict_all_reduce_seconds(400, 1, 8, LINKS) == 0.0
    # Half of 400 bytes is sent twice.
    assert predict_all_reduce_seconds(400, 2, 8, LINKS) == pytest.approx(400 / 100 + 1)
    # Inside a node as before; then each of two ranks reduces its 200 bytes over two nodes.
    assert predict_all_reduce_seconds(400, 4, 2, LINKS) == pytest.approx(5 + 200 / 10 + 2)
    assert predict_all_gather_seconds(400, 2, 8, LINKS) == pytest.approx(200 / 100 + 1)
    assert predict_send_seconds(50, True, LINKS) == pytest.approx(5 + 2)
    assert predict_send_seconds(50, False, LINKS) == pytest.approx(0.5 + 1)


def test_a_layer_takes_the_longer_of_reads_and_compute() -> None:
    layers = [LayerWork(bytes=10, flops=4), LayerWork(bytes=2, flops=40)]
    step = time_layers(3, layers, bandwidth=2.0, flops_per_second=4.0)
    assert (step.memory, step.compute, step.layers) == (6.0, 11.0, 5.0 + 10.0)
    assert step.total == 15.0 and step.tokens_per_second == pytest.approx(3 / 15)
