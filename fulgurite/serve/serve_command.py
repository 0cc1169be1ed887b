"""`fulgurite serve`: command-line options and a TOML file in, a `ServerConfig` out; http/run.py runs it."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from typing import Any

from fulgurite.config import read_env
from fulgurite.errors import ArgumentError
from fulgurite.option_values import (
    DEFAULT_TIMEOUT,
    FAILURE_MODES,
    KV_CACHE_DTYPE_NAMES,
    SERVED_MIXED_TOKENS,
)
from fulgurite.serve.expert_options import add_expert_arguments, given_expert_options
from fulgurite.serve.http.config import (
    ENGINE_PLACES,
    ROUTING,
    SAMPLING_DEFAULTS,
    ServerConfig,
    load_config,
)

SERVER_PACKAGES = ("starlette", "uvicorn", "uvloop", "httptools", "msgspec", "prometheus_client")


def add_options(command: argparse.ArgumentParser) -> None:
    """Options without a default: those that are not given come from the file, or are defaults there."""
    server = command.add_argument_group("server")
    server.add_argument("--config", metavar="FILE", help="TOML file with these settings")
    server.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    server.add_argument("--port", type=int, help="port to listen on (default 8000; 0: a free one)")
    server.add_argument(
        "--api-key",
        action="append",
        dest="api_keys",
        metavar="KEY",
        help="may be repeated (default: FULGURITE_API_KEY)",
    )
    server.add_argument(
        "--max-waiting", type=int, metavar="N", help="requests that may wait (default 256)"
    )
    server.add_argument(
        "--deadline", type=float, metavar="S", help="seconds that a request may take"
    )
    server.add_argument(
        "--stall-timeout",
        type=float,
        metavar="S",
        help="end and start an engine whose step takes longer (default 300; 0: never)",
    )
    server.add_argument(
        "--drain-seconds",
        type=float,
        metavar="S",
        help="for running requests at the end (default 30)",
    )
    server.add_argument(
        "--allow-origin", action="append", dest="allow_origins", metavar="URL", help="for CORS"
    )
    server.add_argument(
        "--access-log", action="store_true", default=None, help="JSON lines on stdout"
    )
    model = command.add_argument_group("model")
    model.add_argument(
        "--model", metavar="NAME", help="folder, file, smollm2 (default) or hub name"
    )
    model.add_argument("--served-model-name", action="append", dest="served_names", metavar="NAME")
    model.add_argument("--chat-template", metavar="FILE", help="replaces the model's")
    model.add_argument(
        "--allow-request-template", action="store_true", default=None, help="in request bodies"
    )
    model.add_argument("--tool-call-parser", metavar="NAME", help="format of tool calls (auto)")
    model.add_argument("--reasoning-parser", metavar="NAME", help="format of reasoning (auto)")
    model.add_argument(
        "--sampling-defaults",
        choices=SAMPLING_DEFAULTS,
        help="of requests that don't say: the model's (default), or OpenAI's",
    )
    model.add_argument("--mock", action="store_true", default=None, help="made-up tokens, no model")
    _add_engine_options(command.add_argument_group("engine"))


def _add_engine_options(engine: argparse._ArgumentGroup) -> None:
    engine.add_argument("--device", help="cpu or cuda (default: cuda if there is a GPU)")
    engine.add_argument("--threads", type=int, metavar="N", help="CPU threads of each engine")
    engine.add_argument("--context", type=int, metavar="N", help="tokens of prompt and reply")
    engine.add_argument("--kv-dtype", choices=["auto", *KV_CACHE_DTYPE_NAMES])
    engine.add_argument("--quantize", metavar="FORMAT", help="quantize a dense model: fp8, q8_0, …")
    engine.add_argument("--max-sequences", type=int, metavar="N", help="requests that run at once")
    engine.add_argument("--max-batched-tokens", type=int, metavar="N", help="tokens of a step")
    engine.add_argument(
        "--max-mixed-tokens",
        type=int,
        metavar="N",
        help=f"tokens of a step while replies are written (default: {SERVED_MIXED_TOKENS['cpu']} on a CPU)",
    )
    engine.add_argument("--cache-tokens", type=int, metavar="N", help="tokens of the KV cache")
    for name, text in (
        ("tensor", "ranks over which weights are sharded"),
        ("expert", "ranks over which experts are distributed"),
        ("pipeline", "ranks over which layers are distributed: pipeline stages"),
        (
            "context-parallel",
            "ranks over which the tokens and KV cache of a prompt are distributed",
        ),
        ("data", "replicas of the model"),
    ):
        engine.add_argument(f"--{name}", type=int, metavar="N", help=text)
    add_expert_arguments(engine)
    engine.add_argument(
        "--on-rank-failure",
        choices=FAILURE_MODES,
        help="requests that run when a rank is lost: fail (default), or retry on new ranks",
    )
    engine.add_argument(
        "--max-restarts", type=int, metavar="N", help="of lost ranks in ten minutes (default 3)"
    )
    engine.add_argument(
        "--rank-timeout",
        type=float,
        dest="timeout",
        metavar="S",
        help=f"seconds that ranks wait for each other (default {DEFAULT_TIMEOUT:g})",
    )
    engine.add_argument("--routing", choices=ROUTING, help="which replica runs a request (prefix)")
    engine.add_argument(
        "--prefill-replicas", type=int, metavar="N", help="replicas that compute prompts only"
    )
    engine.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="run replicas as actors of a Ray cluster (default: this machine's)",
    )
    engine.add_argument("--engine-in", choices=ENGINE_PLACES, help="process (default) or thread")


ENGINE_FIELDS = (
    "device", "context", "kv_dtype", "quantize", "max_sequences", "max_batched_tokens",
    "max_mixed_tokens", "cache_tokens", "tensor", "expert", "pipeline", "context_parallel",
    "on_rank_failure", "max_restarts", "timeout",
)  # fmt: skip
SERVER_FIELDS = (
    "host", "port", "api_keys", "max_waiting", "deadline", "stall_timeout", "drain_seconds",
    "allow_origins", "access_log", "model", "served_names", "chat_template",
    "allow_request_template", "tool_call_parser", "reasoning_parser", "sampling_defaults", "mock",
    "threads", "routing", "prefill_replicas", "engine_in",
)  # fmt: skip


def read_config(options: argparse.Namespace) -> ServerConfig:
    """The config of the file with the options that were given."""
    given: dict[str, Any] = {
        name: value for name in SERVER_FIELDS if (value := getattr(options, name)) is not None
    }
    keys = read_env("FULGURITE_API_KEY")
    if keys is not None:
        given.setdefault("api_keys", [key.strip() for key in keys.split(",")])
    engine = {
        name: value for name in ENGINE_FIELDS if (value := getattr(options, name)) is not None
    }
    engine |= given_expert_options(options)
    if options.data is not None:
        if (options.expert or 1) > 1:
            engine["data"] = options.data  # replicas that share experts run in step
        else:
            given["replicas"] = options.data
    return load_config(
        options.config, {**given, "engine": engine, "status_line": sys.stderr.isatty()}
    )


def serve(options: argparse.Namespace) -> None:
    """Run the server until a signal ends it."""
    check_packages()
    config = read_config(options)
    if options.ray is not None:
        serve_on_ray(config, options.ray or None)
        return
    from fulgurite.serve.http.engines import launch_engines

    with launch_engines(config) as launched:
        from fulgurite.serve.http.run import run_server  # while the engines load

        run_server(config, launched)


def check_packages() -> None:
    """ArgumentError if a package of the extra `serve` is missing."""
    missing = [name for name in SERVER_PACKAGES if not is_installed(name)]
    if missing:
        plural = "s" if len(missing) > 1 else ""
        raise ArgumentError(
            f"fulgurite serve needs the package{plural} {', '.join(missing)}",
            next="pip install 'fulgurite[serve]'",
        )


def is_installed(package: str) -> bool:
    """Whether it can be imported; without importing it."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # an import hook refuses it
        return False


def serve_on_ray(config: ServerConfig, address: str | None) -> None:
    try:
        from fulgurite.serve.ray_serve import run_on_ray
    except ModuleNotFoundError as error:
        raise ArgumentError(
            f"--ray needs the package {error.name}", next="pip install 'fulgurite[serve,ray]'"
        ) from error
    run_on_ray(config, address)
