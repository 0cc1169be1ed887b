"""The router: which replica runs a request. Token ids in, an `EngineHandle` out.

`prefix`: the replica where the request costs least. What a replica's prefix cache lacks must be computed;
requests that it has already must be waited for. Both are counted in blocks of prompt. A prompt that no
replica knows goes so to the least busy one, and a hot prefix spreads once its replica is overloaded.
`round-robin` and `least-loaded` ignore prompts.

The router knows what replicas have cached from the prompts that it sent there (`KnownPrefixes`). A
block's key covers everything before it, so one lookup a block suffices.

With prefill replicas a prompt is first computed by one of them (kv_transfer.py).
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from fulgurite.errors import ArgumentError
from fulgurite.logs import LOG
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.http.kv_transfer import transfer_blocks
from fulgurite.serve.remote.client import EngineError, TokenStream
from fulgurite.serve.remote.handle import EngineHandle
from fulgurite.serve.remote.messages import EngineInfo

BLOCK_TOKENS = 64  # of prefixes that are compared
DEFAULT_KNOWN_BLOCKS = 1 << 16  # of a replica whose cache size is not known yet
# What a request on a replica costs the next one there, in blocks of prompt. Chosen in a simulation
# (tests/serve/http/routing_simulation.py), where 1 and 2 differ from it by up to about 10%.
REQUEST_COST = 1.5
FIRST_INTERVAL = 64.0  # requests between two that ask for a block, before it is known
MIN_TRANSFER_BLOCKS = 2  # shorter prompts are cheaper to compute than to hand over


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


class Router:
    """Replicas behind one `generate`. The first `prefill_replicas` of them only compute prompts."""

    def __init__(
        self, clients: Sequence[EngineHandle], routing: str = "prefix", prefill_replicas: int = 0
    ) -> None:
        self.clients = list(clients)
        self.routing = routing
        self.prefill_clients = self.clients[:prefill_replicas]
        self.decode_clients = self.clients[prefill_replicas:]
        self.known = {client.index: KnownPrefixes() for client in self.clients}
        self.known_restarts = {client.index: 0 for client in self.clients}
        self.starting: Counter[int] = Counter()  # requests by replica that are handed over to it
        self.turn = itertools.count()
        self.num_routed = 0
        self.matched_blocks = self.routed_blocks = self.handed_blocks = 0

    @property
    def capacity(self) -> int:
        """Requests that the ready replicas run at once; those that are stalled run none."""
        ready = (
            client.info
            for client in self.decode_clients
            if client.is_ready and client.state != "stalled"
        )
        return sum(info.max_sequences for info in ready if info is not None)

    def check_engine(self, info: EngineInfo) -> None:
        """ArgumentError if engines of this kind can't do what the router is for."""
        if self.prefill_clients and not info.prefix_caching:
            raise ArgumentError(
                f"prefill replicas hand over KV-cache blocks, but {info.model_type} has no "
                "prefix cache",
                next="leave out --prefill-replicas",
            )

    # ---- the choice --------------------------------------------------------------------------------

    def choose(self, prompt_ids: Sequence[int], cache_salt: str = "") -> EngineHandle:
        """The replica for a prompt; EngineError if none is ready. No prompt: the least busy one."""
        return self._choose_among(self.decode_clients, hash_prefixes(prompt_ids, cache_salt))

    def _choose_among(self, clients: Sequence[EngineHandle], keys: Sequence[bytes]) -> EngineHandle:
        ready = [client for client in clients if client.is_ready and client.state != "stalled"]
        ready = [client for client in ready if client.state != "restarting"] or ready
        if not ready:
            raise EngineError("no engine is ready", next="try again in a few seconds")
        if len(ready) == 1:
            chosen = ready[0]
        elif self.routing == "round-robin":
            chosen = ready[next(self.turn) % len(ready)]
        elif self.routing == "least-loaded":
            chosen = min(ready, key=self._order_by_load)
        else:
            chosen = self._choose_by_prefix(ready, keys)
        if self.routing == "prefix" and len(clients) > 1 and keys:
            self._record(chosen, keys)
        return chosen

    def _order_by_load(self, client: EngineHandle) -> tuple[int, int]:
        return self._count_requests(client), client.index

    def _choose_by_prefix(
        self, ready: Sequence[EngineHandle], keys: Sequence[bytes]
    ) -> EngineHandle:
        matched = [self._known(client).match(keys) for client in ready]
        best = max(matched)
        share = 1.0
        if best and min(matched) < best:
            share = self._share_cost(ready, ready[matched.index(best)], keys[best - 1])

        def estimate_cost(position: int) -> tuple[float, int, int]:
            client = ready[position]
            count = self._count_requests(client)
            missing = (best - matched[position]) * share
            return missing + REQUEST_COST * count, count, client.index

        return ready[min(range(len(ready)), key=estimate_cost)]

    def _share_cost(self, ready: Sequence[EngineHandle], owner: EngineHandle, key: bytes) -> float:
        """The part of a block's cost that one request bears: later ones find it on the new replica."""
        interval = self._known(owner).estimate_interval(key, self.num_routed)
        unfinished = sum(self._count_requests(client) for client in ready)
        return 1 / (1 + unfinished / max(interval, 1) / len(ready))

    def _count_requests(self, client: EngineHandle) -> int:
        return client.num_requests + self.starting[client.index]

    def _known(self, client: EngineHandle) -> KnownPrefixes:
        """What the replica's prefix cache may have; a restarted replica has nothing."""
        known = self.known[client.index]
        if client.info is not None:
            known.limit = max(client.info.cache_tokens // BLOCK_TOKENS, 1)
        if self.known_restarts[client.index] != client.restarts:
            self.known_restarts[client.index] = client.restarts
            known.clear()
        return known

    def _record(self, client: EngineHandle, keys: Sequence[bytes]) -> None:
        known = self._known(client)
        self.matched_blocks += known.match(keys)
        self.routed_blocks += len(keys)
        self.num_routed += 1
        known.add(keys, self.num_routed, self._expect_reply_blocks())

    def _expect_reply_blocks(self) -> int:
        """The average reply so far, in blocks."""
        generated = sum(client.progress.generated_tokens for client in self.decode_clients)
        return round(generated / self.num_routed / BLOCK_TOKENS)

    # ---- requests ----------------------------------------------------------------------------------

    async def prepare(
        self,
        prompt_ids: list[int],
        *,
        priority: int = 0,
        cache_salt: str = "",
        count: int = 1,
    ) -> EngineHandle:
        """The replica for `count` generations from one prompt, with the prompt's blocks if prefill
        replicas compute them. If that fails, the replica computes the prompt itself."""
        client = self.choose(prompt_ids, cache_salt)
        if not any(one.is_ready for one in self.prefill_clients):
            return client
        keys = hash_prefixes(prompt_ids, cache_salt)
        if len(keys) < MIN_TRANSFER_BLOCKS:
            return client
        try:
            with self._count_as_started(client, count):
                prefill = self._choose_among(self.prefill_clients, keys)
                self.handed_blocks += await transfer_blocks(
                    prefill, client, prompt_ids, priority=priority, cache_salt=cache_salt
                )
        except EngineError as error:
            LOG.warning("prefill failed, replica %d computes the prompt: %s", client.index, error)
        if not client.is_ready:
            return self.choose(prompt_ids, cache_salt)
        return client

    @contextmanager
    def _count_as_started(self, client: EngineHandle, count: int) -> Iterator[None]:
        self.starting[client.index] += count
        try:
            yield
        finally:
            self.starting[client.index] -= count

    async def generate(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> TokenStream:
        """Start a generation on the replica that suits the prompt."""
        client = await self.prepare(prompt_ids, priority=priority, cache_salt=cache_salt)
        return client.generate(prompt_ids, params, priority=priority, cache_salt=cache_salt)
