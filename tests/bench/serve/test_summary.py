"""Figures and tables of known replies."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from fulgurite.bench.serve.load import Run
from fulgurite.bench.serve.replies import Reply
from fulgurite.bench.serve.summary import (
    count_cores,
    measure_percentiles,
    parse_goodput,
    summarize,
    take_medians,
)
from fulgurite.bench.serve.tables import format_percentiles, format_tables
from fulgurite.errors import ArgumentError


def make_reply(ttft: float, tokens: int = 3, **more: Any) -> Reply:
    """Sent at 10 s; later tokens come 0.1 s after each other."""
    gaps = array("d", [0.1] * (tokens - 1))
    end = 10 + ttft + 0.1 * (tokens - 1)
    usage = {"prompt_tokens": 4, "output_tokens": tokens, "wanted_tokens": 3, "cached_tokens": 2}
    return Reply(10.0, first_token=10 + ttft, end=end, gaps=gaps, **{**usage, **more})


def test_percentiles() -> None:
    found = measure_percentiles([0.001 * i for i in range(101)])
    assert found == pytest.approx({"p50": 50.0, "p90": 90.0, "p99": 99.0, "mean": 50.0})
    found = measure_percentiles([0.003, 0.001])
    assert found == pytest.approx({"p50": 2.0, "p90": 2.8, "p99": 2.98, "mean": 2.0})
    assert measure_percentiles([]) is None


def test_figures_of_a_run() -> None:
    failed = make_reply(9.0, kind="http 429", detail="too many")
    replies = [make_reply(0.1), make_reply(0.3), make_reply(0.2, tokens=2), failed]
    row = summarize(Run(replies, 2.0, 0.5), {"ttft": 250.0, "e2e": 1000.0}, server_cpu=1.5)
    assert (row["requests"], row["ok"], row["requests_per_s"]) == (4, 3, 1.5)
    assert (row["output_tokens_per_s"], row["total_tokens_per_s"]) == (4.0, 10.0)
    assert (row["cached_tokens"], row["prompt_tokens"], row["short_replies"]) == (6, 12, 1)
    assert row["ttft_ms"]["p50"] == pytest.approx(200) and row["e2e_ms"]["p99"] < 501
    assert row["itl_ms"]["p99"] == pytest.approx(100) == row["tpot_ms"]["p50"]
    assert (row["errors"], row["first_error"]) == ({"http 429": 1}, "too many")
    assert row["goodput_per_s"] == 1.0  # ttft of two
    assert row["client_cpu_share"] == pytest.approx(0.25 / count_cores())


def test_a_run_without_a_whole_reply() -> None:
    row = summarize(Run([make_reply(1.0, kind="timeout")], 2.0, 0.0), {"tpot": 1.0})
    assert row["ttft_ms"] is None and row["goodput_per_s"] == 0 == row["requests_per_s"]
    row = {"group": "g", "load": "1 client", "candidate": "a", "repeats": 1, **row}
    assert "1 × timeout" in format_tables([row])


def test_medians_of_repeats() -> None:
    runs = [Run([make_reply(ttft)], 1.0, 0.0) for ttft in (0.1, 0.5, 0.2)]
    rows = [summarize(run, {}) for run in runs]
    rows[1] = {**rows[1], "errors": {"timeout": 2}, "first_error": "slow", "itl_ms": None}
    row = take_medians(rows)
    assert row["ttft_ms"]["p50"] == pytest.approx(200) and row["errors"] == {"timeout": 2}
    assert row["first_error"] == "slow" and row["itl_ms"]["p50"] == pytest.approx(100)
    assert row["repeats_output_tokens_per_s"] == [3.0, 3.0, 3.0]


def test_limits() -> None:
    assert parse_goodput(["ttft:500", "tpot:2.5"]) == {"ttft": 500.0, "tpot": 2.5}
    for text in ("ttft", "ttft:", "ttft:-1", "ttft:nan", "other:3", "ttft:0"):
        with pytest.raises(ArgumentError, match="--goodput"):
            parse_goodput([text])


def test_milliseconds_and_seconds() -> None:
    assert format_percentiles({"p50": 1.25, "p90": 3.0, "p99": 9.96}) == "1.2/3.0/10.0 ms"
    assert format_percentiles({"p50": 1.2, "p90": 30.0, "p99": 900.0}) == "1/30/900 ms"
    assert format_percentiles({"p50": 900.0, "p90": 3000.0, "p99": 12_000.0}) == "0.9/3.0/12.0 s"
    assert format_percentiles(None) == ""


def test_tables() -> None:
    rows = []
    for load, speed in (("1 client", 1.0), ("8 clients", 2.0)):
        for name, factor in (("fulgurite", 1.0), ("engine-only", 0.5)):
            run = Run([make_reply(0.1)], 1 / (speed * factor), 0.1)
            row = summarize(run, {"ttft": 500.0}, server_cpu=1.0)
            facts = {"group": "m · random", "load": load, "candidate": name, "repeats": 3}
            rows.append({**facts, **row})
    text = format_tables([*rows, {**rows[0], "group": "other"}])
    lines = text.splitlines()
    assert lines[0] == "m · random · medians of 3"
    assert lines[2].split()[:3] == ["1", "·", "fulgurite"]
    assert "fulgurite ÷ engine-only, out tok/s: 2.00 (1 client), 2.00 (8 clients)" in lines
    words = " ".join(lines)  # long lines are wrapped
    assert "50% of prompt tokens from the prefix cache" in words
    assert "goodput 1.0 req/s (ttft 500 ms)" in words and "server 1.00 cores" in words
    assert max(map(len, lines)) <= 100 and "\n\nother · medians of 3\n" in text
    assert text.partition("other")[2].splitlines()[2].split()[:2] == ["1", "1.0"]  # no name
