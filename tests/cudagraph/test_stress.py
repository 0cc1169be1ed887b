"""A short run of the stress test; `python -m tests.cudagraph.stress --steps 10000` is the long one."""

from __future__ import annotations

import pytest

from tests.cudagraph.stress import run_stress


def test_short_stress():
    report = run_stress("cpu", steps=120, seed=1)
    assert "replays" in report and " 0 replays" not in report, report


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [True, "auto"])
def test_short_stress_on_a_gpu(mode):
    print(run_stress("cuda", steps=300, seed=2, mode=mode))
