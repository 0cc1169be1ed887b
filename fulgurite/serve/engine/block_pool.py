"""Blocks of the KV cache, as numbers: who uses which, which are free, which hold what.

A `BlockPool` counts the users of each block. A block nobody uses is free, and still holds its keys
until it is taken again: a request that starts with the same tokens finds it by its hash. The block
taken first is the one that was free for longest; of one request, its last block goes first, since
a first block without the ones before it is of no use to anyone.

Block 0 belongs to nobody: padding is written there, and a table's unused entries point to it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np


class BlockPool:
    """Blocks 1 to `count`."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.users = [0] * (count + 1)
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, count + 1))
        self.block_of: dict[bytes, int] = {}
        self.hash_of: dict[int, bytes] = {}

    def take(self) -> int:
        """A free block, now used once; what it held is forgotten."""
        block, _ = self.free.popitem(last=False)
        held = self.hash_of.pop(block, None)
        if held is not None:
            del self.block_of[held]
        self.users[block] = 1
        return block

    def share(self, block: int) -> None:
        """One user more."""
        if self.users[block] == 0:
            del self.free[block]
        self.users[block] += 1

    def release(self, block: int) -> None:
        """One user less; without any it is free, and found by its hash until it is taken."""
        assert self.users[block] > 0, f"block {block} is released and has no user"
        self.users[block] -= 1
        if self.users[block] == 0:
            self.free[block] = None
            if block not in self.hash_of:
                self.free.move_to_end(block, last=False)  # nothing worth keeping: take it first

    def publish(self, block: int, hash: bytes) -> None:
        """Say what a full block holds; the first block of a content stays the one that is found."""
        if hash not in self.block_of and block not in self.hash_of:
            self.block_of[hash] = block
            self.hash_of[block] = hash

    def forget(self) -> None:
        """No block is found by its content any more."""
        self.block_of.clear()
        self.hash_of.clear()


def next_hash(before: bytes, tokens: np.ndarray) -> bytes:
    """The hash of a full block: of its tokens and of all blocks before it."""
    return hashlib.blake2b(before + tokens.tobytes(), digest_size=16).digest()
