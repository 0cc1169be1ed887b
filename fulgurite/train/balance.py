"""Expert balance: routes of a forward in; tokens per expert, a loss and a new selection bias out.

    with record_routes(model, documents_BT) as recorder:     # inside the captured forward
        hidden = model.compute_hidden_states(...)
    load_LE, aux = recorder.load_LE(), recorder.aux_loss()
    ...
    update_balance(model, load_LE, rate)                     # once a step, from the sum of loads

**What is counted.** Each router's selection in one forward, as an output of the captured graph.
Padding (document -1) does not count. Layers that backward recomputes do not count again.

**bias** (DeepSeek-V3, no loss): after a step, `correction_bias += rate * sign(mean load - load)`. It
changes which experts are selected, never their weights.

**aux** (Switch Transformer, OLMoE; `load_balancing_loss_func` of transformers):

    aux = E * sum_e f_e * P_e     f_e: selections of expert e a token, P_e: its mean probability

both over the tokens of all layers. Its smallest value is the number of experts of a token.

Shapes: L MoE layers; E experts; T tokens; k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fulgurite.errors import ArgumentError
from fulgurite.kernels.moe.router_config import Routes
from fulgurite.models.moe import Router
from fulgurite.train.config import LossSection
from fulgurite.train.optim.shards import read_local

BALANCES = ("auto", "bias", "aux", "none")


def find_routers(model: nn.Module) -> list[Router]:
    """The routers of a model, in layer order."""
    return [module for module in model.modules() if isinstance(module, Router)]


def choose_balance(model: nn.Module, section: LossSection) -> str:
    """`bias`, `aux` or `none` for this model."""
    if section.balance not in BALANCES:
        raise ArgumentError(
            f"loss.balance={section.balance!r}", next=f"use one of {', '.join(BALANCES)}"
        )
    routers = find_routers(model)
    has_bias = bool(routers) and all(router.correction_bias is not None for router in routers)
    if section.balance == "bias" and routers and not has_bias:
        raise ArgumentError(
            "loss.balance='bias', and the routers of this family have no selection bias",
            next="use 'aux', or a family with one (Dots1ForCausalLM, DeepseekV3ForCausalLM)",
        )
    if not routers:
        return "none"
    return section.balance if section.balance != "auto" else "bias" if has_bias else "aux"


@dataclass(frozen=True)
class RouteRecord:
    """What one router selected; its logits only where its scores are needed."""

    router: Router
    experts_Tk: Tensor
    logits_TE: Tensor | None


class RouteRecorder:
    """What the routers of one forward selected: one record a router, in layer order.

    Inside the forward tensors are only kept. They are reduced after it, so a layer under
    `torch.utils.checkpoint` computes the same ops with and without a recorder.
    """

    def __init__(self, model: nn.Module, documents_BT: Tensor | None, needs_scores: bool) -> None:
        self.routers = find_routers(model)
        self.keep_T = None if documents_BT is None else documents_BT.flatten() >= 0
        self.needs_logits = needs_scores
        # Set where ranks have parts of a sequence (parallel/context.py).
        self.sum_over_context: Callable[[Tensor], Tensor] | None = getattr(
            model, "sum_over_context", None
        )
        self.records: list[RouteRecord] = []

    def __enter__(self) -> RouteRecorder:
        for router in self.routers:
            router.observer = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for router in self.routers:
            router.observer = None

    def __call__(self, router: Router, routes: Routes, logits_TE: Tensor | None) -> None:
        """Record one router. A router that backward runs again is not recorded again."""
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            return
        tokens = routes.experts_Tk.shape[0]
        if self.keep_T is not None and len(self.keep_T) != tokens:
            raise ArgumentError(
                f"a router got {tokens} tokens, and documents_BT has {len(self.keep_T)}",
                next="pass the documents of the tokens that this rank computes",
            )
        self.records.append(RouteRecord(router, routes.experts_Tk, logits_TE))

    def load_LE(self) -> Tensor | None:
        """Tokens of each expert of each layer, int64; None: the model has no experts."""
        loads = self._count_loads()
        return torch.stack(loads) if loads else None

    def aux_loss(self) -> Tensor | None:
        """The auxiliary loss of all layers, float32, not weighted; None: no experts."""
        if not self.records:
            return None
        assert self.needs_logits, "record_routes(..., needs_scores=True) for an auxiliary loss"
        score_sums: list[Tensor] = []
        tokens: Tensor | int = 0
        for record in self.records:
            assert record.logits_TE is not None, "needs_scores keeps logits"
            scores_TE = score_experts(record.router, record.logits_TE)
            if self.keep_T is not None:
                scores_TE = torch.where(self.keep_T[:, None], scores_TE, 0.0)
            score_sums.append(scores_TE.sum(0))
            tokens = tokens + (len(scores_TE) if self.keep_T is None else self.keep_T.sum())
        loads = self._count_loads()
        if self.sum_over_context is not None:
            score_sums, loads, tokens = self._sum_over_context(score_sums, loads, tokens)
        return balance_loss(loads, score_sums, tokens)

    def _sum_over_context(
        self, score_sums: list[Tensor], loads: list[Tensor], tokens: Tensor | int
    ) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Sums over the ranks that share a sequence: the loss is that of whole sequences."""
        assert self.sum_over_context is not None, "checked before"
        scores_E, loads_E = torch.stack(score_sums).sum(0), torch.stack(loads).sum(0)
        count = torch.as_tensor(tokens, device=scores_E.device).to(scores_E)[None]
        flat = self.sum_over_context(torch.cat((scores_E, loads_E.to(scores_E), count)))
        scores_E, loads_E, count = flat.split((len(scores_E), len(loads_E), 1))
        return [scores_E], [loads_E.detach()], count.detach()

    def _count_loads(self) -> list[Tensor]:
        return [
            count_tokens(record.experts_Tk, len(record.router.weight), self.keep_T)
            for record in self.records
        ]


