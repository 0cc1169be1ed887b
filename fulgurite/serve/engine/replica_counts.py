"""Counts of an engine over its replicas: those of each replica in, their sums on rank 0 out.

The first rank of each replica sends its counts with the tokens of a step (coordinator.py). What they
say of requests is as old as that step: a request that has ended since does not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from fulgurite.serve.engine.scheduler import ScheduledChunk
from fulgurite.serve.engine.stats import count_tokens

if TYPE_CHECKING:
    from fulgurite.serve.engine.engine_core import EngineCore


class ReplicaCounts(NamedTuple):
    """What one replica has done in a step, and how it is after it."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    running: int = 0
    used_blocks: int = 0
    prefix_cache_blocks: int = 0
    preemptions: int = 0  # since it has started


class EngineCounts(NamedTuple):
    """How all replicas are."""

    running: int
    waiting: int
    used_blocks: int
    total_blocks: int
    prefix_cache_blocks: int
    preemptions: int


def count_replica(engine: EngineCore, chunks: Sequence[ScheduledChunk] = ()) -> ReplicaCounts:
    """The counts of this rank's replica; `chunks`: of the step."""
    scheduler, pools = engine.scheduler, engine.block_manager.pools
    return ReplicaCounts(
        *count_tokens(chunks),
        running=len(scheduler.running),
        used_blocks=sum(pool.num_blocks - len(pool.free_blocks) for pool in pools),
        prefix_cache_blocks=sum(len(pool.hash_by_block) for pool in pools),
        preemptions=scheduler.num_preemptions,
    )


def count_engine(engine: EngineCore) -> EngineCounts:
    """The counts of all replicas on rank 0; on other ranks those of their own."""
    own = count_replica(engine)
    running, used, cached, preempted = own[2:]
    replicas, coordinator = 1, engine.coordinator
    if coordinator is not None and coordinator.mesh.rank == 0:
        replicas = coordinator.mesh.data.size
        unfinished = Counter(coordinator.replica_of.values())
        for replica, counts in coordinator.replica_counts.items():
            running += min(counts.running, unfinished[replica])
            used += counts.used_blocks if unfinished[replica] else 0
            cached += counts.prefix_cache_blocks
            preempted += counts.preemptions
    total = replicas * sum(pool.num_blocks for pool in engine.block_manager.pools)
    return EngineCounts(running, len(engine.requests) - running, used, total, cached, preempted)
