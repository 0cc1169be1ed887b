"""The suite `mla` on tiny shapes: every candidate computes the same, and every line is whole."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from fulgurite import cli, native
from fulgurite.bench import mla, mla_prompts
from fulgurite.kernels.mla.prefill_plan import MLASizes

pytestmark = pytest.mark.skipif(native.find_compiler() is None, reason="needs a C++ compiler")
SIZES = {
    "CONTEXT": 128,
    "KV_LORA_RANK": 32,
    "NOPE_DIM": 16,
    "ROPE_DIM": 8,
    "VALUE_DIM": 12,
    "NUM_HEADS": {"tiny": 3},
}
TINY = replace(
    mla.CPU,
    batches={"tiny": (1, 2)},
    prompts=((70, 5),),
    cold=1 << 16,
    prompt_batches=(mla_prompts.PromptBatch("3 x 9", ((9, 0),) * 3),),
)


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


@pytest.mark.parametrize("lens", [((9, 0),) * 3, ((70, 5), (1, 0), (16, 64), (33, 0))], ids=len)
def test_all_versions_of_many_prompts_are_the_same_attention(lens) -> None:
    sizes = MLASizes(32, 16, 8, 12)
    problem = mla_prompts.make_prompts(sizes, 3, lens, torch.device("cpu"), torch.float32)
    expected = mla_prompts.fulgurite_call(problem)()
    for make_call in (mla_prompts.loop_call, mla_prompts.padded_call):
        torch.testing.assert_close(make_call(problem)(), expected, rtol=1e-4, atol=1e-5)


def test_a_ragged_batch_is_the_same_for_a_seed() -> None:
    first, second = (mla_prompts.draw_ragged(32, 768, 1024, seed=3) for _ in range(2))
    assert first == second and first != mla_prompts.draw_ragged(32, 768, 1024, seed=4)
    assert all(16 <= new <= 768 and 0 <= before <= 1024 for new, before in first.lens)
    assert 0 < sum(before > 0 for _, before in first.lens) < 32


def test_the_command_writes_its_lines(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mla.json"
    assert cli.main(["bench", "mla", "--device", "cpu", "--output", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    decoded = [(row["batch"], row["kept"]) for row in rows if row["part"] == "decode"]
    assert decoded == [(batch, dtype) for batch in (1, 2) for dtype in TINY.cache_dtypes]
    assert all(row["bytes"] > 0 and row["of_floor"] > 0 for row in rows if row["part"] == "decode")
    (asked,) = [row for row in rows if row["part"] == "prompt"]
    assert asked["expanded"] and asked["products"] < asked["if_absorbed"]
    (many,) = [row for row in rows if row["part"] == "prompts"]
    assert many["tokens"] == 27 and many["of_floor"] > 0
    assert min(many[key] for key in ("ours_ms", "loop_ms", "padded_ms")) > 0
    out = capsys.readouterr().out
    assert "of copy" in out and "products saved" in out and "padded" in out
