"""The plan of memory: what it counts, what it refuses, and that it comes true."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fulgurite.errors import CapacityError
from fulgurite.kernels.gemm.modules import QuantEmbedding, QuantLinear
from fulgurite.models import ModelConfig
from fulgurite.models.blocks import GatedMLP
from fulgurite.models.config import ConfigFields
from fulgurite.models.families.llama import LLAMA
from fulgurite.models.families.mistral import MISTRAL
from fulgurite.models.loading.loader import build_model
from fulgurite.plan import memory
from fulgurite.plan.activations import activation_bytes, track_allocations
from fulgurite.plan.kv_cache import group_layers
from fulgurite.plan.memory import (
    EngineLimits,
    MemoryPlan,
    available_bytes,
    format_bytes,
    plan_memory,
    sampling_bytes,
)
from fulgurite.quant import quantize
from fulgurite.serve.engine.kv_cache import PagedKVCache
from fulgurite.serve.engine.request import Request, SamplingParams
from fulgurite.serve.engine.sampling_rows import SamplingRows
from tests.serve.engines import FIELDS

LIMITS = EngineLimits(256, 4, 64, 16, torch.float32)


def plan(
    available: int, limits: EngineLimits = LIMITS, device: str = "cpu", **fields: object
) -> MemoryPlan:
    family = MISTRAL if "sliding_window" in fields else LLAMA
    config: ModelConfig = family.read_config(ConfigFields({**FIELDS, **fields}, "a test"))
    model = build_model(config, family, torch.float32).to("meta")
    return plan_memory(model, limits, torch.device(device), available)


def test_count_expert_load() -> None:
    made = plan(1 << 30)
    hidden, inner, vocabulary = 32, 64, 97
    layer = 2 * hidden + 2 * hidden * hidden + 2 * hidden * 16 + 3 * hidden * inner
    numbers = 2 * vocabulary * hidden + 2 * layer + hidden
    assert 0 <= made.weights - 4 * numbers < 256  # and the rotary frequencies
    assert made.cache_tokens == 4 * 256 and made.group_blocks == (64,)
    assert made.kv_cache == 65 * 16 * (2 * 2 * 2 * 8) * 4
    assert made.total == made.weights + made.activations + made.workspaces + made.kv_cache


def test_logits_of_cuda_graphs_are_counted() -> None:
    """Every graph keeps its own: of 1, 2, 4 and 8 requests, 97 float32 each."""
    few, many = (
        plan(1 << 30, replace(LIMITS, max_sequences=most), "cuda").workspaces for most in (1, 5)
    )
    tables = 4 * 256 // 16  # of a request
    # Sampling: counts and bias of 4 more rows, masks of 97 bits, log-probabilities, a copy.
    sampling = 4 * (8 * 97 + 4 * 4) + 24 * 97 * 4 + 4 * 97 * 4
    assert many - few == 4 * 97 * (2 + 4 + 8) + 4 * tables + sampling


def test_the_sampler_holds_what_is_planned() -> None:
    """Counts, biases and masks, once a request needs them."""
    limits = replace(LIMITS, max_sequences=3)
    rows = SamplingRows(3, 97, torch.device("cpu"))
    request = Request("r", [1, 2], SamplingParams(presence_penalty=1.0), 64)
    request.block_table_row = 0
    rows.write(request)
    assert rows.table is not None
    held = sum(x.nbytes for x in (rows.table.counts_WO, rows.table.bias_WO, rows.table.allowed_WM))
    logprobs = 24 * 97 * 3
    assert sampling_bytes(limits, torch.device("cpu"), 97) == held + logprobs


def test_dequantized_weight_is_counted() -> None:
    """On a GPU, once: the largest that meets 192 rows or more, of a layer or of the scoring table."""
    config = LLAMA.read_config(ConfigFields({**FIELDS, "intermediate_size": 96}, "a test"))

    def workspaces(
        max_batched_tokens: int, requests: int, packed: Sequence[str], device: str = "cuda"
    ) -> int:
        model = build_model(config, LLAMA, torch.bfloat16).to_empty(device="cpu")
        for path in packed:
            module = model.get_submodule(path)
            weight = quantize(torch.randn(module.weight.shape), "int8_g32").to(torch.bfloat16)
            parent, _, name = path.rpartition(".")
            kind = QuantEmbedding if path == "embed_tokens" else QuantLinear
            setattr(model.get_submodule(parent), name, kind(weight))
        limits = replace(LIMITS, max_batched_tokens=max_batched_tokens, max_sequences=requests)
        made = plan_memory(model.to("meta"), limits, torch.device(device), 1 << 30)
        return made.workspaces

    layers = ("layers.0.attention.q_proj", "layers.1.feed_forward.up_proj", "embed_tokens")
    plain = workspaces(192, 4, ())
    assert workspaces(192, 4, layers) - plain == 2 * 96 * 32
    assert workspaces(191, 4, layers) == plain
    assert workspaces(192, 192, (*layers, "lm_head")) - workspaces(192, 192, ()) == 2 * 97 * 32
    assert workspaces(192, 4, layers, "cpu") == workspaces(192, 4, (), "cpu")


def test_cache_size_matches_the_plan() -> None:
    made = plan(1 << 30, sliding_window=40)
    config = MISTRAL.read_config(ConfigFields({**FIELDS, "sliding_window": 40}, "a test"))
    specs = build_model(config, MISTRAL, torch.float32).attention_specs
    cache = PagedKVCache(
        specs, group_layers(specs), made.group_blocks, 16, torch.float32, torch.device("cpu")
    )
    assert cache.num_bytes == made.kv_cache
    assert made.group_blocks == (4 * 8,)  # 40 + 64 tokens touch at most eight blocks


def test_cache_uses_the_remaining_memory() -> None:
    whole = plan(1 << 30)
    tight = plan(whole.total - whole.kv_cache // 2)
    assert 256 <= tight.cache_tokens < whole.cache_tokens
    assert tight.total <= whole.total - whole.kv_cache // 2 < tight.total + 2 * 16 * 512


def test_capacity_error_suggests_what_fits() -> None:
    whole = plan(1 << 30)
    without = whole.total - whole.kv_cache
    with pytest.raises(CapacityError) as error:
        plan(without + 10 * 16 * 256)
    text = str(error.value)
    assert "the model does not fit" in text and 'kv_dtype="fp8"' in text
    context = int(text.split("context=")[1].split()[0])
    shorter = EngineLimits(context, 4, 64, 16, torch.float32)
    assert plan(without + 10 * 16 * 256, shorter).cache_tokens >= context
    with pytest.raises(CapacityError, match="does not fit"):
        plan(whole.weights // 2)


def test_activation_peak_by_hand() -> None:
    """A wide vocabulary decides: logits in float32, and the copy that penalties work on."""
    config = LLAMA.read_config(ConfigFields({**FIELDS, "vocab_size": 20_000}, "a test"))
    model = build_model(config, LLAMA, torch.bfloat16).to("meta")
    logits = 4 * 20_000 * (4 + 4)
    assert logits <= activation_bytes(model, tokens=4, rows=4) < 1.01 * logits
    assert activation_bytes(model, tokens=4, rows=64) == activation_bytes(model, 4, 4)
    # of layers that differ the largest counts: gate, up and what comes of them, of 1000 tokens
    plain = activation_bytes(model, tokens=1000, rows=1)
    model.layers[1].feed_forward = GatedMLP(32, 4096, "silu").to("meta", torch.bfloat16)
    wide = activation_bytes(model, tokens=1000, rows=1)
    assert plain < 2e6 and 2 * 1000 * 2 * 4096 < wide < 5 * 1000 * 2 * 4096


def test_available_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU what is free, and never all of it; on a CPU a share of what the container leaves."""
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    for free, used in ((50, 50), (95, 90), (100, 90)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 100))
        assert available_bytes(cuda) == used
    monkeypatch.setattr(memory, "_free_memory", lambda: 1000)
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert available_bytes(cpu) == 600
    for most, used, usable in (("max", 10, 600), ("900", 500, 240), ("5000", 10, 600)):
        (tmp_path / "memory.max").write_text(f"{most}\n")
        (tmp_path / "memory.current").write_text(f"{used}\n")
        assert available_bytes(cpu) == usable


