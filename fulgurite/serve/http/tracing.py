"""OpenTelemetry spans of requests, if the package is installed; nothing otherwise.

The exporter and its address are set by OpenTelemetry's own variables (`OTEL_EXPORTER_OTLP_ENDPOINT`)
and by running the server under `opentelemetry-instrument`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request

HAS_OPENTELEMETRY = importlib.util.find_spec("opentelemetry") is not None
if HAS_OPENTELEMETRY:
    from opentelemetry import propagate, trace


def has_provider() -> bool:
    """Whether somebody collects spans. The API alone, which other packages bring, records nothing."""
    if not HAS_OPENTELEMETRY:
        return False
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


class Span:
    """One request's span; does nothing without OpenTelemetry."""

    def __init__(self, span: Any = None) -> None:
        self.span = span

    def set_status(self, status: int) -> None:
        if self.span is not None:
            self.span.set_attribute("http.response.status_code", status)
            if status >= 500:
                self.span.set_status(trace.StatusCode.ERROR)


class Tracer:
    """Makes a span for each request; its parent is that of the request's headers."""

    def __init__(self) -> None:
        self.tracer = trace.get_tracer("fulgurite") if has_provider() else None

    @contextmanager
    def span(self, request: Request, path: str, id: str) -> Iterator[Span]:
        if self.tracer is None:
            yield Span()
            return
        parent = propagate.extract(dict(request.headers))
        name = f"{request.method} {path}"
        kind = trace.SpanKind.SERVER
        with self.tracer.start_as_current_span(name, context=parent, kind=kind) as span:
            span.set_attribute("http.request.method", request.method)
            span.set_attribute("http.route", path)
            span.set_attribute("gen_ai.request.id", id)
            yield Span(span)
