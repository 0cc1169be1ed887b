"""The kernels of a decode step, compiled for a GPU down to machine code on any machine.

The compiler rejects what the interpreter accepts: types that change in a loop, tiles too small for
a dot.
"""

from __future__ import annotations

import os

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs triton")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
    ),
]

if os.environ.get("TRITON_INTERPRET") != "1":
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from fulgurite.kernels.attention import triton_kernel
    from fulgurite.kernels.elementwise import triton_elementwise
    from fulgurite.kernels.gemm import (
        triton_fused_linear_kernels,
        triton_gemv,
        triton_invariant_gemm,
    )
    from fulgurite.kernels.linear_attention import triton_causal_conv, triton_delta_rule
    from fulgurite.kernels.mla import (
        triton_absorb,
        triton_decode,
        triton_decode_sm90,
        triton_prefill,
        triton_store_kv,
    )
    from fulgurite.kernels.moe import triton_small_batch, triton_small_batch_routing
    from fulgurite.kernels.sampling import triton_logits, triton_sampling
    from fulgurite.kernels.sampling.table import LogitsTable
    from fulgurite.kernels.tuning.sm_90 import Sm90Heuristics
    from fulgurite.kernels.tuning.sm_100 import Sm100Heuristics
    from tests.kernels.compile_support import IS_HOPPER, TARGET, compile_launches

POINTERS = {
    "block_table_ptr": "*i32", "query_start_loc_ptr": "*i32", "seq_lens_ptr": "*i32",
    "partial_acc_ptr": "*fp32", "partial_max_ptr": "*fp32", "partial_sum_ptr": "*fp32",
    "counter_ptr": "*i32", "partials_ptr": "*fp32", "cos_ptr": "*fp32", "sin_ptr": "*fp32",
    "slot_mapping_ptr": "*i64",
}  # fmt: skip
MLA_BLOCK_M = 64 if IS_HOPPER else Sm100Heuristics.mla_fp8_block_m
FLOATS = {"eps", "offset", "limit", "cache_max", "scale", "softcap", "value_scale"}


def compile_ptx(kernel, constants, num_warps=4, num_stages=3, **types):
    """The PTX of a kernel for sm_90: pointers aligned, sizes multiples of 16, the common case."""
    return compile_kernel(kernel, constants, num_warps, num_stages, **types).asm["ptx"]


def compile_kernel(kernel, constants, num_warps=4, num_stages=3, **types):
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        default = "*bf16" if name.endswith("_ptr") else "fp32" if name in FLOATS else "i32"
        signature[name] = types.get(name, POINTERS.get(name, default))
        if signature[name] != "fp32":
            attributes[(index,)] = [["tt.divisibility", 16]]
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=constexprs, attrs=attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    compiled = triton.compile(source, target=TARGET, options=options)
    assert compiled.asm["cubin"]
    return compiled


@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize("rows, block_n, num_warps", [(1, 8, 8), (4, 16, 2), (16, 16, 4)])
def test_fused_small_m(rows, block_n, num_warps, gate):
    ptx = compile_ptx(
        triton_fused_linear_kernels.fused_small_m_kernel,
        {"NORM": True, "GATE": gate, "BIAS": False, "RESIDUAL": not gate, "EVEN": True, "R": rows,
         "BN": block_n, "C": 128, "W": num_warps, "STAGES": 3, "NATIVE": True, "PREFETCH": 1,
         "PREFETCH_ALL": False, "PDL": True},
        num_warps=num_warps,
    )  # fmt: skip
    assert "mma.sync" in ptx and "cp.async" in ptx
    before, after = ptx.split("griddepcontrol.wait")
    assert "launch_dependents" in before and "ld.global" in before and "cp.async" in after
    assert "cp.async" not in before and "st.global" not in before


@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize("prefetch, prefetch_all", [(1, False), (3, True)])
def test_fused_gemv(prefetch, prefetch_all, gate):
    ptx = compile_ptx(
        triton_gemv.fused_gemv_kernel,
        {"NORM": True, "GATE": gate, "BIAS": False, "RESIDUAL": not gate, "EVEN": True, "BN": 4,
         "BK": 1024, "STAGES": 3, "PREFETCH": prefetch, "PREFETCH_ALL": prefetch_all,
         "PDL": True},
    )  # fmt: skip
    before, after = ptx.split("griddepcontrol.wait")
    assert "ld.global" in before and "st.global" not in before
    assert ("cp.async" in after) != prefetch_all


