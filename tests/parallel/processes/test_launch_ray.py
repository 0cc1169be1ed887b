"""Ranks that Ray starts. Needs the package ray; without it these tests are skipped."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="pip install ray")

from fulgurite.errors import ArgumentError, RankError
from fulgurite.parallel.processes.launch_ray import (
    Place,
    launch_ray,
    order_by_node,
    rank_environments,
)
from tests.parallel.processes.ray_cases import fail_on_one, sum_over_ranks


def test_ranks_of_one_machine_are_consecutive():
    places = [Place(*one) for one in (("a", "A", 3), ("b", "B", 0), ("a", "A", 1), ("b", "B", 5))]
    order = order_by_node(places)
    assert order == [2, 0, 1, 3]
    found = rank_environments([places[index] for index in order], 1234)
    assert [one["RANK"] for one in found] == ["0", "1", "2", "3"]
    assert [one["LOCAL_RANK"] for one in found] == ["1", "3", "0", "5"]  # their GPUs
    assert [one["GROUP_RANK"] for one in found] == ["0", "0", "1", "1"]
    assert {one["LOCAL_WORLD_SIZE"] for one in found} == {"2"}
    assert {(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in found} == {("A", "1234")}


@pytest.mark.slow  # starts a Ray cluster on this machine
def test_ranks_work_together_and_a_failure_names_its_rank():
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error")
    try:
        found = launch_ray(sum_over_ranks, 2, 10, gpus_per_rank=0)
        assert found == [(0, 30.0, (0, 0)), (1, 30.0, (0, 0))]
        with pytest.raises(RankError, match="rank 1 of 2 failed: ValueError: no more of rank 1"):
            launch_ray(fail_on_one, 2, gpus_per_rank=0)
        with pytest.raises(ArgumentError, match="no room for 3 ranks"):
            launch_ray(fail_on_one, 3, gpus_per_rank=0, timeout=2.0)
    finally:
        ray.shutdown()
