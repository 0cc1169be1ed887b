"""A decode step of Triton kernels: its tokens, and the kernels of a layer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.triton_support import DEVICE, INTERPRETED  # isort: skip

from triton.runtime import interpreter

from fulgurite.kernels import registry
from fulgurite.kernels.attention import ops as attention
from fulgurite.kernels.common import triton_pdl
from fulgurite.kernels.common.pdl import pdl_region
from fulgurite.kernels.elementwise import ops
from fulgurite.kernels.gemm import fused_projections
from fulgurite.kernels.grouped_gemm import ops as grouped_gemm
from fulgurite.kernels.mla import ops as mla
from fulgurite.kernels.mla import triton_mla
from fulgurite.kernels.moe import ops as moe
from fulgurite.kernels.moe import routing
from fulgurite.kernels.sampling import ops as sampling
from fulgurite.models.config import ConfigFields
from fulgurite.models.families.registry import find_family
from fulgurite.models.loading.loader import build_random_model
from fulgurite.plan.kv_cache import group_layers
from fulgurite.plan.limits import EngineLimits
from fulgurite.plan.memory import plan_memory
from fulgurite.serve.engine.batch import InputBatch
from fulgurite.serve.engine.engine import Engine
from fulgurite.serve.engine.kv_cache import PagedKVCache
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.engine.runner import merge_projection_weights

REGISTRIES = (
    ops.RMS_NORM_KERNELS,
    ops.ROPE_KERNELS,
    ops.BINARY_KERNELS,
    ops.QK_NORM_ROPE_KERNELS,
    fused_projections.FUSED_LINEAR_KERNELS,
    attention.PAGED_ATTENTION_KERNELS,
    attention.FUSED_DECODE_KERNELS,
    attention.STORE_KV_CACHE_KERNELS,
    mla.MLA_ATTENTION_KERNELS,
    mla.STORE_MLA_CACHE_KERNELS,
    sampling.SAMPLE_KERNELS,
    routing.ROUTE_TOKENS_KERNELS,
    routing.ROUTE_SMALL_BATCH_KERNELS,
    moe.SMALL_BATCH_KERNELS,
    moe.SORT_KERNELS,
    moe.COMBINE_KERNELS,
    grouped_gemm.GROUPED_GEMM_KERNELS,
)
FIELDS = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
FAMILIES = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
    },
    "deepseek_v2_lite": {
        **(DEEPSEEK := {
            "architectures": ["DeepseekV2ForCausalLM"],
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 2,
        }),
        "q_lora_rank": None,
    },
    "deepseek_v2": {**DEEPSEEK, "q_lora_rank": 24},
}  # fmt: skip


@pytest.fixture
def use_cuda_kernels(monkeypatch):
    """In the interpreter CPU tensors use the CUDA kernels of every registry."""
    if INTERPRETED:
        for table in REGISTRIES:
            monkeypatch.setitem(table, "cpu", table["cuda"])


def build_model(name):
    fields = ConfigFields({**FIELDS, **FAMILIES[name]}, "a test")
    family = find_family(fields)
    return build_random_model(family.read_config(fields), family, std=0.3)


def build_engine(model, context=64, max_batched_tokens=8):
    limits = EngineLimits(
        context=context,
        max_sequences=4,
        max_batched_tokens=max_batched_tokens,
        block_size=16,
        kv_dtype=torch.float32,
    )
    device = model.norm.weight.device
    plan = plan_memory(copy.deepcopy(model).to("meta"), limits, device, available=1 << 30)
    return Engine(model, None, plan)


@pytest.mark.parametrize(
    "name",
    [
        "qwen3",
        "qwen3_moe",
        "gpt_oss",
        "deepseek_v2",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("llama", "qwen2", "deepseek_v2_lite")
        ),
    ],
)
@torch.no_grad()
def test_same_tokens_as_on_the_cpu(name, request):
    model = build_model(name)
    prompts = [list(range(3, 12)), [7], [5, 9, 2]]
    params = [
        SamplingParams(max_tokens=3, ignore_eos=True),
        SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.8, top_p=0.9, seed=3),
        SamplingParams(max_tokens=3, ignore_eos=True, temperature=1.0, top_k=7, logprobs=2, seed=4),
    ]
    expected = build_engine(copy.deepcopy(model)).generate(prompts, params)
    request.getfixturevalue("use_cuda_kernels")
    engine = build_engine(model.to(DEVICE))
    if INTERPRETED:
        merge_projection_weights(model)
        engine.runner.no_capture_reason = "the interpreter is not a native kernel"
    outputs = engine.generate(prompts, params)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    for ours, theirs in zip(outputs[2].logprobs, expected[2].logprobs, strict=True):
        assert abs(ours.logprob - theirs.logprob) < 1e-4


class Launches(TorchDispatchMode):
    """Records Triton kernels, and torch ops other than views and allocations."""

    def __init__(self):
        super().__init__()
        self.names = []
        self.inside = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_free = func.is_view or any(word in str(func) for word in ("empty", "detach", "_reshape"))
        if not is_free and not self.inside:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))

    def wrap(self, launch):
        def run(executor, *args, **kwargs):
            self.names.append(executor.fn.__name__)
            self.inside = True
            try:
                return launch(executor, *args, **kwargs)
            finally:
                self.inside = False

        return run


# q_a and kv_a are one kernel with the norm before them, q_b one with its norm
MLA_KERNELS = [
    "store_mla_cache_kernel", "aten.bmm.out", "absorb_queries_kernel", "mla_decode_kernel",
    "aten.bmm.out",
]  # fmt: skip
GEMV, SMALL_M, GEMM = "fused_gemv_kernel", "fused_small_m_kernel", "fused_gemm_kernel"


@pytest.mark.skipif(not INTERPRETED, reason="launches are counted in the interpreter")
@pytest.mark.parametrize(
    "name, count, expected",
    [
        ("llama", 1, [GEMV, "attention_kernel", GEMV, GEMV, GEMV]),
        ("qwen3", 3, [SMALL_M, "attention_kernel", SMALL_M, SMALL_M, SMALL_M]),
        (
            "qwen3_moe",
            2,
            [SMALL_M, "attention_kernel", SMALL_M, "route_small_batch_kernel", "gate_up_kernel",
             "down_kernel"],
        ),
        (
            "deepseek_v2",
            3,
            [SMALL_M, SMALL_M, *MLA_KERNELS, SMALL_M, SMALL_M, SMALL_M],
        ),
        ("deepseek_v2_lite", 1, [GEMV, *MLA_KERNELS, GEMV, GEMV, GEMV]),
        (
            "qwen3",
            18,
            ["rms_norm_kernel", GEMM, "attention_kernel", GEMM, "rms_norm_kernel", GEMM, GEMM],
        ),
    ],
)  # fmt: skip
@torch.inference_mode()
def test_kernels_of_a_decode_layer(name, count, expected, use_cuda_kernels, monkeypatch):
    with torch.inference_mode(False):
        model = build_model(name)
        merge_projection_weights(model)
    specs = model.attention_specs
    cache = PagedKVCache(
        specs, group_layers(specs), [count], 16, torch.float32, torch.device("cpu")
    )
    positions = torch.full((count,), 5)
    blocks = torch.arange(1, count + 1)
    cache.set_batch(
        InputBatch(
            token_ids_T=torch.arange(count),
            positions_T=positions,
            slot_mapping_GT=[blocks * 16 + 5],
            block_tables_GSB=[blocks[:, None].int()],
            query_start_loc_S=torch.arange(count + 1).int(),
            seq_lens_S=positions.int() + 1,
            rope_seq_lens_T=None,
            logit_rows_R=None,
            max_query_len=1,
            max_seq_len=16,
        )
    )
    x, cos_sins = model.embed(torch.arange(count), positions, cache)
    launches = Launches()
    run = launches.wrap(interpreter.GridExecutor.__call__)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", run)
    monkeypatch.setattr(
        registry, "can_skip_dispatcher", lambda *_: True
    )  # despite the dispatch mode of this test
    with launches:
        model.layers[0](x, positions, cos_sins[0], cache)
    assert launches.names == expected


def test_pdl_is_used_only_in_a_region(monkeypatch):
    """Elsewhere the previous kernel may write a weight."""
    monkeypatch.setattr(triton_pdl, "supports_pdl", lambda device: True)
    device = torch.device(DEVICE)
    assert triton_pdl.pdl_options(device) == {"PDL": False}
    with pdl_region():
        assert triton_pdl.pdl_options(device) == {"PDL": True, "launch_pdl": True}
        with pdl_region():
            pass
        assert triton_pdl.pdl_options(device)["PDL"]
    assert triton_pdl.pdl_options(device) == {"PDL": False}


@torch.no_grad()
def test_mla_prompts_are_planned_once_a_step(request, monkeypatch):
    """Long and short prompts, chunked prefill and decode tokens in one step."""
    model = build_model("deepseek_v2")
    lengths = (40, 3, 75, 33)
    prompts = [[(7 * i + j) % 61 for i in range(length)] for j, length in enumerate(lengths)]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    limits = {"context": 96, "max_batched_tokens": 64}
    expected = build_engine(copy.deepcopy(model), **limits).generate(prompts, params)
    request.getfixturevalue("use_cuda_kernels")
    engine = build_engine(model.to(DEVICE), **limits)
    if INTERPRETED:
        merge_projection_weights(model)
        engine.runner.no_capture_reason = "the interpreter is not a native kernel"
    plans, attend = [], triton_mla.mla_attention

    def record(*args):
        plans.append(args[-1])
        return attend(*args)

    for table in (mla.MLA_ATTENTION_KERNELS, vars(triton_mla)):
        name = "mla_attention" if table is vars(triton_mla) else "cpu" if INTERPRETED else "cuda"
        monkeypatch.setitem(table, name, record)
    monkeypatch.setattr(
        triton_mla, "plan_prefill", lambda metadata, *_: metadata.query_lens and pytest.fail()
    )  # a layer makes no plan
    outputs = engine.generate(prompts, params)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    layers = zip(plans[::2], plans[1::2], strict=True)
    assert all(first is second for first, second in layers), "a step has one plan"
    assert any(plan is not None and plan.chunks and plan.absorbed for plan in plans)
