"""The suite `mla` on tiny shapes: every candidate computes the same, and every line is whole."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from fulgurite import cli, native
from fulgurite.bench import mla

pytestmark = pytest.mark.skipif(native.find_compiler() is None, reason="needs a C++ compiler")
SIZES = {
    "CONTEXT": 128,
    "KV_LORA_RANK": 32,
    "NOPE_DIM": 16,
    "ROPE_DIM": 8,
    "VALUE_DIM": 12,
    "NUM_HEADS": {"tiny": 3},
}
TINY = replace(mla.CPU, batches={"tiny": (1, 2)}, prompts=((70, 5),), cold=1 << 16)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SIZES.items():
        monkeypatch.setattr(mla, name, value)
    monkeypatch.setattr(mla, "CPU", TINY)
    monkeypatch.setattr(mla, "measure_roofline", lambda run: (1e10, 1e11))


def test_all_candidates_are_the_same_attention() -> None:
    problem = mla.make_problem(TINY, 3, 2, 128, "float32", 2)
    q, rotation = torch.randn(2, 3, 24), mla.random_rope(2, "cpu")
    # the torch version reads contiguous latents, so blocks must be in order
    in_order = torch.arange(8, dtype=torch.int32).view(2, 2, 2)
    problem = replace(problem, block_tables=list(in_order))
    for ours, paged, torch_call in zip(
        mla.fulgurite_calls(problem, q, rotation, 1),
        mla.paged_attention_calls(problem, q, rotation),
        mla.torch_calls(problem, q, rotation),
        strict=True,
    ):
        wanted = ours()
        torch.testing.assert_close(paged(), wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch_call(), wanted, rtol=1e-4, atol=1e-5)


def test_the_command_writes_its_lines(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mla.json"
    assert cli.main(["bench", "mla", "--device", "cpu", "--output", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    decoded = [(row["batch"], row["kept"]) for row in rows if row["part"] == "decode"]
    assert decoded == [(batch, dtype) for batch in (1, 2) for dtype in TINY.cache_dtypes]
    assert all(row["bytes"] > 0 and row["of_floor"] > 0 for row in rows if row["part"] == "decode")
    (asked,) = [row for row in rows if row["part"] == "prompt"]
    assert asked["expanded"] and asked["products"] < asked["if_absorbed"]
    out = capsys.readouterr().out
    assert "of copy" in out and "products saved" in out
