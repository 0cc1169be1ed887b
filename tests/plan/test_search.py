"""Plans for GPUs nobody has: against real modules, divided models, published sizes, and themselves."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is what these compare with")

from fulgurite.cli import build_parser, main
from fulgurite.errors import ArgumentError, CapacityError
from fulgurite.kernels.dispatch.buffers import DispatchConfig
from fulgurite.models import ModelConfig
from fulgurite.models.config import ConfigFields
from fulgurite.models.families.family import ModelFamily
from fulgurite.models.families.presets import MODEL_PRESETS, find_preset, load_preset
from fulgurite.models.families.registry import find_family
from fulgurite.models.loading.loader import build_model
from fulgurite.parallel.experts.transport import ExpertOptions
from fulgurite.parallel.mesh import Axis, MeshShape
from fulgurite.parallel.tensor import parallelize
from fulgurite.plan.cluster import GPUS, Cluster, MeasuredSpeeds, parse_cluster
from fulgurite.plan.command import plan, read_query, resolve_model
from fulgurite.plan.memory import plan_memory
from fulgurite.plan.search import PlanQuery, count_parameters, plan_mesh, search_meshes
from fulgurite.plan.shard import ShardSpec, build_model_shard, uniform_format
from fulgurite.quant.format import resolve_format
from tests.models.more_cases import MORE_CASES
from tests.models.reference_models import CASES, COMMON
from tests.serve.tiny_checkpoint import save_checkpoint

# Billions of parameters, as published.
PUBLISHED_BILLIONS = {
    "smollm2-135m": 0.1345,
    "llama-3.2-1b": 1.24,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.6,
    "llama-3.1-405b": 405.9,
    "mistral-7b": 7.25,
    "mixtral-8x7b": 46.7,
    "mixtral-8x22b": 140.6,
    "qwen2.5-7b": 7.62,
    "qwen3-0.6b": 0.596,
    "qwen3-8b": 8.19,
    "qwen3-30b-a3b": 30.53,
    "qwen3-235b-a22b": 235.1,
    "gemma-2-9b": 9.24,
    "gemma-3-1b": 1.0,
    "gemma-3-27b": 27.0,
    "phi-3.5-mini": 3.82,
    "phi-4": 14.66,
    "deepseek-v2-lite": 15.7,
    "deepseek-v2": 235.7,
    "deepseek-v3": 671.0,
    "kimi-k2": 1026.4,
    "llama-4-scout": 107.8,
    "llama-4-maverick": 400.7,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "falcon3-7b": 7.46,
    "mistral-nemo": 12.25,
    "mistral-small-24b": 23.57,
    "ministral-8b": 8.02,
    "gemma-7b": 8.54,
    "olmoe-1b-7b": 6.92,
    "olmo-2-1124-13b": 13.72,
    "olmo-2-0325-32b": 32.23,
    "olmo-3-7b": 7.3,
    "granite-3.3-8b": 8.17,
    "granite-3.1-3b-a800m": 3.3,
    "granite-4.0-micro": 3.4,
    "glm-4-9b-0414": 9.4,
    "glm-4-32b-0414": 32.57,
    "glm-4.5-air": 106.85,
    "phi-3.5-moe": 41.87,
    "qwen1.5-moe-a2.7b": 14.32,
    "qwen2-57b-a14b": 57.41,
    "smollm3-3b": 3.08,
    "seed-oss-36b": 36.15,
    "ernie-4.5-21b-a3b": 21.83,
    "hunyuan-7b": 7.5,
    "hunyuan-a13b": 80.39,
    "c4ai-command-r-v01": 34.98,
    "c4ai-command-r7b-12-2024": 8.03,
    "starcoder2-15b": 15.96,
    "exaone-4.0-32b": 32.0,
    "dots.llm1": 142.8,
    "minimax-m2": 228.7,
}


def tiny(name: str) -> tuple[ModelFamily, ModelConfig]:
    prefix, fields = (CASES | MORE_CASES)[name]
    found = ConfigFields({**COMMON, **fields, "architectures": [f"{prefix}ForCausalLM"]}, name)
    family = find_family(found)
    return family, replace(family.read_config(found), dtype=torch.bfloat16)


def ask(model: str, *words: str) -> PlanQuery:
    return read_query(build_parser().parse_args(["plan", "--model", model, *words]))


def question(name: str, cluster: Cluster, **others: object) -> PlanQuery:
    family, config = tiny(name)
    values = {
        "name": name,
        "family": family,
        "config": config,
        "format_lookup": uniform_format(None),
        "format": "bf16",
        "cluster": cluster,
        "context": 64,
        "kv_dtype": torch.bfloat16,
        "batch": 4,
        "max_batched_tokens": 32,
    }
    return PlanQuery(**(values | others))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PUBLISHED_BILLIONS)
def test_published_sizes(name: str) -> None:
    family, config = load_preset(name)
    model = build_model(config, family, torch.bfloat16)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e9 == pytest.approx(PUBLISHED_BILLIONS[name], rel=5e-3)


def test_preset_names_and_aliases() -> None:
    same = ("deepseek-v3", "deepseek-ai/DeepSeek-V3", "DeepSeek-V3-0324")
    assert len({find_preset(name).where for name in same}) == 1  # type: ignore[union-attr]
    assert find_preset("meta-llama/Meta-Llama-3.1-8B-Instruct") is not None
    assert find_preset("meta-llama/Llama-4-Scout-17B-16E-Instruct") is not None
    assert find_preset("mistralai/Mistral-Small-24B-Instruct-2501") is not None
    assert find_preset("allenai/OLMoE-1B-7B-0924-Instruct") is not None
    assert find_preset("whisper-large") is None
    with pytest.raises(ArgumentError, match="qwen3-8b"):
        load_preset("qwen3-7b")
    assert all(load_preset(name)[1].layers for name in MODEL_PRESETS)


@pytest.mark.parametrize("name", CASES | MORE_CASES)
def test_one_rank_has_the_whole_model(name: str) -> None:
    family, config = tiny(name)
    model = build_model(config, family, torch.bfloat16)
    slots = config.moe.num_experts if config.moe else 0
    rank = build_model_shard(config, family, ShardSpec(MeshShape(), slots))
    whole = {key: tuple(tensor.shape) for key, tensor in model.named_parameters()}
    assert {key: tuple(tensor.shape) for key, tensor in rank.parameters()} == whole
    held = [*model.parameters(), *model.buffers()]
    assert sum(rank.component_bytes().values()) == sum(tensor.nbytes for tensor in held)
    assert rank.attention_specs == model.attention_specs


@pytest.mark.covering
@pytest.mark.parametrize("shape", [(1, 2, 1), (1, 4, 1), (2, 1, 2), (2, 2, 4), (1, 3, 1)], ids=str)
@pytest.mark.parametrize("name", CASES | MORE_CASES)
def test_planned_shard_matches_parallelize(name: str, shape: tuple[int, int, int]) -> None:
    """The first rank's weights, as `parallelize` cuts them; no processes are needed for that."""
    family, config = tiny(name)
    mesh_shape = MeshShape(*shape)
    slots = config.moe.num_experts if config.moe else 0
    cut = ShardSpec(mesh_shape, -(-slots // mesh_shape.expert) * mesh_shape.expert)
    if mesh_shape.expert > 1 and config.moe is None:
        with pytest.raises(ArgumentError, match="needs a model with experts"):
            build_model_shard(config, family, cut)
        return
    model = build_model(config, family, torch.bfloat16).to_empty(device="cpu")
    parallelize(model, fake_mesh(mesh_shape), family.sharding_rules)  # type: ignore[arg-type]
    real = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    planned = build_model_shard(config, family, cut).component_bytes()
    assert sum(planned.values()) == real


def fake_mesh(shape: MeshShape) -> SimpleNamespace:
    axes = {
        name: Axis(name, tuple(shape.groups(name)[0]), 0)
        for name in ("world", "data", "tensor", "expert", "expert_data")
    }
    return SimpleNamespace(shape=shape, rank=0, **axes)


@pytest.mark.parametrize("format", ["fp8_e4m3_128x128", "nvfp4", "q8_0"])
def test_quantized_shards_have_the_formats_of_the_planner(format: str) -> None:
    family, config = load_preset("qwen3-30b-a3b")
    entry = resolve_format(format)
    whole, shard = (
        build_model_shard(config, family, ShardSpec(shape, 128), uniform_format(entry))
        for shape in (MeshShape(), MeshShape(1, 4, 4))
    )
    dense = build_model_shard(config, family, ShardSpec(MeshShape(), 128)).component_bytes()
    for part in ("experts", "attention"):
        assert whole.component_bytes()[part] < 0.6 * dense[part]
        assert shard.component_bytes()[part] < 0.4 * whole.component_bytes()[part]
    assert whole.component_bytes()["embedding"] == dense["embedding"]
    assert {weight.format for weight in shard.quantized_weights()} == {entry}


def test_uniform_format_selects_linears() -> None:
    everywhere, experts = (
        uniform_format(resolve_format("fp8")),
        uniform_format(resolve_format("fp8"), True),
    )
    packed = (
        "layers.0.attention.q_proj.weight",
        "layers.3.feed_forward.shared_expert.up_proj.weight",
    )
    for name in packed:
        assert everywhere(name) is not None and experts(name) is None
    assert experts("layers.1.feed_forward.experts.down_proj") is not None
    for name in (
        "embed_tokens.weight",
        "lm_head.weight",
        "norm.weight",
        "layers.0.attention_norm.weight",
        "layers.0.attention.q_norm.weight",
        "layers.0.attention.q_proj.bias",
        "layers.0.attention.sinks",
        "layers.1.feed_forward.router.weight",
        "layers.1.feed_forward.experts.down_proj_bias",
    ):
        assert everywhere(name) is None, name


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral", "deepseek_v3"])
def test_one_gpu_is_planned_as_the_engine_plans(name: str) -> None:
    family, config = tiny(name)
    asked = question(name, Cluster(GPUS["t4"], 1, 1))
    split = plan_mesh(asked, MeshShape())
    model = build_model(config, family, torch.bfloat16).to("meta")
    plan = plan_memory(model, split.memory.limits, torch.device("cuda"), asked.available_bytes)
    assert split.memory.weights == plan.weights
    assert (split.memory.kv_cache, split.memory.workspaces) == (plan.kv_cache, plan.workspaces)
    assert split.memory.cache_tokens == plan.cache_tokens == 4 * 64
    assert split.memory.activations == plan.activations


def test_memory_of_a_rank_adds_up() -> None:
    options = ExpertOptions("symmetric", "f32")
    cluster = Cluster(GPUS["t4"], 4, 1)
    asked = question("deepseek_v3", cluster, expert_options=options, redundant_experts=3)
    split = plan_mesh(asked, MeshShape(4, 1, 4))
    assert split.shard_spec.expert_slots == 12
    assert (
        split.memory.dispatch_buffers
        == DispatchConfig(32, 3, 64, 3, "f32", "bf16").size_buffers(4).total_bytes
        > 0
    )
    parts = (
        split.memory.activations,
        split.memory.workspaces,
        split.memory.dispatch_buffers,
        split.memory.kv_cache,
    )
    assert split.memory.total == sum(split.weights.values()) + sum(parts)
    assert split.max_requests == 4  # one of the four asked for on each rank
    alone = plan_mesh(replace(asked, expert_options=ExpertOptions()), MeshShape(4, 1, 1))
    assert (
        alone.memory.dispatch_buffers == 0
        and alone.weights["experts"] > 2 * split.weights["experts"]
    )
    assert alone.weights["attention"] == split.weights["attention"]


def test_decode_step_by_hand() -> None:
    """A dense model, tensor = 2: every weight once, the keys of all requests, two sums a layer."""
    gpu = replace(GPUS["h100"], memory_bandwidth=1.0, link_bandwidth=1.0)
    asked = question("llama", Cluster(gpu, 2, 1, link_latency=1e-3))
    split = plan_mesh(asked, MeshShape(1, 2, 1))
    decode = split.decode
    assert decode is not None and decode.tokens == 4
    keys = 4 * 64 * 4 * (2 * 1 * 16) * 2  # requests, tokens, layers, one key head of 16, bytes
    lookup = split.weights["embedding"] / 2  # the table is only looked up, the head is read
    others = 64 * 2 + sum(  # the last norm, and rotary tables
        buffer.nbytes
        for buffer in build_model(asked.config, asked.family, torch.bfloat16).buffers()
    )
    read = split.memory.weights - lookup - others + keys
    assert decode.memory == pytest.approx(read / 1e9)
    sums = (4 * 2 + 1) * (4 * 64 * 2 / 1e9 + 1e-3)  # and one of the embeddings; half sent, twice
    logits = 4 * COMMON["vocab_size"] * 2 / 2 / 1e9 + 1e-3
    assert decode.all_reduce == pytest.approx(sums + logits)
    assert decode.total == pytest.approx(decode.layers + decode.all_reduce)
    assert decode.tokens_per_second == pytest.approx(4 / decode.total)


def test_links_between_nodes_count() -> None:
    asked = ask("qwen3-30b-a3b", "--gpus", "2x2", "--batch", "64")
    near = plan_mesh(replace(asked, cluster=parse_cluster("4")), MeshShape(4, 1, 4))
    far = plan_mesh(asked, MeshShape(4, 1, 4))
    assert near.experts is not None and near.experts.transport.name == "symmetric"
    assert far.experts is not None and far.experts.transport.name == "hierarchical"
    assert near.decode is not None and far.decode is not None
    assert far.decode.dispatch > 2 * near.decode.dispatch > 0
    slow = replace(asked, cluster=parse_cluster("2x2", measured=MeasuredSpeeds(network=1.0)))
    slowest = plan_mesh(slow, MeshShape(4, 1, 4))
    assert slowest.prefill is not None and far.prefill is not None
    assert slowest.prefill.dispatch > 10 * far.prefill.dispatch


def test_wire_format_shrinks_dispatch() -> None:
    plans = [
        plan_mesh(ask("qwen3-30b-a3b", "--gpus", "8", "--wire", wire), MeshShape(8, 1, 8))
        for wire in ("auto", "fp8", "nvfp4")
    ]
    times = [plan.prefill.dispatch for plan in plans if plan.prefill is not None]
    sizes = [plan.memory.dispatch_buffers for plan in plans]
    assert times == sorted(times, reverse=True) and sizes == sorted(sizes, reverse=True)
    assert len(set(times)) == len(set(sizes)) == 3


def test_stages_share_the_layers() -> None:
    asked = ask("llama-3.1-70b", "--gpus", "4")
    one, two = (plan_mesh(asked, shape) for shape in (MeshShape(1, 4), MeshShape(1, 2, 1, 2)))
    assert one.fits and two.fits and two.decode is not None and two.decode.transfers > 0
    assert two.memory.weights == pytest.approx(one.memory.weights, rel=0.05)
    shard = build_model_shard(asked.config, asked.family, ShardSpec(MeshShape()))
    stages = shard.split_stages(2)
    parts = [sum(shard.component_bytes(stage).values()) for stage in stages]
    assert parts[0] == pytest.approx(parts[1], rel=0.05)
    assert stages[0].stop == stages[1].start and stages[1].stop == 80
    with pytest.raises(ArgumentError, match="pipeline=100 stages, but the model has 80 layers"):
        shard.split_stages(100)


def test_context_parallel_divides_the_cache() -> None:
    asked = ask("llama-3.1-8b", "--gpus", "4")
    one, four = (plan_mesh(asked, shape) for shape in (MeshShape(4), MeshShape(1, 1, 1, 1, 4)))
    each = [plan.memory.kv_cache / plan.memory.cache_tokens for plan in (one, four)]
    assert each[1] == pytest.approx(each[0] / 4, rel=1e-2)


def test_search_of_deepseek_on_two_nodes() -> None:
    asked = ask("deepseek-v3", "--gpus", "8x2", "--format", "fp8")
    assert asked.format == "fp8_e4m3_128x128"
    assert count_parameters(asked)[1] / 1e9 == pytest.approx(
        37.6, rel=0.01
    )  # 37 published, without a head
    splits = search_meshes(asked)
    best = splits[0]
    assert best.fits and best.mesh_shape == MeshShape(16, 1, 16)
    assert sum(best.weights.values()) / 2**30 == pytest.approx(56.8, abs=0.1)
    assert all(split.memory.total <= asked.available_bytes for split in splits if split.fits)
    speeds = [split.decode.tokens_per_second for split in splits if split.decode]
    assert speeds == sorted(speeds, reverse=True) and len(speeds) >= 5
    keys = 61 * (512 + 64) * 2  # the latent and the rotary key, whatever the heads
    blocks = best.memory.cache_tokens + best.memory.limits.block_size  # and the one for padding
    assert best.memory.kv_cache == blocks * keys


def test_tensor_parallel_replicates_the_mla_cache() -> None:
    asked = ask("deepseek-v3", "--gpus", "16")
    wide = plan_mesh(asked, MeshShape(2, 8, 16))
    assert wide.memory.kv_cache // wide.memory.cache_tokens == pytest.approx(61 * 576 * 2, rel=1e-3)


def test_cache_is_no_larger_than_all_requests_need() -> None:
    """Where all requests that run at once fit, the cache holds these and no more."""
    (split,) = search_meshes(ask("smollm2-135m", "--context", "2048"))
    limits = split.memory.limits
    assert split.memory.cache_tokens == limits.max_sequences * 2048
    assert split.max_requests == limits.max_sequences == split.decode.tokens
    per_token = split.memory.kv_cache / (split.memory.cache_tokens + limits.block_size)
    assert per_token == 30 * 2 * 3 * 64 * 2  # layers, keys and values, heads, numbers, bytes


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["plan", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--model", "qwen3-30b-a3b", "--gpus", "4", "--gpu", "h100")
    assert code == 0 and not err
    assert out.startswith("qwen3-30b-a3b · 30.5B parameters, 3.4B active · bfloat16 · 56.9 GiB")
    for text in (
        "4 × h100",
        "on each GPU with",
        "predicted step",
        "KV cache",
        "capacity:",
        "chosen of",
        "other meshes",
    ):
        assert text in out
    assert max(len(line) for line in out.splitlines()) <= 100
    rows = [line for line in out.splitlines() if line.startswith("  ") and "iB" in line]
    assert rows[-1].split()[0] == "total"


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--model",
        "mixtral-8x7b",
        "--gpus",
        "2",
        "--kv-dtype",
        "fp8",
        "--batch",
        "8",
        "--json",
    )
    code, out, _ = run(capsys, *words)
    values = json.loads(out)
    assert code == 0 and values["parameters"] == 46_702_792_704
    assert values["kv_dtype"] == "float8_e4m3fn" and values["meshes"][0]["fits"]
    first = values["meshes"][0]
    parts = ("activations", "dispatch_buffers", "workspaces", "kv_cache")
    assert first["total"] == sum(first["weights"].values()) + sum(first[name] for name in parts)


@pytest.mark.parametrize(
    "words",
    [
        ("--model", "llama-3.1-405b", "--gpus", "4"),
        ("--model", "llama-3.1-8b", "--gpu", "rtx-4090", "--format", "q4_k", "--context", "131072"),
        ("--model", "qwen3-30b-a3b", "--gpus", "2", "--gpu", "l4"),
    ],
    ids=str,
)
def test_suggestions_fit(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    """What is said to fit does."""
    code, _, err = run(capsys, *words)
    assert code == 1 and err.startswith("CapacityError") and "does not fit" in err
    tips = [line.split(": ")[1].split() for line in err.splitlines() if ": --" in line]
    assert tips
    for option, value in tips:
        changed = [*words]
        if option in words:
            changed[changed.index(option) + 1] = value
        else:
            changed += [option, value]
        assert run(capsys, *changed)[0] == 0, changed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "deepsek-v3"), "did you mean deepseek-v3"),
        (("--model", "llama-3.1-8b", "--gpus", "many"), "--gpus many is not a number of GPUs"),
        (("--model", "llama-3.1-8b", "--gpus", "0x2"), "is not a number of GPUs"),
        (("--model", "llama-3.1-8b", "--gpu", "h900"), "unknown GPU 'h900'"),
        (("--model", "llama-3.1-8b", "--memory", "-1"), "--memory -1 must be"),
        (("--model", "llama-3.1-8b", "--context", "1"), "takes --context 2 to 131072"),
        (("--model", "nothing.gguf"), "there is no file 'nothing.gguf'"),
        (("--model", "llama-3.1-8b", "--batch", "0"), "--batch 0 must be 1 or more"),
        (
            ("--model", "llama-3.1-8b", "--batch", str(10**20)),
            "must be 1 or more, up to 1,000,000,000",
        ),
        (
            ("--model", "llama-3.1-8b", "--max-batched-tokens", str(10**20)),
            "must be 1 or more, up to",
        ),
        (("--model", "llama-3.1-8b", "--gpus", f"8x{10**12}"), "at most 1,000,000 in total"),
        (("--model", "llama-3.1-8b", "--redundant-experts", "2"), "has no experts"),
        (("--model", "llama-3.1-8b", "--format", "fp9"), "unknown number format"),
        (
            ("--model", "llama-3.1-8b", "--expert", "2", "--gpus", "2"),
            "expert=2 needs a model with experts, and this model is dense",
        ),
        (
            ("--model", "qwen3-next-80b-a3b", "--gpus", "8", "--context-parallel", "2"),
            "context_parallel does not support qwen3_next",
        ),
        (
            (
                *("--model", "deepseek-v3", "--gpus", "8x2", "--context-parallel", "2"),
                *("--kv-dtype", "fp8"),
            ),
            "context_parallel has no FP8 cache of MLA latents",
        ),
        (
            ("--model", "qwen3-30b-a3b", "--gpus", "8", "--transport", "hierarchical"),
            "transport='hierarchical' can't be used: all ranks of the axis are on one node",
        ),
        (
            (
                "--model",
                "qwen3-30b-a3b",
                "--gpus",
                "8x2",
                "--transport",
                "symmetric",
                "--expert",
                "16",
            ),
            "transport='symmetric' can't be used: the axis spans several nodes",
        ),
        (
            ("--model", "qwen3-30b-a3b", "--gpus", "8", "--wire", "fp8", "--expert", "1"),
            "are for experts on several ranks, and expert=1",
        ),
        (("--model", "llama-3.1-8b", "--gpus", "8", "--nodes", "3"), "--nodes 3 does not divide 8"),
        (("--model", "llama-3.1-8b", "--gpus", "8x2", "--nodes", "4"), "are 2 nodes"),
        (("--model", "llama-3.1-8b", "--link", "0"), "--link 0 must be a number of GB/s above 0"),
        (("--model", "llama-3.1-8b", "--latency", "-1"), "--latency -1 must be a number of µs"),
        (("--model", "llama-3.1-8b", "--gpus", "4", "--pipeline", "3"), "but there are 4 GPUs"),
        (("--model", "llama-3.1-8b", "--gpus", "8", "--tensor", "3"), "but there are 8 GPUs"),
        (("--model", "qwen3-30b-a3b", "--gpus", "8", "--expert", "3"), "expert 3 must divide"),
    ],
    ids=str,
)
def test_invalid_options(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    code, _, err = run(capsys, *words)
    assert code == 1 and message in err


def test_expert_load_table_and_placement_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    load = torch.exp(torch.randn(48, 128, generator=generator)) * 100
    file, places = tmp_path / "load.json", tmp_path / "places.json"
    file.write_text(json.dumps(load.tolist()))
    words = ("--model", "qwen3-30b-a3b", "--gpus", "8", "--expert", "8", "--expert-load", str(file))
    code, out, _ = run(capsys, *words, "--placement", str(places))
    assert code == 0
    ratios = [
        float(line.split(" × mean")[0].split()[-1]) for line in out.splitlines() if "× mean" in line
    ]
    assert len(ratios) == 3 and ratios[0] > ratios[1] >= ratios[2] and ratios[2] < 1.05
    saved = json.loads(places.read_text())
    assert saved["model"] == "qwen3-30b-a3b"
    assert saved["ranks"] == 8 and len(saved["slots"]) == 48 and len(saved["slots"][0]) == 136
    file.write_text(json.dumps({"model": "Qwen3-30B-A3B-Other", "load": load.tolist()}))
    assert run(capsys, *words)[0] == 0
    file.write_text(json.dumps({"model": "OLMoE-1B-7B", "load": load.tolist()}))
    code, out, err = run(capsys, *words)
    assert code == 1 and "load.json is of OLMoE-1B-7B" in err and not out
    file.write_text(json.dumps(load[:2].tolist()))
    code, out, err = run(capsys, *words)
    assert code == 1 and "it has 48 layers with 128 experts each" in err and not out
    file.unlink()
    code, out, err = run(capsys, *words)
    assert code == 1 and str(file) in err and not out


def test_a_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL_PRESETS["gpt-oss-20b"]))
    source = resolve_model(str(tmp_path))
    assert source.family.name == "gpt_oss" and source.format == "mxfp4 experts, bfloat16"
    asked = ask(str(tmp_path), "--gpu", "rtx-4090")
    assert sum(plan_mesh(asked, MeshShape()).weights.values()) / 1e9 == pytest.approx(13.8, abs=0.1)


def test_safetensors_file_uses_config_of_its_folder(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    source = resolve_model(str(tmp_path / "model.safetensors"))
    assert source.config == resolve_model(str(tmp_path)).config


def test_a_model_that_does_not_fit_raises() -> None:
    options = build_parser().parse_args(["plan", "--model", "llama-3.1-70b", "--gpu", "t4"])
    with pytest.raises(CapacityError, match="does not fit on t4"):
        plan(options)
    assert isinstance(options, argparse.Namespace)