def record_routes(
    model: nn.Module, documents_BT: Tensor | None = None, *, needs_scores: bool = False
) -> RouteRecorder:
    """Record the routes of one forward inside a `with` block; `needs_scores`: for `aux_loss`."""
    return RouteRecorder(model, documents_BT, needs_scores)


def count_tokens(experts_Tk: Tensor, num_experts: int, keep_T: Tensor | None) -> Tensor:
    """Tokens of each expert, int64 [E]; `keep_T` is False for padding."""
    ones_Tk = torch.ones_like(experts_Tk)
    if keep_T is not None:
        ones_Tk = ones_Tk * keep_T[:, None]
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=experts_Tk.device)
    return counts_E.scatter_add(0, experts_Tk.flatten(), ones_Tk.flatten())


def score_experts(router: Router, logits_TE: Tensor) -> Tensor:
    """The probability of each expert, [T, E]: softmax, or sigmoids divided by their sum."""
    if not router.config.is_sigmoid:
        return logits_TE.softmax(-1)
    scores_TE = logits_TE.sigmoid()
    return scores_TE / scores_TE.sum(-1, keepdim=True).clamp(min=1e-20)


def balance_loss(
    loads: Sequence[Tensor], score_sums: Sequence[Tensor], tokens: Tensor | int
) -> Tensor:
    """E * sum_e f_e P_e from sums over the tokens of all layers; 0 without tokens."""
    rows = torch.as_tensor(tokens, device=loads[0].device).clamp(min=1)
    load_E, scores_E = sum(loads[1:], loads[0]), sum(score_sums[1:], score_sums[0])
    return len(load_E) * ((load_E / rows) * (scores_E / rows)).sum()


@torch.no_grad()
def update_balance(model: nn.Module, load_LE: Tensor, rate: float) -> None:
    """Move the selection bias of every router by `rate` towards a mean load.

    `load_LE` is the sum over the step's microbatches and data ranks. A layer without tokens, or with
    a mean load everywhere, does not change.
    """
    routers = find_routers(model)
    rows: list[int] | None = getattr(model, "router_rows", None)
    if rows is not None:  # a rank of a pipeline has some of the routers
        load_LE = load_LE[rows]
    if len(routers) != len(load_LE):
        raise ArgumentError(
            f"a load of {len(load_LE)} layers for {len(routers)} routers",
            next="pass the load_LE that record_routes gave for this model",
        )
    load_LE = load_LE.full_tensor() if isinstance(load_LE, DTensor) else load_LE
    # Exact in integers: sign(sum - E * load) is sign(mean - load).
    direction_LE = torch.sign(load_LE.sum(1, keepdim=True) - load_LE.shape[1] * load_LE)
    for router, direction_E in zip(routers, direction_LE, strict=True):
        if router.correction_bias is not None:
            bias_E = read_local(router.correction_bias)
            bias_E.add_(direction_E.to(bias_E), alpha=rate)


@dataclass(frozen=True)
class BalanceMetrics:
    """How even the load of a step is.

    Attributes:
        max_violation: the largest load over the mean load, minus 1: the worst layer. 0 is even.
        entropy: of the load as a distribution, over its largest value: the worst layer. 1 is even.
        dead_experts: experts without a token, in all layers.
    """

    max_violation: float
    entropy: float
    dead_experts: int


def measure_balance(load_LE: Tensor) -> BalanceMetrics:
    """Metrics of a load [L, E]; layers without any token do not count. This waits for the device."""
    load_LE = load_LE.detach().double().cpu()
    load_LE = load_LE[load_LE.sum(1) > 0]
    if not len(load_LE):
        return BalanceMetrics(0.0, 1.0, 0)
    share_LE = load_LE / load_LE.sum(1, keepdim=True)
    num_experts = load_LE.shape[1]
    entropy_L = -torch.special.xlogy(share_LE, share_LE).sum(1)
    largest = torch.tensor(float(num_experts)).log().item() or 1.0
    even = 1.0 if num_experts == 1 else float(entropy_L.min()) / largest
    violation = float((share_LE.amax(1) * num_experts).max()) - 1
    return BalanceMetrics(violation, even, int((load_LE == 0).sum()))
