"""`fulgurite top`: numbers from Prometheus text, and the frame that shows them."""

from __future__ import annotations

import argparse
import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

prometheus_client = pytest.importorskip("prometheus_client", reason="prometheus_client is missing")

from fulgurite.errors import ArgumentError, FulguriteError  # noqa: E402
from fulgurite.serve import top  # noqa: E402
from fulgurite.serve.scrape import Scrape, Server, Window, find_quantile, parse_scrape  # noqa: E402

BOUNDS = (0.01, 0.1, 1.0)


class Metrics:
    """Some of a server's metrics, with two replicas."""

    def __init__(self) -> None:
        self.registry = registry = prometheus_client.CollectorRegistry()
        self.generated = self.make("Counter", "vllm:generation_tokens")
        self.prompt = self.make("Counter", "vllm:prompt_tokens")
        self.first = prometheus_client.Histogram(
            "vllm:time_to_first_token_seconds",
            "x",
            ["model_name"],
            buckets=BOUNDS,
            registry=registry,
        )
        self.running = self.make("Gauge", "vllm:num_requests_running", "engine")
        self.waiting = self.make("Gauge", "vllm:num_requests_waiting", "engine")
        self.used = self.make("Gauge", "vllm:kv_cache_usage_perc", "engine")
        self.state = self.make("Gauge", "fulgurite:engine_state", "engine")
        self.queries = self.make("Counter", "vllm:prefix_cache_queries", "engine")
        self.hits = self.make("Counter", "vllm:prefix_cache_hits", "engine")
        self.finished = self.make("Counter", "vllm:request_success", "finished_reason")
        self.rejected = self.make("Counter", "fulgurite:requests_rejected", "reason")
        self.preempted = self.make("Counter", "vllm:num_preemptions", "engine")
        self.leaks = self.make("Gauge", "fulgurite:audit_leaks", "kind")
        self.set_gauges()

    def make(self, kind: str, name: str, *labels: str) -> Any:
        return getattr(prometheus_client, kind)(
            name, "x", ["model_name", *labels], registry=self.registry
        )

    def set_gauges(self) -> None:
        for engine, running, waiting, used, state in (("0", 5, 2, 0.5, 1), ("1", 3, 1, 0.7, 0)):
            self.running.labels("tiny", engine).set(running)
            self.waiting.labels("tiny", engine).set(waiting)
            self.used.labels("tiny", engine).set(used)
            self.state.labels("tiny", engine).set(state)
        self.generated.labels("tiny").inc(1000)
        self.prompt.labels("tiny").inc(50)

    def work(self) -> None:
        """Two seconds of work."""
        self.generated.labels("tiny").inc(800)
        self.prompt.labels("tiny").inc(2400)
        for _ in range(98):
            self.first.labels("tiny").observe(0.05)
        for _ in range(2):
            self.first.labels("tiny").observe(30.0)
        self.queries.labels("tiny", "0").inc(200)
        self.hits.labels("tiny", "0").inc(76)
        self.finished.labels("tiny", "stop").inc(1412)
        self.finished.labels("tiny", "length").inc(31)
        self.finished.labels("tiny", "abort").inc(0)

    def render(self) -> str:
        return prometheus_client.generate_latest(self.registry).decode()


class FakeServer:
    """What `Monitor` reads, without a network."""

    url = "http://127.0.0.1:8000"

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.problem: FulguriteError | None = None
        self.health = top.Health(200, {"uptime_seconds": 7450})

    def get_metrics(self) -> str:
        if self.problem:
            raise self.problem
        return self.metrics.render()

    def get_health(self) -> top.Health:
        return self.health


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def monitor(server: FakeServer, clock: Clock) -> top.Monitor:
    return top.Monitor(server, clock)  # type: ignore[arg-type]


