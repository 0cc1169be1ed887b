"""A server with a tiny real model, for tests whose answers depend on sampling, grammars or the cache.

Its tokens are bytes: 256 of them, `<s>` and `</s>`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fulgurite.serve.http.config import ServerConfig
from tests.serve.http.serving import MODEL, RunningServer, serve
from tests.serve.tiny_checkpoint import save_checkpoint

LONGER = {"max_position_embeddings": 1024}
ENGINE = {"device": "cpu", "max_sequences": 8, "context": 1024, "cache_tokens": 4096}


def tiny_config(folder: Path, engine: dict[str, Any] | None = None, **fields: Any) -> ServerConfig:
    """A config with a tiny model that is saved in `folder`; the engine runs in a thread."""
    if not (folder / "config.json").exists():
        save_checkpoint(folder)
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **LONGER}))
    fields = {"served_names": (MODEL,), "engine_in": "thread", "threads": 1, **fields}
    return ServerConfig(model=str(folder), engine={**ENGINE, **(engine or {})}, **fields)


@contextmanager
def serve_tiny(
    folder: Path, engine: dict[str, Any] | None = None, **fields: Any
) -> Iterator[RunningServer]:
    """Run it until the block ends; nothing may be left behind."""
    with serve(tiny_config(folder, engine, **fields)) as running:
        yield running
        assert running.leaks() == {}