@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize("block_m", [32, 64, 128])
def test_fused_gemm(block_m, gate):
    ptx = compile_ptx(
        triton_fused_linear_kernels.fused_gemm_kernel,
        {"GATE": gate, "BIAS": False, "RESIDUAL": not gate, "EVEN": True, "SPLIT": True,
         "BM": block_m, "BN": 64, "BK": 64, "NATIVE": True, "LINES": 4, "PDL": True},
    )  # fmt: skip
    assert "wgmma" in ptx or not IS_HOPPER
    before, _ = ptx.split("griddepcontrol.wait")
    assert "prefetch.global.L2" in before and "cp.async" not in before


@pytest.mark.parametrize("cache", ["*bf16", "*fp8e4nv"])
def test_qk_norm_rope(cache):
    compile_ptx(
        triton_elementwise.qk_norm_rope_kernel,
        {"N": 16, "K": 8, "H": 128, "BH": 128, "V": 128, "BV": 128, "BLOCK_SIZE": 64,
         "NORM": True, "ROPE": True, "INTERLEAVED": False, "STORE": True, "R": 8, "PDL": True},
        num_warps=1,
        key_cache_ptr=cache,
        value_cache_ptr=cache,
    )  # fmt: skip


def test_elementwise():
    compile_ptx(triton_elementwise.rms_norm_kernel, {"BLOCK": 1024, "ROWS": 1, "PDL": True})
    for operation in ("add", "silu", "gelu", "gelu_pytorch_tanh", "sigmoid", "identity"):
        constants = {"HOW": operation, "FACTOR": False, "BLOCK": 1024, "PDL": False}
        compile_ptx(triton_elementwise.binary_kernel, constants)


@pytest.mark.parametrize("block_m", [1, 16])
def test_causal_conv(block_m):
    constants = {"W": 4, "BW": 4, "BT": block_m, "BC": 64, "BIAS": False, "SILU": True}
    compile_ptx(triton_causal_conv.causal_conv_kernel, constants, slots_ptr="*i32")


@pytest.mark.parametrize("key_dim", [128, 256])
def test_gated_delta_rule(key_dim):
    """The tiles of keys of 256 are half as tall; they must fit into shared memory."""
    chunk, heuristics = 64 * 128 // key_dim, Sm90Heuristics
    types = {"state_ptr": "*fp32", "inverse_ptr": "*fp32", "a_log_ptr": "*fp32"}
    types |= {"dt_bias_ptr": "*fp32", "slots_ptr": "*i32", "prompt_lens_ptr": "*i32"}
    sizes = {"GROUP": 2, "D": key_dim, "BD": key_dim, "CHUNK": chunk}
    values = {"V": 128, "BV": min(heuristics.delta_rule_chunked.block_n, chunk)}
    compile_ptx(
        triton_delta_rule.inverse_kernel, sizes, heuristics.delta_rule_inverse.num_warps, **types
    )
    config = heuristics.delta_rule_chunked
    compile_ptx(
        triton_delta_rule.chunked_kernel,
        sizes | values,
        config.num_warps,
        config.num_stages,
        **types,
    )
    config = heuristics.delta_rule_recurrent
    values = {"V": 128, "BV": config.block_n}
    compile_ptx(triton_delta_rule.recurrent_kernel, sizes | values, config.num_warps, **types)


