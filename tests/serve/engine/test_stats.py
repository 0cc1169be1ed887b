"""What an engine says of itself: counts, log records, profiles."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from fulgurite.logs import JsonFormatter
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.profile import check_profile_path, write_profile
from tests.serve.engines import make_engine, quantized_model, tiny_model

PROMPTS = [[1, 2, 3], list(range(40)), [5] * 9]
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def test_counts_of_finished_requests(model):
    engine = make_engine(model, max_batched_tokens=16)
    assert engine.stats().steps == 0 and engine.stats().step_seconds == {}
    engine.generate(PROMPTS, PARAMS)
    stats = engine.stats()
    assert (stats.waiting, stats.running, stats.finished) == (0, 0, {"length": 3})
    assert stats.prefill_tokens == sum(map(len, PROMPTS))
    assert stats.sampled_tokens == 3 * 6
    assert stats.decode_tokens == 3 * 5  # the first token comes from the prompt
    assert stats.used_cache_blocks == 0 < stats.prefix_cache_blocks <= stats.cache_blocks
    assert stats.tokens_per_second > 0
    assert 0 < stats.step_seconds[50] <= stats.step_seconds[90] <= stats.step_seconds[99]
    assert stats.max_batched_tokens == stats.planned_batched_tokens == 16
    json.dumps(stats.to_dict())


def test_prefix_hits_and_preemptions(model):
    engine = make_engine(model)
    engine.generate([PROMPTS[1]], PARAMS)
    cached = engine.generate([PROMPTS[1]], PARAMS)[0].cached_tokens
    assert engine.stats().prefix_cached_tokens == cached > 0
    small = make_engine(model, cache_tokens=64, context=64)
    small.generate([[1] * 20, [2] * 20, [3] * 20], SamplingParams(max_tokens=30, ignore_eos=True))
    assert small.stats().preemptions == small.scheduler.num_preemptions > 0


def test_requests_that_run_and_wait(model):
    engine = make_engine(model, max_sequences=2)
    for prompt in PROMPTS:
        engine.add_request(prompt, PARAMS)
    engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (2, 1) and stats.used_cache_blocks > 0
    assert "2 running, 1 waiting" in str(stats)


def test_captures_formats_and_memory():
    engine = make_engine(quantized_model())
    engine.generate([[1, 2]], PARAMS)
    stats = engine.stats()
    assert stats.captured_steps == (1,) and stats.no_capture_reason is None
    assert stats.memory.weight_formats.keys() == {"q8_0", "float32"}
    assert stats.memory.held == sum(stats.memory.weight_formats.values()) + engine.plan.kv_cache
    assert "q8_0" in str(stats) and "decode steps of 1 requests" in str(stats)


def test_log_records_of_requests_and_steps(model, caplog):
    engine = make_engine(model, max_batched_tokens=16)
    with caplog.at_level(logging.DEBUG, logger="fulgurite"):
        engine.generate(PROMPTS, PARAMS)
    fields = [record.fields for record in caplog.records if hasattr(record, "fields")]
    steps = [one for one in fields if one["event"] == "step"]
    requests = [one for one in fields if one["event"] == "request"]
    assert [one["step"] for one in steps] == list(range(1, engine.stats().steps + 1))
    assert sum(one["prefill_tokens"] for one in steps) == sum(map(len, PROMPTS))
    assert {one["request"]: one["prompt_tokens"] for one in requests} == {
        f"request-{index}": len(prompt) for index, prompt in enumerate(PROMPTS)
    }
    assert "step 1: prefill 1 x 13 + 1 x 3, " in caplog.text
    assert "decode 3, " in caplog.text
    line = json.loads(JsonFormatter().format(caplog.records[-1]))
    assert line["event"] == "request" and line["level"] == "info"
    assert line["message"].startswith(line["request"])


def test_profile_has_named_steps_and_kernels(tmp_path):
    """A captured step replays kernels without Python; under a profiler they have their names."""
    engine, path = make_engine(quantized_model()), tmp_path / "folder" / "trace.json"
    engine.generate([[1, 2]], PARAMS)  # captures
    check_profile_path(path)
    with write_profile(path, torch.device("cpu")):
        profiled = engine.generate([[1, 2, 3, 4, 5]], PARAMS)
    assert profiled[0].token_ids == engine.generate([[1, 2, 3, 4, 5]], PARAMS)[0].token_ids
    events = json.loads(path.read_text())["traceEvents"]
    names = [str(event.get("name")) for event in events]
    assert any(name.endswith(": prefill 1 x 5") for name in names)
    decode = next(event for event in events if str(event.get("name")).endswith(": decode 1"))
    inside = {
        event["name"]
        for event in events
        if event.get("ts", 0) >= decode["ts"]
        and event.get("ts", 0) + event.get("dur", 0) <= decode["ts"] + decode["dur"]
    }
    recorded = {call.kernel.name for call in next_recording(engine).calls}
    assert recorded <= inside


def next_recording(engine):
    """The recording of the captured step, from its closure."""
    steps = engine.runner.recorded_steps
    step = next(step for shape, step in steps.items() if shape.is_decode)
    cells = [cell.cell_contents for cell in step.replay.__closure__]
    return next(cell for cell in cells if hasattr(cell, "calls"))
