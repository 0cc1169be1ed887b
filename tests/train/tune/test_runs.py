"""Whole runs by the trainer: every method and task, resume, adapters and merged weights that load."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="it loads merged weights")

import transformers

from fulgurite.models import CausalLM, load_model
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.llm import LLM
from fulgurite.train.checkpoint import list_checkpoints
from fulgurite.train.config import (
    CheckpointSection,
    DataSection,
    EvaluateSection,
    LogSection,
    ModelSection,
    OptimizerSection,
    TrainConfig,
    TuneSection,
)
from fulgurite.train.stop import StopRequest
from fulgurite.train.trainer import hash_data, replay, train
from fulgurite.train.tune.peft_files import WEIGHTS_FILE
from fulgurite.train.tune.peft_loading import load_adapters
from fulgurite.train.verify import verify_run
from tests.models.reference_models import build_reference
from tests.train.tune.chat_files import CHATML, VOCAB_SIZE, byte_backend, message, write_lines

FILE = "tests.train.tune.test_runs"


def reward_a(prompt: Any, completion: str, **columns: Any) -> float:
    """The share of the letter a."""
    return completion.count("a") / max(1, len(completion))


def save_base(folder: Path, name: str = "dots1") -> Path:
    """A model with a tokenizer and a chat template."""
    model = build_reference(name, num_hidden_layers=2, vocab_size=VOCAB_SIZE)
    model.save_pretrained(folder)
    byte_backend().save(str(folder / "tokenizer.json"))
    settings = {"chat_template": CHATML, "eos_token": "<|im_end|>", "tokenizer_class":
        "PreTrainedTokenizerFast"}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def make_data(folder: Path, task: str) -> str:
    lines: list[object]
    if task == "chat":
        lines = [
            {"messages": [message("user", f"{n}"), message("assistant", f"{n}{n}")]}
            for n in range(12)
        ]
    elif task == "dpo":
        lines = [{"prompt": f"{n}=", "chosen": "a", "rejected": "b"} for n in range(12)]
    elif task == "grpo":
        lines = [{"prompt": f"{n}="} for n in range(6)]
    else:
        lines = [{"text": "Once upon a time there was a fish. " * 6}] * 3
    return write_lines(folder / f"{task}.jsonl", lines)


def make_config(folder: Path, base: Path, task: str, method: str, **fields: Any) -> TrainConfig:
    tune = TuneSection(
        method=method, task=task, rank=4, quantize="int8", rewards=(f"{FILE}:reward_a",),
        group_size=4, max_tokens=6,
    )  # fmt: skip
    config = TrainConfig(
        output=str(folder / "run"), device="cpu", steps=4, batch_size=4, microbatch_size=4,
        compile=False,
        model=ModelSection(init_from=str(base), dtype="float32"),
        data=DataSection(train=(make_data(folder, task),), sequence_length=64, holdout=4),
        optimizer=OptimizerSection(learning_rate=2e-3, warmup=0.0),
        evaluate=EvaluateSection(every=2, batches=1),
        checkpoint=CheckpointSection(every=2),
        log=LogSection(live=False, report=False),
        tune=tune,
    )  # fmt: skip
    return replace(config, **fields)


def compute_logits(model: CausalLM) -> torch.Tensor:
    tokens = torch.arange(40, 60)[None]
    with torch.no_grad():
        return model(tokens, torch.arange(20)[None])


@pytest.mark.parametrize(
    "task, method, is_compiled",
    [
        ("chat", "lora", False),
        ("chat", "qlora", False),
        ("chat", "none", False),
        ("dpo", "lora", False),
        ("grpo", "lora", True),
        ("text", "lora", False),
    ],
)
def test_a_run_leaves_adapters_and_weights(
    task: str, method: str, is_compiled: bool, tmp_path
) -> None:
    base = save_base(tmp_path / "base")
    config = make_config(tmp_path, base, task, method, compile=is_compiled)
    result = train(config)
    assert result.is_finished and result.steps == 4 and result.export is not None
    before, after = load_model(base), load_model(result.export)
    assert float((compute_logits(after) - compute_logits(before)).abs().max()) > 1e-5
    theirs = transformers.AutoModelForCausalLM.from_pretrained(result.export)
    with torch.no_grad():
        expected = theirs(torch.arange(40, 60)[None]).logits
    torch.testing.assert_close(compute_logits(after), expected, rtol=1e-3, atol=1e-3)
    if not is_compiled:
        report = verify_run(config.output, replay=replay, hash_data=hash_data, steps=1, seed=0)
        assert report.has_passed, report.describe()
    if method == "none":
        assert not (tmp_path / "run" / "adapter").exists()
        return
    names = load_adapters(before, tmp_path / "run" / "adapter")
    assert any("experts.gate_up_proj" in name for name in names)
    if method == "lora":  # the base is the one on disk
        scale = float(expected.abs().max())
        torch.testing.assert_close(
            compute_logits(before), compute_logits(after), rtol=1e-3, atol=1e-4 * scale
        )


def test_the_merged_model_serves_the_chat(tmp_path) -> None:
    base = save_base(tmp_path / "base", "qwen3")
    config = make_config(tmp_path, base, "chat", "lora", steps=2)
    result = train(config)
    with LLM(str(result.export), device="cpu", context=64) as llm:
        reply = llm.chat([message("user", "7")], SamplingParams(max_tokens=4))
    assert len(reply.token_ids) >= 1 and reply.finish_reason in ("stop", "length")


def test_adapters_go_on_from_a_checkpoint_to_the_same_bits(tmp_path) -> None:
    base = save_base(tmp_path / "base")
    config = make_config(tmp_path, base, "chat", "qlora", deterministic=True, microbatch_size=1)
    whole = train(replace(config, output=str(tmp_path / "whole")))
    first = train(replace(config, output=str(tmp_path / "parts"), steps=4))
    assert first.loss == whole.loss
    checkpoints = sorted((tmp_path / "parts" / "checkpoints").iterdir())
    assert len(checkpoints) == 2
    for path in checkpoints[1:]:  # as if the run had ended after step 2
        for file in sorted(path.rglob("*"), reverse=True):
            file.unlink() if file.is_file() else file.rmdir()
        path.rmdir()
    again = train(replace(config, output=str(tmp_path / "parts")))
    assert again.loss == whole.loss
    weights = [
        (tmp_path / run / "adapter" / "adapter_model.safetensors").read_bytes()
        for run in ("whole", "parts")
    ]
    assert weights[0] == weights[1]


def test_a_run_stops_and_saves_between_two_samplings(tmp_path, monkeypatch) -> None:
    """A signal in the middle of `updates` steps: the run that goes on has the bits of a whole one."""
    base = save_base(tmp_path / "base")
    config = make_config(
        tmp_path, base, "grpo", "lora", steps=6, deterministic=True, microbatch_size=1,
        checkpoint=CheckpointSection(every=1, keep=9),
    )  # fmt: skip
    config = replace(config, tune=replace(config.tune, updates=2))
    whole = train(replace(config, output=str(tmp_path / "whole")))
    polls: list[int] = []

    def stop_at_three(self: StopRequest) -> bool:
        polls.append(1)
        return len(polls) == 3

    with monkeypatch.context() as patch:
        patch.setattr(StopRequest, "poll", stop_at_three)
        first = train(config)
    assert first.steps == 4 and not first.is_finished
    assert [step for step, _ in list_checkpoints(tmp_path / "run" / "checkpoints")] == [2, 4]
    again = train(config)
    assert again.is_finished and again.loss == whole.loss
    one, two = (tmp_path / run / "adapter" / WEIGHTS_FILE for run in ("whole", "run"))
    assert one.read_bytes() == two.read_bytes()
