"""A model of replicas with prefix caches, to compare routing policies; deterministic.

    python -m tests.serve.http.routing_simulation

Each replica runs steps like an engine: up to `STEP_TOKENS` tokens of prompts, and one token for each
running request. It has an LRU cache of prompt blocks. The times are assumed, not measured: 20,000 tokens
of prompt a second, and 8 ms a decode step. The router is the real one. Its `REQUEST_COST` was chosen on
these workloads.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fulgurite.serve.engine.replica_choice import BLOCK_TOKENS, hash_prefixes
from fulgurite.serve.http.router import Router
from fulgurite.serve.remote.messages import EngineInfo, Progress

STEP_TOKENS = 2048
STEP_SECONDS = 0.008
SECONDS_PER_PROMPT_TOKEN = 5e-5
SECONDS_PER_SEQUENCE = 5e-5
MAX_SEQUENCES = 64


def make_info(cache_tokens: int, **changed: Any) -> EngineInfo:
    fields: dict[str, Any] = dict(
        model_type="simulated", context=1 << 17, vocab_size=1 << 16, max_sequences=MAX_SEQUENCES,
        cache_tokens=cache_tokens, block_size=16, device="none", plan="", planned_bytes=0,
        available_bytes=0, weights="", start_seconds={}, prefix_caching=True, can_embed=False,
    )  # fmt: skip
    return EngineInfo(**{**fields, **changed})


@dataclass
class SimulatedRequest:
    prompt_ids: list[int]
    reply_tokens: int
    keys: list[bytes] = field(default_factory=list)
    arrival: float = 0.0
    first_token: float = 0.0
    missing: int = 0  # prompt tokens that are still to be computed
    left: int = 0  # tokens of the reply


class SimulatedReplica:
    """An `EngineHandle` for the router, with a clock of its own."""

    def __init__(self, index: int, cache_tokens: int) -> None:
        self.index, self.restarts, self.is_ready, self.state = index, 0, True, "idle"
        self.info = make_info(cache_tokens)
        self.limit = cache_tokens // BLOCK_TOKENS
        self.cache: OrderedDict[object, None] = OrderedDict()
        self.reply_keys = itertools.count()
        self.waiting: deque[SimulatedRequest] = deque()
        self.running: list[SimulatedRequest] = []
        self.progress = Progress()
        self.computed_tokens = self.generated_tokens = 0
        self.busy_seconds = 0.0

    @property
    def num_requests(self) -> int:
        return len(self.waiting) + len(self.running)

    def touch(self, keys: Sequence[object]) -> None:
        for key in reversed(keys):
            self.cache[key] = None
            self.cache.move_to_end(key)
        while len(self.cache) > self.limit:
            self.cache.popitem(last=False)

    def admit(self) -> None:
        while self.waiting and len(self.running) < MAX_SEQUENCES:
            request = self.waiting.popleft()
            matched = sum(1 for _ in itertools.takewhile(self.cache.__contains__, request.keys))
            self.touch(request.keys[:matched])
            request.missing = len(request.prompt_ids) - min(
                matched * BLOCK_TOKENS, len(request.prompt_ids) - 1
            )
            request.left = request.reply_tokens
            self.running.append(request)

    def step(self, now: float) -> tuple[float, list[SimulatedRequest]]:
        """Run a step from `now` on: when it ends, and the requests that it finishes."""
        self.admit()
        decoding = [request for request in self.running if not request.missing]
        budget = STEP_TOKENS - len(decoding)
        computed, started = 0, []
        for request in self.running:
            if request.missing and budget:
                count = min(request.missing, budget)
                request.missing -= count
                budget -= count
                computed += count
                if not request.missing:
                    started.append(request)
        sequences = len(decoding) + len(started)
        seconds = STEP_SECONDS + computed * SECONDS_PER_PROMPT_TOKEN
        end = now + seconds + sequences * SECONDS_PER_SEQUENCE
        for request in started:
            request.first_token = end
            self.touch(request.keys)
        for request in (*decoding, *started):
            request.left -= 1
        finished = [one for one in self.running if not one.missing and one.left <= 0]
        self.running = [one for one in self.running if one.missing or one.left > 0]
        for request in finished:
            self.touch([next(self.reply_keys) for _ in range(request.reply_tokens // BLOCK_TOKENS)])
            self.touch(request.keys)
        self.computed_tokens += computed
        self.generated_tokens += sequences
        self.progress = Progress(generated_tokens=self.generated_tokens)
        self.busy_seconds += end - now
        return end, finished


@dataclass(frozen=True)
class Outcome:
    """What a policy did. `imbalance`: the busiest replica's time over the average."""

    computed_tokens: int
    seconds: float
    imbalance: float
    first_token_seconds: float


