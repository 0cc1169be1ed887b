"""What all ranks run next: the proposal of each rank in, the chunks and shape of the step out.

All ranks call `agree_on_step` for the same step. The chunks of one replica are the same on all its ranks:
then a step of a size that ran before needs no agreement. Several replicas agree on every step.

A step that is launched ahead waits if a replica must know its tokens first, if no replica has anything to
run, or if some rank has no memory for it beside the steps in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fulgurite.serve.engine.coordinator import Coordinator, StepProposal, count_scheduled
from fulgurite.serve.engine.request import Request
from fulgurite.serve.engine.runner import CapturedShape, is_decode_step
from fulgurite.serve.engine.scheduler import ScheduledChunk, sampled_requests

if TYPE_CHECKING:
    from fulgurite.serve.engine.engine_core import EngineCore

AgreedStep = tuple[list[ScheduledChunk], CapturedShape | None]


def can_launch(
    engine: EngineCore, chunks: Sequence[ScheduledChunk] | None, requests: Sequence[Request]
) -> bool:
    """Whether these chunks need not wait for a step in flight. `requests`: those that this rank samples."""
    if chunks is None:
        return False
    if not engine.in_flight:
        return True
    has_replicas = engine.coordinator is not None and engine.coordinator.mesh.data.size > 1
    if not chunks and not has_replicas:  # other replicas may have something to run
        return False
    return engine.sampler.can_sample_ahead(requests)


def propose_step(
    engine: EngineCore, chunks: list[ScheduledChunk] | None, samples: bool = True
) -> StepProposal:
    """What this rank can run, of these chunks. `samples`: this rank samples their tokens."""
    found = chunks or []
    requests = sampled_requests(found) if samples else []
    num_requests, num_tokens = count_scheduled(found)
    return StepProposal(
        max_tokens=engine.scheduler.max_batched_tokens,
        can_replay=engine.runner.no_capture_reason is None and is_decode_step(found),
        num_requests=num_requests,
        variant=engine.sampler.find_variant(requests),
        num_tokens=num_tokens,
        can_launch=can_launch(engine, chunks, requests),
    )


def agree_on_step(
    engine: EngineCore,
    chunks: list[ScheduledChunk],
    proposal: StepProposal,
    coordinator: Coordinator,
) -> AgreedStep | None:
    """The chunks of a step for which every rank has the memory, and the captured step that runs them;
    None: it is not launched now."""
    memory, scheduler = engine.memory, engine.scheduler
    while True:
        step = proposal._replace(max_tokens=memory.reserve(chunks))
        if coordinator.mesh.data.size > 1 or not memory.is_proven(chunks):
            step = coordinator.agree(step)
        fits = step.max_tokens >= scheduler.max_batched_tokens
        if engine.in_flight and not fits:
            engine.max_in_flight = 1  # two steps at once need more memory than one
        if engine.in_flight and not (fits and step.can_launch and step.num_requests):
            return None
        if fits:
            break
        memory.shrink_to(step.max_tokens)
        chunks = scheduler.schedule()
        num_requests, num_tokens = count_scheduled(chunks)
        proposal = proposal._replace(
            num_requests=num_requests,
            num_tokens=num_tokens,
            can_replay=False,  # the variant is that of other chunks
        )
    runner, communication = engine.runner, engine.communication
    is_captured = step.can_replay and step.num_requests > 0
    if is_captured and communication is not None:
        captured_size = runner.captured_size(step.num_requests)
        is_captured = communication.begin_step(max(step.num_tokens, captured_size))
        if not is_captured:
            runner.note_eager_step(
                f"the dispatch of {captured_size} tokens is too large for equal splits"
            )
    if not is_captured and communication is not None:
        own_tokens = count_scheduled(chunks)[1]
        communication.begin_step(step.num_tokens, runner.count_equal_micro_batches(own_tokens))
    return chunks, CapturedShape(step.num_requests, step.variant) if is_captured else None
