"""Twins: the time to a loss, and a short run of both."""

from __future__ import annotations

import pytest

from fulgurite.bench.train import twin


def test_times_between_points() -> None:
    curve = [(1.0, 5.0), (2.0, 4.0), (3.0, 4.5), (4.0, 3.0)]
    assert twin.seconds_to(curve, 5.0) == 1.0
    assert twin.seconds_to(curve, 4.25) == 1.75
    assert twin.seconds_to(curve, 3.0) == 4.0
    with pytest.raises(AssertionError):
        twin.seconds_to(curve, 2.0)


def test_both_reach_the_same_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    curves = {twin.DENSE: [(1.0, 5.0), (2.0, 4.0)], twin.MIXTURE: [(1.0, 4.0), (2.0, 3.0)]}
    found = iter(curves.values())
    figures = {"parameters": 1, "active_parameters": 1, "tokens_per_second": 1, "best_loss": 1}
    monkeypatch.setattr(twin, "build_parts", lambda config: config)
    monkeypatch.setattr(twin, "train_for", lambda parts, budget: (next(found), dict(figures)))
    rows = {row["model"]: row for row in twin.measure_twins("cpu", quick=True)}
    assert {row["target_loss"] for row in rows.values()} == {4.0}
    assert rows[twin.MIXTURE]["speedup"] == 2.0 and rows[twin.DENSE]["speedup"] == 1.0
    assert "2.00" in twin.format_twins(list(rows.values()))
