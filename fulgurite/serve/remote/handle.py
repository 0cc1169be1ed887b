"""`EngineHandle`: what a router needs of an engine, wherever it runs.

`EngineClient` implements it for a process or thread of this machine, `RayEngineClient`
(serve/ray_serve.py) for an actor on another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fulgurite.serve.engine.prefix_chunk import CHUNK_BYTES, PrefixBlocks
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.remote.client import TokenStream
from fulgurite.serve.remote.messages import EngineInfo, Progress


class EngineHandle(Protocol):
    """An engine. `index` is its number among the replicas; `restarts` how often it lost its cache."""

    index: int
    info: EngineInfo | None
    progress: Progress
    restarts: int
    is_ready: bool

    @property
    def num_requests(self) -> int: ...

    @property
    def state(self) -> str: ...

    def generate(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> TokenStream: ...

    async def embed(self, prompts: list[list[int]]) -> list[bytes]: ...

    async def export_prefix(
        self,
        prompt_ids: list[int],
        cache_salt: str = "",
        *,
        hashes: Sequence[bytes] = (),
        start: int = 0,
        max_bytes: int = CHUNK_BYTES,
    ) -> PrefixBlocks: ...

    async def import_prefix(self, blocks: PrefixBlocks) -> int: ...
