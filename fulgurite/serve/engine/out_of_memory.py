"""A device that runs out of memory while the engine runs: a failed step in, a smaller one out.

    the step failed                 what the next try changes
    with steps in flight            it waits for them, and steps are no longer launched ahead
    with several tokens             caches are freed; steps have at most half of its tokens, from now on
    with one token                  all other running requests are preempted
    with one token, and alone       nothing helps: the request ends with an error, the others go on

A failed step leaves requests and blocks as they were, so that the next try is an ordinary step. The
limit of a failed step is kept: memory that was too small once is likely to be too small again. Only
a request that can't run at all gives back the limit from before its first failure.

Ranks have to agree, and a rank that stops in the middle of a step leaves the others waiting. So with
several ranks the activations of a step that is larger than any before are reserved first, and all
ranks run it only if all of them could (`reserve`, `shrink_to`).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import torch

from fulgurite.device import is_out_of_memory
from fulgurite.logs import LOG
from fulgurite.plan.memory import MemoryPlan
from fulgurite.serve.engine.request import Request
from fulgurite.serve.engine.runner import ModelRunner
from fulgurite.serve.engine.scheduler import ScheduledChunk, Scheduler


class OutOfMemoryHandler:
    """Shrinks the steps of one engine after failures. `max_batched_tokens` is the current limit."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, plan: MemoryPlan) -> None:
        self.scheduler, self.runner, self.plan = scheduler, runner, plan
        self.num_failures = 0
        self.proven_tokens = 0  # the largest step that ran
        # The limit before the first failed step of a request.
        self.limits_before = weakref.WeakKeyDictionary[Request, int]()

    def record_success(self, chunks: Sequence[ScheduledChunk]) -> None:
        self.proven_tokens = max(self.proven_tokens, count_tokens(chunks))

    def shrink(self, chunks: Sequence[ScheduledChunk], failure: str) -> Request | None:
        """Make the next step smaller than this one, which failed.

        Returns the request that can't run even alone, if that is what failed.
        """
        self.num_failures += 1
        self.free_caches()
        tokens = count_tokens(chunks)
        for chunk in chunks:
            self.limits_before.setdefault(chunk.request, self.scheduler.max_batched_tokens)
        if tokens > 1:
            self.set_limit(tokens // 2, f"a step of {tokens} tokens: {first_line(failure)}")
            return None
        request = chunks[0].request
        others = [one for one in self.scheduler.running if one is not request]
        for one in reversed(others):  # the newest first: the queue keeps the order of arrival
            self.scheduler.preempt(one)
        if others:
            LOG.warning("out of memory with one token a step: %d requests preempted", len(others))
            return None
        self.scheduler.max_batched_tokens = self.limits_before.pop(request)
        return request

    def set_limit(self, tokens: int, reason: str) -> None:
        """Compute at most so many tokens a step from now on."""
        self.scheduler.max_batched_tokens = tokens
        LOG.warning("out of memory in %s; steps have at most %d tokens now", reason, tokens)

    def free_caches(self) -> None:
        """Free what can be made again: captured steps, and memory that torch keeps for later."""
        self.runner.drop_captured_steps()
        gc.collect()  # frames of the failed step may be in reference cycles
        if self.plan.device.type == "cuda":
            torch.cuda.empty_cache()

    # ---- several ranks -----------------------------------------------------------------------------

    def is_proven(self, chunks: Sequence[ScheduledChunk]) -> bool:
        """Whether a step of so many tokens ran before."""
        return count_tokens(chunks) <= self.proven_tokens

    def reserve(self, chunks: Sequence[ScheduledChunk]) -> int:
        """Reserve the memory of a step; the most tokens of a step for which there is memory."""
        tokens = count_tokens(chunks)
        if self.is_proven(chunks) or self.can_reserve(tokens):
            return self.scheduler.max_batched_tokens
        return max(tokens // 2, 1)

    def shrink_to(self, max_tokens: int) -> bool:
        """Make steps as small as all ranks can run; whether they became smaller."""
        if max_tokens >= self.scheduler.max_batched_tokens:
            return False
        self.num_failures += 1
        self.free_caches()
        self.set_limit(max_tokens, "some rank")
        return True

    def can_reserve(self, tokens: int) -> bool:
        """Whether the planned activations of so many tokens can be allocated.

        They are freed at once, and torch keeps the memory for the step.
        """
        planned = self.plan.activations * tokens // self.plan.limits.max_batched_tokens
        try:
            torch.empty(planned, dtype=torch.uint8, device=self.plan.device)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True


def describe_failure(request: Request, failure: str) -> str:
    """The error of a request that can't run."""
    return (
        f"{request.id}, token {request.length}: out of memory, even alone and with one token a step "
        f"({first_line(failure)})"
    )


def count_tokens(chunks: Sequence[ScheduledChunk]) -> int:
    return sum(chunk.num_tokens for chunk in chunks)


def first_line(text: str) -> str:
    return text.partition("\n")[0]
