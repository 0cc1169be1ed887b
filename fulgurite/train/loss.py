"""`LossModule`: a model and a microbatch in, sums of losses over its tokens out.

    loss_t = logsumexp(logits_t) - logits_t[label_t]          cross entropy
    z_t    = logsumexp(logits_t)^2                            z-loss
    total  = sum_t loss_t + z_loss * sum_t z_t + aux_loss * tokens * aux

`total` is what backward runs on; a layout divides gradients by the tokens of the whole step.

Logits are computed for some rows at a time (`linear_cross_entropy`), and their gradient with them, in
forward: [tokens, vocabulary] never exists as a whole. That needs no second matmul in backward.

Shapes: B rows; T tokens; D hidden size; V vocabulary; C rows of a chunk.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fulgurite.determinism import is_deterministic
from fulgurite.kernels.cross_entropy.args import CrossEntropyArgs
from fulgurite.kernels.cross_entropy.ops import cross_entropy_rows
from fulgurite.kernels.gemm.dense_linear import dense_linear
from fulgurite.kernels.gemm.modules import VocabTable
from fulgurite.kernels.gemm.reference import upcast
from fulgurite.models.layers import CausalLM
from fulgurite.op import op
from fulgurite.train.attention import TrainingAttention
from fulgurite.train.balance import choose_balance, record_routes
from fulgurite.train.batch import IGNORED
from fulgurite.train.config import LossSection

# Bytes of a chunk of logits, by device: large enough for full GEMMs, small beside the model.
CHUNK_BYTES = {"cpu": 2**22, "cuda": 2**29}


class LossSums(NamedTuple):
    """Sums over the tokens of a microbatch that have a label. No two share memory: they are added in place.

    Attributes:
        total: what backward runs on: the loss with all weighted terms.
        loss: cross entropy, float32.
        z_loss: squared log-partition, float32; not weighted.
        tokens: tokens with a label, int64.
        load_LE: tokens that each expert of each MoE layer got; None: no experts.
    """

    total: Tensor
    loss: Tensor
    z_loss: Tensor
    tokens: Tensor
    load_LE: Tensor | None = None


class LossModule(nn.Module):
    """A model with its loss: what a training step compiles and runs.

    `fulgurite.compile` captures it as one graph. Its parameters are those of `model`.
    """

    def __init__(self, model: CausalLM, section: LossSection | None = None) -> None:
        super().__init__()
        self.model = model
        self.section = section or LossSection()
        self.balance = choose_balance(model, self.section)

    def forward(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor,
        positions_BT: Tensor,
        documents_BT: Tensor | None = None,
        offsets_S: Tensor | None = None,
    ) -> LossSums:
        attention = TrainingAttention(documents_BT, offsets_S)
        needs_aux = self.balance == "aux"
        with record_routes(self.model, documents_BT, needs_scores=needs_aux) as recorder:
            hidden_BTD = self.model.compute_hidden_states(tokens_BT, positions_BT, attention)
        total, loss, z_loss = sum_cross_entropy(
            self.model, hidden_BTD.flatten(0, -2), labels_BT.flatten(), self.section.z_loss
        )
        tokens = (labels_BT != IGNORED).sum()
        aux = recorder.aux_loss() if needs_aux else None
        if aux is not None:
            total = total + self.section.aux_loss * tokens * aux
        return LossSums(total, loss, z_loss, tokens, recorder.load_LE())


class LossTable(VocabTable):
    """A head that computes the loss itself: one whose columns other ranks have, too."""

    @abstractmethod
    def sum_cross_entropy(
        self, hidden_TD: Tensor, labels_T: Tensor, z_weight: float, scale: float, cap: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `linear_cross_entropy`."""


