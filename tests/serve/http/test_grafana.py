"""The Grafana dashboard: valid, and every query is over a metric that the server has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fulgurite.serve.http

PATH = Path(fulgurite.serve.http.__file__).parent / "grafana.json"
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:iteration_tokens_total",
    "fulgurite:step_seconds",
    "fulgurite:mask_seconds",
}
COUNTERS = {
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "fulgurite:requests_rejected_total",
    "fulgurite:forced_tokens_total",
    "fulgurite:disconnects_total",
    "fulgurite:deadline_exceeded_total",
}
GAUGES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "fulgurite:engine_state",
    "fulgurite:engine_restarts_total",
    "fulgurite:audit_leaks",
    "fulgurite:replica_requests_running",
}
SERIES = COUNTERS | GAUGES | {f"{name}_bucket" for name in HISTOGRAMS}
LABELS = {"model_name", "engine", "finished_reason", "reason", "le", "where", "kind"}
NAME = re.compile(r"(?:vllm|fulgurite):\w+")


@pytest.fixture(scope="module")
def board() -> dict[str, Any]:
    return json.loads(PATH.read_text(encoding="utf-8"))


def find_panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def find_queries(board: dict[str, Any]) -> Iterator[str]:
    for panel in find_panels(board):
        for target in panel["targets"]:
            yield target["expr"]


def test_every_query_is_over_known_series(board: dict[str, Any]) -> None:
    for query in find_queries(board):
        names = NAME.findall(query)
        assert names and set(names) <= SERIES, query
    definitions = [v["definition"] for v in board["templating"]["list"] if "definition" in v]
    assert {name for text in definitions for name in NAME.findall(text)} <= SERIES


def test_every_metric_is_shown(board: dict[str, Any]) -> None:
    shown = {name for query in find_queries(board) for name in NAME.findall(query)}
    assert SERIES - shown == set()


def test_rates_are_of_counters_and_gauges_are_not_rated(board: dict[str, Any]) -> None:
    for query in find_queries(board):
        for name in NAME.findall(query):
            is_rated = re.search(rf"(?:rate|increase)\({name}\{{", query) is not None
            assert is_rated == (name not in GAUGES), (name, query)
        assert ("histogram_quantile" in query) <= ("by (le)" in query), query


def test_queries_are_well_formed(board: dict[str, Any]) -> None:
    for query in find_queries(board):
        for left, right in ("()", "{}", "[]"):
            assert query.count(left) == query.count(right), query
        for selector in re.findall(r"\{(.*?)\}", query):
            assert re.fullmatch(r'\w+=~"\$\w+"(, \w+=~"\$\w+")*', selector), query
        labels = set(re.findall(r'(\w+)=~"', query))
        labels |= {
            name for group in re.findall(r"by \((.*?)\)", query) for name in group.split(", ")
        }
        assert labels <= LABELS, query


def test_variables_are_defined(board: dict[str, Any]) -> None:
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    used = set(re.findall(r"\$\{?(\w+)", json.dumps([board["panels"], board["templating"]])))
    assert used - {"__rate_interval", "__all"} == set(variables)


def test_panels_have_an_id_a_place_and_the_chosen_data_source(board: dict[str, Any]) -> None:
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    assert board["schemaVersion"] >= 39
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in find_panels(board):
        assert panel["title"] and panel["description"] and panel["targets"]
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert all(source["uid"] == "${datasource}" for source in sources)


def test_the_server_has_these_metrics() -> None:
    metrics = pytest.importorskip(
        "fulgurite.serve.http.metrics",
        reason="the server's packages are missing",
        exc_type=ImportError,
    )
    families = {f.name: f.type for f in metrics.Metrics("tiny").registry.collect()}
    kinds = {"histogram": HISTOGRAMS, "counter": COUNTERS, "gauge": GAUGES}
    for kind, names in kinds.items():
        bare = {name.removesuffix("_total") if kind == "counter" else name for name in names}
        assert {name for name in bare if families.get(name) != kind} == set(), kind
