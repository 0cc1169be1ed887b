"""Spans of requests, with a provider that records them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("opentelemetry", reason="opentelemetry is missing")

from opentelemetry import trace
from starlette.requests import Request

from fulgurite.serve.http.tracing import Tracer

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
REQUEST = Request(
    {"type": "http", "method": "POST", "headers": [(b"traceparent", PARENT.encode())]}
)


class FakeSpan:
    def __init__(self) -> None:
        self.attributes: dict[str, Any] = {}
        self.status: Any = None

    def set_attribute(self, name: str, value: Any) -> None:
        self.attributes[name] = value

    def set_status(self, status: Any) -> None:
        self.status = status


class FakeTracer:
    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []
        self.span = FakeSpan()

    @contextmanager
    def start_as_current_span(self, name: str, **options: Any) -> Any:
        self.started.append({"name": name, **options})
        yield self.span


@pytest.mark.parametrize("status, is_error", [(200, False), (400, False), (503, True)])
def test_a_request_is_a_server_span_with_its_parent(status: int, is_error: bool) -> None:
    tracer, fake = Tracer(), FakeTracer()
    tracer.tracer = fake  # type: ignore[assignment]
    with tracer.span(REQUEST, "/v1/completions", "req-1") as span:
        span.set_status(status)
    (started,) = fake.started
    assert started["name"] == "POST /v1/completions"
    assert started["kind"] is trace.SpanKind.SERVER
    parent = trace.get_current_span(started["context"]).get_span_context()
    assert f"{parent.trace_id:032x}-{parent.span_id:016x}" == PARENT[3:-3]
    assert fake.span.attributes["http.response.status_code"] == status
    assert (fake.span.status is trace.StatusCode.ERROR) == is_error


def test_nothing_is_recorded_without_a_provider() -> None:
    tracer = Tracer()
    assert tracer.tracer is None
    with tracer.span(REQUEST, "/", "req-1") as span:
        span.set_status(500)