def sum_cross_entropy(
    model: CausalLM, hidden_TD: Tensor, labels_T: Tensor, z_weight: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """The sums of loss + z_weight * z, of loss and of z. Only the first has a gradient."""
    table = model.embed_tokens if model.lm_head is None else model.lm_head
    config = model.config
    if isinstance(table, LossTable):
        return table.sum_cross_entropy(
            hidden_TD, labels_T, z_weight, config.logit_scale, config.logit_softcap
        )
    if not isinstance(table, (nn.Linear, nn.Embedding)):
        return _sum_any_logits(model, hidden_TD, labels_T, z_weight)
    bias = getattr(table, "bias", None)
    return linear_cross_entropy(
        hidden_TD,
        table.weight,
        bias,
        labels_T,
        z_weight=z_weight,
        scale=config.logit_scale,
        cap=config.logit_softcap,
    )


def _sum_any_logits(
    model: CausalLM, hidden_TD: Tensor, labels_T: Tensor, z_weight: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for a head of any kind (quantized, with adapters, sharded), by torch's autograd."""
    rows = chunk_rows(model.config.vocab_size, hidden_TD)
    total = loss = z = hidden_TD.new_zeros((), dtype=torch.float32)
    for hidden_CD, labels_C in zip(hidden_TD.split(rows), labels_T.split(rows), strict=True):
        logits_CV = upcast(model.compute_logits(hidden_CD))
        is_labelled = labels_C != IGNORED
        log_z_C = logits_CV.logsumexp(-1)
        picked_C = logits_CV.gather(1, labels_C.clamp(min=0)[:, None])[:, 0]
        chunk_loss = torch.where(is_labelled, log_z_C - picked_C, 0).sum()
        chunk_z = torch.where(is_labelled, log_z_C.square(), 0).sum()
        total = total + chunk_loss + z_weight * chunk_z
        loss, z = loss + chunk_loss.detach(), z + chunk_z.detach()
    return total, loss, z


def chunk_rows(vocab_size: int, hidden_TD: Tensor) -> int:
    """Rows of logits to compute at a time."""
    limit = CHUNK_BYTES.get(hidden_TD.device.type, CHUNK_BYTES["cuda"])
    return max(64, limit // (vocab_size * 4) // 64 * 64)


# ---- logits, loss and gradient by chunks -----------------------------------------------------------


def linear_cross_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_T: Tensor,
    *,
    z_weight: float = 0.0,
    scale: float = 1.0,
    cap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of the loss of logits = cap * tanh(scale * (hidden @ weight.T + bias) / cap).

    Returns sums of loss + z_weight * z, of loss and of z; only the first has a gradient.
    """
    has_gradients = torch.is_grad_enabled()
    outputs = _linear_cross_entropy_op(
        hidden_TD,
        weight_VD,
        bias_V,
        labels_T,
        scale,
        cap,
        z_weight,
        chunk_rows(weight_VD.shape[0], hidden_TD),
        has_gradients and hidden_TD.requires_grad,
        has_gradients and weight_VD.requires_grad,
        is_deterministic(),
    )
    total, loss, z = outputs[:3]
    return total, loss.detach(), z.detach()


@op("fulgurite::linear_cross_entropy")
def _linear_cross_entropy_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    scale: float,
    cap: float | None,
    z_weight: float,
    rows: int,
    hidden_gradient: bool,
    weight_gradient: bool,
    batch_invariant: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Three sums, then the gradients of the first: of hidden, weight and bias (empty: none)."""
    sum_dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    sums = hidden.new_zeros(3, dtype=sum_dtype)
    grads = _allocate_gradients(hidden, weight, bias, hidden_gradient, weight_gradient)
    grad_hidden, grad_weight, grad_bias = grads
    project = dense_linear if batch_invariant else F.linear
    args = CrossEntropyArgs(scale, cap, z_weight, hidden_gradient or weight_gradient)
    for start in range(0, len(hidden), rows):
        hidden_CD, labels_C = hidden[start : start + rows], labels[start : start + rows]
        loss_C, z_C, grad_CV = cross_entropy_rows(project(hidden_CD, weight, bias), labels_C, args)
        sums += torch.stack([(loss_C + z_weight * z_C).sum(), loss_C.sum(), z_C.sum()])
        if grad_CV is None:
            continue
        if hidden_gradient:
            torch.mm(grad_CV, weight, out=grad_hidden[start : start + rows])
        if weight_gradient:
            _add_product(grad_weight, grad_CV.t(), hidden_CD)
            if bias is not None:
                grad_bias += grad_CV.sum(0)
    return sums[0].clone(), sums[1].clone(), sums[2].clone(), *grads


def _allocate_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    hidden_gradient: bool,
    weight_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros for the gradients of hidden, weight (in float32 at least) and bias; empty where unneeded."""
    shapes = (
        (hidden.shape if hidden_gradient else (0,), hidden.dtype),
        (weight.shape if weight_gradient else (0,), upcast(weight[:0]).dtype),
        (weight.shape[:1] if weight_gradient and bias is not None else (0,), hidden.dtype),
    )
    grads = [hidden.new_zeros(shape, dtype=dtype) for shape, dtype in shapes]
    return grads[0], grads[1], grads[2]


def _add_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """out += left @ right, where out may have more bits than the operands."""
    if out.dtype == left.dtype:
        out.addmm_(left, right)
    elif out.device.type == "cuda":
        out += torch.mm(left, right, out_dtype=out.dtype)
    else:
        out += left.to(out.dtype) @ right.to(out.dtype)


@_linear_cross_entropy_op.fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    scale: float,
    cap: float | None,
    z_weight: float,
    rows: int,
    hidden_gradient: bool,
    weight_gradient: bool,
    batch_invariant: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    sum_dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    sums = [hidden.new_empty((), dtype=sum_dtype) for _ in range(3)]
    grads = _allocate_gradients(hidden, weight, bias, hidden_gradient, weight_gradient)
    return sums[0], sums[1], sums[2], *grads


@_linear_cross_entropy_op.backward
def _(inputs: tuple, output: tuple, grad_total: Tensor, *rest: Tensor) -> tuple:  # type: ignore[type-arg]
    hidden, weight, bias, *others = inputs
    *_, hidden_gradient, weight_gradient, _ = others
    _, _, _, grad_hidden, grad_weight, grad_bias = output
    grads = (
        grad_hidden * grad_total.to(hidden.dtype) if hidden_gradient else None,
        (grad_weight * grad_total).to(weight.dtype) if weight_gradient else None,
        grad_bias * grad_total.to(hidden.dtype) if weight_gradient and bias is not None else None,
    )
    return *grads, *[None] * len(others)
