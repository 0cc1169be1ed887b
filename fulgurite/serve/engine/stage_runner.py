"""One step on a pipeline stage or context-parallel rank: `ScheduledChunk`s in, their logits out.

The logits come out on the first stage. With context parallelism a rank runs its part of the tokens.

A step of many tokens is cut into micro-batches, so that the stages work at the same time:

    stage 0   a0  b0  c0  ..  head          a0: the layers of stage 0 for micro-batch a
    stage 1       a1  b1  c1                every stage sends hidden states to the next one
    stage 2           a2  b2  c2            the last one sends those of sampled tokens to the first

Every rank runs the same scheduler, so all stages know the micro-batches without a word. Long prompts are
cut, too: each stage computes the tokens of a request in order, so the keys of earlier tokens are there.
A small step is one micro-batch, since each one reads all weights of a stage. Decode steps of that size
are captured (captured_step.py).

Shapes: T tokens of a micro-batch; R tokens whose logits are computed; D hidden size; O vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fulgurite.kernels.linear_attention.ops import CUT_ALIGNMENT
from fulgurite.models.kv_cache import NoKVCache
from fulgurite.models.layers import CausalLM
from fulgurite.parallel.pipeline import Pipeline, PipelineStage
from fulgurite.serve.engine.batch import InputBatch
from fulgurite.serve.engine.kv_cache import PagedKVCache
from fulgurite.serve.engine.logprobs import (
    PendingPromptLogprobs,
    PromptSpan,
    compute_prompt_logprobs,
    find_prompt_spans,
)
from fulgurite.serve.engine.scheduler import ScheduledChunk

# Tokens from which on a GEMM costs arithmetic and not the read of its weights: about 200 in bfloat16 on
# an H200 (990 TFLOPS over 4.8 TB/s), fewer on CPUs. Smaller micro-batches would read weights again.
MIN_MICRO_BATCH_TOKENS = {"cpu": 32, "cuda": 256}

BuildBatch = Callable[[Sequence[ScheduledChunk]], InputBatch]


class StageOutput(NamedTuple):
    """The hidden states of a micro-batch after the last stage; on other stages what they computed.

    sampled_RD     of the tokens that are sampled
    prompts_LD     of this rank's tokens before those of the spans
    num_tokens     of the micro-batch, and how many of them are sampled
    """

    sampled_RD: Tensor
    prompts_LD: Tensor
    spans: list[PromptSpan]
    num_tokens: int
    num_sampled: int


class StageRunner:
    """Runs this rank's stage of a step. `build_batch`: chunks → the batch on the device.
    `rows_at_once`: of prompts, whose logits are computed at once.

    If ranks of several replicas share experts, all of them run as many micro-batches in every step as
    there are stages, with tokens or without.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_cache: PagedKVCache,
        build_batch: BuildBatch,
        rows_at_once: int,
    ) -> None:
        self.model, self.kv_cache, self.build_batch = model, kv_cache, build_batch
        self.stage = model.stage or PipelineStage(0, 1, 0, len(model.layers))
        self.pipeline, self.context, self.device = model.pipeline, model.context, model.device
        assert (self.pipeline is None) == (self.stage.count == 1), "several stages have links"
        self.has_shared_experts = self.pipeline is not None and self.pipeline.replicas_share_experts
        # Layers with states read a prompt in chunks of this size.
        self.alignment = CUT_ALIGNMENT[self.device.type] if model.state_specs else 1
        self.rows_at_once = rows_at_once
        self.min_tokens = MIN_MICRO_BATCH_TOKENS[self.device.type]

    def run(self, chunks: Sequence[ScheduledChunk]) -> tuple[Tensor, list[PendingPromptLogprobs]]:
        """The logits of all chunks that need sampling, [R, O], on other stages none of them; and the
        log-probabilities of prompts."""
        micro_batches = self._split(chunks)
        outputs: list[StageOutput] = []
        for micro_batch in micro_batches:
            if micro_batch:
                outputs.append(self._run_micro_batch(micro_batch))
            else:
                self._run_layers_empty()
        if self.pipeline is not None and self.stage.is_first:
            outputs = [self._receive_output(self.pipeline, output) for output in outputs]
        prompt_logprobs = [pending for output in outputs for pending in self._run_spans(output)]
        if self.stage.is_first:
            sampled_RD = torch.cat([output.sampled_RD for output in outputs])
            logits_RO = self.model.compute_logits(sampled_RD).float()
        else:
            logits_RO = self._no_logits()
        if self.pipeline is not None:
            self.pipeline.finish()
        return logits_RO, prompt_logprobs

    def run_empty(self) -> Tensor:
        """A step without tokens: other ranks may send tokens to this rank's experts."""
        for _ in range(self.stage.count if self.has_shared_experts else 1):
            self._run_layers_empty()
        return self._no_logits()

    def _split(self, chunks: Sequence[ScheduledChunk]) -> list[list[ScheduledChunk]]:
        count = self.stage.count
        if self.has_shared_experts:
            parts = split_micro_batches(chunks, count, self.alignment)
            return parts + [[] for _ in range(count - len(parts))]
        tokens = sum(chunk.num_tokens for chunk in chunks)
        return split_micro_batches(chunks, self._count_micro_batches(tokens), self.alignment)

    def count_equal_micro_batches(self, tokens: int) -> int:
        """How many micro-batches a step has, if none has more than its share of the tokens; or 1."""
        if self.alignment > 1:
            return 1
        return self.stage.count if self.has_shared_experts else self._count_micro_batches(tokens)

    def _count_micro_batches(self, tokens: int) -> int:
        return max(1, min(self.stage.count, tokens // self.min_tokens))

    def is_one_micro_batch(self, tokens: int) -> bool:
        """Whether a decode step of so many tokens may be captured: all ranks then run it as one."""
        return self.has_shared_experts or self._count_micro_batches(tokens) == 1

    def _run_micro_batch(self, chunks: Sequence[ScheduledChunk]) -> StageOutput:
        """The hidden states after this stage, which are sent to the next one."""
        batch, model = self.build_batch(chunks), self.model
        self.kv_cache.set_batch(batch)
        token_ids_T, positions_T = batch.token_ids_T, batch.positions_T
        spans = list(find_prompt_spans(chunks))
        first, end = self._local_range(len(token_ids_T))
        token_ids_T, positions_T = token_ids_T[first:end], positions_T[first:end]
        x_TD, cos_sins = model.embed(token_ids_T, positions_T, self.kv_cache)
        if self.pipeline is not None and not self.stage.is_first:
            self.pipeline.receive(x_TD)
        x_TD = model.run_layers(x_TD, positions_T, cos_sins, self.kv_cache)
        counts = len(batch.token_ids_T), sum(chunk.needs_sampling for chunk in chunks)
        if not self.stage.is_last:
            self._send(x_TD)
            return StageOutput(x_TD, x_TD, spans, *counts)
        sampled_RD = self._select_sampled(x_TD, chunks, batch)
        prompts_LD = self._select_prompts(x_TD, spans, first, end)
        self._send(sampled_RD)
        self._send(prompts_LD)
        return StageOutput(sampled_RD, prompts_LD, spans, *counts)

    def _local_range(self, tokens: int) -> tuple[int, int]:
        """Which tokens of a micro-batch this rank runs."""
        return (0, tokens) if self.context is None else self.context.local_range(tokens)

    def _send(self, x: Tensor) -> None:
        if self.pipeline is not None:
            self.pipeline.send(x)

    def _select_sampled(
        self, x_TD: Tensor, chunks: Sequence[ScheduledChunk], batch: InputBatch
    ) -> Tensor:
        """The hidden states of the tokens that are sampled; on every context rank those of all."""
        if self.context is None:
            return x_TD if batch.logit_rows_R is None else x_TD[batch.logit_rows_R]
        ends = itertools.accumulate(chunk.num_tokens for chunk in chunks)
        rows = [end - 1 for end, chunk in zip(ends, chunks, strict=True) if chunk.needs_sampling]
        return self.context.gather_rows(x_TD, rows, len(batch.token_ids_T))

    def _select_prompts(
        self, x_TD: Tensor, spans: Sequence[PromptSpan], first: int, end: int
    ) -> Tensor:
        """The hidden states of this rank's tokens before those of the spans."""
        local = [span.clip(first, end) for span in spans]
        parts = [x_TD[span.row : span.row + span.num_tokens] for span in local]
        return torch.cat([x_TD[:0], *parts])

    def _run_spans(self, output: StageOutput) -> Iterator[PendingPromptLogprobs]:
        """The log-probabilities of a micro-batch's prompts. A context rank computes those of its tokens,
        and gets the others."""
        local_range, row = self._local_range(output.num_tokens), 0
        for span in output.spans:
            if not self.stage.is_first:
                yield PendingPromptLogprobs(span, None)
                continue
            local = span.clip(*local_range)
            hidden_LD = output.prompts_LD[row : row + local.num_tokens]
            row += local.num_tokens
            words_LW = compute_prompt_logprobs(self.model, hidden_LD, local, self.rows_at_once)
            if self.context is not None:
                bounds = self.context.all_ranges(output.num_tokens)
                counts = [span.clip(*one).num_tokens for one in bounds]
                words_LW = self.context.gather_counted(words_LW, counts, "log-probabilities")
            yield PendingPromptLogprobs(span, words_LW)

    def _run_layers_empty(self) -> None:
        none_T = torch.zeros(0, dtype=torch.int64, device=self.device)
        cache = NoKVCache()
        x_TD, cos_sins = self.model.embed(none_T, none_T, cache)
        self.model.run_layers(x_TD, none_T, cos_sins, cache)

    def _receive_output(self, pipeline: Pipeline, output: StageOutput) -> StageOutput:
        """What the last stage sends for a micro-batch."""
        local_range = self._local_range(output.num_tokens)
        num_prompts = sum(span.clip(*local_range).num_tokens for span in output.spans)
        received = []
        for count in (output.num_sampled, num_prompts):
            rows_RD = output.sampled_RD.new_empty(count, self.model.config.hidden_size)
            pipeline.receive(rows_RD)
            received.append(rows_RD)
        return output._replace(sampled_RD=received[0], prompts_LD=received[1])

    def _no_logits(self) -> Tensor:
        return torch.zeros(0, self.model.config.vocab_size, device=self.device)


def split_micro_batches(
    chunks: Sequence[ScheduledChunk], count: int, alignment: int = 1
) -> list[list[ScheduledChunk]]:
    """At most `count` micro-batches of about equally many tokens; none is empty.

    Chunks stay in order. One of several tokens may be cut, where its position is a multiple of
    `alignment`.
    """
    total = sum(chunk.num_tokens for chunk in chunks)
    parts: list[list[ScheduledChunk]] = [[] for _ in range(count)]
    part, seen = 0, 0
    for chunk in chunks:
        rest: ScheduledChunk | None = chunk
        while rest is not None:
            end = -(-total * (part + 1) // count)  # of this micro-batch
            head, rest = _cut(rest, end - seen, alignment)
            if head is not None:
                parts[part].append(head)
                seen += head.num_tokens
            if rest is not None or seen >= end:
                part = min(part + 1, count - 1)
    return [part for part in parts if part]


def _cut(
    chunk: ScheduledChunk, tokens: int, alignment: int
) -> tuple[ScheduledChunk | None, ScheduledChunk | None]:
    """The first tokens of a chunk, at most `tokens` if it can be cut there, and the rest."""
    if chunk.num_tokens <= tokens:
        return chunk, None
    stop = (chunk.start + tokens) // alignment * alignment
    if stop <= chunk.start:
        stop = chunk.start + alignment - chunk.start % alignment  # make progress, larger than asked
    if stop >= chunk.end:
        return chunk, None
    size = stop - chunk.start
    head = chunk._replace(num_tokens=size, needs_sampling=False, ends_pending=False)
    return head, chunk._replace(start=stop, num_tokens=chunk.num_tokens - size)
