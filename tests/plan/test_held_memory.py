"""The memory plan against what an engine holds: tensors that are alive after it has generated."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="it writes the checkpoints")

import transformers

from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.llm import LLM
from tests.models.reference_models import build_reference
from tests.plan.held_memory import HostAllocationTracker, live_tensors, storage_bytes

TOLERANCE = 0.05
SIZES = {"vocab_size": 211, "hidden_size": 128}  # weights outweigh block tables and buffers
# Each family once, formats in turn: dense, GGUF blocks, FP8 rows, FP4 and INT4 with packed panels.
CASES = [
    ("llama", None),
    ("mistral", "q8_0"),
    ("qwen3", "fp8"),
    ("gemma2", "nvfp4"),
    ("qwen2", "int4_g32"),
    ("mixtral", "q4_0"),
    ("qwen3_moe", "nvfp4"),
    ("deepseek_v3", "q8_0"),
    ("gpt_oss", "int4_g32"),
    ("llama4", "fp8"),
    ("granite", "mxfp4"),
    ("olmoe", None),
]
PROMPTS = [[1, 2, 3] * 9]
OPTIONS = {"device": "cpu", "context": 64, "max_sequences": 2, "max_batched_tokens": 64}


def load(family: str, format: str | None, folder: Path, **sizes: object) -> LLM:
    transformers.utils.logging.disable_progress_bar()
    build_reference(family, **sizes).save_pretrained(folder)
    return LLM(folder, quantize=format, **OPTIONS)


@pytest.mark.parametrize(("family", "format"), CASES, ids=str)
def test_plan_is_what_is_held(family, format, tmp_path):
    before = live_tensors()  # kept alive: their addresses are not used again
    llm = load(family, format, tmp_path, **SIZES)
    llm.generate(PROMPTS, SamplingParams(max_tokens=4, ignore_eos=True))
    known = storage_bytes(before)
    held = sum(count for id, count in storage_bytes(live_tensors()).items() if id not in known)
    planned = llm.plan.weights + llm.plan.kv_cache + llm.plan.workspaces + llm.plan.states
    assert abs(planned - held) <= TOLERANCE * held, f"planned {planned}, held {held}"


@pytest.mark.parametrize(
    ("family", "format"), [("llama", None), ("mixtral", None), ("gemma2", "q8_0")], ids=str
)
def test_a_full_step_needs_no_more_than_planned(family, format, tmp_path):
    llm = load(family, format, tmp_path, **SIZES)
    llm.generate(PROMPTS, SamplingParams(max_tokens=2, ignore_eos=True))
    for start in range(2):
        llm.engine.add_request([start + 7] * 32, SamplingParams(max_tokens=1))
    with HostAllocationTracker() as tracker:
        llm.engine.step()
    assert llm.stats().finished["length"] == 3
    assert 0.3 * llm.plan.activations < tracker.peak <= 1.05 * llm.plan.activations
