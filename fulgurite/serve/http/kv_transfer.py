"""Disaggregated prefill: a prompt in, its KV-cache blocks from one replica to another.

    prefill replica: compute the prompt, export ══ chunks ══▶ decode replica: import, find it cached

Blocks travel in chunks of a few MiB (serve/engine/prefix_blocks.py). Both engines run steps between
chunks, and the event loop serves other requests. Leaving early leaves nothing behind: blocks that have
arrived are ordinary cached blocks.
"""

from __future__ import annotations

import asyncio
from collections import deque

from fulgurite.serve.engine.prefix_chunk import PrefixBlocks
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.remote.handle import EngineHandle

CHUNKS_AHEAD = 3  # that are exported while one is imported


async def transfer_blocks(
    prefill: EngineHandle,
    decode: EngineHandle,
    prompt_ids: list[int],
    *,
    priority: int = 0,
    cache_salt: str = "",
) -> int:
    """The number of blocks that were handed over; EngineError if a replica fails.

    Nothing is computed or sent if `decode` has all full blocks of the prompt already.
    """
    own = await decode.export_prefix(prompt_ids, cache_salt, max_bytes=0)
    start = len(own.hashes)
    if decode.info is None or start >= (len(prompt_ids) - 1) // decode.info.block_size:
        return 0
    await compute_prompt(prefill, prompt_ids, priority, cache_salt)
    return await send_blocks(prefill, decode, prompt_ids, cache_salt, start)


async def compute_prompt(
    engine: EngineHandle, prompt_ids: list[int], priority: int, cache_salt: str
) -> None:
    """Bring a prompt into the engine's prefix cache."""
    params = SamplingParams(max_tokens=1)
    stream = engine.generate(prompt_ids, params, priority=priority, cache_salt=cache_salt)
    try:
        while not stream.is_finished:
            await stream.next()
    finally:
        stream.cancel()


async def send_blocks(
    source: EngineHandle,
    target: EngineHandle,
    prompt_ids: list[int],
    cache_salt: str = "",
    start: int = 0,
) -> int:
    """Send the cached blocks of a prompt from block `start` on; returns how many arrived."""
    chunk = await source.export_prefix(prompt_ids, cache_salt, start=start)
    hashes, size = chunk.hashes, chunk.end - start
    if size <= 0:
        return 0
    starts = deque(range(chunk.end, len(hashes), size))
    ahead: deque[asyncio.Future[PrefixBlocks]] = deque()
    try:
        while True:
            while starts and len(ahead) < CHUNKS_AHEAD:
                following = source.export_prefix([], hashes=hashes, start=starts.popleft())
                ahead.append(asyncio.ensure_future(following))
            reach = await target.import_prefix(chunk)
            if reach < chunk.end or not ahead:
                return max(min(reach, chunk.end) - start, 0)
            chunk = await ahead.popleft()
            if chunk.hashes != hashes:  # the source has evicted some
                return max(chunk.start - start, 0)
    finally:
        for one in ahead:
            one.cancel()
        await asyncio.gather(*ahead, return_exceptions=True)
