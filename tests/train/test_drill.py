"""The drill: random kills change no bit; what changes bits is found."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fulgurite.errors import ArgumentError
from fulgurite.train.config import TrainConfig
from fulgurite.train.drill import DrillReport, FinalState, Kill, Killer, Pace, run_drill
from fulgurite.train.heartbeat import Beat
from tests.train import tiny_run
from tests.train.test_supervisor import make_config


def train_differently(config: TrainConfig) -> None:
    """A run whose bits depend on its folder."""
    if Path(config.output or "").name == "disturbed":
        torch.manual_seed = lambda seed: torch.default_generator.manual_seed(6)
    tiny_run.train(config)


@pytest.mark.parametrize("ranks", [1, 2])
def test_kills_change_no_bit(tmp_path: Path, ranks: int) -> None:
    config = replace(make_config(tmp_path, sleep=0.05), steps=12)
    report = run_drill(config, ranks, tiny_run.train, kills=3, seed=1)
    assert report.has_passed, report.describe()
    assert len(report.kills) == 3
    assert all(kill.step is None or kill.step < 12 for kill in report.kills)
    assert len(report.undisturbed.losses) == 12
    assert report.undisturbed.step == 12
    assert "passed" in report.describe() and report.undisturbed.weights in report.describe()
    assert json.loads((tmp_path / "drill.json").read_text())["has_passed"]


@pytest.mark.parametrize("step", [0, 3])
def test_ranks_faster_than_the_undisturbed_ones_are_killed_in_time(step: int) -> None:
    """A drill whose kills come too late would fail, though nothing is wrong with the run."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    beats = (Beat(number, number) for number in itertools.count(1))
    group: Any = SimpleNamespace(pids=[process.pid], beats=lambda: [next(beats)])
    killer = Killer(1, 0, Pace(first_step=600.0, step=600.0, steps=5))
    thread = threading.Thread(target=killer._kill, args=(group, 0, step, 600.0), daemon=True)
    thread.start()
    try:
        assert process.wait(20) == -signal.SIGKILL
        thread.join()
        assert killer.left == 0 and killer.kills[0].step in (step + 1, step + 2)
    finally:
        process.kill()
        process.wait()


def test_another_result_fails_the_drill(tmp_path: Path) -> None:
    report = run_drill(make_config(tmp_path), 1, train_differently, kills=1, seed=1)
    assert not report.has_passed
    assert report.differing_steps[0] == 1
    assert "FAILED: losses differ from step 1 on" in report.describe()


def test_equal_losses_with_other_weights_fail() -> None:
    first = FinalState(2, "a", "b", {"1": "0x1p+0"})
    kills = (Kill(0, 1.0, None),)
    assert DrillReport(first, first, kills).has_passed
    assert not DrillReport(first, replace(first, everything="c"), kills).has_passed
    assert (
        "final states differ"
        in DrillReport(first, replace(first, everything="c"), kills).describe()
    )
    assert not DrillReport(first, first, ()).has_passed
    assert "too short" in DrillReport(first, first, ()).describe()
    assert DrillReport(first, replace(first, losses={}), ()).differing_steps == [1]


def test_a_drill_needs_bits_to_compare(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with pytest.raises(ArgumentError, match="not deterministic"):
        run_drill(replace(config, deterministic=False), 1, tiny_run.train)
    with pytest.raises(ArgumentError, match="0 kills"):
        run_drill(config, 1, tiny_run.train, kills=0)
    with pytest.raises(ArgumentError, match="no folder"):
        run_drill(replace(config, output=None), 1, tiny_run.train)
