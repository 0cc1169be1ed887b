"""The conservation audit: an engine in, counts of what is held without a reason out.

Blocks, rows of the block tables, and entries of every table must belong to unfinished requests.
After any failure, cancel or preemption all counts are 0. The server exports them as a metric, and
tests check them after random faults.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING

from fulgurite.serve.engine.block_manager import BlockManager
from fulgurite.serve.engine.request import Request, RequestState

if TYPE_CHECKING:
    from fulgurite.serve.engine.engine import Engine


def audit_engine(engine: Engine) -> dict[str, int]:
    """By kind, the number of things that nobody accounts for.

    blocks          block references that no running request has, or that are missing
    rows            rows of the block tables that are neither free nor a running request's
    requests        unfinished requests that the scheduler does not have, or the reverse
    detokenizers    detokenizers and listeners of requests that are gone
    steps           steps in flight without any request
    """
    scheduler, manager = engine.scheduler, engine.block_manager
    known = engine.requests
    local = {request for request in known.values() if engine._is_local(request)}
    scheduled = {*scheduler.waiting, *scheduler.running, *engine.unscheduled_requests()}
    return {
        "blocks": count_block_leaks(manager, scheduler.running),
        "rows": count_row_leaks(manager, scheduler.running),
        "requests": len(local ^ scheduled) + count_misplaced(scheduler.waiting, scheduler.running),
        "detokenizers": len({*engine.detokenizers, *engine.listeners} - {*known}),
        "steps": 0 if known else len(engine.in_flight),
    }


def count_block_leaks(manager: BlockManager, running: Collection[Request]) -> int:
    """Differences between the blocks' reference counts and the running requests' block tables."""
    leaks = 0
    for index, pool in enumerate(manager.pools):
        held: Counter[int] = Counter()
        for request in running:
            row = request.block_table_row
            first, end = manager.first_blocks[index, row], manager.num_blocks[index, row]
            held.update(manager.block_tables[index][row, first:end].tolist())
        counted = {block: count for block, count in enumerate(pool.ref_counts) if count}
        leaks += sum(abs(counted.get(block, 0) - held.get(block, 0)) for block in {*counted, *held})
        leaks += abs(pool.num_blocks - len(pool.free_blocks) - len(counted))
    return leaks


def count_row_leaks(manager: BlockManager, running: Collection[Request]) -> int:
    rows = [*manager.free_rows, *(request.block_table_row for request in running)]
    total = len(manager.min_num_blocks)
    return abs(total - len(rows)) + len(rows) - len({*rows})


def count_misplaced(waiting: Collection[Request], running: Collection[Request]) -> int:
    """Requests whose state is not that of their queue."""
    wrong = sum(request.state is not RequestState.WAITING for request in waiting)
    return wrong + sum(request.state is not RequestState.RUNNING for request in running)
