"""A sample of a test's combinations of parameters that has every value of every parameter."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence

import pytest


def mark_uncovering(items: Iterable[pytest.Item]) -> None:
    """Mark `slow` what a test marked `covering` doesn't need for every value of its parameters."""
    tests: defaultdict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        is_marked = item.get_closest_marker("covering") and not item.get_closest_marker("slow")
        if isinstance(item, pytest.Function) and is_marked:
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        # one id for each `parametrize`; `indices` and `params` don't tell which values belong together
        sample = choose_covering([case.callspec._idlist for case in cases])
        for position, case in enumerate(cases):
            if position not in sample:
                case.add_marker(pytest.mark.slow)


def choose_covering(cases: Sequence[Sequence[Hashable]]) -> set[int]:
    """Positions of few cases that have each value of each axis, and pair the values in turn."""
    uses: Counter[tuple[int, Hashable]] = Counter()
    left = {position: [*enumerate(case)] for position, case in enumerate(cases)}
    chosen: set[int] = set()
    while left:

        def rank(position: int) -> tuple[int, int]:
            values = left[position]
            return sum(not uses[value] for value in values), -sum(uses[value] for value in values)

        best = max(left, key=rank)
        if not rank(best)[0]:
            break
        uses.update(left.pop(best))
        chosen.add(best)
    return chosen
