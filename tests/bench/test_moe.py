"""The suite `moe` on a tiny layer: every candidate computes the same, and every line is whole."""

from __future__ import annotations

import json

import pytest
import torch

from fulgurite import cli, native
from fulgurite.bench import moe
from fulgurite.kernels.moe.ops import fused_experts

pytestmark = pytest.mark.skipif(native.find_compiler() is None, reason="needs a C++ compiler")
TINY = moe.LayerShape("tiny", 64, 32, 8, 2)


def test_all_candidates_are_the_same_layer() -> None:
    layer = moe.make_expert_weights(TINY, "float32", "cpu")
    routes = moe.random_routes(TINY, 4, "cpu")[0]
    x = torch.randn(4, 64)
    with torch.no_grad():
        ours = fused_experts(x, routes, *layer)
        for name, function in moe.find_baselines(TINY, layer, 4):
            found = function(x, routes, *layer)
            torch.testing.assert_close(found, ours, rtol=1e-4, atol=1e-5, msg=name)


def test_a_floor_is_the_larger_of_reading_and_computing() -> None:
    layer = moe.make_expert_weights(TINY, "float32", "cpu")
    routes = [moe.Routes(torch.ones(3, 2), torch.tensor([[0, 1], [0, 1], [0, 5]]))]
    slow = moe.Roofline(bandwidth=1.0, flops=1e30)
    nbytes = 3 * 3 * 64 * 32 * 4  # three experts, three matrices
    assert moe.roofline_seconds(TINY, layer, routes, slow) == nbytes
    busy = moe.Roofline(bandwidth=1e30, flops=1.0)
    assert moe.roofline_seconds(TINY, layer, routes, busy) == 6 * 6 * 64 * 32


def test_the_command_writes_its_lines(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(moe, "CPU_SHAPES", (TINY,))
    monkeypatch.setattr(moe, "CPU_TOKENS", (1, 3))
    monkeypatch.setattr(moe, "measure_cpu_roofline", lambda: moe.Roofline(1e10, 1e11))
    path = tmp_path / "moe.json"
    assert cli.main(["bench", "moe", "--device", "cpu", "--output", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["kind"], row["tokens"]) for row in rows] == [
        (kind, tokens) for kind in moe.CPU_WEIGHT_FORMATS for tokens in (1, 3)
    ]
    assert all(row["ours_ms"] > 0 and row["percent_of_floor"] > 0 for row in rows)
    assert all(row["loop_ms"] > 0 for row in rows if row["kind"] == "float32")
    assert "× best other" in capsys.readouterr().out
