"""What travels between a server and an engine: msgspec Structs, encoded as msgpack.

To the engine: `LoadModel` once, then `Command`s. From it: `Ready` or `LoadFailed` once, then `Report`s.
Nothing here can run code when it is decoded: no pickle, plain data only.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from fulgurite.serve.engine.prefix_chunk import CHUNK_BYTES, PrefixBlocks
from fulgurite.serve.engine.request import RequestOptions, SamplingParams


class LoadModel(msgspec.Struct, frozen=True, tag="load"):
    """The model to serve. `options` are fields of `LLMConfig`; `mock`: no model, made-up tokens.

    `faults`: accept `InjectFault` (tests only).
    """

    name: str
    options: dict[str, Any] = {}
    threads: int | None = None
    mock: dict[str, Any] | None = None
    faults: bool = False


class EngineInfo(msgspec.Struct, frozen=True):
    """What a server must know about a loaded engine."""

    model_type: str
    context: int
    vocab_size: int
    max_sequences: int
    cache_tokens: int
    block_size: int
    device: str
    plan: str  # the memory plan as a table
    planned_bytes: int
    available_bytes: int
    weights: str  # number formats
    start_seconds: dict[str, float]  # of its start, by part: imports, weights, warm-up
    prefix_caching: bool
    can_embed: bool


# ---- to the engine ------------------------------------------------------------------------------


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    """One generation. `params` are the fields of `SamplingParams` that differ from their defaults."""

    id: int
    prompt_ids: list[int]
    params: dict[str, Any]
    priority: int = 0
    cache_salt: str = ""

    def read_params(self) -> SamplingParams:
        return SamplingParams(**self.params)

    def read_options(self) -> RequestOptions:
        return RequestOptions(self.priority, self.cache_salt, detokenize=False)


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    ids: list[int]


class Embed(msgspec.Struct, frozen=True, tag="embed"):
    id: int
    prompts: list[list[int]]


class ExportPrefix(msgspec.Struct, frozen=True, tag="export"):
    """Ask for a chunk of the KV-cache blocks of a prompt's prefix; see `export_prefix`."""

    id: int
    prompt_ids: list[int]
    cache_salt: str = ""
    hashes: list[bytes] = []
    start: int = 0
    max_bytes: int = CHUNK_BYTES


class ImportPrefix(msgspec.Struct, frozen=True, tag="import"):
    """Put a chunk of another engine's KV-cache blocks into the prefix cache."""

    id: int
    blocks: PrefixBlocks


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset"):
    pass


class Audit(msgspec.Struct, frozen=True, tag="audit"):
    id: int


class InjectFault(msgspec.Struct, frozen=True, tag="fault"):
    """Tests: `raise` in the next step, `hang` for some seconds, `exit` at once, `oom` in the next step."""

    kind: str
    seconds: float = 0.0


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    pass


# ---- from the engine ----------------------------------------------------------------------------


class Finish(msgspec.Struct, frozen=True, array_like=True):
    """How a generation ended; see `Result`. `queue_seconds` is the time before its first step."""

    reason: str
    stopped_by: int | str | None
    error: str | None
    cached_tokens: int
    queue_seconds: float
    first_token_seconds: float
    seconds: float
    restarts: int = 0
    cause: str = ""  # of the error, see ERROR_CAUSES of engine/request.py


class TokenUpdate(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one generation. `logprobs`: (token, logprob, ((token, logprob), ...)) of each.

    `prompt_logprobs`: the same with ranks, of all tokens of the prompt after the first; in one update.
    """

    id: int
    token_ids: list[int]
    logprobs: list[tuple[int, float, list[tuple[int, float]]]] | None = None
    finish: Finish | None = None
    prompt_logprobs: list[tuple[int, float, int, list[tuple[int, float]]]] | None = None


class Progress(msgspec.Struct, frozen=True):
    """The engine's counters, with every report. Counts are totals since it was loaded.

    step_seconds    durations of the steps since the last report
    step_tokens     tokens of these steps
    mask_seconds    times that steps waited for grammar masks since the last report
    audit           leaks by kind; of the last audit
    rank_restarts   how often all ranks of the engine were restarted
    restarting      why they are being restarted now; empty: they are not
    """

    steps: int = 0
    running: int = 0
    waiting: int = 0
    used_blocks: int = 0
    total_blocks: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    forced_tokens: int = 0
    failed_steps: int = 0
    step_seconds: list[float] = []
    step_tokens: list[int] = []
    mask_seconds: list[float] = []
    audit: dict[str, int] = {}
    rank_restarts: int = 0
    restarting: str = ""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    info: EngineInfo


class LoadFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The model can't be loaded."""

    message: str


class Report(msgspec.Struct, frozen=True, tag="report"):
    """All updates since the last report, and the counters. Also sent as a heartbeat."""

    updates: list[TokenUpdate]
    progress: Progress


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """A command failed; for `Generate`, `Embed` and others with an id."""

    id: int
    message: str


class Embeddings(msgspec.Struct, frozen=True, tag="embeddings"):
    """Rows of float32 values, little-endian."""

    id: int
    rows: list[bytes]


class Exported(msgspec.Struct, frozen=True, tag="exported"):
    id: int
    blocks: PrefixBlocks


class Done(msgspec.Struct, frozen=True, tag="done"):
    """A command with an id is done. `values`: what it returned."""

    id: int
    values: dict[str, int] = {}


Command = (
    Generate
    | Cancel
    | Embed
    | ExportPrefix
    | ImportPrefix
    | ResetPrefixCache
    | Audit
    | InjectFault
    | Shutdown
)
Message = Ready | LoadFailed | Report | Rejected | Embeddings | Exported | Done

DEFAULT_PARAMS = {
    field.name: getattr(SamplingParams(), field.name)
    for field in dataclasses.fields(SamplingParams)
}


def encode_params(params: SamplingParams) -> dict[str, Any]:
    """The fields that differ from their defaults, without stop strings: the server looks for these."""
    return {
        name: value
        for name, default in DEFAULT_PARAMS.items()
        if name != "stop" and (value := getattr(params, name)) != default
    }
