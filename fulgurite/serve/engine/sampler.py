"""The sampler: logits of a step in, one token a request out, and log-probabilities if asked for.

The order of operations, with the settings of each request:

    logit bias ▶ banned tokens ▶ penalties ▶ temperature ▶ min-p ▶ top-k ▶ top-p ▶ sample

Penalties: `repetition_penalty` divides the positive logits (multiplies the negative ones) of all
tokens in prompt and reply. `frequency_penalty` is subtracted for every occurrence in the reply,
`presence_penalty` once. Temperature and what follows is `kernels/sampling/ops.py`. Log-probabilities
come from the raw logits, before all of this.

Shapes: R requests; O vocabulary; C distinct tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fulgurite.kernels.sampling.ops import greedy_sample, philox_uniform, sample_rows
from fulgurite.serve.engine.request import Request, TokenLogprob

PRECOMPUTED_POSITIONS = 32  # positions whose random numbers are drawn at once
MIN_TEMPERATURE = 1e-30  # float32 would divide by 0 below; it is greedy long before


class Sampler:
    """Samples tokens, and caches the settings and random numbers of consecutive steps.

    Most steps have the requests of the step before, so their settings are the same. Random numbers
    depend on seed and position only, so they are drawn for many positions at once.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.settings_R5: np.ndarray = np.empty((0, 5))
        self.first_positions: np.ndarray = np.empty(0, dtype=np.int64)  # of `uniforms`, by request
        self.uniforms: np.ndarray = np.empty((0, 0))  # a row for each position from there on

    def sample(self, logits_RO: Tensor, requests: Sequence[Request]) -> list[int]:
        """The next token of each request; row r of the logits belongs to request r."""
        processed = [i for i, request in enumerate(requests) if request.needs_logit_processing]
        if processed:
            logits_RO = logits_RO.clone()
            for index in processed:
                process_logits(logits_RO[index], requests[index])
        sampled = [index for index, request in enumerate(requests) if request.is_sampled]
        if not sampled:
            return greedy_sample(logits_RO).tolist()
        settings = self.get_settings([requests[index] for index in sampled], logits_RO.shape[1])
        if len(sampled) == len(requests):
            return sample_rows(logits_RO, settings).tolist()
        tokens_R = greedy_sample(logits_RO)
        tokens_R[sampled] = sample_rows(logits_RO[sampled], settings).to(tokens_R.device)
        return tokens_R.tolist()

    def get_settings(self, requests: list[Request], vocab_size: int) -> Tensor:
        """Temperature, min-p, top-k, top-p and the random number of each request: [R, 5]."""
        positions = np.array([request.length for request in requests], dtype=np.int64)
        if requests != self.requests:
            settings_R5 = np.empty((len(requests), 5))
            settings_R5[:, :4] = [
                (max(p.temperature, MIN_TEMPERATURE), p.min_p, min(p.top_k, vocab_size), p.top_p)
                for p in (request.params for request in requests)
            ]
            uniforms = draw_uniforms(requests, positions, 1)
            # Assigned together and last: an interrupt before leaves a consistent state.
            self.requests, self.settings_R5 = requests, settings_R5
            self.first_positions, self.uniforms = positions, uniforms
        offsets = positions - self.first_positions
        if offsets.min() < 0 or offsets.max() >= len(self.uniforms):
            uniforms = draw_uniforms(requests, positions, PRECOMPUTED_POSITIONS)
            self.first_positions, self.uniforms = positions, uniforms
            offsets[:] = 0
        self.settings_R5[:, 4] = self.uniforms[offsets, np.arange(len(requests))]
        # A copy, since the transfer of the previous step to a GPU may still be under way.
        return torch.from_numpy(self.settings_R5.copy())


def draw_uniforms(requests: Sequence[Request], positions: np.ndarray, count: int) -> np.ndarray:
    """[count, R]: random numbers of each request for its position and the following ones."""
    seeds = np.array([request.seed for request in requests], dtype=np.uint64)
    all_positions = positions + np.arange(count)[:, None]
    all_seeds = np.broadcast_to(seeds, all_positions.shape)
    uniforms = philox_uniform(all_seeds.ravel(), all_positions.ravel())
    return uniforms.reshape(all_positions.shape)


def process_logits(logits_O: Tensor, request: Request) -> None:
    """Apply logit bias, banned tokens, the grammar and penalties, in place."""
    params = request.params
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits_O.device)
        bias = torch.tensor(list(params.logit_bias.values()), device=logits_O.device)
        logits_O[ids] += bias.to(logits_O.dtype)
    if params.banned_token_ids:
        banned = torch.tensor(params.banned_token_ids, device=logits_O.device)
        logits_O[banned] = float("-inf")
    allowed = None if request.constraint is None else request.constraint.allowed_tokens()
    if allowed is not None:
        logits_O.masked_fill_(~allowed.to(logits_O.device), float("-inf"))
    if params.has_penalties:
        apply_penalties(logits_O, request)


def apply_penalties(logits_O: Tensor, request: Request) -> None:
    """Apply repetition, frequency and presence penalties, in place."""
    params = request.params
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(request.tokens[: request.length])).to(logits_O.device)
        values = logits_O[seen]
        penalty = params.repetition_penalty
        logits_O[seen] = torch.where(values < 0, values * penalty, values / penalty)
    if params.frequency_penalty or params.presence_penalty:
        ids, counts = np.unique(request.output_ids, return_counts=True)
        penalties = params.frequency_penalty * counts + params.presence_penalty
        ids_C = torch.from_numpy(ids).to(logits_O.device)
        logits_O[ids_C] -= torch.from_numpy(penalties).to(logits_O.device, logits_O.dtype)


def compute_logprobs(logits_O: Tensor, token: int, count: int) -> TokenLogprob:
    """Log-probabilities of the sampled token and of the `count` most likely tokens."""
    values_O = logits_O.float().log_softmax(dim=-1)
    top = values_O.topk(min(count, len(values_O)))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return TokenLogprob(token, float(values_O[token]), tuple(pairs))
