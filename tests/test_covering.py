"""Of a test marked `covering`, the normal run has every value of every parameter."""

from __future__ import annotations

import itertools

from tests.covering import choose_covering


def test_every_value_of_every_axis_is_chosen():
    cases = list(itertools.product("abcde", (1, 2), (True, False, None)))
    chosen = [cases[position] for position in choose_covering(cases)]
    assert len(chosen) == 5
    for axis in zip(*cases):
        assert set(axis) == set(list(zip(*chosen))[list(zip(*cases)).index(axis)])


def test_values_are_paired_in_turn():
    """Not every program with the first mode."""
    cases = list(itertools.product(range(6), ("train", "infer")))
    modes = [cases[position][1] for position in choose_covering(cases)]
    assert sorted(modes) == ["infer"] * 3 + ["train"] * 3


def test_one_axis_keeps_every_case():
    assert choose_covering([(name,) for name in "abc"]) == {0, 1, 2}
    assert choose_covering([("x", "only")]) == {0} and choose_covering([]) == set()
