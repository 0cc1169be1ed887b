"""The suite `generate` for GPUs: its floors by hand, and a whole run of a small shape on the CPU."""

from __future__ import annotations

import pytest
import torch

from fulgurite.bench.generate import gpu as suite
from fulgurite.models.config import ConfigFields
from fulgurite.models.families.presets import load_preset
from fulgurite.models.families.registry import find_family
from fulgurite.models.loading.loader import build_model

SMALL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def work_of(name):
    family, config = load_preset(name)
    return suite.count_model_cost(build_model(config, family, torch.bfloat16))


def test_a_dense_model_reads_every_weight_but_the_embedding():
    work = work_of("llama-3.1-8b")
    hidden, inner, vocabulary = 4096, 14336, 128256
    layer = hidden * (4096 + 2 * 1024 + 4096) + 3 * hidden * inner + 2 * hidden
    weights = 32 * layer + hidden + vocabulary * hidden
    assert work.dense_bytes == 2 * weights and work.active == weights
    assert work.token_bytes == 32 * 2 * 8 * 128 * 2
    bytes, operations = work.decode(4, 100)
    assert bytes == 2 * weights + 4 * 100 * work.token_bytes
    assert operations == 4 * (2 * weights + 32 * 4 * 32 * 128 * 100)
    assert suite.Limits(4e12, 7e14).floor(*work.decode(1, 100)) == pytest.approx(
        (2 * weights + 100 * work.token_bytes) / 4e12
    )


def test_tied_embeddings_are_read_as_the_head():
    work = work_of("qwen3-0.6b")
    assert work.dense_bytes == pytest.approx(2 * 596e6, rel=0.01)


def test_experts_count_as_often_as_they_are_met():
    work = work_of("qwen3-30b-a3b")
    each = 48 * 3 * 2048 * 768 * 2
    assert work.expert_bytes == each and (work.experts, work.chosen) == (128, 8)
    one, _ = work.decode(1, 0)
    many, _ = work.decode(10_000, 0)
    assert one == pytest.approx(work.dense_bytes + 8 * each)
    assert many == pytest.approx(work.dense_bytes + 128 * each)
    assert work.active == pytest.approx(3.3e9, rel=0.1)


def test_a_prompt_asks_for_one_row_of_logits():
    work = work_of("qwen3-0.6b")
    _, operations = work.prefill(10)
    layers = work.active - work.head
    assert operations == 10 * (2 * layers + work.attention * 5.5) + 2 * work.head


def test_a_whole_run(monkeypatch):
    fields = ConfigFields(SMALL, "a test")
    family = find_family(fields)
    monkeypatch.setattr(suite, "load_preset", lambda _: (family, family.read_config(fields)))
    monkeypatch.setattr(suite, "find_preset", lambda _: fields)
    monkeypatch.setattr(suite, "TRANSFORMERS_BATCHES", (2,))
    rows = suite.measure_model(
        "small",
        suite.Limits(1e10, 1e11),
        (1, 2),
        device="cpu",
        dtype=torch.float32,
        prompt=8,
        long_prompt=40,
        new=4,
    )
    assert [row["what"] for row in rows[:3]] == ["prefill", "decode", "decode"]
    assert all(row["ms"] > 0 for row in rows)
    assert all(0 < row["percent"] <= 100 for row in rows[:3])
    assert "transformers_ms" in rows[2] and "transformers_ms" not in rows[1]
    assert {row["what"] for row in rows[3:]} == {
        f"sampling: {how}" for how in suite.SAMPLING_SETTINGS
    }
    text = suite.format_table(rows)
    assert "prefill" in text and "of floor" in text and "top-k, top-p" in text
