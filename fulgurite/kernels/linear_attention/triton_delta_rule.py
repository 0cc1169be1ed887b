# mypy: allow-untyped-defs, allow-incomplete-defs
"""The gated delta rule on GPUs: chunked for whole blocks of a prompt, recurrent for the rest.

    S = decay S + k (beta (v - k^T decay S))^T,    out = q^T S

Chunked, for a block of CHUNK tokens with state S before it and G_i the log decay up to token i:

    A_ij   = beta_i k_i.k_j exp(G_i - G_j) for j < i                    inverse_kernel: (I + A)^-1,
                                                                        all blocks in parallel
    U      = (I + A)^-1 beta (V - exp(G) K S)                           chunked_kernel: block by block
    out    = exp(G) Q S + tril(Q K^T exp(G_i - G_j)) U
    S     <- exp(G_last) S + (exp(G_last - G) K)^T U

Which tokens run chunked depends on positions alone: blocks begin at multiples of CHUNK and end
within the prompt. The other tokens, with all of a reply, run token by token in `recurrent_kernel`,
with the same launch config in prefill and decode. So a request gives the same bits wherever its
prompt is cut at a multiple of CHUNK, and after a preemption. A call that begins inside of a block
runs recurrently. In deterministic mode all tokens do: bits don't depend on cuts at all, nor on which
tokens are the prompt's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.common.triton_launch import cached_launch
from fulgurite.kernels.integer_math import cdiv, next_power_of_2
from fulgurite.kernels.linear_attention.metadata import DeltaRuleInputs, SequenceLayout
from fulgurite.kernels.tuning.heuristics import heuristics_for

CHUNK = 64  # tokens of a block; half as many for keys of more than 128, and so on
NEVER = 1 << 30  # a chunk that no sequence reaches: all tokens run recurrently
CHUNK_ELEMENTS = CHUNK * 128  # of a block's keys and of a tile of the state, in shared memory
MAX_KEY_DIM = 512
NORM_EPS = tl.constexpr(1e-6)  # of the queries' and keys' length
SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def locate(query_start_loc_ptr, seq_lens_ptr, prompt_lens_ptr, sequence, CHUNK: tl.constexpr):
    """First token, number of tokens, whether the state is new, and tokens that run chunked."""
    first = tl.load(query_start_loc_ptr + sequence)
    count = tl.load(query_start_loc_ptr + sequence + 1) - first
    length = tl.load(seq_lens_ptr + sequence)
    start = length - count
    whole = tl.load(prompt_lens_ptr + sequence) // CHUNK * CHUNK
    chunked = (tl.minimum(length, whole) - start) // CHUNK * CHUNK
    chunked = tl.where((start % CHUNK == 0) & (chunked > 0), chunked, 0)
    return first, count, start == 0, chunked


@triton.jit
def load_gates(a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, token, head, a_stride, b_stride):
    """Log decay and beta of tokens of one head."""
    rate = tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    a = tl.load(a_ptr + token * a_stride + head).to(tl.float32)
    a += tl.load(dt_bias_ptr + head).to(tl.float32)
    softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
    beta = tl.sigmoid(tl.load(b_ptr + token * b_stride + head).to(tl.float32))
    return -rate * softplus, beta


@triton.jit
def load_unit_rows(ptr, token, head, token_stride, head_stride, D: tl.constexpr, BD: tl.constexpr):
    """Rows [tokens, BD] of one head in float32, divided by their length."""
    column = tl.arange(0, BD)
    at = ptr + token[:, None] * token_stride + head * head_stride + column[None, :]
    x = tl.load(at, (column < D)[None, :], 0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 1) + NORM_EPS)[:, None]


@triton.jit
def load_unit(ptr, token, head, token_stride, head_stride, D: tl.constexpr, BD: tl.constexpr):
    """One row [BD] of one head in float32, divided by its length."""
    column = tl.arange(0, BD)
    at = ptr + token * token_stride + head * head_stride + column
    x = tl.load(at, column < D, 0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 0) + NORM_EPS)


@cached_launch
def inverse_kernel(
    k_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, inverse_ptr, query_start_loc_ptr, seq_lens_ptr,
    slots_ptr, prompt_lens_ptr, k_token, k_head, a_token, b_token, heads,
    GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """(I + A)^-1 of one block and value head, by forward substitution; stored as [T, N, CHUNK]."""
    sequence, block, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots_ptr + sequence)
    first, _count, _is_new, chunked = locate(
        query_start_loc_ptr, seq_lens_ptr, prompt_lens_ptr, sequence, CHUNK
    )
    if (slot >= 0) & ((block + 1) * CHUNK <= chunked):
        row = tl.arange(0, CHUNK)
        token = (first + block * CHUNK + row).to(tl.int64)
        log_decay, beta = load_gates(
            a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, token, head, a_token, b_token
        )
        k = load_unit_rows(k_ptr, token, head // GROUP, k_token, k_head, D, BD)
        total = tl.cumsum(log_decay.to(tl.float64), 0)  # large sums with small differences
        below = row[:, None] > row[None, :]
        since = tl.exp(tl.where(below, (total[:, None] - total[None, :]).to(tl.float32), 0.0))
        products = tl.dot(k, tl.trans(k), input_precision="tf32x3")
        # Rows of -A become rows of the inverse, from the top; the diagonal of ones is added last.
        matrix = tl.where(below, -beta[:, None] * products * since, 0.0)
        for i in range(1, CHUNK):
            is_row = (row == i)[:, None]
            current = tl.sum(tl.where(is_row, matrix, 0.0), 0)
            solved = current + tl.sum(current[:, None] * matrix, 0)
            matrix = tl.where(is_row, solved[None, :], matrix)
        matrix += tl.where(row[:, None] == row[None, :], 1.0, 0.0)
        into = inverse_ptr + (token * heads + head)[:, None] * CHUNK + row[None, :]
        tl.store(into, matrix)


@cached_launch
def chunked_kernel(
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, state_ptr, out_ptr, inverse_ptr,
    query_start_loc_ptr, seq_lens_ptr, slots_ptr, prompt_lens_ptr, q_token, q_head, k_token, k_head,
    v_token, v_head, a_token, b_token, heads, scale,
    GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The whole blocks of one sequence and value head, BV columns of the value."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    column = tl.program_id(2) * BV + tl.arange(0, BV)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    first, _count, is_new, chunked = locate(
        query_start_loc_ptr, seq_lens_ptr, prompt_lens_ptr, sequence, CHUNK
    )
    if (slot >= 0) & (chunked > 0):
        key = tl.arange(0, BD)
        at_state = state_ptr + (slot * heads + head) * D * V + key[:, None] * V + column[None, :]
        in_state = (key < D)[:, None] & (column < V)[None, :]
        stored = tl.where(is_new, 0, D)  # rows of the old state
        state = tl.load(at_state, in_state & (key < stored)[:, None], 0.0)
        row = tl.arange(0, CHUNK)
        causal = row[:, None] >= row[None, :]
        for start in range(0, chunked, CHUNK):
            token = (first + start + row).to(tl.int64)
            log_decay, beta = load_gates(
                a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, token, head, a_token, b_token
            )
            exact = tl.cumsum(log_decay.to(tl.float64), 0)
            last = tl.sum(tl.where(row == CHUNK - 1, exact, 0.0), 0)
            total = exact.to(tl.float32)
            k = load_unit_rows(k_ptr, token, head // GROUP, k_token, k_head, D, BD)
            q = load_unit_rows(q_ptr, token, head // GROUP, q_token, q_head, D, BD) * scale
            v = tl.load(
                v_ptr + token[:, None] * v_token + head * v_head + column[None, :],
                (column < V)[None, :], 0.0,
            ).to(tl.float32)  # fmt: skip
            inverse = tl.load(inverse_ptr + (token * heads + head)[:, None] * CHUNK + row[None, :])
            decay = tl.exp(total)[:, None]
            reads = tl.dot(k * decay, state, input_precision="tf32x3")
            delta = tl.dot(inverse, beta[:, None] * (v - reads), input_precision="tf32x3")
            since = (exact[:, None] - exact[None, :]).to(tl.float32)
            since = tl.exp(tl.where(causal, since, 0.0))
            inner = tl.dot(q, tl.trans(k), input_precision="tf32x3")
            inner = tl.where(causal, inner * since, 0.0)
            out = tl.dot(q * decay, state, input_precision="tf32x3")
            out += tl.dot(inner, delta, input_precision="tf32x3")
            into = out_ptr + (token * heads + head)[:, None] * V + column[None, :]
            tl.store(into, out.to(out_ptr.dtype.element_ty), (column < V)[None, :])
            kept = k * tl.exp((last - exact).to(tl.float32))[:, None]
            update = tl.dot(tl.trans(kept), delta, input_precision="tf32x3")
            state = state * tl.exp(last.to(tl.float32)) + update
        tl.store(at_state, state, in_state)


@cached_launch
def recurrent_kernel(
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, state_ptr, out_ptr,
    query_start_loc_ptr, seq_lens_ptr, slots_ptr, prompt_lens_ptr, q_token, q_head, k_token, k_head,
    v_token, v_head, a_token, b_token, heads, scale,
    GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The tokens after the whole blocks of one sequence and value head, BV columns of the value."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    column = tl.program_id(2) * BV + tl.arange(0, BV)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    first, count, is_new, chunked = locate(
        query_start_loc_ptr, seq_lens_ptr, prompt_lens_ptr, sequence, CHUNK
    )
    if (slot >= 0) & (count > chunked):
        key = tl.arange(0, BD)
        at_state = state_ptr + (slot * heads + head) * D * V + key[:, None] * V + column[None, :]
        in_state = (key < D)[:, None] & (column < V)[None, :]
        stored = tl.where(is_new & (chunked == 0), 0, D)  # rows of the old state
        state = tl.load(at_state, in_state & (key < stored)[:, None], 0.0)
        for index in range(chunked, count):
            token = (first + index).to(tl.int64)
            log_decay, beta = load_gates(
                a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, token, head, a_token, b_token
            )
            k = load_unit(k_ptr, token, head // GROUP, k_token, k_head, D, BD)
            q = load_unit(q_ptr, token, head // GROUP, q_token, q_head, D, BD) * scale
            at = v_ptr + token * v_token + head * v_head + column
            v = tl.load(at, column < V, 0.0).to(tl.float32)
            state *= tl.exp(log_decay)
            delta = beta * (v - tl.sum(k[:, None] * state, 0))
            state += k[:, None] * delta[None, :]
            out = tl.sum(q[:, None] * state, 0)
            into = out_ptr + (token * heads + head) * V + column
            tl.store(into, out.to(out_ptr.dtype.element_ty), column < V)
        tl.store(at_state, state, in_state)


def gated_delta_rule(inputs: DeltaRuleInputs, state: Tensor, layout: SequenceLayout) -> Any:
    """`linear_attention.ops.gated_delta_rule`."""
    q, k, v, a, b, a_log, dt_bias = inputs
    if any(x.dtype not in SUPPORTED_DTYPES or x.stride(-1) != 1 for x in inputs):
        return NotImplemented
    if not state.is_contiguous() or q.shape[2] > MAX_KEY_DIM:
        return NotImplemented
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    sequences, (heads, value_dim) = len(layout.slots_S), v.shape[1:]
    if not out.numel() or not sequences:
        return out
    heuristics = heuristics_for(v.device)
    key_dim = q.shape[2]
    block_d = max(16, next_power_of_2(key_dim))
    chunk = min(CHUNK, CHUNK_ELEMENTS // block_d) if heuristics.delta_rule_chunks_prompts else NEVER
    sizes = {"GROUP": heads // q.shape[1], "D": key_dim, "BD": block_d, "CHUNK": chunk}
    strides = (
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], a.stride(0), b.stride(0), heads,
        key_dim**-0.5,
    )  # fmt: skip
    arguments = (*inputs, state, out)
    if layout.max_query_len >= chunk:
        inverse = torch.empty((v.shape[0], heads, chunk), dtype=torch.float32, device=v.device)
        config = heuristics.delta_rule_inverse
        inverse_kernel[(sequences, layout.max_query_len // chunk, heads)](
            k, a, b, a_log, dt_bias, inverse, *layout[:4], *k.stride()[:2], a.stride(0),
            b.stride(0), heads, **sizes, num_warps=config.num_warps,
        )  # fmt: skip
        config = heuristics.delta_rule_chunked
        width = min(config.block_n, max(16, next_power_of_2(value_dim)), CHUNK_ELEMENTS // block_d)
        chunked_kernel[(sequences, heads, cdiv(value_dim, width))](
            *arguments, inverse, *layout[:4], *strides, **sizes, V=value_dim, BV=width,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    config = heuristics.delta_rule_recurrent
    width = min(config.block_n, next_power_of_2(value_dim))
    recurrent_kernel[(sequences, heads, cdiv(value_dim, width))](
        *arguments, *layout[:4], *strides, **sizes, V=value_dim, BV=width,
        num_warps=config.num_warps,
    )  # fmt: skip
    return out
