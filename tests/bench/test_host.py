"""The suite `host`: every candidate of a case computes the same, and every row is whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fulgurite import cli, native
from fulgurite.bench import host, host_ranks

pytestmark = pytest.mark.skipif(native.find_compiler() is None, reason="needs a C++ compiler")


@pytest.mark.parametrize("number", range(len(host.make_cases("cpu"))))
def test_all_candidates_compute_the_same(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(host.CANDIDATES, host.INDUCTOR, lambda f: f)  # compiling takes seconds
    torch.manual_seed(0)
    case = host.make_cases("cpu")[number]
    torch.manual_seed(1)
    results = {}
    for name, step in host.make_steps(case, "cpu"):
        torch.manual_seed(2)
        results[name] = step()
    assert set(results) == {host.EAGER, host.INDUCTOR, host.OURS}
    tolerance = 2e-2 if case.name == "MoE layer" else 1e-4  # bfloat16
    ours, eager = results[host.OURS], results[host.EAGER]
    torch.testing.assert_close(ours, eager, rtol=tolerance, atol=tolerance)


def test_the_command_writes_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    candidates = {name: host.CANDIDATES[name] for name in (host.EAGER, host.OURS)}
    monkeypatch.setattr(host, "CANDIDATES", candidates)  # delitem reorders it
    meshes = [mesh for mesh in host_ranks.CASES if "data" in mesh.options]  # ranks take seconds
    monkeypatch.setattr(host_ranks, "CASES", meshes)
    path = tmp_path / "host.json"
    arguments = ["bench", "host", "--device", "cpu", "--quick", "--output", str(path)]
    assert cli.main(arguments) == 0
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 2 * (len(host.make_cases("cpu")) - 2) + 1, "without rms_norm"
    assert rows[-1]["case"] == "decode step, data 2, expert 2"
    assert all(row["wall_us"] > 0 for row in rows)
    assert 0 < rows[-1]["host_us"] < rows[-1]["wall_us"]
    assert "block forward + backward" in capsys.readouterr().out


def test_some_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "host", "--device", "cpu", "--quick", "--only"]
    output = ["--output", str(tmp_path / "host.json")]
    assert cli.main([*arguments, "decode step, ONE", *output]) == 0
    out = capsys.readouterr().out
    assert "decode step, one rank" in out and "block" not in out
    assert cli.main([*arguments, "three ops", *output]) == 1
    assert "no case of the suite has 'three ops' in its name" in capsys.readouterr().err


def test_waits_for_the_device_are_no_host_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Event:
        def synchronize(self) -> None:
            now[0] += 5

    monkeypatch.setattr(host_ranks.time, "thread_time", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = host_ranks.HostClock()
    with clock.count_waits():
        Event().synchronize()
        now[0] += 1
    assert clock() == 1
    Event().synchronize()
    assert clock() == 6
