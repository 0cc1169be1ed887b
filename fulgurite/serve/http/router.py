"""The router: which replica runs a request. Token ids in, an `EngineHandle` out.

`prefix`: the replica where the request costs least (engine/replica_choice.py). `round-robin` and
`least-loaded` ignore prompts.

With prefill replicas a prompt is first computed by one of them (kv_transfer.py).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fulgurite.errors import ArgumentError
from fulgurite.logs import LOG
from fulgurite.serve.engine.replica_choice import BLOCK_TOKENS, ReplicaChooser, hash_prefixes
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.http.kv_transfer import transfer_blocks
from fulgurite.serve.remote.client import EngineError, TokenStream
from fulgurite.serve.remote.handle import EngineHandle
from fulgurite.serve.remote.messages import EngineInfo

MIN_TRANSFER_BLOCKS = 2  # shorter prompts are cheaper to compute than to hand over


class Router:
    """Replicas behind one `generate`. The first `prefill_replicas` of them only compute prompts."""

    def __init__(
        self, clients: Sequence[EngineHandle], routing: str = "prefix", prefill_replicas: int = 0
    ) -> None:
        self.clients = list(clients)
        self.routing = routing
        self.prefill_clients = self.clients[:prefill_replicas]
        self.decode_clients = self.clients[prefill_replicas:]
        self.chooser = ReplicaChooser()
        self.known_restarts = {client.index: 0 for client in self.clients}
        self.starting: Counter[int] = Counter()  # requests by replica that are handed over to it
        self.turn = itertools.count()
        self.handed_blocks = 0

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
        for client in ready:
            self._update_known(client)
        loads = {client.index: self._count_requests(client) for client in ready}
        chosen = self.chooser.choose(loads, keys)
        return next(client for client in ready if client.index == chosen)

    def _count_requests(self, client: EngineHandle) -> int:
        return client.num_requests + self.starting[client.index]

    def _update_known(self, client: EngineHandle) -> None:
        """Note the size of the replica's prefix cache; a restarted replica has nothing."""
        known = self.chooser.known[client.index]
        if client.info is not None:
            known.limit = max(client.info.cache_tokens // BLOCK_TOKENS, 1)
        if self.known_restarts[client.index] != client.restarts:
            self.known_restarts[client.index] = client.restarts
            known.clear()

    def _record(self, client: EngineHandle, keys: Sequence[bytes]) -> None:
        self._update_known(client)
        self.chooser.record(client.index, keys, self._expect_reply_blocks())

    def _expect_reply_blocks(self) -> int:
        """The average reply so far, in blocks."""
        generated = sum(client.progress.generated_tokens for client in self.decode_clients)
        return round(generated / (self.chooser.num_requests + 1) / BLOCK_TOKENS)

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
