"""The loss of GRPO: sampled completions and their advantages in, a policy gradient out.

    ratio_t = exp(logp_t - old_t)                                    1 on policy
    kl_t    = exp(ref_t - logp_t) - (ref_t - logp_t) - 1
    loss_t  = -min(ratio_t A, clip(ratio_t, 1 - c, 1 + c) A) + beta kl_t

`old` are the log-probabilities of the sampler, `ref` those of the model before tuning, A the advantage
of the completion: its reward minus the mean of its group, over the group's standard deviation. The loss
is the mean over all completion tokens of a step (TRL's `loss_type="dapo"`).

A row of a batch is one completion. Its document number says which row of the `RolloutTable` it is: the
table has what a `Batch` has no place for.

Shapes: B rows; T tokens; N completions of a step; G completions of a prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fulgurite.errors import ArgumentError
from fulgurite.models.layers import CausalLM
from fulgurite.train.batch import IGNORED
from fulgurite.train.loss import LossSums
from fulgurite.train.tune.logprobs import compute_logprobs

ADVANTAGE_EPSILON = 1e-4  # TRL's: a group of equal rewards has advantages of 0


def group_advantages(rewards_NG: Tensor) -> Tensor:
    """(reward - mean) / (standard deviation + epsilon) within each group, [N, G].

    Both are divided by the largest reward, so that no square of a large one overflows.
    """
    scale_N1 = rewards_NG.abs().amax(1, keepdim=True).clamp(min=1.0)
    scaled_NG = rewards_NG / scale_N1
    deviation_NG = scaled_NG - scaled_NG.mean(1, keepdim=True)
    spread_N1 = scaled_NG.std(1, keepdim=True)
    return deviation_NG / (spread_N1 + ADVANTAGE_EPSILON / scale_N1)


def grpo_loss(
    logp_BT: Tensor,
    old_BT: Tensor,
    reference_BT: Tensor | None,
    advantage_B1: Tensor,
    clip_range: float,
    beta: float,
) -> tuple[Tensor, Tensor]:
    """The loss and the KL term of each token."""
    ratio_BT = torch.exp(logp_BT - old_BT)
    clipped_BT = ratio_BT.clamp(1 - clip_range, 1 + clip_range)
    loss_BT = -torch.minimum(ratio_BT * advantage_B1, clipped_BT * advantage_B1)
    if reference_BT is None:
        return loss_BT, torch.zeros_like(loss_BT)
    difference_BT = reference_BT - logp_BT
    kl_BT = torch.exp(difference_BT) - difference_BT - 1
    return loss_BT + beta * kl_BT, kl_BT


class RolloutTable(nn.Module):
    """What the loss knows of each completion of a step, in fixed buffers."""

    advantages_N: Tensor
    old_NT: Tensor
    reference_NT: Tensor

    def __init__(self, completions: int, length: int, device: torch.device) -> None:
        super().__init__()
        shapes = {
            "advantages_N": (completions,),
            "old_NT": (completions, length),
            "reference_NT": (completions, length),
        }
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape, device=device), persistent=False)

    @torch.no_grad()
    def write(self, advantages_N: Tensor, old_NT: Tensor, reference_NT: Tensor | None) -> None:
        """Replace all rows, in place."""
        self.advantages_N.copy_(advantages_N)
        self.old_NT.copy_(old_NT)
        if reference_NT is not None:
            self.reference_NT.copy_(reference_NT)


class GRPOLoss(nn.Module):
    """The model with the loss of sampled completions."""

    def __init__(
        self,
        model: CausalLM,
        table: RolloutTable,
        *,
        clip_range: float,
        beta: float,
        temperature: float,
    ) -> None:
        super().__init__()
        if not clip_range > 0 or beta < 0 or not temperature > 0:
            raise ArgumentError(
                f"tune.clip_range={clip_range} and tune.temperature={temperature} must be above 0, "
                f"tune.beta={beta} 0 or more"
            )
        self.model, self.table = model, table
        self.clip_range, self.beta, self.temperature = clip_range, beta, temperature

    def forward(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor,
        positions_BT: Tensor,
        documents_BT: Tensor | None = None,
        offsets_S: Tensor | None = None,
    ) -> LossSums:
        """Sums over the tokens of completions; `z_loss` is the sum of their KL terms."""
        assert documents_BT is not None, "the document of a row is its place in the table"
        logp_BT = compute_logprobs(
            self.model, tokens_BT, labels_BT, positions_BT, documents_BT, self.temperature
        )
        table, rows_B = self.table, documents_BT[:, 0]
        loss_BT, kl_BT = grpo_loss(
            logp_BT,
            table.old_NT[rows_B],
            table.reference_NT[rows_B] if self.beta else None,
            table.advantages_N[rows_B][:, None],
            self.clip_range,
            self.beta,
        )
        is_token_BT = labels_BT != IGNORED
        loss = torch.where(is_token_BT, loss_BT, 0.0).sum()
        kl = torch.where(is_token_BT, kl_BT, 0.0).sum().detach()
        return LossSums(loss, loss.detach().clone(), kl, is_token_BT.sum())
