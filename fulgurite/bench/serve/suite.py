"""Suite `serve`: requests per second, tokens per second and latencies of a server under load.

    fulgurite bench serve                   starts `fulgurite serve` and measures it
    fulgurite bench serve --url URL         measures any OpenAI-compatible server
    fulgurite bench serve --mock            without a model: what the server itself costs
    fulgurite bench serve --engine-only     and the same requests on an `LLM`, without a server
    fulgurite bench serve --llama-cpp       and llama.cpp's server on the same file and threads
    fulgurite bench serve --idle-streams N  memory of a server that holds N streams, without a model
    fulgurite bench serve --routing         replicas: prefix-aware routing against round robin

Candidates of one run take turns. Each repeat starts fresh processes. Rows are medians of the repeats.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from fulgurite.bench import results
from fulgurite.bench.serve import idle
from fulgurite.bench.serve.candidates import (
    Candidate,
    HttpOptions,
    LlamaServer,
    Load,
    make_job,
    open_engine,
    open_server,
    serve_fulgurite,
)
from fulgurite.bench.serve.http_client import Address, Expected, check_packages
from fulgurite.bench.serve.processes import Server, exit_on_terminate, find_llama_server
from fulgurite.bench.serve.summary import Row, parse_goodput, summarize, take_medians
from fulgurite.bench.serve.tables import format_tables
from fulgurite.bench.serve.workloads import MAKERS, Lengths, Workload
from fulgurite.errors import ArgumentError
from fulgurite.models.loading import hub
from fulgurite.plan.limits import MAX_SEQUENCES

MODEL = "smollm2"
CLIENTS, QUICK_CLIENTS = "1,8,64,256", "1,8"
REPEATS = 3
SETTLE_SECONDS = 4.0  # servers are idle before a load comes
# Of a mode: the workload, tokens of a prompt, tokens of a reply, requests a client.
DEFAULTS: dict[str, tuple[str, str, str, int]] = {
    "serve": ("random", "128", "64", 2),
    "mock": ("random", "32", "512", 16),
    "routing": ("shared-prefix", "32", "16", 24),
}
MIN_REQUESTS = 16
GROUPS, ROUTING_GROUPS = 8, 24
# Two replicas hold all prefixes if each is on one of them, and some room is left.
CACHE_SHARE = 0.6

Found = dict[tuple[str, str], list[Row]]  # (load, candidate) → a row a repeat


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="NAME", help=f"name, folder or file (default: {MODEL})")
    parser.add_argument("--url", help="measure this server (default: start fulgurite serve)")
    parser.add_argument("--api-key", metavar="KEY", help="sent to the server of --url")
    parser.add_argument("--mock", action="store_true", help="an engine without a model")
    parser.add_argument(
        "--idle-streams", type=int, metavar="N", help="memory of the server with N open streams"
    )
    parser.add_argument("--engine-only", action="store_true", help="compare with an LLM alone")
    parser.add_argument(
        "--llama-cpp",
        nargs="?",
        const="",
        metavar="PATH",
        help="compare with llama-server (default: LLAMA_SERVER, or on the PATH)",
    )
    parser.add_argument("--routing", action="store_true", help="compare routings of replicas")
    parser.add_argument(
        "--replicas", type=int, default=2, metavar="N", help="of --routing (default: 2)"
    )
    parser.add_argument(
        "--cache-share",
        type=float,
        default=CACHE_SHARE,
        metavar="X",
        help="of --routing: the part of all prefixes that a replica's KV cache holds "
        f"(default: {CACHE_SHARE}; 0: as much as fits in memory)",
    )
    parser.add_argument("--workload", metavar="NAME", help=f"one of {', '.join(MAKERS)}")
    parser.add_argument("--api", choices=["completions", "chat"], default="completions")
    parser.add_argument("--no-stream", action="store_true", help="replies in one piece")
    parser.add_argument("--prompt-tokens", metavar="N", help="or A:B, drawn evenly")
    parser.add_argument("--output-tokens", metavar="N", help="or A:B, drawn evenly")
    for name, default, text in (
        ("prefix-tokens", 1024, "of shared-prefix: tokens of a prefix"),
        ("turns", 4, "of multi-turn: requests of a conversation"),
        ("seed", 0, "of the workload"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)
    parser.add_argument(
        "--groups",
        type=int,
        metavar="N",
        help=f"of shared-prefix: number of prefixes ({GROUPS}; of --routing {ROUTING_GROUPS})",
    )
    parser.add_argument("--clients", metavar="N,N", help=f"closed loops (default: {CLIENTS})")
    parser.add_argument(
        "--rate", metavar="X,X", help="open loops: conversations a second (Poisson)"
    )
    parser.add_argument("--requests", type=int, metavar="N", help="of each load")
    parser.add_argument("--repeats", type=int, metavar="N", help=f"default: {REPEATS}")
    parser.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS", help="limits of ttft, tpot and e2e"
    )
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of a request")
    parser.add_argument("--threads", type=int, metavar="N", help="of each engine on a CPU")
    parser.add_argument("--max-sequences", type=int, metavar="N", help="requests that run at once")
    parser.add_argument("--server-args", default="", metavar="TEXT", help="for fulgurite serve")
    parser.add_argument(
        "--extra-body", default="{}", metavar="JSON", help="fields of each request; null: none"
    )


# ---- options -------------------------------------------------------------------------------------


def read_mode(options: argparse.Namespace) -> str:
    """`serve`, `mock` or `routing`; ArgumentError for options that exclude each other."""
    alone = [name for name in ("url", "mock", "routing") if getattr(options, name)]
    compared = [name for name in ("engine_only",) if getattr(options, name)]
    compared += ["llama_cpp"] if options.llama_cpp is not None else []
    if len(alone) > 1 or (alone and compared):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in [*alone, *compared])
        raise ArgumentError(f"{names} exclude each other", next="give one of them")
    return "serve" if not alone or alone == ["url"] else alone[0]


def read_workload(options: argparse.Namespace, mode: str) -> Workload:
    kind, prompt, output, _ = DEFAULTS[mode]
    return Workload(
        options.workload or kind,
        Lengths.parse(options.prompt_tokens or prompt, "--prompt-tokens"),
        Lengths.parse(options.output_tokens or output, "--output-tokens"),
        prefix=options.prefix_tokens,
        groups=(ROUTING_GROUPS if mode == "routing" else GROUPS)
        if options.groups is None
        else options.groups,
        turns=options.turns,
        is_chat=options.api == "chat",
    )


def read_loads(options: argparse.Namespace, mode: str) -> list[Load]:
    """The loads of one repeat."""
    per_client = DEFAULTS[mode][3]
    if options.requests is not None and options.requests < 1:
        raise ArgumentError(f"--requests {options.requests} must be 1 or more")
    if options.rate is not None:
        rates = _parse_numbers(options.rate, "--rate")
        return [Load(options.requests or max(MIN_REQUESTS, round(10 * x)), rate=x) for x in rates]
    text = options.clients or (QUICK_CLIENTS if options.quick else CLIENTS)
    return [
        Load(options.requests or max(MIN_REQUESTS, per_client * int(count)), clients=int(count))
        for count in _parse_numbers(text, "--clients", whole=True)
    ]


def _parse_numbers(text: str, option: str, whole: bool = False) -> list[float]:
    try:
        numbers = [int(part) if whole else float(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if not all(0 < number < 1e6 for number in numbers):
        raise ArgumentError(f"{option} {text} must be positive numbers", next=f"{option} 1,8,64")
    return numbers


def read_http_options(options: argparse.Namespace) -> HttpOptions:
    try:
        extra = json.loads(options.extra_body)
    except ValueError:
        extra = None
    if not isinstance(extra, dict):
        raise ArgumentError(
            f"--extra-body {options.extra_body} is no JSON object", next='{"top_k": 1}'
        )
    if not options.timeout > 0:
        raise ArgumentError(f"--timeout {options.timeout} must be more than 0")
    expected = Expected(is_stream=not options.no_stream, timeout=options.timeout)
    model = options.model if options.url else None  # our own servers have one model
    settle = 0.0 if options.mock else SETTLE_SECONDS
    return HttpOptions(model, options.api_key, expected, tuple(extra.items()), settle)


# ---- candidates ----------------------------------------------------------------------------------


def choose_candidates(options: argparse.Namespace, workload: Workload) -> list[Candidate]:
    """What takes turns. The first one is compared with the others."""
    http = read_http_options(options)
    if options.url:
        server = Server(Address.parse(options.url))
        return [Candidate("server", lambda: open_server(server, http))]
    arguments = server_arguments(options)

    def serve(name: str, *more: str) -> Candidate:
        return Candidate(name, lambda: serve_fulgurite([*arguments, *more], http, options.threads))

    if options.mock:
        return [serve("fulgurite", "--mock")]
    if options.routing:
        shared = ["--data", str(options.replicas), *limit_cache(options, workload)]
        return [
            serve("prefix-aware", *shared),
            serve("round-robin", *shared, "--routing", "round-robin"),
        ]
    candidates = [serve("fulgurite")]
    if options.engine_only:
        opened = partial(open_engine, options.model or MODEL, llm_options(options), options.threads)
        candidates.append(Candidate("engine-only", opened))
    if options.llama_cpp is not None:
        llama = find_llama(options, workload)
        candidates.append(Candidate("llama.cpp", lambda: llama.open(http)))
    return candidates


def limit_cache(options: argparse.Namespace, workload: Workload) -> list[str]:
    """The cache of each replica: a part of all prefixes, and what running requests add to them."""
    if options.replicas < 2 or options.cache_share < 0 or not math.isfinite(options.cache_share):
        raise ArgumentError(
            f"--replicas {options.replicas} --cache-share {options.cache_share}",
            next="--routing compares 2 or more replicas; the share is 0 or more",
        )
    if not options.cache_share:
        return []
    running = options.max_sequences or MAX_SEQUENCES[torch.device(options.device).type]
    prefixes = math.ceil(options.cache_share * workload.groups) * workload.prefix
    return [
        "--cache-tokens",
        str(prefixes + running * (workload.prompt.high + workload.output.high)),
    ]


def server_arguments(options: argparse.Namespace) -> list[str]:
    """Arguments of `fulgurite serve` that all its candidates share."""
    arguments = [] if options.mock else ["--model", options.model or MODEL]
    if options.device == "cpu" and torch.cuda.is_available():
        arguments += ["--device", "cpu"]
    if options.threads is not None:
        arguments += ["--threads", str(options.threads)]
    if options.max_sequences is not None:
        arguments += ["--max-sequences", str(options.max_sequences)]
    return arguments + shlex.split(options.server_args)


def llm_options(options: argparse.Namespace) -> dict[str, Any]:
    found = {"device": options.device}
    if options.max_sequences is not None:
        found["max_sequences"] = options.max_sequences
    return found


def find_llama(options: argparse.Namespace, workload: Workload) -> LlamaServer:
    model = hub.resolve_model_path(options.model or MODEL)
    if model.suffix != ".gguf":
        raise ArgumentError(f"llama.cpp can't load {model.name}", next="--model FILE.gguf")
    return LlamaServer(
        find_llama_server(options.llama_cpp),
        Path(model),
        options.threads or torch.get_num_threads(),
        options.max_sequences or MAX_SEQUENCES[torch.device(options.device).type],
        -(-(workload.max_context + 1) // 256) * 256,
    )


# ---- the suite -----------------------------------------------------------------------------------


def run_serve(options: argparse.Namespace) -> None:
    """Suite `serve`."""
    check_packages()
    if options.idle_streams is not None:
        run_idle_streams(options)
        return
    mode = read_mode(options)
    workload = read_workload(options, mode)
    loads = read_loads(options, mode)
    goodput = parse_goodput(options.goodput)
    repeats = (1 if options.quick else REPEATS) if options.repeats is None else options.repeats
    if repeats < 1:
        raise ArgumentError(f"--repeats {repeats} must be 1 or more")
    candidates = choose_candidates(options, workload)
    group = describe_group(options, workload, candidates)
    found: Found = {}
    with exit_on_terminate(), Progress(transient=True) as progress:
        bar = progress.add_task("serve", total=repeats * len(candidates) * len(loads))
        for repeat, candidate in itertools.product(range(repeats), candidates):
            progress.update(bar, description=f"{candidate.name}: starting")
            with candidate.open() as measure:
                for number, load in enumerate(loads):
                    progress.update(bar, description=f"{candidate.name}, {load}")
                    seed = options.seed + 1000 * repeat + number
                    run, cpu = measure(make_job(workload, replace(load, seed=seed)))
                    figures = summarize(run, goodput, cpu)
                    found.setdefault((str(load), candidate.name), []).append(figures)
                    progress.advance(bar)
            rows = make_rows(options, group, found)
            path = save_rows(options, rows)  # partial results survive an interrupt
    print(format_tables(rows))
    print(f"written to {path}")


def run_idle_streams(options: argparse.Namespace) -> None:
    """The mode `--idle-streams`: one server, one row."""
    if options.url or options.routing or options.engine_only or options.llama_cpp is not None:
        raise ArgumentError("--idle-streams measures a server of its own", next="give it alone")
    command = results.describe_machine(options.device)["command"]
    with exit_on_terminate():
        rows = [idle.make_row(options.idle_streams, command)]
    path = save_rows(options, rows)
    print(format_tables(rows))
    print(f"written to {path}")


def describe_group(
    options: argparse.Namespace, workload: Workload, candidates: Sequence[Candidate]
) -> str:
    """The title of the table: what was served, the workload, and who took turns."""
    subject = "mock engine" if options.mock else options.url or Path(options.model or MODEL).name
    title = f"{subject} · {workload.describe()}{', not streamed' * options.no_stream}"
    if options.routing:
        share = f", each caches {options.cache_share:.0%} of them" if options.cache_share else ""
        title += f" · {options.replicas} replicas{share}"
    names = [candidate.name for candidate in candidates]
    return title if len(names) == 1 else f"{title} · {' against '.join(names)}"


def make_rows(options: argparse.Namespace, group: str, found: Found) -> list[Row]:
    """A row for each load and candidate; loads in order."""
    loads = list(dict.fromkeys(load for load, _ in found))
    command = results.describe_machine(options.device)["command"]
    rows = []
    for load, name in sorted(found, key=lambda key: loads.index(key[0])):
        runs = found[load, name]
        facts = {"group": group, "load": load, "candidate": name, "repeats": len(runs)}
        rows.append({**facts, "command": command, **take_medians(runs)})
    return rows


def save_rows(options: argparse.Namespace, rows: list[Row]) -> Path:
    """Write the rows. Today's default file keeps its rows of other groups: modes share it."""
    path = results.default_path("serve", options.device, options.output)
    if options.output is None and path.exists():
        earlier = json.loads(path.read_text(encoding="utf-8"))["rows"]
        rows = [row for row in earlier if row["group"] != rows[0]["group"]] + rows
    return results.save_results("serve", options.device, rows, options.output)
