"""The sampler: logits of a step in, one token a request out, and log-probabilities if asked for.

The order of operations, with the settings of each request:

    logit bias ▶ banned tokens ▶ penalties ▶ temperature ▶ min-p ▶ top-k ▶ top-p ▶ sample

Penalties: `repetition_penalty` divides the positive logits (multiplies the negative ones) of all
tokens in prompt and reply. `frequency_penalty` is subtracted for every occurrence in the reply,
`presence_penalty` once. All of it runs on the device (`kernels/sampling/ops.py`), with the state in
`sampling_rows.py`. Log-probabilities come from the raw logits, before all of this (`logprobs.py`).

A step is sampled in five calls, so that the host need not wait for the device:

    prepare   the settings of the step, from positions that are known before the tokens are
    write_grammar_masks    the masks of grammars, which other threads compute while the model runs: after
              its layers, but before the launch of a CUDA graph
    run       sample and count on the device; part of the CUDA graph of a captured step
    collect   start to copy tokens and log-probabilities to the host
    read      wait for them (`SampledTokens`)

Shapes: R requests; O vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fulgurite.kernels.sampling.ops import philox_uniform, record_tokens, sample_tokens
from fulgurite.kernels.sampling.table import HAS_MASK, NUM_PROCESSING, NUM_SETTINGS
from fulgurite.serve.engine.logprobs import PendingLogprobs, compute_logprobs
from fulgurite.serve.engine.request import Request, TokenLogprob
from fulgurite.serve.engine.sampling_rows import SamplingRows

PRECOMPUTED_POSITIONS = 32  # positions whose random numbers are drawn at once
RECENT_STEPS = 1000  # whose waiting times are kept
MIN_TEMPERATURE = 1e-30  # float32 would divide by 0 below; it is greedy long before
GREEDY_SETTINGS = (0.0, 0.0, 0.0, 1.0)


class SamplingVariant(NamedTuple):
    """Which kernels sampling runs: a captured step has a CUDA graph for each."""

    is_random: bool  # some request is not greedy
    uses_threshold: bool  # some request has top-k or top-p
    is_processed: bool  # some request has a bias, a mask or penalties

    def union(self, other: SamplingVariant) -> SamplingVariant:
        """The variant for the requests of both."""
        return SamplingVariant(*(one or two for one, two in zip(self, other, strict=True)))


GREEDY_VARIANT = SamplingVariant(False, False, False)


@dataclass(frozen=True)
class SamplingInputs:
    """What the device needs to sample a step, besides the logits (`kernels/sampling/table.py`)."""

    requests: list[Request]
    settings_R5: np.ndarray
    processing_R5: np.ndarray
    variant: SamplingVariant
    constrained: Sequence[tuple[int, Request]] = ()  # rows whose masks are not written yet


class SampledTokens:
    """The tokens of a step, which may still run. Negative ones are errors of their request."""

    def __init__(self, tokens_R: Tensor, logprobs: PendingLogprobs | None) -> None:
        self.logprobs = logprobs
        self.event: torch.cuda.Event | None = None
        self.tokens_R = tokens_R
        if tokens_R.is_cuda:
            self.tokens_R = torch.empty(len(tokens_R), dtype=torch.int64, pin_memory=True)
            self.tokens_R.copy_(tokens_R, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def read(self) -> tuple[list[int], list[TokenLogprob | None]]:
        """Wait for the step; its tokens, and the log-probabilities where they were asked for."""
        if self.event is not None:
            self.event.synchronize()
        tokens: list[int] = self.tokens_R.tolist()
        if self.logprobs is None:
            return tokens, [None] * len(tokens)
        return tokens, self.logprobs.read(tokens)


class Sampler:
    """Samples tokens, and caches the settings and random numbers of consecutive steps.

    Most steps have the requests of the step before, so their settings are the same. Random numbers
    depend on seed and position only, so they are drawn for many positions at once.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.rows = SamplingRows(num_rows, vocab_size, device)
        self.vocab_size, self.device = vocab_size, device
        self.requests: list[Request] = []
        self.settings_R5: np.ndarray = np.empty((0, NUM_SETTINGS))
        self.processing_R5: np.ndarray = np.empty((0, NUM_PROCESSING))
        self.is_random: np.ndarray = np.empty(0, dtype=bool)
        self.processed: list[tuple[int, Request]] = []
        self.variant = GREEDY_VARIANT
        self.first_positions: np.ndarray = np.empty(0, dtype=np.int64)  # of `uniforms`, by request
        self.uniforms: np.ndarray = np.empty((0, 0))  # a row for each position from there on
        self.mask_seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self.was_interrupted = False  # a step ran that nobody reads: last tokens are not to be used

    def can_sample_ahead(self, requests: Sequence[Request]) -> bool:
        """Whether a step can be launched before the tokens that it depends on are known."""
        return not self.was_interrupted and not any(
            request.num_pending
            and (
                request.constraint is not None  # its mask depends on the token
                or (request.params.has_penalties and not self.rows.has_counts(request))
            )
            for request in requests
        )

    # ---- prepare -----------------------------------------------------------------------------------

    def find_variant(self, requests: list[Request]) -> SamplingVariant:
        """The kernels that sampling for these requests runs."""
        if not requests:
            return GREEDY_VARIANT
        if requests != self.requests:
            self._cache_settings(requests)
        return self.variant

    def prepare(self, requests: list[Request]) -> SamplingInputs:
        """The settings of the next tokens of these requests. `finish` must follow the step."""
        variant = self.find_variant(requests)
        processing_R5 = self.processing_R5.copy()
        processing_R5[:, 0] = [request.block_table_row for request in requests]
        for index, request in self.processed:
            processing_R5[index, 1] = self.rows.write(request)
        constrained = [(i, r) for i, r in self.processed if r.constraint is not None]
        for _, request in constrained:
            if request.grammar is not None:
                request.grammar.start_mask()
        settings_R5 = self.settings_R5
        if variant.is_random:
            settings_R5 = settings_R5.copy()
            settings_R5[:, 4] = np.where(self.is_random, self._draw(requests), 0.0)
        self.was_interrupted = True
        self.rows.begin_counting(requests)
        return SamplingInputs(requests, settings_R5, processing_R5, variant, constrained)

    def write_grammar_masks(self, inputs: SamplingInputs) -> None:
        """Write the masks of grammars; waits for those that are still being computed."""
        if not inputs.constrained:
            return
        start = time.perf_counter()
        for index, request in inputs.constrained:
            if self.rows.write_grammar_mask(request):
                inputs.processing_R5[index, 1] = int(inputs.processing_R5[index, 1]) | HAS_MASK
        self.mask_seconds.append(time.perf_counter() - start)

    def take_mask_seconds(self) -> list[float]:
        """How long each step since the last call waited for masks, and wrote them."""
        taken, self.mask_seconds = [*self.mask_seconds], deque(maxlen=RECENT_STEPS)
        return taken

    def finish(self, inputs: SamplingInputs) -> None:
        """Record that the step was launched, before its chunks are marked as computed."""
        self.rows.finish_counting(inputs.requests)
        self.was_interrupted = False

    def _cache_settings(self, requests: list[Request]) -> None:
        all_params = [request.params for request in requests]
        settings_R5, processing_R5 = (
            np.zeros((len(requests), columns)) for columns in (NUM_SETTINGS, NUM_PROCESSING)
        )
        settings_R5[:, :4] = [
            GREEDY_SETTINGS
            if p.is_greedy
            else (
                max(p.temperature, MIN_TEMPERATURE),
                p.min_p,
                min(p.top_k, self.vocab_size),
                p.top_p,
            )
            for p in all_params
        ]
        processing_R5[:, 2:] = [
            (p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in all_params
        ]
        is_random = np.array([not p.is_greedy for p in all_params], dtype=bool)
        processed = [(i, r) for i, r in enumerate(requests) if r.needs_logit_processing]
        uses_threshold = bool(((settings_R5[:, 2] > 0) | (settings_R5[:, 3] < 1)).any())
        variant = SamplingVariant(bool(is_random.any()), uses_threshold, bool(processed))
        # Assigned together and last: an interrupt before leaves a consistent state.
        self.first_positions, self.uniforms = np.empty(0, dtype=np.int64), np.empty((0, 0))
        self.settings_R5, self.processing_R5 = settings_R5, processing_R5
        self.is_random, self.processed, self.variant = is_random, processed, variant
        self.requests = requests

    def _draw(self, requests: list[Request]) -> np.ndarray:
        """The random number of each request's next token."""
        positions = np.array([request.scheduled_length for request in requests], dtype=np.int64)
        if len(self.uniforms):
            offsets = positions - self.first_positions
            if offsets.min() >= 0 and offsets.max() < len(self.uniforms):
                numbers: np.ndarray = self.uniforms[offsets, np.arange(len(requests))]
                return numbers
        count = PRECOMPUTED_POSITIONS if len(self.uniforms) else 1  # requests may change right away
        uniforms = draw_uniforms(requests, positions, count)
        self.first_positions, self.uniforms = positions, uniforms
        first: np.ndarray = uniforms[0]
        return first

    # ---- run, collect ------------------------------------------------------------------------------

    def run(
        self,
        logits_RO: Tensor,
        settings_R5: Tensor,
        processing_R5: Tensor,
        variant: SamplingVariant,
    ) -> Tensor:
        """Sample and count one token of each row, on the device and without a sync."""
        table = self.rows.table if variant.is_processed else None
        tokens_R = sample_tokens(
            logits_RO,
            settings_R5 if variant.is_random else None,
            processing_R5,
            table,
            variant.uses_threshold,
        )
        counts_WO = None if table is None else table.counts_WO
        record_tokens(tokens_R, processing_R5, self.rows.last_tokens_W, counts_WO)
        return tokens_R

    def run_eagerly(self, logits_RO: Tensor, inputs: SamplingInputs) -> Tensor:
        """`run`, with inputs that are on the host."""
        self.write_grammar_masks(inputs)
        settings_R5, processing_R5 = (
            torch.from_numpy(array).to(self.device, non_blocking=True)
            for array in (inputs.settings_R5, inputs.processing_R5)
        )
        return self.run(logits_RO, settings_R5, processing_R5, inputs.variant)

    def collect(
        self, logits_RO: Tensor, tokens_R: Tensor, requests: Sequence[Request]
    ) -> SampledTokens:
        """Start to copy the tokens to the host, and log-probabilities of the raw logits."""
        return SampledTokens(tokens_R, compute_logprobs(logits_RO, tokens_R, requests))


def draw_uniforms(requests: Sequence[Request], positions: np.ndarray, count: int) -> np.ndarray:
    """[count, R]: random numbers of each request for its position and the following ones."""
    seeds = np.array([request.seed for request in requests], dtype=np.uint64)
    all_positions = positions + np.arange(count)[:, None]
    all_seeds = np.broadcast_to(seeds, all_positions.shape)
    uniforms = philox_uniform(all_seeds.ravel(), all_positions.ravel())
    return uniforms.reshape(all_positions.shape)
