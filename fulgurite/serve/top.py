"""`fulgurite top`: what a running server does, live in the terminal.

GET /metrics and /health every second ─▶ scrapes of the last half minute ─▶ one table of lines.

A server that can't be reached is a line of the table; polling goes on.
"""

from __future__ import annotations

import contextlib
import math
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections import deque
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fulgurite.config import read_env
from fulgurite.errors import FulguriteError
from fulgurite.serve.scrape import (
    DEFAULT_URL,
    Health,
    PollError,
    Quantile,
    Scrape,
    Server,
    Window,
    parse_scrape,
    require_prometheus_client,
)

WINDOW_SECONDS = 30.0  # latencies and rates of hits are of this long
HISTORY = 40  # points of the sparkline
STATES = ("idle", "busy", "stalled", "starting")  # values of fulgurite:engine_state
STYLES = {"idle": "dim", "busy": "green", "stalled": "bold red", "starting": "yellow"}
# Of several replicas the last of these is shown.
SEVERITY = ("idle", "busy", "starting", "stalled")
BLOCKS = "▁▂▃▄▅▆▇█"
GENERATED, PROMPT = "vllm:generation_tokens_total", "vllm:prompt_tokens_total"
PROBLEMS = {  # counters of what went wrong, in the order they are shown
    "fulgurite:disconnects_total": "disconnected",
    "fulgurite:deadline_exceeded_total": "past deadline",
    "vllm:num_preemptions_total": "preempted",
    "fulgurite:failed_steps_total": "failed steps",
    "fulgurite:engine_restarts_total": "engine restarts",
}


# ---- the command ---------------------------------------------------------------------------------


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the server (default: {DEFAULT_URL})")
    parser.add_argument(
        "--api-key", metavar="KEY", help="sent as a bearer token (default: FULGURITE_API_KEY)"
    )
    parser.add_argument(
        "--interval",
        type=_read_interval,
        default=1.0,
        metavar="SECONDS",
        help="time between two polls (default: 1)",
    )
    parser.add_argument(
        "--once", action="store_true", help="poll twice, print once and leave; for pipes"
    )


def _read_interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.05 <= seconds <= 3600:  # also false for nan
        raise ArgumentTypeError(f"{text!r} is not a number of seconds from 0.05 to 3600")
    return seconds


def run_top(options: Namespace) -> None:
    """Show a server until ctrl-C, or once."""
    require_prometheus_client()
    key = options.api_key or (read_env("FULGURITE_API_KEY") or "").partition(",")[0] or None
    monitor = Monitor(Server(options.url, key))
    console = Console(highlight=False)
    if options.once:
        print_once(monitor, console, options.interval)
        return
    with contextlib.suppress(KeyboardInterrupt):  # the way to leave
        show_live(monitor, console, options.interval)


def print_once(monitor: Monitor, console: Console, interval: float) -> None:
    """One frame. Rates need two polls. A server that can't be reached is an error."""
    monitor.poll()
    if not monitor.problem:
        time.sleep(interval)
        monitor.poll()
    if monitor.problem:
        raise PollError(monitor.problem, next="start `fulgurite serve`, or give --url its address")
    console.print(monitor.render())