def simulate(
    requests: Iterator[SimulatedRequest],
    routing: str,
    replicas: int,
    cache_tokens: int,
    clients: int,
) -> Outcome:
    """Run all requests; `clients` of them at a time, the next one when one ends."""
    engines = [SimulatedReplica(index, cache_tokens) for index in range(replicas)]
    router = Router(engines, routing)  # type: ignore[arg-type]
    events: list[tuple[float, int]] = []
    is_stepping = [False] * replicas
    done: list[SimulatedRequest] = []

    def start(now: float) -> None:
        request = next(requests, None)
        if request is None:
            return
        request.keys, request.arrival = hash_prefixes(request.prompt_ids), now
        index = router.choose(request.prompt_ids).index
        engines[index].waiting.append(request)
        if not is_stepping[index]:
            is_stepping[index] = True
            heapq.heappush(events, (now, index))

    for number in range(clients):
        start(number * 1e-4)
    now = 0.0
    while events:
        now, index = heapq.heappop(events)
        end, finished = engines[index].step(now)
        for request in finished:
            done.append(request)
            start(end)
        is_stepping[index] = engines[index].num_requests > 0
        if is_stepping[index]:
            heapq.heappush(events, (end, index))
        now = end
    busy = [engine.busy_seconds for engine in engines]
    return Outcome(
        sum(engine.computed_tokens for engine in engines),
        now,
        max(busy) / (sum(busy) / replicas),
        sum(request.first_token - request.arrival for request in done) / len(done),
    )


def shared_prefixes(
    count: int, groups: int, prefix: int, suffix: int = 128, reply: int = 64, zipf: float = 0.0
) -> Iterator[SimulatedRequest]:
    """Requests with one of `groups` prefixes; `zipf`: how much more popular the first ones are."""
    generator = random.Random(0)
    prefixes = [generator.choices(range(1 << 15), k=prefix) for _ in range(groups)]
    weights = [(rank + 1) ** -zipf for rank in range(groups)]
    for _ in range(count):
        (chosen,) = generator.choices(prefixes, weights)
        prompt = chosen + generator.choices(range(1 << 15), k=suffix)
        yield SimulatedRequest(prompt, generator.randint(reply // 2, reply * 3 // 2))


def unique_prompts(count: int, tokens: int = 1024, reply: int = 64) -> Iterator[SimulatedRequest]:
    generator = random.Random(1)
    for _ in range(count):
        prompt = generator.choices(
            range(1 << 15), k=generator.randint(tokens // 2, tokens * 3 // 2)
        )
        yield SimulatedRequest(prompt, generator.randint(reply // 2, reply * 3 // 2))


def conversations(count: int, users: int, turn: int = 256) -> Iterator[SimulatedRequest]:
    """Users take turns at random; each prompt is the history with one more turn."""
    generator = random.Random(2)
    system = generator.choices(range(1 << 15), k=512)
    histories = [list(system) for _ in range(users)]
    for _ in range(count):
        history = generator.choice(histories)
        history += generator.choices(range(1 << 15), k=turn)
        yield SimulatedRequest(list(history), 64)
        if len(history) > 6000:
            history[:] = system


WORKLOADS: dict[str, tuple[Callable[[int, int], Iterator[SimulatedRequest]], int]] = {
    # name: (requests by number of requests and replicas, cache tokens of a replica)
    "shared, small caches": (lambda n, r: shared_prefixes(n, 12 * r, 4096), 80_000),
    "shared, some popular": (lambda n, r: shared_prefixes(n, 12 * r, 4096, zipf=1.0), 80_000),
    "shared, large caches": (lambda n, r: shared_prefixes(n, 16, 2048), 160_000),
    "one hot prefix": (lambda n, r: shared_prefixes(n, 1, 4096), 80_000),
    "conversations": (lambda n, r: conversations(n, 40 * r), 160_000),
    "unique prompts": (lambda n, r: unique_prompts(n), 80_000),
}


def main() -> None:
    policies = ("prefix", "least-loaded", "round-robin")
    for name, (make, cache_tokens) in WORKLOADS.items():
        for replicas in (2, 4, 8):
            count = 200 * replicas
            outcomes = [
                simulate(make(count, replicas), policy, replicas, cache_tokens, 24 * replicas)
                for policy in policies
            ]
            texts = [
                f"{one.computed_tokens / 1e3:6.0f} k, {count / one.seconds:6.1f}/s, "
                f"{one.imbalance:.2f}, {1e3 * one.first_token_seconds:5.0f} ms"
                for one in outcomes
            ]
            print(f"{name:21} {replicas}  " + "  |  ".join(texts))


if __name__ == "__main__":
    main()