def test_live_allocations_are_counted() -> None:
    with track_allocations() as watch, torch.device("meta"):
        first = torch.zeros(100)
        view = first[:50]
        second = first + 1
        del first
        assert watch.current == 800  # the view holds it
        del view
        assert watch.current == 400
        third = second.double()
        del second, third
    assert watch.current == 0 and watch.peak == 1200


def test_the_table_and_sizes() -> None:
    lines = plan(1 << 30).format_table().splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "weights",
        "activations",
        "workspaces",
        "KV cache",
        "total",
    ]
    assert "1,024 tokens in blocks of 16, float32" in lines[3] and "1.0 GiB" in lines[4]
    assert [format_bytes(n) for n in (0, 1023, 1024, 1536 << 20)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 GiB",
    ]


MEASURE = """
import json, sys, torch
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.serve.engines import make_engine, tiny_model
from fulgurite.serve.engine.request import SamplingParams

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(l for l in lines if l.startswith("VmRSS")).split()[1]) * 1024

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(l for l in lines if l.startswith("VmHWM")).split()[1]) * 1024

torch.set_num_threads(1)
small = make_engine(tiny_model())  # imports, and what the first matmul sets up
small.generate([[1] * 40], SamplingParams(max_tokens=3))
before = resident()
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
model = tiny_model(hidden_size=1024, intermediate_size=4096, num_attention_heads=8, num_key_value_heads=8,
                   num_hidden_layers=4, vocab_size=8000, max_position_embeddings=2048)
engine = make_engine(model, context=2048, max_sequences=4, max_batched_tokens=1024, block_size=16)
ids = [[seed, *range(2040)] for seed in range(4)]
engine.generate(ids, SamplingParams(max_tokens=6, ignore_eos=True))
print(json.dumps([engine.plan.total, peak() - before]))
"""


@pytest.mark.slow
def test_planned_memory_matches_measured() -> None:
    """Within 5% of what the process then takes, weights, cache and activations in use."""
    folder = str(__file__).rsplit("/plan/", 1)[0]
    command = [sys.executable, "-c", MEASURE, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    planned, measured = json.loads(done.stdout)
    assert abs(planned - measured) < 0.05 * measured
