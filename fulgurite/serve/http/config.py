"""The server's settings: a TOML file and command-line options in, a `ServerConfig` out.

Every field can be set in the file under its own name; `[engine]` holds fields of `LLMConfig`. Options of
the command line override the file.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_origin, get_type_hints

from fulgurite.errors import ArgumentError
from fulgurite.option_values import HEARTBEAT_SECONDS
from fulgurite.serve.llm_config import LLMConfig

ROUTING = ("prefix", "round-robin", "least-loaded")
ENGINE_PLACES = ("process", "thread")
SAMPLING_DEFAULTS = ("model", "openai")
# Types of `LLMConfig` that a file names by text; this module imports no torch.
TORCH_NAMES = SimpleNamespace(dtype=str, device=str)
MIN_STALL_SECONDS = 2 * HEARTBEAT_SECONDS


@dataclass(frozen=True)
class Limits:
    """What a request may ask for. More is refused before it costs anything.

    Attributes:
        body_bytes: size of a request body.
        header_bytes: size of all request headers.
        json_depth: nesting of a body.
        choices: `n`.
        stops: number of stop strings.
        stop_characters: length of a stop string.
        logprobs: `top_logprobs`.
        batch: prompts of one completion, or inputs of one embedding request.
        tools: number of tools.
        pending_bytes: bodies of all requests that wait or run.
        read_seconds: from the first byte of a request to its last.
        write_seconds: a client that reads nothing for so long is disconnected.
        stored_responses: finished responses that `GET /v1/responses/ID` can still read.
    """

    body_bytes: int = 4 << 20
    header_bytes: int = 32 << 10
    json_depth: int = 64
    choices: int = 128
    stops: int = 16
    stop_characters: int = 256
    logprobs: int = 20
    batch: int = 256
    tools: int = 128
    pending_bytes: int = 512 << 20
    read_seconds: float = 60.0
    write_seconds: float = 60.0
    stored_responses: int = 1024

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (0 < value < math.inf):
                raise ArgumentError(f"{name}={value} must be more than 0", where="[limits]")


@dataclass(frozen=True)
class ServerConfig:
    """All settings of `fulgurite serve`.

    Attributes:
        model: folder, file, `smollm2`, or a name on the hub.
        served_names: names of the model in requests. Empty: the last part of `model`.
        host: address to listen on.
        port: port to listen on; 0: a free one.
        api_keys: keys of which each request needs one. Empty: no key is needed.
        max_waiting: requests that may wait; further ones get status 429.
        replicas: engines with the whole model; each is a process.
        routing: which replica runs a request: `prefix`, `round-robin` or `least-loaded`.
        prefill_replicas: of the replicas, those that only compute prompts for the others.
        engine_in: `process` or `thread`: where engines run.
        deadline: seconds that a request may take if it does not say. None: no limit.
        stall_seconds: an engine that reports nothing for so long is stalled.
        stall_timeout: one that reports nothing for so long is ended and started again; 0: never.
        drain_seconds: that running requests have to finish after SIGTERM or ctrl-C.
        threads: CPU threads of each engine. None: cores divided by replicas.
        max_tokens: of a reply, if the request does not say. None: up to the context.
        sampling_defaults: of requests that don't say: `model`: those of its generation_config.json;
            `openai`: temperature 1 and nothing else.
        tool_call_parser: format of tool calls; `auto`: from the chat template.
        reasoning_parser: format of reasoning; `auto`: from the chat template.
        chat_template: file with a chat template that replaces the model's.
        allow_request_template: accept `chat_template` in requests. It runs sandboxed.
        allow_origins: origins of web pages that may call the server (CORS).
        access_log: print one JSON line a request.
        status_line: print one line a second while requests run.
        mock: serve made-up tokens without a model.
        faults: accept injected faults (tests).
        engine: fields of `LLMConfig`.
        mock_options: options of the mock engine.
    """

    model: str = "smollm2"
    served_names: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    max_waiting: int = 256
    replicas: int = 1
    routing: str = "prefix"
    prefill_replicas: int = 0
    engine_in: str = "process"
    deadline: float | None = None
    stall_seconds: float = 60.0
    stall_timeout: float = 300.0
    drain_seconds: float = 30.0
    threads: int | None = None
    max_tokens: int | None = None
    sampling_defaults: str = "model"
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    chat_template: str | None = None
    allow_request_template: bool = False
    allow_origins: tuple[str, ...] = ()
    access_log: bool = False
    status_line: bool = False
    mock: bool = False
    faults: bool = False
    engine: Mapping[str, Any] = field(default_factory=dict)
    mock_options: Mapping[str, Any] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        _check_choice("routing", self.routing, ROUTING)
        _check_choice("engine_in", self.engine_in, ENGINE_PLACES)
        _check_choice("sampling_defaults", self.sampling_defaults, SAMPLING_DEFAULTS)
        if not 0 <= self.port <= 65535:
            raise ArgumentError(f"port={self.port} must be 0 to 65535")
        if self.replicas < 1:
            raise ArgumentError(f"replicas={self.replicas} must be 1 or more")
        if not 0 <= self.prefill_replicas < self.replicas:
            raise ArgumentError(
                f"prefill_replicas={self.prefill_replicas} of replicas={self.replicas}",
                next="leave at least one replica for decode",
            )
        if self.max_waiting < 0:
            raise ArgumentError(f"max_waiting={self.max_waiting} must be 0 or more")
        for name in ("deadline", "threads", "max_tokens"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ArgumentError(f"{name}={value} must be more than 0", next="or leave it out")
        if not 0 <= self.drain_seconds < math.inf:
            raise ArgumentError(f"drain_seconds={self.drain_seconds} must be 0 or more")
        if not MIN_STALL_SECONDS <= self.stall_seconds < math.inf:
            raise ArgumentError(
                f"stall_seconds={self.stall_seconds} must be {MIN_STALL_SECONDS:g} or more: "
                f"an idle engine reports every {HEARTBEAT_SECONDS:g} s"
            )
        if self.stall_timeout and not MIN_STALL_SECONDS <= self.stall_timeout < math.inf:
            raise ArgumentError(
                f"stall_timeout={self.stall_timeout} must be 0 (never), or "
                f"{MIN_STALL_SECONDS:g} or more: an idle engine reports every {HEARTBEAT_SECONDS:g} s"
            )
        if any(not key for key in self.api_keys):
            raise ArgumentError(
                "an API key is empty", next="give --api-key some text, or leave it out"
            )
        _check_engine(self.engine)

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.served_names or (Path(self.model).name,)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ArgumentError(f"{name}={value!r} is not one of {', '.join(choices)}")


def _check_engine(values: Mapping[str, Any]) -> None:
    """ArgumentError for settings that `LLMConfig` does not have, and for wrong types."""
    hints = get_type_hints(LLMConfig, localns={"torch": TORCH_NAMES})
    for name, value in values.items():
        if name not in hints:
            raise ArgumentError(
                f"[engine] has no setting {name!r}", next=f"it has {', '.join(sorted(hints))}"
            )
        if not _has_type(value, hints[name]):
            raise ArgumentError(
                f"{name}={value!r} must be {_describe(hints[name])}", where="[engine]"
            )


def load_config(path: str | Path | None, options: Mapping[str, Any]) -> ServerConfig:
    """The config of a TOML file (None: the defaults), overridden by `options`."""
    values: dict[str, Any] = {} if path is None else _read_toml(Path(path))
    where = "the command line" if path is None else str(path)
    engine = values.pop("engine", {})
    if not isinstance(engine, Mapping):
        raise ArgumentError("[engine] must be a table", where=where)
    engine = {**engine, **options.get("engine", {})}
    limits = build_dataclass(Limits, values.pop("limits", {}), f"{where} [limits]")
    merged = {**values, **options, "engine": engine, "limits": limits}
    return build_dataclass(ServerConfig, merged, where)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ArgumentError(f"{path} can't be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path} is not TOML: {error}") from error


def build_dataclass(kind: type[Any], values: Mapping[str, Any], where: str) -> Any:
    """An instance with these fields; ArgumentError for unknown names and wrong types."""
    if not isinstance(values, Mapping):
        raise ArgumentError(f"{where} must be a table")
    hints = get_type_hints(kind)
    for name, value in values.items():
        if name not in hints:
            raise ArgumentError(
                f"there is no setting {name!r}", where=where, next=f"settings: {', '.join(hints)}"
            )
        if not _has_type(value, hints[name]):
            raise ArgumentError(f"{name}={value!r} must be {_describe(hints[name])}", where=where)
    fields = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return kind(**fields)


def _has_type(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin is tuple:
        return isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)
    if origin is Mapping or hint is Limits:
        return isinstance(value, Mapping | Limits)
    if origin is None:
        if hint is float:
            return isinstance(value, int | float) and not isinstance(value, bool)
        return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
    return any(_has_type(value, one) for one in get_args(hint))


def _describe(hint: Any) -> str:
    names = {str: "text", int: "an integer", float: "a number", bool: "true or false"}
    if get_origin(hint) is tuple:
        return "a list of strings"
    if get_origin(hint) is Mapping:
        return "a table"
    hidden = (type(None), Path)  # nothing, and another way to write text
    options = [one for one in get_args(hint) if one not in hidden] or [hint]
    return " or ".join(names.get(one, str(one)) for one in options)
