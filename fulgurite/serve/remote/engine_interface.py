"""`ServedEngine`: what an `EngineLoop` drives. Imports no torch.

served_engine.py has the real one, mock.py one without a model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fulgurite.serve.remote.messages import (
    EngineInfo,
    ExportPrefix,
    Generate,
    PrefixBlocks,
    Progress,
    TokenUpdate,
)

Listener = Callable[[TokenUpdate], None]
RestartListener = Callable[[str], None]
WireLogprobs = list[tuple[int, float, list[tuple[int, float]]]]
WirePromptLogprobs = list[tuple[int, float, int, list[tuple[int, float]]]]


class ServedEngine(Protocol):
    """An engine that a loop can drive. Methods raise ArgumentError for requests that can't run."""

    info: EngineInfo

    @property
    def has_unfinished_requests(self) -> bool: ...

    @property
    def can_continue(self) -> bool:
        """Whether other requests can run after a step has failed."""
        ...

    def add(self, request: Generate, listener: Listener) -> None: ...

    def cancel(self, id: int) -> None: ...

    def step(self) -> None: ...

    def fail_step(self, reason: str) -> None: ...

    def watch_ranks(self, listener: RestartListener) -> None:
        """Call this with the reason before ranks are restarted, and with "" afterwards."""
        ...

    def check_ranks(self) -> None:
        """Restart ranks that were lost while nothing ran."""
        ...

    def prepare_step(self) -> bool:
        """While nothing runs: prepare for later steps, for a moment. False: nothing is left to do."""
        ...

    def embed(self, prompts: list[list[int]]) -> list[bytes]: ...

    def export_prefix(self, request: ExportPrefix) -> PrefixBlocks: ...

    def import_prefix(self, blocks: PrefixBlocks) -> int: ...

    def reset_prefix_cache(self) -> None: ...

    def audit(self) -> dict[str, int]: ...

    def read_progress(self) -> Progress:
        """Counters, and the steps since the last call."""
        ...

    def close(self) -> None: ...
