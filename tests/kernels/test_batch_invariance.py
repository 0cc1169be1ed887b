"""Rows of a kernel's result have the same bits whatever the other rows of the call (CPU).

And on GPUs, in deterministic mode: launch configs don't depend on the number of rows.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from fulgurite.determinism import deterministic
from fulgurite.kernels.attention.metadata import AttentionMetadata, AttentionOptions
from fulgurite.kernels.attention.ops import paged_attention
from fulgurite.kernels.common.triton_operands import dequant_scheme
from fulgurite.kernels.elementwise import ops as elementwise
from fulgurite.kernels.gemm.dense_linear import dense_linear
from fulgurite.kernels.gemm.modules import default_activation_format
from fulgurite.kernels.gemm.quant_linear import quant_linear
from fulgurite.kernels.grouped_gemm.ops import grouped_gemm
from fulgurite.kernels.tuning import heuristics_for
from fulgurite.quant import FORMATS, QuantTensor, quantize, resolve_format

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COUNTS = (2, 3, 4, 5, 7, 8, 9, 12, 13, 16, 17, 31, 64, 130)
ROWS = 130


def check_rows(function, x: Tensor, counts: tuple[int, ...] = COUNTS) -> Tensor:
    """function(x) and function of fewer rows, from several rows on, equal function of each row."""
    alone = torch.cat([function(x[row : row + 1]) for row in range(len(x))])
    for count in counts:
        for start in {0, min(3, len(x) - count)}:
            part = slice(start, start + count)
            assert torch.equal(function(x[part]), alone[part]), f"{count} rows from {start} on"
    return alone


@pytest.mark.parametrize("size", [1, 20, 99])  # torch computes the end of a tensor in other bits
@pytest.mark.parametrize("activation", elementwise.ACTIVATIONS)
def test_activations(activation: str, size: int) -> None:
    torch.manual_seed(size)
    x = 3 * torch.randn(ROWS, size)
    with torch.inference_mode():
        out = check_rows(lambda rows: elementwise.activate(rows, activation), x)
    expected = elementwise.ACTIVATIONS[activation](x.double()).float()
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    with torch.inference_mode():  # token layouts [B, T] and one token alone
        assert torch.equal(
            elementwise.activate(x[:128].view(2, 64, size), activation)[1, 3], out[67]
        )
        assert torch.equal(elementwise.activate(x[5], activation), out[5])
        assert elementwise.activate(x[:0], activation).shape == (0, size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(64, 96), (33, 77), (1, 300), (50, 1)])
def test_dense_linear(dtype: torch.dtype, n: int, k: int) -> None:
    torch.manual_seed(n + k)
    x, weight, bias = (torch.randn(*size).to(dtype) for size in ((ROWS, k), (n, k), (n,)))
    out = check_rows(lambda rows: dense_linear(rows, weight, bias), x)
    expected = x.double() @ weight.double().t() + bias.double()
    # sums are float32, rounded once: half a unit of the dtype, and K roundings of float32
    tolerance = torch.finfo(dtype).eps + k * 2**-24
    assert (out.double() - expected).abs().max() <= tolerance * expected.abs().max()


def test_dense_linear_with_a_residual_and_its_gradient() -> None:
    torch.manual_seed(0)
    shapes = ((2, 5, 32), (24, 32), (24,), (2, 5, 24))
    inputs = [torch.randn(*shape, dtype=torch.float32, requires_grad=True) for shape in shapes]
    out = dense_linear(*inputs)
    x, weight, bias, residual = inputs
    expected = torch.nn.functional.linear(x, weight, bias) + residual
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, inputs, grad)
    torch.testing.assert_close(got, torch.autograd.grad(expected, inputs, grad))


def test_dense_linear_of_no_rows() -> None:
    assert dense_linear(torch.randn(0, 7), torch.randn(3, 7)).shape == (0, 3)


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quant_linear(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weight = quantize(torch.randn(40, 256), name)
    assert isinstance(weight, QuantTensor)
    x, bias = torch.randn(ROWS, 256).to(dtype), torch.randn(40)
    for activations in sorted({"none", default_activation_format(weight)}):
        check_rows(lambda rows, a=activations: quant_linear(rows, weight, bias, a), x)


@pytest.mark.parametrize("format", [None, "q4_0", "fp8_e4m3_row"])
def test_grouped_gemm(format: str | None) -> None:
    """A row's result depends neither on the rows of its expert nor on those of others."""
    torch.manual_seed(2)
    experts, rows, k = 3, 90, 64
    dense = torch.randn(experts, 48, k)
    weight = dense if format is None else quantize(dense, format)
    x = torch.randn(rows, k)
    ends = torch.tensor([40, 41, 90], dtype=torch.int32)
    together = grouped_gemm(x, ends, weight)
    for row, expert in ((0, 0), (39, 0), (40, 1), (41, 2), (89, 2)):
        alone = (torch.arange(experts) >= expert).to(torch.int32)
        one = grouped_gemm(x[row : row + 1], alone, weight)
        assert torch.equal(one[0], together[row])


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("heads", "key_heads", "size", "block_size"), [(9, 3, 32, 16), (2, 2, 24, 5)]
)
@pytest.mark.parametrize(("window", "chunk"), [(None, None), (100, None), (None, 300)])
def test_paged_attention(
    cache_dtype: torch.dtype,
    heads: int,
    key_heads: int,
    size: int,
    block_size: int,
    window: int | None,
    chunk: int | None,
) -> None:
    """One query, a chunk of them and all of them, past several splits of keys; with a companion."""
    torch.manual_seed(3)
    length = 600
    blocks = -(-length // block_size)
    shape = (2 * blocks + 1, block_size, key_heads, size)
    keys, values = torch.randn(shape).to(cache_dtype), torch.randn(shape).to(cache_dtype)
    table = (torch.randperm(2 * blocks) + 1).view(2, blocks).to(torch.int32)
    q = torch.randn(length, heads, size)
    options = AttentionOptions(scale=size**-0.5, window=window, chunk=chunk)

    def attend(queries: Tensor, lengths: list[int], counts: list[int]) -> Tensor:
        starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
        metadata = AttentionMetadata(
            table[: len(lengths)], starts, torch.tensor(lengths, dtype=torch.int32)
        )
        return paged_attention(queries, keys, values, metadata, options)

    whole = attend(q, [length], [length])
    for t in (0, 15, 63, 64, 100, 255, 256, 299, 300, 511, 512, 599):
        assert torch.equal(attend(q[t : t + 1], [t + 1], [1])[0], whole[t])
        crowded = attend(torch.cat((q[t : t + 1], q[:3])), [t + 1, 590], [1, 3])
        assert torch.equal(crowded[0], whole[t])
    for start, end in ((0, 10), (10, 14), (14, 300), (300, 303), (303, 600)):
        assert torch.equal(attend(q[start:end], [end], [end - start]), whole[start:end])


# ---- GPUs ----------------------------------------------------------------------------------------


MLA_KINDS = ((False, False), (False, True), (True, False))  # is_float32, is_fp8


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3_row", "fp8_e4m3_128x128", "int4_g128", "nvfp4"])
def test_order_of_additions_of_deterministic_mode_ignores_rows(name: str) -> None:
    """Kernels, steps and parts of K are those of one row for every number of rows."""
    scheme = dequant_scheme(resolve_format(name))
    assert scheme is not None
    with deterministic():
        table = heuristics_for(torch.device("cpu"))
        for rows in (1, 2, 7, 16, 17, 64, 191, 192, 500, 4096):
            gemms = [
                table.dense_gemm(rows, n, 4096)
                for n in (4096, 28672)  # type: ignore[attr-defined]
            ]
            gemms += [
                table.weight_only_gemm(rows, 4096, 4096, scheme),
                table.dequantized_gemm(rows, 28672, 4096, scheme),
                table.scaled_gemm(rows, 4096, 4096, scheme.scaling),
                table.expert_gemm(rows, 4096, 4096, 8, scheme, is_8bit=False),
                table.grouped_gemm(rows, 8, scheme, False, torch.bfloat16),
            ]
            # rows of x are columns of the MMA; a tile of the weight has the rows of whole MMAs
            assert all(one.block_n % (16 * one.num_warps) == 0 for one in gemms)
            assert all(one.block_n >= 64 and not one.small_m for one in gemms)
            others = [
                table.grouped_gemm_dense(rows, 8, False),
                table.grouped_gemm_fp8(rows, 8, False, False),
                table.grouped_gemm_4bit(rows, 8, scheme, False),
                table.small_m_experts(rows, 8, 4096, 4096, scheme),
                table.route_tokens(rows, 64, torch.bfloat16),
                table.gguf_gemm(rows),
                table.rope_heads(rows, 128),
                table.prefers_library_scaled_mm((0, 0), rows, 4096, 4096),
            ]
            attention = [
                table.attention_config(rows, 128, False, rows, rows),
                *(table.mla_decode_config(rows, *kind, rows, 16 * rows) for kind in MLA_KINDS),
            ]
            # how many programs share the parts, and how many stages are in flight, changes no bit
            found = (
                [(one.block_k, one.part_k) for one in gemms],
                others,
                [replace(one, split_k=1, num_stages=1) for one in attention],
            )
            if rows == 1:
                expected = found
            assert found == expected
            assert all(one.part_k % one.block_n == 0 for one in attention)
            assert all(one.part_k % one.block_k == 0 for one in gemms)
    assert table.max_small_batch == table.fused_linear_max_rows == 0
    assert not table.mla_expands_keys and not table.delta_rule_chunks_prompts


def test_parts_of_k_depend_on_k_alone() -> None:
    """Merged weights, and shards along N, have the bits of the whole."""
    with deterministic():
        table = heuristics_for(torch.device("cpu"))
        for k in (64, 1000, 4096, 14336, 28672):
            parts = {table.dense_gemm(m, n, k).part_k for m in (1, 300) for n in (64, 4096, 50000)}  # type: ignore[attr-defined]
            assert len(parts) == 1 and -(-k // parts.pop()) <= 8
