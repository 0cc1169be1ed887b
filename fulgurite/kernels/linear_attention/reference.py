"""Linear attention in plain torch: the oracle of the kernels, and the differentiable form.

`causal_conv` and `gated_delta_rule` take any device and dtype and update the states in place.
`convolve` and `chunked_delta_rule` are their differentiable forms for sequences of equal length.
`recurrent_delta_rule` is the definition, token by token; in float64 it is exact for tests.

    S_t = decay_t S_{t-1} + k_t (beta_t (v_t - k_t^T decay_t S_{t-1}))^T,    out_t = q_t^T S_t

Shapes: B sequences; T tokens; C channels; W taps; K key heads; N value heads; D key size; V value
size; R state slots.
"""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.kernels.linear_attention.metadata import DeltaRuleInputs, SequenceLayout

NORM_EPS = 1e-6  # of the queries' and keys' length
CHUNK = 64  # tokens that the chunked form computes at once


def causal_conv(
    x_TC: Tensor,
    weight_WC: Tensor,
    bias_C: Tensor | None,
    state_RWC: Tensor,
    layout: SequenceLayout,
    activation: str | None,
) -> Tensor:
    """`ops.causal_conv`, one sequence after the other."""
    out_TC = torch.zeros_like(x_TC, memory_format=torch.contiguous_format)
    taps = weight_WC.shape[0]
    for slot, start, end, is_new in _sequences(layout):
        past = state_RWC[slot].to(x_TC.dtype)
        inputs = torch.cat((torch.zeros_like(past) if is_new else past, x_TC[start:end]))
        out_TC[start:end] = convolve(inputs[None], weight_WC, bias_C, activation)[0, taps - 1 :]
        state_RWC[slot] = inputs[len(inputs) - (taps - 1) :].to(state_RWC.dtype)
    return out_TC


def convolve(
    x_BTC: Tensor,
    weight_WC: Tensor,
    bias_C: Tensor | None,
    activation: str | None,
    segments_T: Tensor | None = None,
) -> Tensor:
    """activation(bias + sum_w weight[w] * x[t - W + 1 + w]), zeros before the first token.

    `segments_T`, or one row a sequence: tokens of other segments count as zeros, too.
    """
    taps, length = weight_WC.shape[0], x_BTC.shape[1]
    weight = weight_WC.float()
    out = x_BTC.float() * weight[taps - 1]
    for shift in range(1, min(taps, length)):
        past = x_BTC[:, : length - shift].float() * weight[taps - 1 - shift]
        if segments_T is not None:
            same = segments_T[..., shift:] == segments_T[..., : length - shift]
            past = past * same[..., None]
        out = out + F.pad(past, (0, 0, shift, 0))
    if bias_C is not None:
        out = out + bias_C.float()
    if activation == "silu":
        out = F.silu(out)
    return out.to(x_BTC.dtype)


def gated_delta_rule(inputs: DeltaRuleInputs, state_RNDV: Tensor, layout: SequenceLayout) -> Tensor:
    """`ops.gated_delta_rule`, one sequence after the other."""
    out_TNV = torch.zeros_like(inputs.v_TNV, memory_format=torch.contiguous_format)
    for slot, start, end, is_new in _sequences(layout):
        state = state_RNDV[slot]
        state = torch.zeros_like(state) if is_new else state
        part = inputs.map_tokens(operator.itemgetter(slice(start, end)))
        out, new_state = recurrent_delta_rule(part, state)
        out_TNV[start:end] = out.to(out_TNV.dtype)
        state_RNDV[slot] = new_state
    return out_TNV


def recurrent_delta_rule(
    inputs: DeltaRuleInputs, state_NDV: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """One sequence, token by token, in `dtype`: outputs [T, N, V] and the last state."""
    q, k, v, log_decay, beta = prepare(inputs, dtype)
    state, outputs = state_NDV.to(dtype), []
    for t in range(q.shape[0]):
        state = state * log_decay[t].exp()[:, None, None]
        delta = beta[t][:, None] * (v[t] - torch.einsum("nd,ndv->nv", k[t], state))
        state = state + k[t][:, :, None] * delta[:, None, :]
        outputs.append(torch.einsum("nd,ndv->nv", q[t], state))
    return torch.stack(outputs) if outputs else v, state


def chunked_delta_rule(inputs: DeltaRuleInputs, batch: int) -> Tensor:
    """`batch` sequences of equal length from zero states: outputs [B, T, N, V] in float32.

    Within a chunk the deltas U solve (I + A) U = beta (V - decayed K S), with A the strictly lower
    triangle of beta_i k_i.k_j decay_{j..i}; S is the state before the chunk.
    """
    q, k, v, log_decay, beta = (
        x.unflatten(0, (batch, -1)).transpose(1, 2) for x in prepare(inputs, torch.float32)
    )
    length, value_dim = q.shape[2], v.shape[-1]
    state = q.new_zeros(batch, q.shape[1], q.shape[3], value_dim)
    outputs = []
    for start in range(0, length, CHUNK):
        part = slice(start, min(start + CHUNK, length))
        q_c, k_c, v_c, beta_c = q[:, :, part], k[:, :, part], v[:, :, part], beta[:, :, part]
        exact = log_decay[:, :, part].double().cumsum(-1)  # large sums with small differences
        since = (exact[..., :, None] - exact[..., None, :]).tril().float().exp().tril()
        left = (exact[..., -1:] - exact).float().exp()[..., None]
        total = exact.float()
        system = (beta_c[..., None] * (k_c @ k_c.mT) * since).tril(-1)
        reads = (k_c * total.exp()[..., None]) @ state
        delta = torch.linalg.solve_triangular(
            system, beta_c[..., None] * (v_c - reads), upper=False, unitriangular=True
        )
        inner = (q_c @ k_c.mT) * since
        outputs.append((q_c * total.exp()[..., None]) @ state + inner @ delta)
        state = state * total[..., -1].exp()[..., None, None] + (k_c * left).mT @ delta
    out = torch.cat(outputs, dim=2) if outputs else v
    return out.transpose(1, 2)


def prepare(
    inputs: DeltaRuleInputs, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Normalized and scaled queries, normalized keys, values, log decays and betas, by value head."""
    q, k, v, a, b, a_log, dt_bias = (x.to(dtype) for x in inputs)
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS) for x in (q, k))
    group = v.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(group, dim=1) for x in (q * q.shape[-1] ** -0.5, k))
    log_decay = -a_log.exp() * F.softplus(a + dt_bias)
    return q, k, v, log_decay, b.sigmoid()


def _sequences(layout: SequenceLayout) -> list[tuple[int, int, int, bool]]:
    """Slot, first token, end, and whether it starts from a zero state, of each real sequence."""
    bounds, lengths = layout.query_start_loc.tolist(), layout.seq_lens_S.tolist()
    return [
        (slot, start, end, length == end - start)
        for slot, start, end, length in zip(
            layout.slots_S.tolist(), bounds[:-1], bounds[1:], lengths, strict=True
        )
        if slot >= 0 and end > start
    ]
