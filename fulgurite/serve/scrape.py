"""Numbers of a running server from its `/metrics` and `/health`.

    Server ─▶ text, Health              over HTTP
    text ─ parse_scrape ─▶ Scrape       the value of every series at one time
    two Scrapes ─▶ Window               increases, rates and quantiles between them

Counters that went back to 0, because the server restarted, count from 0: as in PromQL.
"""

from __future__ import annotations

import http.client
import json
import math
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from fulgurite.errors import ArgumentError, FulguriteError

try:
    from prometheus_client.parser import text_string_to_metric_families
except ImportError:  # an optional package: the error comes when it is needed
    text_string_to_metric_families = None  # type: ignore[assignment]

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_SECONDS = 5.0
MAX_BYTES = 32 << 20

Series = tuple[str, tuple[tuple[str, str], ...]]  # name and labels


# ---- over HTTP -----------------------------------------------------------------------------------


class PollError(FulguriteError):
    """The server did not answer as asked."""


@dataclass(frozen=True)
class Health:
    """The answer of `/health`."""

    status: int = 200
    body: dict[str, Any] = field(default_factory=dict)

    @property
    def uptime(self) -> float | None:
        found = self.body.get("uptime_seconds", self.body.get("uptime"))
        if isinstance(found, bool) or not isinstance(found, (int, float)):
            return None
        return float(found) if math.isfinite(found) else None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would send the API key to another host."""

    def redirect_request(self, *arguments: Any, **options: Any) -> None:
        return None


class Server:
    """The server's address. It is reached directly, without a proxy."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        _check_address(url)
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise ArgumentError("--api-key has characters that no header can hold")
        self.url = url.rstrip("/")
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)

    def get(self, path: str) -> tuple[int, str]:
        """Status and text. Raises PollError without an answer."""
        try:
            with self._open(path) as reply:
                return reply.status, reply.read(MAX_BYTES).decode("utf-8", "replace")
        except urllib.error.URLError as problem:
            reason = getattr(problem.reason, "strerror", None) or problem.reason
            raise PollError(f"{self.url} can't be reached: {reason}") from problem
        except (OSError, http.client.HTTPException) as problem:
            raise PollError(f"{self.url}{path} gave no answer: {problem!r}") from problem

    def _open(self, path: str) -> Any:
        """The reply, also one that refuses."""
        request = urllib.request.Request(self.url + path, headers=self.headers)
        try:
            return self.opener.open(request, timeout=TIMEOUT_SECONDS)
        except urllib.error.HTTPError as refused:
            return refused

    def get_metrics(self) -> str:
        status, text = self.get("/metrics")
        if status == 401:
            raise PollError(f"{self.url}/metrics needs a key: give it with --api-key")
        if status != 200:
            raise PollError(f"{self.url}/metrics answered {status}: {text[:100].strip()}")
        return text

    def get_health(self) -> Health:
        status, text = self.get("/health")
        try:
            body = json.loads(text)
        except ValueError:
            body = None  # some servers answer with an empty body
        return Health(status, body if isinstance(body, dict) else {})


def _check_address(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number, a bracket that is never closed
        is_address = False
    if not is_address or not url.isprintable() or " " in url:
        raise ArgumentError(f"--url {url!r} is not an address", next=f"write {DEFAULT_URL}")


# ---- series --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scrape:
    """The value of every series, read `at` a time in seconds."""

    at: float
    series: Mapping[Series, float]

    def select(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        """Labels and value of each series of that name."""
        for (found, labels), value in self.series.items():
            if found == name:
                yield dict(labels), value

    def total(self, name: str) -> float | None:
        """The sum over all labels. None: there is no such series."""
        values = [value for _, value in self.select(name)]
        return sum(values) if values else None

    def totals(self, name: str, label: str) -> dict[str, float]:
        """The sum for each value of a label."""
        return _sum_by(label, self.select(name))

    def label_values(self, label: str) -> list[str]:
        """The values that a label has anywhere."""
        return sorted({dict(labels)[label] for _, labels in self.series if label in dict(labels)})


def require_prometheus_client() -> None:
    """ArgumentError if the package that reads metrics is missing."""
    if text_string_to_metric_families is None:
        raise ArgumentError(
            "reading metrics needs the package prometheus_client",
            next="pip install 'fulgurite[serve]'",
        )


def parse_scrape(text: str, at: float) -> Scrape:
    """Read Prometheus text."""
    require_prometheus_client()
    try:
        series = {
            (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    except (ValueError, KeyError, IndexError, TypeError) as problem:  # whatever the parser trips on
        raise FulguriteError(
            f"the answer is not Prometheus text: {problem}",
            next="give --url the address of a `fulgurite serve`",
        ) from problem
    return Scrape(at, series)


@dataclass(frozen=True)
class Window:
    """What happened between two scrapes."""

    before: Scrape
    after: Scrape

    @property
    def seconds(self) -> float:
        return self.after.at - self.before.at

    def select(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        """Labels and increase of each series of that name. A series that is new began at 0."""
        for (found, labels), value in self.after.series.items():
            if found == name:
                start = self.before.series.get((found, labels), 0.0)
                yield dict(labels), value - start if value >= start else value

    def increase(self, name: str) -> float:
        return sum(value for _, value in self.select(name))

    def increases(self, name: str, label: str) -> dict[str, float]:
        return _sum_by(label, self.select(name))

    def rate(self, name: str) -> float | None:
        """Increase a second. None: no time has passed."""
        return self.increase(name) / self.seconds if self.seconds > 0 else None

    def quantile(self, name: str, q: float) -> Quantile | None:
        """The q-th quantile of a histogram's observations. None: there were none."""
        cumulative = self.increases(f"{name}_bucket", "le")
        return find_quantile({float(bound): n for bound, n in cumulative.items()}, q)


@dataclass(frozen=True)
class Quantile:
    """A value, or the bound that it is above (`is_above`) where the last bucket holds it."""

    value: float
    is_above: bool = False


def find_quantile(cumulative: Mapping[float, float], q: float) -> Quantile | None:
    """Interpolate in the bucket that holds the quantile, as PromQL's `histogram_quantile`.

    `cumulative` has, for each upper bound, the number of observations up to it; the last bound is
    infinite. The first bucket begins at 0.
    """
    bounds = sorted(cumulative)
    total = cumulative[bounds[-1]] if bounds else 0.0
    if total <= 0:
        return None
    rank, low, below = q * total, 0.0, 0.0
    for bound in bounds:
        count = cumulative[bound]
        if count >= rank and count > below:
            if bound == float("inf"):
                break
            return Quantile(low + (bound - low) * (rank - below) / (count - below))
        low, below = (low if bound == float("inf") else bound), max(below, count)
    return Quantile(low, is_above=True)


def _sum_by(label: str, entries: Iterator[tuple[dict[str, str], float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for labels, value in entries:
        if label in labels:
            sums[labels[label]] = sums.get(labels[label], 0.0) + value
    return sums
