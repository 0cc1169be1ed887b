"""Logits of a step in, a token for each request out (and log-probabilities where asked for).

The order, for every request by its own settings:

    logit bias ▶ bans ▶ penalties ▶ temperature ▶ min-p ▶ top-k ▶ top-p ▶ draw

Penalties: repetition divides the logit (multiplies a negative one) of every token of prompt and
reply; frequency subtracts its value for each time a token is in the reply, presence once. The rest
is `kernels/sampling.py`. Log-probabilities are the model's own, before all of this.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fulgurite.kernels import sampling
from fulgurite.serve.request import Request, TokenLogprob

COLDEST = 1e-30  # below, float32 would divide by 0; it is greedy long before


def choose(logits_RO: Tensor, requests: Sequence[Request]) -> list[int]:
    """The next token of each request; row r of the logits is request r's."""
    changed = [index for index, request in enumerate(requests) if request.changes_logits]
    if changed:
        logits_RO = logits_RO.clone()
        for index in changed:
            change_logits(logits_RO[index], requests[index])
    drawn = [index for index, request in enumerate(requests) if not request.params.greedy]
    if len(drawn) == len(requests):
        return sampling.sample_rows(logits_RO, _settings(requests, logits_RO.shape[1])).tolist()
    tokens_R = sampling.greedy(logits_RO)
    if drawn:
        settings = _settings([requests[index] for index in drawn], logits_RO.shape[1])
        new = sampling.sample_rows(logits_RO[drawn], settings)
        tokens_R[drawn] = new.to(tokens_R.device)
    return tokens_R.tolist()


def _settings(requests: Sequence[Request], vocabulary: int) -> Tensor:
    """Temperature, min-p, top-k, top-p and the random number of each request: [R, 5]."""
    seeds = np.array([request.seed for request in requests], dtype=np.uint64)
    positions = np.array([request.length for request in requests], dtype=np.uint64)
    settings = np.empty((len(requests), 5))
    settings[:, :4] = [
        (max(one.temperature, COLDEST), one.min_p, min(one.top_k, vocabulary), one.top_p)
        for one in (request.params for request in requests)
    ]
    settings[:, 4] = sampling.uniform(seeds, positions)
    return torch.from_numpy(settings)


def change_logits(logits_O: Tensor, request: Request) -> None:
    """Bias, bans and penalties, in place."""
    params = request.params
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits_O.device)
        bias = torch.tensor(list(params.logit_bias.values()), device=logits_O.device)
        logits_O[ids] += bias.to(logits_O.dtype)
    if params.banned:
        logits_O[torch.tensor(params.banned, device=logits_O.device)] = float("-inf")
    allowed = None if request.constraint is None else request.constraint.allowed()
    if allowed is not None:
        logits_O.masked_fill_(~allowed.to(logits_O.device), float("-inf"))
    if params.penalised:
        penalise(logits_O, request)


def penalise(logits_O: Tensor, request: Request) -> None:
    params = request.params
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(request.tokens[: request.length])).to(logits_O.device)
        values = logits_O[seen]
        penalty = params.repetition_penalty
        logits_O[seen] = torch.where(values < 0, values * penalty, values / penalty)
    if params.frequency_penalty or params.presence_penalty:
        ids, counts = np.unique(request.generated, return_counts=True)
        weights = params.frequency_penalty * counts + params.presence_penalty
        ids_C = torch.from_numpy(ids).to(logits_O.device)
        logits_O[ids_C] -= torch.from_numpy(weights).to(logits_O.device, logits_O.dtype)


def log_probabilities(logits_O: Tensor, token: int, count: int) -> TokenLogprob:
    """Of the chosen token and the `count` likeliest."""
    values_O = logits_O.float().log_softmax(dim=-1)
    top = values_O.topk(min(count, len(values_O)))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return TokenLogprob(token, float(values_O[token]), tuple(pairs))