@pytest.mark.parametrize("cache", ["*bf16", "*fp8e4nv"])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(
    "block_m, block_n, num_warps, is_decode, part_keys",
    [(16, 32, 4, True, 0), (128, 64, 8, False, 0), (64, 64, 4, True, 256), (64, 64, 4, False, 256)],
)
def test_attention(block_m, block_n, num_warps, is_decode, part_keys, block_size, cache):
    """Split and fused with the projections' heads, as in decode; or neither. In parts, or not."""
    ptx = compile_ptx(
        triton_kernel.attention_kernel,
        {"HEADS": 32, "GROUP": 4, "H": 128, "H1": 128, "H2": 16, "V": 128, "BV": 128,
         "BLOCK_SIZE": block_size, "VALUES_IN_KEYS": False, "HAS_SINKS": True, "SOFTCAP": False,
         "SPLIT": is_decode, "ONE_LOOP": False, "PRECISION": "tf32", "COMPUTE": tl.bfloat16,
         "BM": block_m, "BN": block_n, "MIN_SPLIT_KEYS": 128, "PART_KEYS": part_keys,
         "SHARDED": False, "MERGE_SPLITS": 8 if is_decode else 1, "MERGE_ROWS": 8, "FUSED": is_decode,
         "NORM": is_decode, "ROPE": is_decode, "INTERLEAVED": False, "PDL": is_decode},
        num_warps=num_warps,
        key_cache_ptr=cache,
        value_cache_ptr=cache,
    )  # fmt: skip
    assert ("mma.sync" if block_m == 16 else "wgmma") in ptx or not IS_HOPPER


def test_moe_small_batch():
    types = {"experts_ptr": "*i64", "weights_ptr": "*fp32", "logits_ptr": "*fp32", "alpha": "fp32",
             "scaling_factor": "fp32"}  # fmt: skip
    shared = {"TOP_K": 8, "EVEN_K": True, "NUM_STAGES": 3, "PDL": True}
    gate_up = {**shared, "NORM": True, "GATE": 1, "BLOCK_N": 8, "BLOCK_K": 512}
    assert "cp.async" in compile_ptx(triton_small_batch.gate_up_kernel, gate_up, **types)
    down = {**shared, "TOP_K_POW2": 8, "RESIDUAL": True, "BLOCK_N": 4, "BLOCK_K": 256}
    assert "cp.async" in compile_ptx(triton_small_batch.down_kernel, down, num_warps=8, **types)
    router = {"TOP_K": 8, "SIGMOID": True, "TOPK_BEFORE_SCORING": False, "RENORMALIZE": True,
              "NORM": True, "ROUTER_BIAS": True, "CORRECTION_BIAS": True}  # fmt: skip
    sizes = {"BLOCK_N": 2, "BLOCK_K": 8192, "EXPERTS_POW2": 256, "BLOCK_E": 64, "PDL": True}
    kernel = triton_small_batch_routing.route_small_batch_kernel
    compile_ptx(kernel, {**router, **sizes}, num_warps=8, **types)


@pytest.mark.parametrize("rows", [1, 40])
def test_sampling(rows, monkeypatch):
    launches = {
        launch.function.__name__: launch
        for launch in compile_launches(triton_sampling, monkeypatch)
    }
    settings = torch.tensor([[1.0, 0.0, 0, 0.9, 0.5]], dtype=torch.float64).expand(rows, -1)
    triton_sampling.sample_rows(torch.empty(rows, 151_936), settings)
    for name in ("max", "candidates", "threshold", "sample"):
        assert len(launches[f"{name}_kernel"].kernels) == 1
    ptx = launches["pivot_kernel"].kernels[0].asm["ptx"]
    pivots = Sm90Heuristics().sampling_num_pivots(rows)
    if IS_HOPPER:
        assert ptx.count("fma.rn.f32") >= 4 * pivots  # one per pivot, of four tokens at once
    triton_sampling.greedy_sample(torch.empty(rows, 151_936, dtype=torch.bfloat16))
    assert len(launches["argmax_kernel"].kernels) == 1


