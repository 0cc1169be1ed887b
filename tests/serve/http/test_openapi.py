"""`/openapi.json`: it names every endpoint, and random requests of both kinds find no failure.

Positive requests follow the document, negative ones break it. Neither may cause a status 5xx, a status or
a body that the document does not have. A request that breaks the document must be refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.generation import GenerationMode

from fulgurite.serve.http.api.openapi import OPERATIONS, build_document
from fulgurite.serve.http.app import ENDPOINTS
from tests.serve.http.serving import MODEL, RunningServer, mock_config, serve

KEY = "test-key"
HEADERS = {"authorization": f"Bearer {KEY}"}
load_all_checks()
# A positive request may still be refused: JSON Schema can't say all, and random ids are unknown.
CHECK_NAMES = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
    "negative_data_rejection",
)
CHECKS_OF_CASES = CHECKS.get_by_names(CHECK_NAMES)
PATHS = [(method, path.replace(":path}", "}")) for method, path in OPERATIONS]
WITH_INPUT = [
    (method, path)
    for (method, path), operation in zip(PATHS, OPERATIONS.values(), strict=True)
    if operation.body is not None or "{" in path
]


@pytest.fixture(scope="module")
def keyed_server() -> Iterator[RunningServer]:
    with serve(mock_config(api_keys=(KEY,), max_tokens=4)) as server:
        yield server
        assert server.leaks() == {}


@pytest.fixture(scope="module")
def schema(keyed_server: RunningServer) -> Any:
    return schemathesis.openapi.from_url(f"{keyed_server.url}/openapi.json", headers=HEADERS)


def send_cases(schema: Any, method: str, path: str, mode: GenerationMode, count: int) -> None:
    """Send random requests to an endpoint and check the replies."""
    kinds = {}

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=schema[path][method].as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        response = case.call_and_validate(headers=HEADERS, checks=CHECKS_OF_CASES)
        kinds[response.status_code] = kinds.get(response.status_code, 0) + 1

    send()
    assert kinds, "no request was sent"


@pytest.mark.covering
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(("method", "path"), WITH_INPUT)
def test_random_requests(schema: Any, method: str, path: str, mode: GenerationMode) -> None:
    send_cases(schema, method, path, mode, 4)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(("method", "path"), WITH_INPUT)
def test_many_random_requests(schema: Any, method: str, path: str, mode: GenerationMode) -> None:
    send_cases(schema, method, path, mode, 200)


def test_document_has_every_endpoint(keyed_server: RunningServer) -> None:
    assert set(OPERATIONS) == set(ENDPOINTS)
    document = keyed_server.get("/openapi.json", headers=HEADERS).json()
    assert document["openapi"] == "3.1.0"
    described = {(m.upper(), path) for path, item in document["paths"].items() for m in item}
    assert described == set(PATHS)
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_examples_work(keyed_server: RunningServer) -> None:
    document = build_document((MODEL,), needs_key=True)
    for (method, route), operation in OPERATIONS.items():
        if operation.body is not None:
            body = document["paths"][route][method.lower()]["requestBody"]["content"]
            example = body["application/json"]["example"]
            reply = keyed_server.post(route, example, headers=HEADERS)
            assert reply.status_code == 200, (route, reply.text)
            assert set(operation.keys) <= set(reply.json())
        elif "{" not in route:
            reply = keyed_server.get(route, headers=HEADERS)
            assert reply.status_code == 200, route
            assert reply.headers["content-type"].partition(";")[0] in operation.produces


@pytest.mark.parametrize(
    ("status", "content", "media_type"),
    [
        (400, b"{", "application/json"),
        (413, b" " * ((4 << 20) + 1), "application/json"),
        (415, b"<a/>", "text/xml"),
    ],
)
def test_failures_of_bodies_are_documented(
    keyed_server: RunningServer, status: int, content: bytes, media_type: str
) -> None:
    document = build_document((MODEL,), needs_key=True)
    headers = {**HEADERS, "content-type": media_type}
    for (method, route), operation in OPERATIONS.items():
        if operation.body is not None:
            reply = httpx.request(
                method, keyed_server.url + route, content=content, headers=headers
            )
            assert reply.status_code == status, (route, reply.text)
            described = document["paths"][route][method.lower()]["responses"][str(status)]
            name = described["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            jsonschema.validate(reply.json(), document["components"]["schemas"][name])


def test_unknown_fields_are_refused_as_the_document_says() -> None:
    schemas = build_document((MODEL,), needs_key=False)["components"]["schemas"]
    for operation in OPERATIONS.values():
        if operation.body is not None:
            assert schemas[operation.body.__name__]["additionalProperties"] is False


@pytest.mark.parametrize(("method", "route"), OPERATIONS)
def test_key_is_needed_where_the_document_says(
    keyed_server: RunningServer, method: str, route: str
) -> None:
    path = route.replace("{id}", "resp_x").replace("{model:path}", MODEL)
    reply = httpx.request(method, keyed_server.url + path)
    document = build_document((MODEL,), needs_key=True)
    described = document["paths"][route.replace(":path}", "}")][method.lower()]
    assert (reply.status_code == 401) == ("security" in described)


def test_other_methods_are_refused(keyed_server: RunningServer) -> None:
    for route in dict.fromkeys(route for _, route in OPERATIONS):
        path = route.replace("{id}", "resp_x").replace("{model:path}", MODEL)
        reply = httpx.request("PATCH", keyed_server.url + path, headers=HEADERS)
        assert reply.status_code == 405, route
        assert "allow" in reply.headers