def show_live(monitor: Monitor, console: Console, interval: float) -> None:
    """Frames without end: in place in a terminal, one below the other in a pipe."""
    monitor.poll()
    if not console.is_terminal:
        while True:
            console.print(monitor.render())
            time.sleep(interval)
            monitor.poll()
    with Live(monitor.render(), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            monitor.poll()
            live.update(monitor.render(), refresh=True)


# ---- polling -------------------------------------------------------------------------------------


class Monitor:
    """Polls a server and keeps what rates need."""

    def __init__(self, server: Server, clock: Callable[[], float] = time.monotonic) -> None:
        self.server = server
        self.clock = clock
        self.scrapes: deque[Scrape] = deque()
        self.rates: deque[float] = deque(maxlen=HISTORY)
        self.health = Health()
        self.problem: str | None = None
        self.last_answer: float | None = None

    def poll(self) -> None:
        """Read the server's numbers, or note why they can't be read."""
        try:
            scrape = parse_scrape(self.server.get_metrics(), self.clock())
            self.health = self.server.get_health()
        except FulguriteError as problem:
            self.problem = problem.what
            return
        self.problem = None
        self.last_answer = scrape.at
        self.scrapes.append(scrape)
        while len(self.scrapes) > 2 and scrape.at - self.scrapes[1].at >= WINDOW_SECONDS:
            self.scrapes.popleft()
        rate = self.step.rate(GENERATED)
        if rate is not None:
            self.rates.append(rate)

    @property
    def step(self) -> Window:
        """Between the last two polls."""
        return Window(self.scrapes[-2 if len(self.scrapes) > 1 else -1], self.scrapes[-1])

    @property
    def window(self) -> Window:
        """The last half minute."""
        return Window(self.scrapes[0], self.scrapes[-1])

    def render(self) -> Table:
        table = Table.grid(padding=(0, 3, 0, 0))
        table.add_column(style="dim", no_wrap=True, min_width=11)
        table.add_column(overflow="fold")
        if self.scrapes:
            add_lines(table, self)
        if self.problem:
            table.add_row(Text("problem", style="red"), Text(self._describe_problem(), style="red"))
        return table

    def _describe_problem(self) -> str:
        if self.last_answer is None:
            return f"{self.problem} · trying again"
        ago = format_duration(self.clock() - self.last_answer)
        return f"{self.problem} · trying again · the numbers above are {ago} old"


# ---- the lines -----------------------------------------------------------------------------------


def add_lines(table: Table, monitor: Monitor) -> None:
    """All lines of a frame, top to bottom."""
    now, step, window = monitor.scrapes[-1], monitor.step, monitor.window
    table.add_row("fulgurite", make_headline(now, monitor))
    running, waiting = (now.total(f"vllm:num_requests_{kind}") for kind in ("running", "waiting"))
    table.add_row("requests", f"{format_count(running)} running · {format_count(waiting)} waiting")
    speeds = (
        f"{format_rate(step.rate(GENERATED))} generated · {format_rate(step.rate(PROMPT))} prompt"
    )
    table.add_row("tokens/s", f"{speeds}   {draw_sparkline(list(monitor.rates))}".rstrip())
    table.add_row("cache", describe_cache(now, window))
    for label, name in (
        ("first token", "vllm:time_to_first_token_seconds"),
        ("inter-token", "vllm:inter_token_latency_seconds"),
        ("queue", "vllm:request_queue_time_seconds"),
        ("step", "fulgurite:step_seconds"),
    ):
        table.add_row(label, describe_latency(window, name))
    table.add_row(
        "finished", describe_counts(now.totals("vllm:request_success_total", "finished_reason"))
    )
    table.add_row("problems", describe_problems(now))
    engines = now.totals("fulgurite:engine_state", "engine")
    if len(engines) > 1:
        for engine in sorted(engines, key=lambda name: (len(name), name)):
            table.add_row(f"replica {engine}", describe_replica(now, engine))


def make_headline(now: Scrape, monitor: Monitor) -> Text:
    state = find_state(now)
    line = Text(" · ".join(now.label_values("model_name")) or "no model", style="bold")
    line.append(" · ", style="not bold").append(state, style=f"not bold {STYLES.get(state, '')}")
    uptime = monitor.health.uptime
    if uptime is not None:
        line.append(f" · up {format_duration(uptime)}", style="not bold")
    if monitor.health.status != 200:
        line.append(f" · /health answers {monitor.health.status}", style="not bold red")
    return line.append(f" · {monitor.server.url}", style="not bold dim")


def find_state(now: Scrape) -> str:
    """The most serious state of any replica."""
    states = {name_state(value) for _, value in now.select("fulgurite:engine_state")}
    known = [state for state in SEVERITY if state in states]
    return known[-1] if known else "state unknown"


def name_state(value: float) -> str:
    return STATES[int(value)] if value in range(len(STATES)) else f"state {value:g}"


def describe_cache(now: Scrape, window: Window) -> str:
    """`61% used · prefix hits 38%`; of several replicas the mean."""
    used = [value for _, value in now.select("vllm:kv_cache_usage_perc")]
    text = f"{format_percent(sum(used) / len(used) if used else None)} used · prefix hits "
    queries = window.increase("vllm:prefix_cache_queries_total")
    hits = window.increase("vllm:prefix_cache_hits_total")
    return text + format_percent(hits / queries if queries else None)


def describe_latency(window: Window, name: str) -> str:
    halves = ((0.5, "p50"), (0.99, "p99"))
    return " · ".join(f"{label} {format_quantile(window.quantile(name, q))}" for q, label in halves)


def describe_counts(counts: dict[str, float]) -> str:
    """`412 stop · 31 length`, the most frequent first."""
    ranked = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
    return " · ".join(f"{format_count(n)} {label}" for label, n in ranked if n) or "none yet"


def describe_problems(now: Scrape) -> Text:
    """What went wrong since the start; leaks of the audit are red."""
    rejected = now.totals("fulgurite:requests_rejected_total", "reason")
    parts = [
        f"{format_count(n)} rejected ({reason})" for reason, n in sorted(rejected.items()) if n
    ]
    totals = {label: now.total(name) for name, label in PROBLEMS.items()}
    parts += [f"{format_count(n)} {label}" for label, n in totals.items() if n]
    leaks = now.total("fulgurite:audit_leaks")
    line = Text(" · ".join(parts))
    if leaks:
        line.append(f"{' · ' if parts else ''}{format_count(leaks)} leaked", style="bold red")
    return line if line.plain else Text("none")


def describe_replica(now: Scrape, engine: str) -> str:
    def read(name: str) -> float | None:
        return now.totals(name, "engine").get(engine)

    state = read("fulgurite:engine_state")
    return " · ".join(
        (
            name_state(state if state is not None else -1),
            f"{format_count(read('vllm:num_requests_running'))} running",
            f"{format_count(read('vllm:num_requests_waiting'))} waiting",
            f"cache {format_percent(read('vllm:kv_cache_usage_perc'))}",
        )
    )


# ---- numbers as text -----------------------------------------------------------------------------


def format_count(number: float | None) -> str:
    return "–" if number is None or not math.isfinite(number) else f"{number:,.0f}"


def format_rate(rate: float | None) -> str:
    if rate is None or not math.isfinite(rate):
        return "–"
    return f"{rate:.1f}" if 0 < rate < 9.95 else f"{rate:,.0f}"


def format_percent(part: float | None) -> str:
    return "–" if part is None or not math.isfinite(part) else f"{100 * part:.0f}%"


def format_quantile(found: Quantile | None) -> str:
    """`84 ms`; `> 7.5 s` where only the bound is known."""
    if found is None:
        return "–"
    value = found.value
    if value < 0.01:
        text = f"{1e3 * value:.2g} ms"
    else:
        text = f"{1e3 * value:.0f} ms" if value < 0.9995 else f"{value:.1f} s"
    return f"> {text}" if found.is_above else text


def format_duration(seconds: float) -> str:
    """`41 s`, `12 min`, `2 h 4 min`, `3 d 5 h`."""
    minutes = int(seconds) // 60
    if minutes < 1:
        return f"{seconds:.0f} s"
    hours = minutes // 60
    if hours < 1:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def draw_sparkline(values: list[float]) -> str:
    """A block for each value, the highest for the maximum."""
    top = max(values, default=0.0)
    if top <= 0 or len(values) < 2:
        return ""
    return "".join(BLOCKS[round(value / top * (len(BLOCKS) - 1))] for value in values)
