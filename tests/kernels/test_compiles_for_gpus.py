"""The kernels of a decode step, compiled for an H200 on whatever machine this is: down to machine code.

What the interpreter takes the compiler may refuse: types that change in a loop, tiles too small for a dot.
"""

from __future__ import annotations

import os

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs triton")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled there"
    ),
]

if os.environ.get("TRITON_INTERPRET") != "1":
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from fulgurite.kernels.attention import triton_attention
    from fulgurite.kernels.elementwise import triton_elementwise
    from fulgurite.kernels.gemm import triton_fused_linear, triton_gemv
    from fulgurite.kernels.mla import (
        triton_absorb,
        triton_decode,
        triton_decode_sm90,
        triton_prefill,
        triton_store_kv,
    )
    from fulgurite.kernels.moe import triton_small_batch, triton_small_batch_routing
    from fulgurite.kernels.sampling import triton_sampling
    from tests.kernels.compile_support import compile_launches

POINTERS = {
    "tables_ptr": "*i32", "starts_ptr": "*i32", "lengths_ptr": "*i32", "parts_ptr": "*fp32",
    "tops_ptr": "*fp32", "sums_ptr": "*fp32", "count_ptr": "*i32", "partial_ptr": "*fp32",
    "cos_ptr": "*fp32", "sin_ptr": "*fp32", "slots_ptr": "*i64", "logits": "*fp32", "state": "*i64",
    "tokens": "*i64", "counters": "*i32", "sums": "*fp32", "chunk_sums": "*i64", "chunk_ties": "*i64",
}  # fmt: skip
FLOATS = {"eps", "offset", "limit", "scale", "softcap", "value_scale"}


def compiled(kernel, constants, warps=4, stages=3, **types):
    """The PTX of a kernel for sm_90: pointers aligned, sizes multiples of 16, as they mostly are."""
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        plain = "*bf16" if name.endswith("_ptr") else "fp32" if name in FLOATS else "i32"
        if kernel is triton_attention.attention_kernel and name == "tokens":
            signature[name] = "i32"
        else:
            signature[name] = types.get(name, POINTERS.get(name, plain))
        if signature[name] != "fp32":
            attributes[(index,)] = [["tt.divisibility", 16]]
    fixed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=fixed, attrs=attributes)
    made = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages}
    )
    assert made.asm["cubin"]
    return made.asm["ptx"]


@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize("rows, columns, warps", [(1, 8, 8), (4, 16, 2), (16, 16, 4)])
def test_few_rows(rows, columns, warps, gate):
    text = compiled(
        triton_fused_linear.few_kernel,
        {"NORM": True, "GATE": gate, "BIAS": False, "RESIDUAL": not gate, "EVEN": True, "R": rows,
         "BN": columns, "C": 128, "W": warps, "STAGES": 3, "NATIVE": True, "HELD": 1, "WHOLE": False,
         "EARLY": True},
        warps=warps,
    )  # fmt: skip
    assert "mma.sync" in text and "cp.async" in text
    before, after = text.split("griddepcontrol.wait")
    assert "launch_dependents" in before and "ld.global" in before and "cp.async" in after
    assert "cp.async" not in before and "st.global" not in before


@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize("held, whole", [(1, False), (3, True)])
def test_one_row(held, whole, gate):
    text = compiled(
        triton_gemv.row_kernel,
        {"NORM": True, "GATE": gate, "BIAS": False, "RESIDUAL": not gate, "EVEN": True, "BN": 4,
         "BK": 1024, "STAGES": 3, "HELD": held, "WHOLE": whole, "EARLY": True},
    )  # fmt: skip
    before, after = text.split("griddepcontrol.wait")
    assert "ld.global" in before and "st.global" not in before
    assert ("cp.async" in after) != whole


@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize("rows", [32, 64, 128])
def test_tiles(rows, gate):
    text = compiled(
        triton_fused_linear.tile_kernel,
        {"GATE": gate, "BIAS": False, "RESIDUAL": not gate, "EVEN": True, "SPLIT": True, "BM": rows,
         "BN": 64, "BK": 64, "NATIVE": True, "LINES": 4, "EARLY": True},
    )  # fmt: skip
    assert "wgmma" in text
    before, _ = text.split("griddepcontrol.wait")
    assert "prefetch.global.L2" in before and "cp.async" not in before


