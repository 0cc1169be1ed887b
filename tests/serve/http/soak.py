"""`python -m tests.serve.http.soak --minutes 3 --seed 1`: chaos for some minutes, then figures.

    --model mock | tiny     made-up tokens, or a tiny real model under memory pressure
    --engine-in process | thread

Rounds of actions run until the time is over. After each round the server must be idle, hold nothing, and
answer as before. A failure prints the seed, the number of the action, what was sent and received on its
connections, and the figures up to there.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import resource
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from fulgurite.serve.remote import client as client_module
from tests.serve.http.chaos import ChaosError, Figures, failing_steps, run_chaos
from tests.serve.http.serving import RunningServer, serve
from tests.serve.http.test_chaos import (
    FAULTS,
    MOCK_PROMPTS,
    check_recovered,
    make_tiny_prompts,
    mock_server,
    tiny_chaos_config,
)

ROUND_ACTIONS = 200


def read_memory() -> float:
    """MiB that this process has in memory: the server and the clients."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / (1 << 20)


def soak(minutes: float, seed: int, model: str, engine_in: str) -> None:
    client_module.RESTART_DELAYS = (0.0,)
    harmless = [kind for kind in FAULTS if kind != "kill"]
    faults = [*harmless, *harmless, "kill"] if engine_in == "process" else harmless
    totals = Figures()
    with ExitStack() as stack:
        if model == "mock":
            server = stack.enter_context(mock_server(engine_in=engine_in))
            prompts = MOCK_PROMPTS
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            config = tiny_chaos_config(Path(folder), engine_in=engine_in)
            server = stack.enter_context(serve(config))
            prompts = make_tiny_prompts(server)
        start, memory = time.monotonic(), 0.0
        stack.callback(print_figures, server, totals, f"seed {seed} · {model} in a {engine_in}")
        for number in itertools.count():
            if time.monotonic() - start > 60 * minutes:
                break
            with failing_steps(seed + number) as failures:
                figures = asyncio.run(
                    run_chaos(
                        server,
                        prompts,
                        seed=seed,
                        num_actions=ROUND_ACTIONS,
                        first_action=number * ROUND_ACTIONS,
                        faults=faults,
                        fault_every=50,
                    )
                )
            figures.faults.update({f"{kind} in a step": n for kind, n in failures.items()})
            totals.add(figures)
            check_recovered(server, prompts)
            gc.collect()
            memory = memory or read_memory()  # after the first round: caches are filled
        growth = read_memory() - memory
        print(f"time      {time.monotonic() - start:.0f} s")
        print(f"memory    {memory:.0f} MiB after the first round, {growth:+.1f} MiB since")


def print_figures(server: RunningServer, totals: Figures, title: str) -> None:
    restarts = sum(client.restarts for client in server.app.server.clients)
    seconds = sorted(totals.reply_seconds) or [0.0]
    quantiles = [seconds[int(q * (len(seconds) - 1))] for q in (0.5, 0.9, 0.99, 1.0)]
    print(title)
    print(f"actions   {totals.actions.total()}: {format_counts(totals.actions)}")
    print(f"outcomes  {format_counts(totals.outcomes)}")
    print(f"faults    {format_counts(totals.faults)} · {restarts} restarts")
    print("replies   p50 {:.3f} s, p90 {:.3f} s, p99 {:.3f} s, longest {:.3f} s".format(*quantiles))
    print(f"audit     {server.leaks() or 'all zero'}")


def format_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", choices=["mock", "tiny"], default="mock")
    parser.add_argument("--engine-in", choices=["process", "thread"], default="process")
    options = parser.parse_args()
    try:
        soak(options.minutes, options.seed, options.model, options.engine_in)
    except* ChaosError as group:
        for error in group.exceptions:
            print(f"failed: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
