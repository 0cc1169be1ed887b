"""Values of routing: the router's configuration, its result, and the norm in front of it.

They are here, apart from the operators, so that kernels and operators can both import them.

Shapes: T tokens; D hidden size; E experts; k experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fulgurite.errors import ArgumentError

SPARSEMIXER = "sparsemixer"
SCORING_FUNCTIONS = ("softmax", "sigmoid", SPARSEMIXER)
GROUP_SCORES = ("max", "top2_sum")


class RmsNormArgs(NamedTuple):
    """What `rms_norm` takes besides x."""

    weight_D: Tensor
    eps: float
    offset: float


class Routes(NamedTuple):
    """The experts of each token (int64), best first, and their weights (float32)."""

    weights_Tk: Tensor
    experts_Tk: Tensor


@dataclass(frozen=True)
class RouterConfig:
    """How experts are selected and weighted. The fields are the operator's arguments, in order.

    top_k                experts of a token
    scoring              "softmax" or "sigmoid" of the logits; "sparsemixer": softmax, for each
                         selected expert, over the experts near it that were not selected before
    topk_before_scoring  select by logits, and score only the selected ones
    renormalize          divide weights by their sum
    scaling_factor       multiply weights by it
    num_groups           groups of experts, of which the best `topk_groups` can be selected
    group_score          a group's score: its best expert's ("max"), or its best two's ("top2_sum")
    jitter_eps           sparsemixer: an expert is near the selected one, of logit m, if
                         (m - logit) / max(|logit|, m) <= 2 * jitter_eps
    """

    top_k: int
    scoring: str = "softmax"
    topk_before_scoring: bool = False
    renormalize: bool = False
    scaling_factor: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    group_score: str = "max"
    jitter_eps: float = 0.0

    @property
    def selects_groups(self) -> bool:
        """Whether some groups of experts are excluded."""
        return self.topk_groups < self.num_groups

    @property
    def is_top2_sum(self) -> bool:
        return self.group_score == "top2_sum"

    @property
    def is_sigmoid(self) -> bool:
        return self.scoring == "sigmoid"

    @property
    def is_sparsemixer(self) -> bool:
        return self.scoring == SPARSEMIXER

    def check(self, experts: int) -> None:
        """Raise if the configuration does not fit this number of experts."""
        for name, value, allowed in (
            ("scoring", self.scoring, SCORING_FUNCTIONS),
            ("group_score", self.group_score, GROUP_SCORES),
        ):
            if value not in allowed:
                raise ArgumentError(f"{name}={value!r}", next=f"one of {', '.join(allowed)}")
        if self.is_sparsemixer and (self.topk_before_scoring or self.num_groups > 1):
            raise ArgumentError(
                "sparsemixer selects and scores one expert after the other",
                next="topk_before_scoring=False and num_groups=1",
            )
        groups = self.num_groups
        if groups < 1 or not 1 <= self.topk_groups <= groups or experts % groups:
            raise ArgumentError(
                f"{experts} experts can't be selected from {self.topk_groups} of {groups} groups",
                next="num_groups must divide the experts, and topk_groups be at least 1",
            )
        reachable = experts // groups * self.topk_groups
        if not 1 <= self.top_k <= reachable:
            raise ArgumentError(
                f"top_k={self.top_k}, and {reachable} of {experts} experts can be selected",
                next=f"top_k from 1 to {reachable}, or a larger topk_groups",
            )