@pytest.mark.parametrize("pages", ["*bf16", "*fp8e4nv"])
def test_heads(pages):
    compiled(
        triton_elementwise.heads_kernel,
        {"N": 16, "K": 8, "H": 128, "BH": 128, "V": 128, "BV": 128, "PAGE": 64, "NORM": True,
         "TURN": True, "INTERLEAVED": False, "STORE": True, "R": 8, "EARLY": True},
        warps=1,
        keys_ptr=pages,
        values_ptr=pages,
    )  # fmt: skip


def test_glue():
    compiled(triton_elementwise.norm_kernel, {"BLOCK": 1024, "ROWS": 1, "EARLY": True})
    for how in ("add", "silu", "gelu", "gelu_pytorch_tanh"):
        compiled(triton_elementwise.combine_kernel, {"HOW": how, "BLOCK": 1024, "EARLY": False})


@pytest.mark.parametrize("pages", ["*bf16", "*fp8e4nv"])
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("rows, keys, warps, split", [(16, 32, 4, True), (128, 64, 8, False)])
def test_attention(rows, keys, warps, split, page, pages):
    """Split and from the linears' own heads, as in decode; or neither."""
    text = compiled(
        triton_attention.attention_kernel,
        {"HEADS": 32, "GROUP": 4, "H": 128, "H1": 128, "H2": 16, "V": 128, "BV": 128, "PAGE": page,
         "SHARED": False, "HAS_SINKS": True, "SOFTCAP": False, "SPLIT": split, "BOUNDED": False,
         "PRECISION": "tf32", "COMPUTE": tl.bfloat16, "BM": rows, "BN": keys,
         "LEAST": 128, "TOGETHER": 8 if split else 1, "MERGED": 8, "FRESH": split,
         "NORM": split, "TURN": split, "INTERLEAVED": False, "EARLY": split},
        warps=warps,
        keys_ptr=pages,
        values_ptr=pages,
    )  # fmt: skip
    assert ("mma.sync" if split else "wgmma") in text


def test_experts_of_few_tokens():
    types = {"experts_ptr": "*i64", "weights_ptr": "*fp32", "logits_ptr": "*fp32", "alpha": "fp32",
             "scaling": "fp32"}  # fmt: skip
    common = {"K": 8, "EVEN": True, "STAGES": 3, "EARLY": True}
    inner = {**common, "NORM": True, "GATE": 1, "BN": 8, "BK": 512}
    assert "cp.async" in compiled(triton_small_batch.inner_kernel, inner, **types)
    outer = {**common, "BJ": 8, "RESIDUAL": True, "BN": 4, "BK": 256}
    assert "cp.async" in compiled(triton_small_batch.outer_kernel, outer, warps=8, **types)
    rule = {"K": 8, "SIGMOID": True, "FIRST": False, "RENORMALISE": True, "BIAS": True}
    sizes = {"BN": 2, "BD": 8192, "BE": 256, "BLOCK": 64, "EARLY": True}
    compiled(
        triton_small_batch_routing.few_routes_kernel,
        {**rule, **sizes, "NORM": True, "ADD": True},
        warps=8,
        **types,
    )


@pytest.mark.parametrize("rows", [1, 40])
def test_drawing(rows, monkeypatch):
    made = {each.function.__name__: each for each in compile_launches(triton_sampling, monkeypatch)}
    settings = torch.tensor([[1.0, 0.0, 0, 0.9, 0.5]], dtype=torch.float64).expand(rows, -1)
    triton_sampling.sample_rows(torch.empty(rows, 151_936), settings)
    assert all(
        len(made[f"{name}_kernel"].kernels) == 1 for name in ("most", "list", "edge", "draw")
    )
    pivots = triton_sampling.PIVOTS if rows == 1 else triton_sampling.FEW_PIVOTS
    text = made["pivot_kernel"].kernels[0].asm["ptx"]
    assert text.count("fma.rn.f32") >= 4 * pivots  # one a pivot, of four tokens at once
    triton_sampling.greedy(torch.empty(rows, 151_936, dtype=torch.bfloat16))
    assert len(made["greedy_kernel"].kernels) == 1


