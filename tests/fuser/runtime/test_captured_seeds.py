"""Random kernels inside CUDA graphs read seeds that are new at every replay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fulgurite.cudagraph.seeds import CapturedSeeds, capture_seeds
from tests.cudagraph.fake import ReplayedSeeds
from tests.fuser import support

RUNS_ON_TRITON = True


def test_numbers_of_a_replay_are_those_of_a_call() -> None:
    if support.TARGET == "cpp":
        pytest.skip("regions of CPUs are not captured")
    with support.target_device():
        x = torch.ones(1000)
    region = support.lower_for_target(lambda x: (torch.rand_like(x), F.dropout(x, 0.5)), (x,))
    region(x)
    assert region.is_capturable and "random_seed_address" in region.source
    torch.manual_seed(7)
    expected = [region(x) for _ in range(4)]
    seeds = CapturedSeeds(x.device)
    with capture_seeds(seeds):
        captured = region(x)
    assert len(seeds.draws) == 1
    torch.manual_seed(7)
    for numbers in expected:
        seeds.draw()
        with capture_seeds(ReplayedSeeds(seeds)):
            torch.testing.assert_close(region(x), numbers, rtol=0, atol=0)
    assert not torch.equal(captured[0], expected[0][0])


def test_several_seeds_are_written_in_order() -> None:
    seeds = CapturedSeeds(torch.device("cpu"))
    for value in (3, 1 << 62, (1 << 63) - 1):
        seeds.add(lambda value=value: value)
    seeds.draw()
    assert seeds.memory[:3].tolist() == [3, 1 << 62, (1 << 63) - 1]
    assert seeds.last_address == seeds.memory[2:].data_ptr()
