"""Routing histograms: as uneven as they say, and routes without repeated experts."""

from __future__ import annotations

import pytest
import torch

from fulgurite.bench.expert_routing import interpolate_load, make_routing

LOAD_LE = torch.tensor([[10, 30, 20, 40], [5, 20, 10, 5]])


@pytest.mark.parametrize(
    ("name", "busiest"), [("uniform", 1.0), ("zipf", 16 / 3.38073), ("sand", 1.8 * 16 / 15.5)]
)
def test_the_busiest_expert(name, busiest):
    routing = make_routing(name, 16, LOAD_LE)
    assert routing.busiest == pytest.approx(busiest, rel=1e-4)
    assert routing.probabilities_E.sum() == pytest.approx(1)


def test_loads_of_layers_are_sorted_and_interpolated():
    same = interpolate_load(LOAD_LE, 4)  # layers: 1.6, 1.2, .8, .4 and 2, 1, .5, .5
    torch.testing.assert_close(same, torch.tensor([1.8, 1.1, 0.65, 0.45]))
    torch.testing.assert_close(interpolate_load(LOAD_LE, 7)[1::2], (same[1:] + same[:-1]) / 2)


@pytest.mark.parametrize("name", ["uniform", "zipf", "sand"])
def test_routes_follow_the_histogram(name):
    routing = make_routing(name, 16, LOAD_LE)
    chosen_Tk = routing.draw(4000, 1, seed=3)
    counts_E = torch.bincount(chosen_Tk.flatten(), minlength=16) / 4000
    torch.testing.assert_close(counts_E, routing.probabilities_E, rtol=0, atol=0.03)
    several_Tk = routing.draw(100, 8, seed=3)
    assert all(len(set(row)) == 8 for row in several_Tk.tolist())
    assert torch.equal(several_Tk, routing.draw(100, 8, seed=3))
    assert routing.draw(0, 8, seed=3).shape == (0, 8)