LATENT = {"C": 512, "BC": 512, "R": 64, "BR": 64}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("heads, rows, warps", [(16, 16, 4), (128, 64, 8)])
def test_absorbed_latents(heads, rows, warps, packed):
    text = compiled(
        triton_decode.absorbed_kernel,
        {**LATENT, "HEADS": heads, "PAGE": 64, "PACKED": packed, "HALF": packed, "SPLIT": True,
         "PRECISION": "tf32", "BM": rows, "BN": 32},
        warps=warps,
        q_ptr="*fp16" if packed else "*bf16",
        latents_ptr="*fp8e4nv" if packed else "*bf16",
        scales_ptr="*fp32",
        powers_ptr="*fp32",
        tokens="i32",
    )  # fmt: skip
    assert ("wgmma" if rows >= 64 else "mma.sync") in text and "cp.async" in text
    compiled(triton_decode.merge_kernel, {"HEADS": heads, "C": 512, "BC": 512, "SPLITS": 16})


@pytest.mark.parametrize("packed", [False, True])
def test_latents_of_many_heads(packed):
    """Gluon: descriptors in the signature; products of a step are issued one after the other, without waits between."""
    kernel = triton_decode_sm90.hopper_kernel
    kept, asked = ("fp8e4nv", "fp16") if packed else ("bf16", "bf16")
    constants = {"HEADS": 128, "C": 512, "R": 64, "PAGE": 64, "PACKED": packed, "SPLIT": True,
                 "BM": 64, "BN": 64, "num_warps": 8}  # fmt: skip
    types = {"q": tile_of(asked, 512), "q_rope": tile_of("bf16", 64), "latents": tile_of(kept, 512),
             "ropes": tile_of("bf16", 64), "scales_ptr": "*fp32", "powers_ptr": "*fp32"}  # fmt: skip
    signature = {
        name: "constexpr" if name in constants
        else types.get(name, POINTERS.get(name, "*bf16" if name.endswith("_ptr") else "i32"))
        for name in kernel.arg_names
    } | {"scale": "fp32"}  # fmt: skip
    fixed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, signature, fixed, {})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert made.asm["cubin"] and made.metadata.shared <= 227 << 10
    text = made.asm["ptx"]
    assert text.count("wgmma.wait_group") < 10 < text.count("wgmma.mma_async")
    assert "cp.async.bulk.tensor" in text


def tile_of(kind, columns):
    """The type of a descriptor of tiles of 64 rows."""
    kinds = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp8e4nv": gl.float8e4nv}
    layout = gl.NVMMASharedLayout.get_default_for([64, columns], kinds[kind])
    return f"tensordesc<{kind}[64, {columns}],{layout!r}>"


@pytest.mark.parametrize("packed", [False, True])
def test_queries_of_latents(packed):
    compiled(
        triton_absorb.queries_kernel,
        {**LATENT, "HEADS": 128, "D": 128, "INTERLEAVED": True, "PACKED": packed, "BM": 4},
        latent_ptr="*fp16" if packed else "*bf16",
        powers_ptr="*fp32",
    )


@pytest.mark.parametrize("packed", [False, True])
def test_latents_out_of_pages(packed):
    compiled(
        triton_prefill.gather_kernel,
        {**LATENT, "PAGE": 64, "PACKED": packed, "BK": triton_prefill.GATHERED},
        latents_ptr="*fp8e4nv" if packed else "*bf16",
        scales_ptr="*fp32",
        table_ptr="*i32",
    )


@pytest.mark.parametrize("first, last", [(True, True), (False, True), (True, False)])
def test_expanded_latents(first, last):
    text = compiled(
        triton_prefill.expanded_kernel,
        {"HEADS": 128, "D": 128, "BD": 128, "R": 64, "BR": 64, "V": 128, "BV": 128, "INTERLEAVED": True,
         "FIRST": first, "LAST": last, "PRECISION": "tf32", "BM": 128, "BN": 64},
        warps=8,
        stages=2,
        gathered_ptr="*fp32",
        tokens="i32",
    )  # fmt: skip
    assert "wgmma" in text


@pytest.mark.parametrize("packed", [False, True])
def test_new_latents(packed):
    compiled(
        triton_store_kv.write_kernel,
        {**LATENT, "INTERLEAVED": True, "PAGE": 64, "PACKED": packed, "NATIVE": True},
        latents_ptr="*fp8e4nv" if packed else "*bf16",
        scales_ptr="*fp32",
    )
