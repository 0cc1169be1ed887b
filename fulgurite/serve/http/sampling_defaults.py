"""The sampling that a model's authors recommend: a checkpoint in, defaults of requests out.

They are fields of generation_config.json. A request's own fields override them.
"""

from __future__ import annotations

import json
from pathlib import Path

from fulgurite.errors import ArgumentError
from fulgurite.serve.engine.request import SamplingParams

FILE = "generation_config.json"
FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_sampling_defaults(path: Path) -> dict[str, float]:
    """The fields that the checkpoint has; ArgumentError if they can't be used."""
    file = (path.parent if path.is_file() else path) / FILE
    if not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError):
        return {}  # loading the tokenizer says what is wrong
    given = values if isinstance(values, dict) else {}
    defaults = {name: given[name] for name in FIELDS if given.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except ArgumentError as error:
        raise ArgumentError(
            f"{FILE}: {error.what}",
            where=str(file),
            next='correct the file, or set sampling_defaults = "openai"',
        ) from error
    return defaults