def read_lines(monitor: top.Monitor, width: int = 100) -> dict[str, str]:
    """The frame, by the first word of each line."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(monitor.render())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in text.splitlines())
    return {line[:13].strip(): line[13:].strip() for line in text.splitlines() if line.strip()}


# ---- numbers -------------------------------------------------------------------------------------


def scrape(at: float, **values: float) -> Scrape:
    return Scrape(at, {(name, ()): value for name, value in values.items()})


def test_a_counter_that_restarted_counts_from_zero() -> None:
    assert Window(scrape(0, n=90), scrape(2, n=100)).rate("n") == 5
    assert Window(scrape(0, n=90), scrape(2, n=8)).rate("n") == 4
    assert Window(scrape(0), scrape(2, n=8)).rate("n") == 4
    assert Window(scrape(0, n=90), scrape(2)).rate("n") == 0
    assert Window(scrape(2, n=90), scrape(2, n=90)).rate("n") is None


INF = float("inf")


@pytest.mark.parametrize(
    ("cumulative", "q", "value", "is_above"),
    [
        ({1.0: 10, 2.0: 20, INF: 20}, 0.5, 1.0, False),
        ({1.0: 10, 2.0: 20, INF: 20}, 0.75, 1.5, False),
        ({1.0: 0, 2.0: 4, INF: 4}, 0.5, 1.5, False),
        ({1.0: 1, 2.0: 1, INF: 100}, 0.99, 2.0, True),
        ({1.0: 5, INF: 5}, 0.0, 0.0, False),
        ({1.0: 5, INF: 5}, 1.0, 1.0, False),
        ({INF: 5}, 0.5, 0.0, True),
    ],
)
def test_quantile(cumulative: dict[float, float], q: float, value: float, is_above: bool) -> None:
    found = find_quantile(cumulative, q)
    assert found is not None
    assert found.value == pytest.approx(value) and found.is_above == is_above


def test_quantile_of_nothing() -> None:
    assert find_quantile({}, 0.5) is None
    assert find_quantile({1.0: 0.0, INF: 0.0}, 0.5) is None


@pytest.mark.parametrize("text", ["<html>hello</html>", "a{b=", "name value", '{"error": 1}'])
def test_text_that_is_not_prometheus(text: str) -> None:
    with pytest.raises(FulguriteError, match="not Prometheus text"):
        parse_scrape(text, 0.0)


def test_without_prometheus_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fulgurite.serve.scrape.text_string_to_metric_families", None)
    with pytest.raises(FulguriteError, match=r"fulgurite\[serve\]"):
        parse_scrape("", 0.0)


# ---- a frame -------------------------------------------------------------------------------------


def test_a_frame(monitor: top.Monitor, server: FakeServer, clock: Clock) -> None:
    monitor.poll()
    server.metrics.work()
    clock.now += 2
    monitor.poll()
    server.metrics.generated.labels("tiny").inc(1600)
    clock.now += 2
    monitor.poll()
    assert read_lines(monitor) == {
        "fulgurite": "tiny · busy · up 2 h 4 min · http://127.0.0.1:8000",
        "requests": "8 running · 3 waiting",
        "tokens/s": "800 generated · 0 prompt   ▅█",
        "cache": "60% used · prefix hits 38%",
        "first token": "p50 56 ms · p99 > 1.0 s",
        "inter-token": "p50 – · p99 –",
        "queue": "p50 – · p99 –",
        "step": "p50 – · p99 –",
        "finished": "1,412 stop · 31 length",
        "problems": "none",
        "replica 0": "busy · 5 running · 2 waiting · cache 50%",
        "replica 1": "idle · 3 running · 1 waiting · cache 70%",
    }


def test_rates_need_two_polls(monitor: top.Monitor) -> None:
    monitor.poll()
    assert read_lines(monitor)["tokens/s"] == "– generated · – prompt"


def test_problems_of_the_server(monitor: top.Monitor, server: FakeServer) -> None:
    server.metrics.state.labels("tiny", "1").set(2)
    server.metrics.rejected.labels("tiny", "queue_full").inc(7)
    server.metrics.preempted.labels("tiny", "0").inc(2)
    server.metrics.leaks.labels("tiny", "blocks").set(3)
    server.health = top.Health(503, {})
    monitor.poll()
    lines = read_lines(monitor)
    assert lines["fulgurite"].startswith("tiny · stalled · /health answers 503")
    assert lines["problems"] == "7 rejected (queue_full) · 2 preempted · 3 leaked"


def test_a_server_that_goes_away_and_comes_back(
    monitor: top.Monitor, server: FakeServer, clock: Clock
) -> None:
    server.problem = top.PollError("http://x can't be reached: Connection refused")
    monitor.poll()
    assert read_lines(monitor) == {
        "problem": "http://x can't be reached: Connection refused · trying again"
    }
    server.problem = None
    monitor.poll()
    assert "problem" not in read_lines(monitor)
    server.problem = top.PollError("no answer")
    clock.now += 4
    monitor.poll()
    lines = read_lines(monitor)
    assert lines["requests"] == "8 running · 3 waiting"
    assert lines["problem"] == "no answer · trying again · the numbers above are 4 s old"


def test_old_scrapes_leave_the_window(
    monitor: top.Monitor, server: FakeServer, clock: Clock
) -> None:
    for _ in range(100):
        monitor.poll()
        clock.now += 1
    assert monitor.window.seconds == top.WINDOW_SECONDS
    assert len(monitor.rates) == top.HISTORY
    clock.now += 1000
    monitor.poll()
    assert len(monitor.scrapes) == 2


@pytest.mark.parametrize("text", ["", "# HELP x y\n", "up 1\n", 'x{engine="0"} NaN\n'])
def test_a_server_of_another_kind(
    monitor: top.Monitor, server: FakeServer, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "get_metrics", lambda: text)
    monitor.poll()
    lines = read_lines(monitor)
    assert lines["fulgurite"].startswith("no model · state unknown")
    assert lines["requests"] == "– running · – waiting"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.4, "59 s"), (60, "1 min"), (7450, "2 h 4 min"), (277200, "3 d 5 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert top.format_duration(seconds) == text


@pytest.mark.parametrize(
    ("body", "uptime"),
    [({}, None), ({"uptime_seconds": 3}, 3.0), ({"uptime": True}, None), ({"uptime": "1"}, None)],
)
def test_uptime_of_any_health(body: dict[str, Any], uptime: float | None) -> None:
    assert top.Health(200, body).uptime == uptime


# ---- the command, over HTTP ----------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    metrics = Metrics()
    status = 200
    keys: list[str | None] = []  # noqa: RUF012 (of the class on purpose: a handler lives for one request)

    def do_GET(self) -> None:
        Handler.keys.append(self.headers.get("Authorization"))
        status, text = 200, b'{"status": "ok", "uptime_seconds": 41}'
        if self.path == "/metrics":
            status, text = Handler.status, Handler.metrics.render().encode()
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "http://127.0.0.1:9/stolen")
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Handler.metrics, Handler.status, Handler.keys = Metrics(), 200, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    top.add_options(parser)
    return parser.parse_args(arguments)


def test_once(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    top.run_top(parse("--url", url, "--api-key", "secret", "--once", "--interval", "0.05"))
    printed = capsys.readouterr().out
    assert "8 running · 3 waiting" in printed and "up 41 s" in printed
    assert "0 generated" in printed
    assert "\x1b" not in printed
    assert Handler.keys == ["Bearer secret"] * 4


@pytest.mark.parametrize(
    ("status", "message"), [(401, "--api-key"), (404, "answered 404"), (302, "answered 302")]
)
def test_once_with_a_refusal(url: str, status: int, message: str) -> None:
    """A redirect is not followed: it would get the key."""
    Handler.status = status
    with pytest.raises(FulguriteError, match=message):
        top.run_top(parse("--url", url, "--once", "--interval", "0.05"))


def test_once_without_a_server() -> None:
    with pytest.raises(FulguriteError, match="can't be reached: Connection refused") as found:
        top.run_top(parse("--url", "http://127.0.0.1:9", "--once"))
    assert "fulgurite serve" in str(found.value)


def test_live_until_interrupted(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sleeps = iter(range(2))

    def sleep(seconds: float) -> None:
        if next(sleeps, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(top.time, "sleep", sleep)
    top.run_top(parse("--url", url))
    assert capsys.readouterr().out.count("8 running") == 3


def test_live_in_a_terminal(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The screen is left as it was found, also on ctrl-C."""

    def sleep(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(top.time, "sleep", sleep)
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=30)
    with pytest.raises(KeyboardInterrupt):
        top.show_live(top.Monitor(Server(url)), console, 1.0)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "8 running" in text
    assert text.index("\x1b[?1049h") < text.index("8 running") < text.index("\x1b[?1049l")


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "x", ""])
def test_bad_intervals(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--interval", text)
    assert "is not a number of seconds" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", "localhost:8000", "ftp://x", "http://", "http://[", "http://x:y", "http://a b"]
)
def test_bad_addresses(text: str) -> None:
    with pytest.raises(ArgumentError, match="is not an address"):
        Server(text)


def test_a_key_that_no_header_can_hold() -> None:
    with pytest.raises(ArgumentError, match="--api-key") as found:
        Server("http://127.0.0.1:9", "se\ncret")
    assert "cret" not in str(found.value)
