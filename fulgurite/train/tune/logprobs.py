"""Log-probabilities of labels: a model and a batch in, one number a token out, with a gradient.

    logp_t = log_softmax(logits_t / temperature)[label_t]        0 where there is no label

Logits are computed for some rows at a time, and again in backward: [tokens, vocabulary] never exists as
a whole. In deterministic mode they are the bits that the engine reports for the same tokens.

Shapes: B rows; T tokens; D hidden size; V vocabulary; C rows of a chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fulgurite.determinism import is_deterministic
from fulgurite.kernels.elementwise import ops as elementwise
from fulgurite.kernels.gemm.dense_linear import dense_linear
from fulgurite.kernels.gemm.reference import upcast
from fulgurite.models.layers import CausalLM
from fulgurite.op import op
from fulgurite.train.attention import TrainingAttention
from fulgurite.train.batch import IGNORED
from fulgurite.train.loss import chunk_rows

ALIGNED_COLUMNS = 4  # float32 numbers of 16 bytes: rows of so many begin at an aligned address


def compute_logprobs(
    model: CausalLM,
    tokens_BT: Tensor,
    labels_BT: Tensor,
    positions_BT: Tensor,
    documents_BT: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """The log-probability of each label, [B, T] in float32."""
    attention = TrainingAttention(documents_BT)
    hidden_BTD = model.compute_hidden_states(tokens_BT, positions_BT, attention)
    logprobs_T = label_logprobs(model, hidden_BTD.flatten(0, -2), labels_BT.flatten(), temperature)
    return logprobs_T.view(labels_BT.shape)


def label_logprobs(
    model: CausalLM, hidden_TD: Tensor, labels_T: Tensor, temperature: float = 1.0
) -> Tensor:
    """The same from hidden states."""
    table = model.embed_tokens if model.lm_head is None else model.lm_head
    config, rows = model.config, chunk_rows(model.config.vocab_size, hidden_TD)
    if not isinstance(table, nn.Linear | nn.Embedding):  # quantized, or with an adapter
        parts = [
            _pick(upcast(model.compute_logits(hidden_CD)), labels_C, temperature)
            for hidden_CD, labels_C in zip(hidden_TD.split(rows), labels_T.split(rows), strict=True)
        ]
        return torch.cat(parts)
    bias = getattr(table, "bias", None)
    numbers = (config.logit_scale, config.logit_softcap or 0.0, temperature)
    needs_weight = torch.is_grad_enabled() and table.weight.requires_grad
    out: Tensor = _label_logprobs_op(
        hidden_TD, table.weight, bias, labels_T, *numbers, rows, is_deterministic(), needs_weight
    )
    return out


def _pick(logits_CV: Tensor, labels_C: Tensor, temperature: float) -> Tensor:
    """log_softmax(logits / temperature) at the labels; 0 without one."""
    logits_CV = logits_CV if temperature == 1.0 else logits_CV / temperature
    picked_C = _log_softmax(logits_CV).gather(1, labels_C.clamp(min=0)[:, None])[:, 0]
    return torch.where(labels_C != IGNORED, picked_C, 0.0)


def _log_softmax(logits_CV: Tensor) -> Tensor:
    """Row by row where a GPU's kernel would read rows from unaligned addresses: the engine's bits."""
    is_unaligned = logits_CV.is_cuda and logits_CV.shape[1] % ALIGNED_COLUMNS
    if is_unaligned and is_deterministic():
        return torch.stack([row_V.clone().log_softmax(-1) for row_V in logits_CV])
    return logits_CV.log_softmax(-1)


def _logits(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    scale: float,
    cap: float,
    invariant: bool,
) -> Tensor:
    """As `CausalLM.compute_logits`, in float32. `cap` 0: none."""
    project = dense_linear if invariant else F.linear
    logits_CV = project(hidden_CD, weight_VD, bias_V)
    logits_CV = logits_CV if scale == 1.0 else logits_CV * scale
    if cap:
        logits_CV = elementwise.activate(logits_CV / cap, "tanh") * cap
    return upcast(logits_CV)


@op("fulgurite::label_logprobs")
def _label_logprobs_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    scale: float,
    cap: float,
    temperature: float,
    rows: int,
    invariant: bool,
    needs_weight: bool,
) -> Tensor:
    """`needs_weight`: whether the weight gets a gradient, for backward."""
    parts = [
        _pick(_logits(hidden_CD, weight, bias, scale, cap, invariant), labels_C, temperature)
        for hidden_CD, labels_C in zip(hidden.split(rows), labels.split(rows), strict=True)
    ]
    return torch.cat(parts)


@_label_logprobs_op.fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    scale: float,
    cap: float,
    temperature: float,
    rows: int,
    invariant: bool,
    needs_weight: bool,
) -> Tensor:
    return upcast(hidden[:0]).new_empty(labels.shape)


@op("fulgurite::label_logprobs_backward")
def _backward_op(
    grad_out: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    scale: float,
    cap: float,
    temperature: float,
    rows: int,
    invariant: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias; the last two are empty if they are not needed."""
    grad_hidden = torch.empty_like(hidden)
    grad_weight = upcast(weight).new_zeros(weight.shape if needs_weight else (0,))
    grad_bias = upcast(weight).new_zeros(
        weight.shape[0] if needs_weight and bias is not None else 0
    )
    for start in range(0, len(hidden), rows):
        part = slice(start, start + rows)
        logits_CV = _logits(hidden[part], weight, bias, scale, cap, invariant)
        grad_C = torch.where(labels[part] != IGNORED, grad_out[part], 0.0) / temperature
        grad_CV = (logits_CV / temperature).softmax(-1).mul_(-grad_C[:, None])
        grad_CV.scatter_add_(1, labels[part].clamp(min=0)[:, None], grad_C[:, None])
        if cap:
            grad_CV *= 1 - (logits_CV / cap).square()
        grad_CV = (grad_CV * scale).to(weight.dtype)
        grad_hidden[part] = grad_CV @ weight
        if needs_weight:
            grad_weight += grad_CV.t() @ hidden[part]
            if bias is not None:
                grad_bias += grad_CV.sum(0)
    return grad_hidden, grad_weight, grad_bias


@_backward_op.fake
def _(
    grad_out: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    scale: float,
    cap: float,
    temperature: float,
    rows: int,
    invariant: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    weight = upcast(weight)
    biases = weight.shape[0] if needs_weight and bias is not None else 0
    grad_weight = weight.new_empty(weight.shape if needs_weight else (0,))
    return torch.empty_like(hidden), grad_weight, weight.new_empty(biases)


@_label_logprobs_op.backward
def _(inputs: tuple, output: Tensor, grad_out: Tensor) -> tuple:  # type: ignore[type-arg]
    _, weight, bias, *others = inputs
    needs_weight = others[-1]
    grads = _backward_op(grad_out, *inputs)
    grad_weight = grads[1].to(weight.dtype) if needs_weight else None
    grad_bias = grads[2].to(bias.dtype) if needs_weight and bias is not None else None
    return grads[0], grad_weight, grad_bias, *[None] * len(others)
