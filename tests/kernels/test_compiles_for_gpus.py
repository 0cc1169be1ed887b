"""The kernels of a decode step, compiled for an H200 on whatever machine this is: down to machine code.

What the interpreter takes the compiler may refuse: types that change in a loop, tiles too small for a dot.
"""

from __future__ import annotations

import os

import pytest

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

    from fulgurite.kernels.triton import (
        attention,
        fused_linear,
        glue,
        mla_decode,
        mla_expand,
        mla_write,
        sampling,
    )

POINTERS = {
    "tables_ptr": "*i32", "starts_ptr": "*i32", "lengths_ptr": "*i32", "parts_ptr": "*fp32",
    "tops_ptr": "*fp32", "sums_ptr": "*fp32", "count_ptr": "*i32", "partial_ptr": "*fp32",
    "cos_ptr": "*fp32", "sin_ptr": "*fp32", "slots_ptr": "*i64", "logits": "*fp32", "state": "*i64",
    "tokens": "*i64", "counters": "*i32", "counts": "*fp32", "sums": "*fp32", "settings": "*fp64",
    "listed": "*fp32", "chunk_sums": "*i64", "chunk_ties": "*i64",
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
        if kernel is attention.attention_kernel and name == "tokens":
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
        fused_linear.few_kernel,
        {"NORM": True, "GATE": gate, "BIAS": False, "RESIDUAL": not gate, "EVEN": True, "R": rows,
         "BN": columns, "C": 128, "W": warps, "STAGES": 3, "NATIVE": True},
        warps=warps,
    )  # fmt: skip
    assert "mma.sync" in text and "cp.async" in text


@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize("rows", [32, 64, 128])
def test_tiles(rows, gate):
    text = compiled(
        fused_linear.tile_kernel,
        {"GATE": gate, "BIAS": False, "RESIDUAL": not gate, "EVEN": True, "SPLIT": True, "BM": rows,
         "BN": 64, "BK": 64, "NATIVE": True},
    )  # fmt: skip
    assert "wgmma" in text


@pytest.mark.parametrize("pages", ["*bf16", "*fp8e4nv"])
def test_heads(pages):
    compiled(
        glue.heads_kernel,
        {"N": 16, "K": 8, "H": 128, "BH": 128, "V": 128, "BV": 128, "PAGE": 64, "NORM": True,
         "TURN": True, "INTERLEAVED": False, "STORE": True},
        warps=1,
        keys_ptr=pages,
        values_ptr=pages,
    )  # fmt: skip


def test_glue():
    compiled(glue.norm_kernel, {"BLOCK": 1024, "ROWS": 1})
    for how in ("add", "silu", "gelu", "gelu_pytorch_tanh"):
        compiled(glue.combine_kernel, {"HOW": how, "BLOCK": 1024})


@pytest.mark.parametrize("pages", ["*bf16", "*fp8e4nv"])
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("rows, keys, warps, split", [(16, 32, 4, True), (128, 64, 8, False)])
def test_attention(rows, keys, warps, split, page, pages):
    text = compiled(
        attention.attention_kernel,
        {"HEADS": 32, "GROUP": 4, "H": 128, "H1": 128, "H2": 16, "V": 128, "BV": 128, "PAGE": page,
         "SHARED": False, "HAS_SINKS": True, "SOFTCAP": False, "SPLIT": split, "BOUNDED": False,
         "PRECISION": "tf32", "COMPUTE": tl.bfloat16, "BM": rows, "BN": keys,
         "SPLITS": 32 if split else 1, "MERGED": 2},
        warps=warps,
        keys_ptr=pages,
        values_ptr=pages,
    )  # fmt: skip
    assert ("mma.sync" if split else "wgmma") in text


def test_drawing():
    sizes = {"CHUNK": sampling.CHUNK}
    compiled(sampling.most_kernel, {**sizes, "GREEDY": True})
    text = compiled(sampling.bins_kernel, {**sizes, "STEP": sampling.STEP, "NATIVE": True})
    assert "mma" in text
    compiled(sampling.edge_kernel, {**sizes, "BLOCK": sampling.BLOCK})
    compiled(sampling.draw_kernel, {**sizes, "CHUNKS": 128})


LATENT = {"C": 512, "BC": 512, "R": 64, "BR": 64, "INTERLEAVED": True}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("heads, rows, warps", [(16, 16, 4), (128, 64, 8)])
def test_absorbed_latents(heads, rows, warps, packed):
    text = compiled(
        mla_decode.absorbed_kernel,
        {**LATENT, "HEADS": heads, "PAGE": 64, "PACKED": packed, "SPLIT": True, "PRECISION": "tf32",
         "COMPUTE": tl.bfloat16, "BM": rows, "BN": 32},
        warps=warps,
        latents_ptr="*fp8e4nv" if packed else "*bf16",
        scales_ptr="*fp32",
    )  # fmt: skip
    assert ("wgmma" if rows >= 64 else "mma.sync") in text and "cp.async" in text
    compiled(mla_decode.merge_kernel, {"HEADS": heads, "C": 512, "BC": 512, "SPLITS": 16})


@pytest.mark.parametrize("first, last", [(True, True), (False, True), (True, False)])
def test_expanded_latents(first, last):
    text = compiled(
        mla_expand.expanded_kernel,
        {"HEADS": 128, "D": 128, "BD": 128, "R": 64, "BR": 64, "V": 128, "BV": 128, "INTERLEAVED": True,
         "FIRST": first, "LAST": last, "PRECISION": "tf32", "COMPUTE": tl.bfloat16, "BM": 128, "BN": 64},
        warps=8,
        stages=2,
        gathered_ptr="*fp32",
        tokens="i32",
    )  # fmt: skip
    assert "wgmma" in text


@pytest.mark.parametrize("packed", [False, True])
def test_new_latents(packed):
    compiled(
        mla_write.write_kernel,
        {**LATENT, "PAGE": 64, "PACKED": packed, "NATIVE": True},
        latents_ptr="*fp8e4nv" if packed else "*bf16",
        scales_ptr="*fp32",
    )
