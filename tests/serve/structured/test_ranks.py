"""Grammars on several ranks: rank 0 has them, and all ranks compute the tokens that are forced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fulgurite.serve.engine.request import Result, SamplingParams
from fulgurite.serve.llm import LLM
from tests.serve.structured.test_engine import SCHEMA
from tests.serve.tiny_checkpoint import save_checkpoint

PROMPTS = ["Hello", "A long text, " * 4, "x", "Hello", "y"]
PARAMS = [
    SamplingParams(max_tokens=12, ignore_eos=True),
    SamplingParams(json_schema=SCHEMA, temperature=1.0, seed=2, max_tokens=90),
    SamplingParams(choices=["all of it is forced"]),
    SamplingParams(json_schema=SCHEMA, max_tokens=90),
    SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True),
]


def generate(path: Path, **options: int) -> list[Result]:
    with LLM(path, device="cpu", context=160, timeout=60.0, **options) as llm:
        results = llm.generate(PROMPTS, PARAMS)
        assert not any(llm.engine.audit().values())
        assert llm.engine.recorder.forced_tokens > 100
    return results


@pytest.mark.parametrize(
    "axes", [{"tensor": 2}, pytest.param({"data": 2}, marks=pytest.mark.slow)], ids=str
)
def test_replies_are_those_of_one_rank(tmp_path: Path, axes: dict[str, int]) -> None:
    path = save_checkpoint(tmp_path)
    wanted, found = generate(path), generate(path, **axes)
    for one, other in zip(wanted, found, strict=True):
        assert (one.finish_reason, one.error) == (other.finish_reason, other.error)
        if "data" in axes:  # shards of a product are added in another order
            assert one.token_ids == other.token_ids
    assert json.loads(found[1].text) and json.loads(found[3].text)
    assert found[2].text == "all of it is forced"
