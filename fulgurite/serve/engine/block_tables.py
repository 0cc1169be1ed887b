"""Which blocks hold a request's keys: a request and a number of tokens in, rows of block ids out.

Layers that see equally far back share a `Group`: one pool of blocks, one table a request. A layer
with a window (or chunks) gives back the blocks it can't see any more, so a long text costs such a
layer only its window. Tables are rows of one matrix a group; a step copies the rows it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fulgurite.models.cache import AttentionSpec
from fulgurite.serve.engine.block_pool import BlockPool, next_hash
from fulgurite.serve.engine.request import Request


@dataclass(frozen=True)
class Group:
    """Layers that see equally far back."""

    layers: tuple[int, ...]
    window: int | None
    chunk: int | None

    def oldest(self, position: int) -> int:
        """The first key that the query at `position`, or any later one, sees."""
        oldest = 0
        if self.window is not None:
            oldest = max(oldest, position - self.window + 1)
        if self.chunk is not None:
            oldest = max(oldest, position // self.chunk * self.chunk)
        return oldest

    def blocks(self, tokens: int, step_tokens: int, block_size: int) -> int:
        """The most blocks a request of `tokens` tokens has at once, computed in such steps."""
        whole = -(-tokens // block_size)
        reach = [size for size in (self.window, self.chunk) if size is not None]
        if not reach:
            return whole
        return min(whole, (min(reach) + step_tokens - 2) // block_size + 2)


def make_groups(specs: Sequence[AttentionSpec]) -> list[Group]:
    layers: dict[tuple[int | None, int | None], list[int]] = {}
    for spec in specs:
        layers.setdefault((spec.window, spec.chunk), []).append(spec.layer)
    return [Group(tuple(found), *reach) for reach, found in layers.items()]


class BlockTables:
    """The tables of up to `rows` running requests of up to `context` tokens.

    `pools[g]` belongs to `groups[g]`. A step computes at most `step_tokens`. `reuse`: whether
    requests find each other's blocks.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        pools: Sequence[BlockPool],
        block_size: int,
        rows: int,
        context: int,
        step_tokens: int,
        reuse: bool = True,
    ) -> None:
        self.groups = list(groups)
        self.pools = list(pools)
        self.block_size = block_size
        self.step_tokens = step_tokens
        self.reuse = reuse
        columns = -(-context // block_size)
        self.tables = [np.zeros((rows, columns), dtype=np.int32) for _ in groups]
        self.starts = np.zeros((len(self.groups), rows), dtype=np.int64)  # first block kept
        self.stops = np.zeros((len(self.groups), rows), dtype=np.int64)  # blocks so far
        self.held = [0] * rows  # blocks so far in the group that has fewest, for a quick look
        self.bounded = any(g.window is not None or g.chunk is not None for g in groups)
        self.free_rows = list(range(rows - 1, -1, -1))

    def open(self, request: Request) -> None:
        """Give the request a row, and the blocks that already hold the beginning of its tokens."""
        assert request.row < 0 and request.computed == 0, f"{request.id} is open already"
        row = request.row = self.free_rows.pop()
        count = self._found(request) if self.reuse else 0
        request.computed = request.published = 0
        for index, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            start = group.oldest(count * self.block_size) // self.block_size
            self.starts[index, row], self.stops[index, row] = min(start, count), count
            for block in range(start, count):
                found = pool.block_of[request.block_hashes[block]]
                pool.share(found)
                self.tables[index][row, block] = found
        request.computed = count * self.block_size
        request.published = count
        self.held[row] = count

    def admits(self, request: Request) -> bool:
        """Whether an open request could run to its next new token without preempting anyone."""
        size, step = self.block_size, self.step_tokens
        return all(
            group.blocks(request.length + 1, step, size)
            - int(self.stops[index, request.row] - self.starts[index, request.row])
            <= len(self.pools[index].free)
            for index, group in enumerate(self.groups)
        )

    def reserve(self, request: Request, tokens: int) -> bool:
        """Blocks for the first `tokens` tokens; False, and none taken, where there are too few."""
        row = request.row
        if self.bounded:
            self._drop_unseen(request)
        wanted = -(-tokens // self.block_size)
        if self.held[row] >= wanted:
            return True
        missing = wanted - self.stops[:, row]
        if any(count > len(pool.free) for count, pool in zip(missing, self.pools, strict=True)):
            return False
        for index, pool in enumerate(self.pools):
            table = self.tables[index][row]
            for block in range(int(self.stops[index, row]), wanted):
                table[block] = pool.take()
            self.stops[index, row] = max(wanted, self.stops[index, row])
        self.held[row] = wanted
        return True

    def publish(self, request: Request) -> None:
        """Let others find the blocks that are full by now."""
        full = request.computed // self.block_size
        if not self.reuse or full <= request.published:
            return
        self._hash(request, full)
        for index, pool in enumerate(self.pools):
            table = self.tables[index][request.row]
            for block in range(request.published, full):
                if table[block]:
                    pool.publish(int(table[block]), request.block_hashes[block])
        request.published = full

    def close(self, request: Request) -> None:
        """Give back the row and all blocks; the last block first."""
        row = request.row
        for index, pool in enumerate(self.pools):
            table = self.tables[index][row]
            for block in range(
                int(self.stops[index, row]) - 1, int(self.starts[index, row]) - 1, -1
            ):
                pool.release(int(table[block]))
            table[: self.stops[index, row]] = 0
        self.starts[:, row] = self.stops[:, row] = self.held[row] = 0
        self.free_rows.append(row)
        request.row, request.computed, request.published = -1, 0, 0

    def forget(self) -> None:
        """No request finds keys that an earlier one left."""
        for pool in self.pools:
            pool.forget()

    def capacity(self) -> int:
        """The tokens one request alone may have."""
        tokens = self.tables[0].shape[1] * self.block_size
        for group, pool in zip(self.groups, self.pools, strict=True):
            if pool.count < group.blocks(tokens, self.step_tokens, self.block_size):
                tokens = min(tokens, pool.count * self.block_size)
        return tokens

    def _drop_unseen(self, request: Request) -> None:
        for index, group in enumerate(self.groups):
            first = group.oldest(request.computed) // self.block_size
            table = self.tables[index][request.row]
            for block in range(int(self.starts[index, request.row]), first):
                self.pools[index].release(int(table[block]))
                table[block] = 0
                self.starts[index, request.row] = block + 1

    def _hash(self, request: Request, blocks: int) -> None:
        hashes, size = request.block_hashes, self.block_size
        for block in range(len(hashes), blocks):
            before = hashes[-1] if hashes else b""
            hashes.append(next_hash(before, request.tokens[block * size : (block + 1) * size]))

    def _found(self, request: Request) -> int:
        """How many blocks of the request's beginning every group has; its last token is left to run."""
        count = (request.length - 1) // self.block_size
        self._hash(request, count)
        hashes, checked = request.block_hashes, -1
        while count != checked:
            checked = count
            for group, pool in zip(self.groups, self.pools, strict=True):
                start = group.oldest(count * self.block_size) // self.block_size
                missing = (b for b in range(start, count) if hashes[b] not in pool.block_of)
                count = next(missing, count)
        return count
