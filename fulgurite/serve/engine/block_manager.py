"""KV-cache blocks of requests: requests and token counts in, block tables out.

A `BlockManager` gives every running request one block table per `KVCacheGroup`. The tables of a group
are the rows of one matrix; a step copies the rows that it needs. Blocks that lie before a sliding
window or attention chunk are freed while the request runs.

A `BlockPool` counts the references of each block. A block without references is free, but keeps its
contents until it is allocated again. A request with the same prefix finds it by its hash (prefix
cache). Free blocks are reused in LRU order. The last block of a request is freed first, because a
block is only useful together with all blocks before it.

Block 0 is never allocated: padding is written there, and unused table entries point to it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from fulgurite.plan.kv_cache import KVCacheGroup
from fulgurite.plan.limits import EngineLimits
from fulgurite.serve.engine.request import Request


class BlockPool:
    """Blocks 1 to `num_blocks`."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * (num_blocks + 1)
        self.free_blocks: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self.block_by_hash: dict[bytes, int] = {}
        self.hash_by_block: dict[int, bytes] = {}

    def allocate(self) -> int:
        """Take the least recently used free block; its contents leave the prefix cache."""
        block, _ = self.free_blocks.popitem(last=False)
        old_hash = self.hash_by_block.pop(block, None)
        if old_hash is not None:
            del self.block_by_hash[old_hash]
        self.ref_counts[block] = 1
        return block

    def add_reference(self, block: int) -> None:
        """Share a block with one more request."""
        if self.ref_counts[block] == 0:
            del self.free_blocks[block]
        self.ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Drop one reference. Without references the block is free, and stays in the prefix cache."""
        assert self.ref_counts[block] > 0, f"block {block} is released and has no references"
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            self.free_blocks[block] = None
            if block not in self.hash_by_block:  # not reusable: allocate it first
                self.free_blocks.move_to_end(block, last=False)

    def cache_block(self, block: int, hash: bytes) -> None:
        """Enter a full block into the prefix cache, unless a block of the same contents is there."""
        if hash not in self.block_by_hash and block not in self.hash_by_block:
            self.block_by_hash[hash] = block
            self.hash_by_block[block] = hash

    def reset_prefix_cache(self) -> None:
        self.block_by_hash.clear()
        self.hash_by_block.clear()


def hash_block(previous: bytes, tokens: np.ndarray) -> bytes:
    """The hash of a full block: of its tokens and of all blocks before it, or of the cache salt."""
    return hashlib.blake2b(previous + tokens.tobytes(), digest_size=16).digest()


class BlockManager:
    """Block tables of up to `limits.max_sequences` running requests.

    `pools[g]` holds the blocks of `groups[g]`. With `prefix_caching` requests reuse the blocks of
    equal prefixes.
    """

    def __init__(
        self,
        groups: Sequence[KVCacheGroup],
        pools: Sequence[BlockPool],
        limits: EngineLimits,
        prefix_caching: bool = True,
    ) -> None:
        self.groups = list(groups)
        self.pools = list(pools)
        self.block_size = limits.block_size
        self.max_batched_tokens = limits.max_batched_tokens
        self.prefix_caching = prefix_caching
        rows, columns = limits.max_sequences, -(-limits.context // limits.block_size)
        self.num_rows, self.num_columns = (
            rows,
            columns,
        )  # no groups: all layers are linear attention
        self.block_tables = [np.zeros((rows, columns), dtype=np.int32) for _ in groups]
        # By group and row: the first block that is still held, and the end of the held blocks.
        self.first_blocks = np.zeros((len(self.groups), rows), dtype=np.int64)
        self.num_blocks = np.zeros((len(self.groups), rows), dtype=np.int64)
        self.min_num_blocks = [0] * rows  # the minimum over groups, for a fast check
        self.has_windows = any(
            group.sliding_window is not None or group.chunk_size is not None for group in groups
        )
        self.free_rows = list(range(rows - 1, -1, -1))

    def allocate(self, request: Request) -> None:
        """Give the request a row of the block tables and the cached blocks of its prefix."""
        assert request.block_table_row < 0, f"{request.id} has a block table already"
        assert request.num_computed_tokens == 0, f"{request.id} has computed tokens already"
        row = request.block_table_row = self.free_rows.pop()
        count = self.match_prefix(request) if self.prefix_caching else 0
        for index, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            start = group.first_visible(count * self.block_size) // self.block_size
            self.first_blocks[index, row], self.num_blocks[index, row] = min(start, count), count
            for position in range(start, count):
                block = pool.block_by_hash[request.block_hashes[position]]
                pool.add_reference(block)
                self.block_tables[index][row, position] = block
        request.num_computed_tokens = count * self.block_size
        request.num_cached_blocks = count
        self.min_num_blocks[row] = count

    def can_finish_prefill(self, request: Request) -> bool:
        """Whether an allocated request can reach its next new token without a preemption."""
        row, size = request.block_table_row, self.block_size
        return all(
            group.max_blocks(request.length + 1, self.max_batched_tokens, size)
            - int(self.num_blocks[index, row] - self.first_blocks[index, row])
            <= len(self.pools[index].free_blocks)
            for index, group in enumerate(self.groups)
        )

    def reserve(self, request: Request, tokens: int) -> bool:
        """Allocate blocks for the first `tokens` tokens. False, and nothing allocated, if too few."""
        row = request.block_table_row
        if self.has_windows:
            self._free_out_of_window(request)
        wanted = -(-tokens // self.block_size)
        if self.min_num_blocks[row] >= wanted:
            return True
        missing = wanted - self.num_blocks[:, row]
        if any(
            count > len(pool.free_blocks) for count, pool in zip(missing, self.pools, strict=True)
        ):
            return False
        for index, pool in enumerate(self.pools):
            table = self.block_tables[index][row]
            for position in range(int(self.num_blocks[index, row]), wanted):
                table[position] = pool.allocate()
            self.num_blocks[index, row] = max(wanted, self.num_blocks[index, row])
        self.min_num_blocks[row] = wanted
        return True

    def cache_full_blocks(self, request: Request, num_computed: int) -> None:
        """Enter the full blocks of the first `num_computed` tokens into the prefix cache."""
        num_full = num_computed // self.block_size
        if not self.prefix_caching or num_full <= request.num_cached_blocks:
            return
        self._hash_blocks(request, num_full)
        for index, pool in enumerate(self.pools):
            table = self.block_tables[index][request.block_table_row]
            for position in range(request.num_cached_blocks, num_full):
                if table[position]:
                    pool.cache_block(int(table[position]), request.block_hashes[position])
        request.num_cached_blocks = num_full

    def free(self, request: Request) -> None:
        """Release the row and all blocks of the request, the last block first."""
        row = request.block_table_row
        for index, pool in enumerate(self.pools):
            table = self.block_tables[index][row]
            first, end = int(self.first_blocks[index, row]), int(self.num_blocks[index, row])
            for position in range(end - 1, first - 1, -1):
                pool.release(int(table[position]))
            table[:end] = 0
        self.first_blocks[:, row] = self.num_blocks[:, row] = self.min_num_blocks[row] = 0
        self.free_rows.append(row)
        request.block_table_row = -1
        request.num_computed_tokens = request.num_cached_blocks = request.num_state_tokens = 0

    def reset_prefix_cache(self) -> None:
        """Later requests find no keys of earlier ones."""
        for pool in self.pools:
            pool.reset_prefix_cache()

    def max_request_tokens(self) -> int:
        """The most tokens of a request that runs alone."""
        tokens = self.num_columns * self.block_size
        for group, pool in zip(self.groups, self.pools, strict=True):
            needed = group.max_blocks(tokens, self.max_batched_tokens, self.block_size)
            if pool.num_blocks < needed:
                tokens = min(tokens, pool.num_blocks * self.block_size)
        return tokens

    def _free_out_of_window(self, request: Request) -> None:
        """Release blocks that no later token of the request attends to."""
        for index, group in enumerate(self.groups):
            first = group.first_visible(request.num_computed_tokens) // self.block_size
            table = self.block_tables[index][request.block_table_row]
            for position in range(int(self.first_blocks[index, request.block_table_row]), first):
                self.pools[index].release(int(table[position]))
                table[position] = 0
                self.first_blocks[index, request.block_table_row] = position + 1

    def _hash_blocks(self, request: Request, num_blocks: int) -> None:
        hashes, size = request.block_hashes, self.block_size
        for position in range(len(hashes), num_blocks):
            previous = hashes[-1] if hashes else request.options.cache_salt.encode()
            tokens = request.tokens[position * size : (position + 1) * size]
            hashes.append(hash_block(previous, tokens))

    def match_prefix(self, request: Request) -> int:
        """The number of prefix blocks that every group has cached, and that need not run again."""
        count = request.reusable_length // self.block_size
        self._hash_blocks(request, count)
        return self.match_hashes(request.block_hashes[:count])

    def match_hashes(self, hashes: Sequence[bytes]) -> int:
        """The number of leading blocks with these hashes that every group has cached."""
        count, checked = len(hashes), -1
        while count != checked:
            checked = count
            for group, pool in zip(self.groups, self.pools, strict=True):
                start = group.first_visible(count * self.block_size) // self.block_size
                missing = (b for b in range(start, count) if hashes[b] not in pool.block_by_hash)
                count = next(missing, count)
        return count