def test_logits_processing(monkeypatch):
    launches = {
        launch.function.__name__: launch for launch in compile_launches(triton_logits, monkeypatch)
    }
    logits, table = torch.empty(3, 1003), LogitsTable.allocate(4, 1003, torch.device("cpu"))
    processing, last = torch.zeros(3, 5, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    triton_logits.process_logits(logits, processing, table)
    triton_logits.record_tokens(last[:3], processing, last, table.counts_WO)
    triton_logits.fill_pending_tokens(last[:3], last[:3], last)
    for name in ("process", "record", "pending"):
        assert len(launches[f"{name}_kernel"].kernels) == 1
    assert "div.rn.f32" in launches["process_kernel"].kernels[0].asm["ptx"]  # rounds as torch does


LATENT = {"C": 512, "BC": 512, "R": 64, "BR": 64}


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_mla_decode_in_deterministic_mode(is_fp8, is_split):
    """The config of all numbers of rows fits into shared memory; the context is in parts."""
    ptx = compile_ptx(
        triton_decode.mla_decode_kernel,
        {**LATENT, "HEADS": 16, "BLOCK_SIZE": 16, "FP8": is_fp8, "CONVERT_F16": is_fp8,
         "SPLIT": is_split, "PRECISION": "tf32", "PART_KEYS": 256, "BM": MLA_BLOCK_M,
         "BN": 32 if is_fp8 else 64, "PDL": False},
        num_warps=8,
        num_stages=3 if is_fp8 else 2,
        q_ptr="*fp16" if is_fp8 else "*bf16",
        latents_ptr="*fp8e4nv" if is_fp8 else "*bf16",
        scales_ptr="*fp32",
        powers_ptr="*fp32",
    )  # fmt: skip
    assert "wgmma" in ptx or not IS_HOPPER


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_invariant_gemm_multiplies_float32_without_tf32(dtype):
    ptx = compile_ptx(
        triton_invariant_gemm.invariant_gemm_kernel,
        {"BIAS": True, "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "NATIVE": True},
        num_warps=4,
        x_ptr=f"*{dtype}",
        w_ptr=f"*{dtype}",
        out_ptr=f"*{dtype}",
        bias_ptr=f"*{dtype}",
    )
    assert "tf32" not in ptx and ("fma.rn.f32" in ptx) == (dtype == "fp32")


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("heads, block_m, num_warps", [(16, 16, 4), (128, MLA_BLOCK_M, 8)])
def test_mla_decode(heads, block_m, num_warps, is_fp8):
    ptx = compile_ptx(
        triton_decode.mla_decode_kernel,
        {**LATENT, "HEADS": heads, "BLOCK_SIZE": 64, "FP8": is_fp8, "CONVERT_F16": is_fp8,
         "SPLIT": True, "PRECISION": "tf32", "PART_KEYS": 0, "BM": block_m, "BN": 32,
         "PDL": True},
        num_warps=num_warps,
        q_ptr="*fp16" if is_fp8 else "*bf16",
        latents_ptr="*fp8e4nv" if is_fp8 else "*bf16",
        scales_ptr="*fp32",
        powers_ptr="*fp32",
    )  # fmt: skip
    instruction = "wgmma" if block_m >= 64 else "mma.sync"
    assert (instruction in ptx or not IS_HOPPER) and "cp.async" in ptx
    assert_starts_early(ptx, num_waits=2)  # of both kinds of programs without work
    assert ("prefetch.global.L2" in ptx) == (block_m == 16)
    for is_ordered in (False, True):
        constants = {"HEADS": heads, "C": 512, "BC": 512, "SPLITS": 16, "ORDERED": is_ordered}
        compile_ptx(triton_decode.merge_splits_kernel, {**constants, "PDL": True})


@pytest.mark.skipif(not IS_HOPPER, reason="wgmma is Hopper's")
@pytest.mark.parametrize("is_fp8", [False, True])
def test_mla_decode_sm90(is_fp8):
    """Gluon: tensor descriptors in the signature; few waits between the wgmmas."""
    kernel = triton_decode_sm90.mla_decode_sm90_kernel
    latent, query = ("fp8e4nv", "fp16") if is_fp8 else ("bf16", "bf16")
    constants = {"HEADS": 128, "C": 512, "R": 64, "BLOCK_SIZE": 64, "FP8": is_fp8, "SPLIT": True,
                 "BM": 64, "BN": 64, "num_warps": 8, "PDL": True}  # fmt: skip
    types = {"q": descriptor_type(query, 512), "q_rope": descriptor_type("bf16", 64),
             "latents": descriptor_type(latent, 512), "ropes": descriptor_type("bf16", 64),
             "scales_ptr": "*fp32", "powers_ptr": "*fp32"}  # fmt: skip
    signature = {
        name: "constexpr" if name in constants
        else types.get(name, POINTERS.get(name, "*bf16" if name.endswith("_ptr") else "i32"))
        for name in kernel.arg_names
    } | {"scale": "fp32"}  # fmt: skip
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, signature, constexprs, {})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert compiled.asm["cubin"] and compiled.metadata.shared <= 227 << 10
    ptx = compiled.asm["ptx"]
    assert ptx.count("wgmma.wait_group") < 10 < ptx.count("wgmma.mma_async")
    assert "cp.async.bulk.tensor" in ptx
    assert_starts_early(ptx, num_waits=2)


def assert_starts_early(ptx, num_waits):
    """The next kernel may start at once; each way through the kernel has a wait (PDL)."""
    before, *_ = ptx.split("griddepcontrol.wait", 1)
    assert "griddepcontrol.launch_dependents" in before and "ret;" not in before
    assert ptx.count("griddepcontrol.wait") == num_waits


def descriptor_type(dtype, columns):
    """The type of a tensor descriptor with blocks of 64 rows."""
    dtypes = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp8e4nv": gl.float8e4nv}
    layout = gl.NVMMASharedLayout.get_default_for([64, columns], dtypes[dtype])
    return f"tensordesc<{dtype}[64, {columns}],{layout!r}>"


@pytest.mark.parametrize("is_fp8", [False, True])
def test_mla_absorb_queries(is_fp8):
    compile_ptx(
        triton_absorb.absorb_queries_kernel,
        {**LATENT, "HEADS": 128, "D": 128, "INTERLEAVED": True, "FP8": is_fp8, "BM": 4,
         "PDL": True},
        latent_ptr="*fp16" if is_fp8 else "*bf16",
        powers_ptr="*fp32",
    )  # fmt: skip


@pytest.mark.parametrize("is_fp8", [False, True])
def test_mla_gather_latents(is_fp8):
    compile_ptx(
        triton_prefill.gather_latents_kernel,
        {**LATENT, "BLOCK_SIZE": 64, "FP8": is_fp8, "BK": Sm90Heuristics.mla_gather.block_m,
         "PDL": True},
        latents_ptr="*fp8e4nv" if is_fp8 else "*bf16",
        scales_ptr="*fp32",
        table_ptr="*i32",
        tiles_ptr="*i32",
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("has_state", [False, True])
def test_mla_prefill(has_state, block_m, dtype):
    config = Sm90Heuristics().mla_prefill_config(block_m, is_float32=dtype == "*fp32")
    compiled = compile_kernel(
        triton_prefill.mla_prefill_kernel,
        {"HEADS": 128, "D": 128, "BD": 128, "R": 64, "BR": 64, "V": 128, "BV": 128,
         "INTERLEAVED": True, "STATE": has_state, "SUBTILES": block_m // config.block_m,
         "PRECISION": "ieee" if dtype == "*fp32" else "tf32", "BM": config.block_m,
         "BN": config.block_n, "PDL": True},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        tiles_ptr="*i32", max_ptr="*fp32", sum_ptr="*fp32", acc_ptr="*fp32",
        q_ptr=dtype, kv_ptr=dtype, ropes_ptr=dtype, out_ptr=dtype,
    )  # fmt: skip
    ptx = compiled.asm["ptx"]
    assert "wgmma" in ptx or not IS_HOPPER or dtype == "*fp32"
    assert compiled.metadata.shared <= 227 << 10
    assert_starts_early(ptx, num_waits=1)


@pytest.mark.parametrize("is_fp8", [False, True])
def test_store_mla_cache(is_fp8):
    compile_ptx(
        triton_store_kv.store_mla_cache_kernel,
        {
            **LATENT,
            "INTERLEAVED": True,
            "BLOCK_SIZE": 64,
            "FP8": is_fp8,
            "NATIVE": True,
            "PDL": True,
        },
        latents_ptr="*fp8e4nv" if is_fp8 else "*bf16",
        scales_ptr="*fp32",
    )
