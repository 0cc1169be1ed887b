"""Which replica runs a request: a prompt and the load of each replica in, a replica's number out.

The request goes where it costs least. What a replica's prefix cache lacks must be computed; requests
that it has already must be waited for. Both are counted in blocks of prompt. A prompt that no replica
knows goes so to the least busy one, and a hot prefix spreads once its replica is overloaded.

What replicas have cached is known from the prompts that were sent there (`KnownPrefixes`). A block's
key covers everything before it, so one lookup a block suffices.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

BLOCK_TOKENS = 64  # of prefixes that are compared
DEFAULT_KNOWN_BLOCKS = 1 << 16  # of a replica whose cache size is not known yet
# What a request on a replica costs the next one there, in blocks of prompt. Chosen in a simulation
# (tests/serve/http/routing_simulation.py), where 1 and 2 differ from it by up to about 10%.
REQUEST_COST = 1.5
FIRST_INTERVAL = 64.0  # requests between two that ask for a block, before it is known


class KnownBlock(NamedTuple):
    """When a block was asked for last, and every how many requests it is, on average."""

    last: int
    interval: float


class KnownPrefixes:
    """Keys of the prompt blocks that one replica has cached, presumably; the most recent last.

    `limit` is the size of the replica's cache in blocks. Replies fill the cache as well: they are
    entered as blocks that nobody asks for.
    """

    def __init__(self, limit: int = DEFAULT_KNOWN_BLOCKS) -> None:
        self.limit = limit
        self.blocks: OrderedDict[bytes | int, KnownBlock] = OrderedDict()
        self.reply_blocks = itertools.count()

    def match(self, keys: Sequence[bytes]) -> int:
        """How many blocks of a prompt were sent here before."""
        return sum(1 for _ in itertools.takewhile(self.blocks.__contains__, keys))

    def add(self, keys: Sequence[bytes], number: int = 0, reply_blocks: int = 0) -> None:
        """Enter the prompt of request `number`."""
        for reply_block in itertools.islice(self.reply_blocks, reply_blocks):
            self.blocks[reply_block] = KnownBlock(number, FIRST_INTERVAL)
        for key in reversed(keys):  # the first block is the most useful: forgotten last
            self.blocks[key] = KnownBlock(number, self.estimate_interval(key, number))
            self.blocks.move_to_end(key)
        while len(self.blocks) > self.limit:
            self.blocks.popitem(last=False)

    def estimate_interval(self, key: bytes, number: int) -> float:
        """Every how many requests a block is asked for, if request `number` asks for it."""
        block = self.blocks.get(key)
        if block is None:
            return FIRST_INTERVAL
        return (number - block.last + block.interval) / 2

    def clear(self) -> None:
        self.blocks.clear()


def hash_prefixes(prompt_ids: Sequence[int], cache_salt: str = "") -> list[bytes]:
    """A key for each full block of a prompt: of its tokens and all before them."""
    keys, previous = [], cache_salt.encode()
    tokens = array("q", prompt_ids)
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = tokens[start : start + BLOCK_TOKENS].tobytes()
        previous = hashlib.blake2b(previous + block, digest_size=12).digest()
        keys.append(previous)
    return keys


class ReplicaChooser:
    """Chooses replicas by what they know. `known`: by number of the replica."""

    def __init__(self) -> None:
        self.known: defaultdict[int, KnownPrefixes] = defaultdict(KnownPrefixes)
        self.num_requests = 0
        self.matched_blocks = self.prompt_blocks = 0

    def choose(self, loads: Mapping[int, int], keys: Sequence[bytes]) -> int:
        """The replica where a prompt costs least. `loads`: unfinished requests by replica."""
        matched = {replica: self.known[replica].match(keys) for replica in loads}
        owner = max(matched, key=lambda replica: matched[replica])
        best, share = matched[owner], 1.0
        if min(matched.values()) < best:
            share = self._share_cost(loads, owner, keys[best - 1])

        def estimate_cost(replica: int) -> tuple[float, int, int]:
            missing = (best - matched[replica]) * share
            return missing + REQUEST_COST * loads[replica], loads[replica], replica

        return min(loads, key=estimate_cost)

    def _share_cost(self, loads: Mapping[int, int], owner: int, key: bytes) -> float:
        """The part of a block's cost that one request bears: later ones find it on the new replica."""
        interval = self.known[owner].estimate_interval(key, self.num_requests)
        return 1 / (1 + sum(loads.values()) / max(interval, 1) / len(loads))

    def record(self, replica: int, keys: Sequence[bytes], reply_blocks: int = 0) -> None:
        """A prompt has gone to a replica, with a reply of presumably so many blocks."""
        self.matched_blocks += self.known[replica].match(keys)
        self.prompt_blocks += len(keys)
        self.num_requests += 1
        self.known[replica].add(keys, self.num_requests, reply_blocks)

    def clear(self) -> None:
        """Replicas have nothing any more."""
        for known in self.known.values():
            known.clear()
