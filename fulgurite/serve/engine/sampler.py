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

from fulgurite.kernels.sampling import ops
from fulgurite.serve.engine.request import Request, TokenLogprob

AHEAD = 32  # positions whose random numbers are made at once
COLDEST = 1e-30  # below, float32 would divide by 0; it is greedy long before


def choose(logits_RO: Tensor, requests: Sequence[Request], draws: Draws | None = None) -> list[int]:
    """The next token of each request; row r of the logits is request r's.

    `draws`: those of an engine, which remember from step to step.
    """
    changed = [index for index, request in enumerate(requests) if request.changes_logits]
    if changed:
        logits_RO = logits_RO.clone()
        for index in changed:
            change_logits(logits_RO[index], requests[index])
    drawn = [index for index, request in enumerate(requests) if request.draws]
    if not drawn:
        return ops.greedy(logits_RO).tolist()
    settings = (draws or Draws()).settings([requests[index] for index in drawn], logits_RO.shape[1])
    if len(drawn) == len(requests):
        return ops.sample_rows(logits_RO, settings).tolist()
    tokens_R = ops.greedy(logits_RO)
    new = ops.sample_rows(logits_RO[drawn], settings)
    tokens_R[drawn] = new.to(tokens_R.device)
    return tokens_R.tolist()


class Draws:
    """What the draws of one step after the other go by.

    Most steps are for the requests of the step before. Their settings are then the same, and their
    random numbers, which come from seeds and positions alone, were made AHEAD of time, many at once.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.table: np.ndarray = np.empty((0, 5))
        self.first: np.ndarray = np.empty(0, dtype=np.int64)  # positions of the first numbers
        self.numbers: np.ndarray = np.empty((0, 0))  # a row for each position from there on

    def settings(self, requests: list[Request], vocabulary: int) -> Tensor:
        """Temperature, min-p, top-k, top-p and the random number of each request: [R, 5]."""
        positions = np.array([request.length for request in requests], dtype=np.int64)
        if requests != self.requests:
            table = np.empty((len(requests), 5))
            table[:, :4] = [
                (max(one.temperature, COLDEST), one.min_p, min(one.top_k, vocabulary), one.top_p)
                for one in (request.params for request in requests)
            ]
            numbers = random_numbers(requests, positions, 1)
            # last and together: an interrupt before leaves what belongs to the requests before
            self.requests, self.table, self.first, self.numbers = (
                requests,
                table,
                positions,
                numbers,
            )
        ahead = positions - self.first
        if ahead.min() < 0 or ahead.max() >= len(self.numbers):
            numbers = random_numbers(requests, positions, AHEAD)
            self.first, self.numbers = positions, numbers
            ahead[:] = 0
        self.table[:, 4] = self.numbers[ahead, np.arange(len(requests))]
        return torch.from_numpy(self.table.copy())  # a copy to a GPU may still be on its way


def random_numbers(requests: Sequence[Request], positions: np.ndarray, count: int) -> np.ndarray:
    """[count, R]: those of each request at its position and the next ones."""
    seeds = np.array([request.seed for request in requests], dtype=np.uint64)
    every = positions + np.arange(count)[:, None]
    found = ops.uniform(np.broadcast_to(seeds, every.shape).ravel(), every.ravel())
    return found.reshape(every.shape)


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
