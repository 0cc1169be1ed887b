"""`PrefixBlocks`: a chunk of exported KV-cache blocks, as it travels between processes.

prefix_blocks.py exports and imports them. The server only hands them on, without torch.
"""

from __future__ import annotations

from dataclasses import dataclass

CHUNK_BYTES = 4 << 20  # of one chunk, if a block is not larger


@dataclass(frozen=True)
class PrefixBlocks:
    """A chunk of a prefix: the blocks from `start` to `end`.

    hashes     of all blocks of the prefix
    contents   by cache group: its blocks in the chunk, one after another. Blocks before the group's
               sliding window are left out (`first_block`).
    layout     of the cache; both engines must have the same
    """

    hashes: list[bytes]
    start: int
    end: int
    contents: list[bytes]
    layout: str
