"""Suite `compile`: compile time, and the overhead of a compiled call.

In: nothing. Out: for a 12-layer GPT-2-sized model, the time from the first call to the end of the first backward in a
fresh process with empty caches; and the time of one call of a two-op function on a 2×2 tensor. Baselines are
torch.compile with aot_eager and with inductor.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor, nn

import fulgurite
from fulgurite import timing
from fulgurite.bench import results

Compile = Callable[[Any], Any]
CANDIDATES: dict[str, Compile] = {
    "eager": lambda f: f,
    "aot_eager": lambda f: torch.compile(f, backend="aot_eager"),
    "inductor": lambda f: torch.compile(f),
    "fulgurite": lambda f: fulgurite.compile(f),
    "fulgurite, blocks": lambda f: fulgurite.compile(f, granularity="blocks"),
    "fulgurite, one graph": lambda f: fulgurite.compile(f, granularity="model"),
}


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).split(width, dim=-1)
        q, k, v = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """GPT-2 small: 12 layers, width 768, 12 heads; a small vocabulary keeps the run short."""

    def __init__(self, layers: int = 12, width: int = 768, vocabulary: int = 1024) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(1024, width)
        self.layers = nn.ModuleList(Layer(width, 12) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


def run_compile(options: argparse.Namespace) -> None:
    """Suite `compile`."""
    repeats = 1 if options.quick else 3
    rows: list[dict[str, Any]] = []
    work = [(name, round_) for round_ in range(repeats) for name in CANDIDATES if name != "eager"]
    colds: dict[str, list[dict[str, float]]] = {}
    with Progress(transient=True) as progress:
        bar = progress.add_task("cold compiles", total=len(work))
        for name, _ in work:
            colds.setdefault(name, []).append(_run_in_fresh_process(name, options.device))
            progress.advance(bar)
    overhead = measure_call_overhead(options.device)
    for name in CANDIDATES:
        row: dict[str, Any] = {"case": name, "call_us": 1e6 * overhead[name]}
        if name in colds:
            row["forward_s"] = statistics.median(cold["forward"] for cold in colds[name])
            row["backward_s"] = statistics.median(cold["backward"] for cold in colds[name])
            row["cold_s"] = row["forward_s"] + row["backward_s"]
        rows.append(row)
    baseline = next(row["cold_s"] for row in rows if row["case"] == "aot_eager")
    for row in rows:
        if "cold_s" in row:
            row["times_aot_eager"] = baseline / row["cold_s"]
    print(format_table(rows))
    print(f"written to {results.save_results('compile', options.device, rows, options.output)}")


def format_table(rows: list[dict[str, Any]]) -> str:
    head = ["", "forward", "backward", "cold compile", "× aot_eager", "two-op call"]
    body = [
        [
            row["case"],
            *(
                f"{row[key]:.2f} s" if key in row else ""
                for key in ("forward_s", "backward_s", "cold_s")
            ),
            f"{row['times_aot_eager']:.2f}" if "times_aot_eager" in row else "",
            f"{row['call_us']:.1f} µs",
        ]
        for row in rows
    ]
    return results.format_table([head, *body])


def measure_call_overhead(device: str) -> dict[str, float]:
    """Seconds of one call of a two-op function on a 2×2 tensor, candidates taking turns."""
    x = torch.randn(2, 2, device=device)
    calls: dict[str, timing.Thunk] = {}
    for name, compile_ in CANDIDATES.items():
        torch._dynamo.reset_code_caches()

        def two_ops(x: Tensor) -> Tensor:
            return (x + 1) * 2

        compiled = compile_(two_ops)
        calls[name] = functools.partial(compiled, x)
    with torch.no_grad():
        return timing.median_times(calls, repeats=25, budget=2.0)


def time_cold_compile(name: str, device: str) -> dict[str, float]:
    """Seconds of the first forward and the first backward in this process."""
    torch.manual_seed(0)
    model = GPT2().to(device)
    tokens = torch.randint(0, 1024, (1, 16), device=device)
    model(tokens).backward()  # start-up of the libraries is not measured
    compiled = CANDIDATES[name](model)
    timing.synchronize()
    start = time.perf_counter()
    loss = compiled(tokens)
    timing.synchronize()
    middle = time.perf_counter()
    loss.backward()
    timing.synchronize()
    return {"forward": middle - start, "backward": time.perf_counter() - middle}


def _run_in_fresh_process(name: str, device: str) -> dict[str, float]:
    code = (
        "import json, fulgurite.bench.compile_time as suite; "
        f"print(json.dumps(suite.time_cold_compile({name!r}, {device!r})))"
    )
    environment = {**os.environ, **results.fresh_cache_environment()}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    return json.loads(done.stdout.splitlines()[-1])
