"""`GET /openapi.json`: the endpoints and the Structs of their bodies in, an OpenAPI 3.1 document out.

Bodies are described by the Structs that validate them, with the additions of openapi_schemas.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fulgurite.serve.http.api.chat_completions import ChatCompletionRequest
from fulgurite.serve.http.api.completions import CompletionRequest
from fulgurite.serve.http.api.messages import CountTokensRequest, MessageRequest
from fulgurite.serve.http.api.openapi_schemas import (
    ANTHROPIC_ERROR,
    DETAILS,
    OPENAI_ERROR,
    Schema,
)
from fulgurite.serve.http.api.operations import (
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from fulgurite.serve.http.api.responses_request import ResponseRequest
from fulgurite.serve.http.asgi import JsonResponse
from fulgurite.serve.http.server import Server
from fulgurite.version import VERSION

REFERENCE = "#/components/schemas/{name}"
PLACEHOLDER = "{model}"  # in examples: the name of the served model
JSON, TEXT, EVENTS = "application/json", "text/plain", "text/event-stream"
ERRORS = {
    400: "The request can't be right; `param` names the field",
    401: "The API key is missing or wrong",
    404: "There is no such model, response or path",
    413: "The body is too large",
    415: "The body is no JSON, by its content-type",
    429: "Too many requests wait; `Retry-After` says when to come back",
    500: "The server failed; its log has the request under its id",
    501: "This server's engine can't do that",
    503: "No engine is ready, or the server shuts down",
    504: "The deadline has passed",
}


@dataclass(frozen=True)
class Operation:
    """One endpoint.

    body      the Struct of the request; None: it has none
    example   a body that works
    keys      that a successful reply has at least
    produces  media types of a successful reply
    parameters  of the query: name → schema
    also      further statuses, with the keys of `keys`
    """

    summary: str
    body: type[msgspec.Struct] | None = None
    example: Any = None
    keys: tuple[str, ...] = ()
    produces: tuple[str, ...] = (JSON,)
    parameters: tuple[tuple[str, str], ...] = ()
    needs_key: bool = True
    also: tuple[int, ...] = ()


USER = {"role": "user", "content": "Hello"}
USAGE = ("id", "object", "model", "choices", "usage")
RESPONSE = ("id", "object", "status", "output", "model")
OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        "Answer a conversation",
        ChatCompletionRequest,
        {"model": PLACEHOLDER, "messages": [USER], "max_tokens": 8},
        USAGE,
        (JSON, EVENTS),
    ),
    ("POST", "/v1/completions"): Operation(
        "Continue a text",
        CompletionRequest,
        {"model": PLACEHOLDER, "prompt": "Hello", "max_tokens": 8},
        USAGE,
        (JSON, EVENTS),
    ),
    ("POST", "/v1/responses"): Operation(
        "Make a response",
        ResponseRequest,
        {"model": PLACEHOLDER, "input": "Hello", "max_output_tokens": 16},
        RESPONSE,
        (JSON, EVENTS),
    ),
    ("POST", "/v1/responses/input_tokens"): Operation(
        "Count the tokens of a response's prompt",
        ResponseRequest,
        {"model": PLACEHOLDER, "input": "Hello"},
        ("object", "input_tokens"),
    ),
    ("GET", "/v1/responses/{id}"): Operation(
        "Read a stored response, or follow its events",
        keys=RESPONSE,
        produces=(JSON, EVENTS),
        parameters=(("stream", "boolean"), ("starting_after", "integer")),
    ),
    ("DELETE", "/v1/responses/{id}"): Operation(
        "Delete a stored response", keys=("id", "object", "deleted")
    ),
    ("POST", "/v1/responses/{id}/cancel"): Operation(
        "Cancel a response in the background", keys=RESPONSE
    ),
    ("GET", "/v1/responses/{id}/input_items"): Operation(
        "List what a stored response was made from",
        keys=("object", "data", "first_id", "last_id", "has_more"),
        parameters=(("limit", "integer"), ("order", "string"), ("after", "string")),
    ),
    ("POST", "/v1/messages"): Operation(
        "Answer a conversation, in Anthropic's form",
        MessageRequest,
        {"model": PLACEHOLDER, "max_tokens": 8, "messages": [USER]},
        ("id", "type", "role", "content", "stop_reason", "usage"),
        (JSON, EVENTS),
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        "Count the tokens of a conversation",
        CountTokensRequest,
        {"model": PLACEHOLDER, "messages": [USER]},
        ("input_tokens",),
    ),
    ("POST", "/v1/embeddings"): Operation(
        "Embed texts",
        EmbeddingRequest,
        {"model": PLACEHOLDER, "input": "Hello"},
        ("object", "data", "model", "usage"),
    ),
    ("GET", "/v1/models"): Operation("List the served models", keys=("object", "data")),
    ("GET", "/v1/models/{model:path}"): Operation("Describe a model", keys=("id", "object")),
    ("POST", "/tokenize"): Operation(
        "Text or a conversation to tokens",
        TokenizeRequest,
        {"model": PLACEHOLDER, "prompt": "Hello"},
        ("count", "tokens", "max_model_len"),
    ),
    ("POST", "/detokenize"): Operation(
        "Tokens to text", DetokenizeRequest, {"tokens": [1, 2, 3]}, ("prompt",)
    ),
    ("GET", "/metrics"): Operation("Prometheus metrics", produces=(TEXT,)),
    ("GET", "/audit"): Operation("What requests have left behind", keys=("server",)),
    ("GET", "/version"): Operation("The server's version", keys=("version",)),
    ("GET", "/openapi.json"): Operation("This document", keys=("openapi", "paths")),
    ("GET", "/health"): Operation(
        "Whether requests can be served", keys=("status", "engines"), needs_key=False, also=(503,)
    ),
    ("GET", "/ping"): Operation(
        "The same as /health", keys=("status", "engines"), needs_key=False, also=(503,)
    ),
}


async def openapi(request: Request, server: Server) -> Response:
    """Handle a request."""
    return JsonResponse(build_document(server.config.model_names, bool(server.config.api_keys)))


def build_document(model_names: tuple[str, ...], needs_key: bool) -> Schema:
    bodies = [one.body for one in OPERATIONS.values() if one.body is not None]
    _, components = msgspec.json.schema_components(bodies, ref_template=REFERENCE)
    for name, schema in components.items():
        add_details(name, schema, model_names)
    components |= {"Error": OPENAI_ERROR, "AnthropicError": ANTHROPIC_ERROR}
    paths: dict[str, Schema] = {}
    for (method, route), operation in OPERATIONS.items():
        path = route.replace(":path}", "}")
        described = describe_operation(path, operation, model_names[0], needs_key)
        paths.setdefault(path, {})[method.lower()] = described
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Fulgurite", "version": VERSION},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": keys if needs_key else {}},
    }


def add_details(name: str, schema: Schema, model_names: tuple[str, ...]) -> None:
    """Describe the fields that a Struct leaves open."""
    for field, described in schema.get("properties", {}).items():
        if field == "model":
            options = described.get("anyOf", [described])
            names = {"enum": [*model_names, ""], "description": "Empty: the first served model."}
            nulls = [one for one in options if one == {"type": "null"}]
            described.clear()
            described["anyOf"] = [names, *nulls]
        element = DETAILS.get((name, field))
        if element is not None:
            for option in described.get("anyOf", [described]):
                if option.get("type") == "array":
                    option["items"] = element


def describe_operation(path: str, operation: Operation, model: str, needs_key: bool) -> Schema:
    is_anthropic = path.startswith("/v1/messages")
    error = REFERENCE.format(name="AnthropicError" if is_anthropic else "Error")
    responses: Schema = {
        str(status): {"description": text, "content": {JSON: {"schema": {"$ref": error}}}}
        for status, text in ERRORS.items()
    }
    for status in (200, *operation.also):
        responses[str(status)] = describe_success(operation)
    described: Schema = {"summary": operation.summary, "responses": responses}
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    parameters = [describe_parameter(name, "path", "string") for name in names]
    parameters += [describe_parameter(name, "query", type) for name, type in operation.parameters]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        described["requestBody"] = describe_body(operation, model)
    if needs_key and operation.needs_key:
        described["security"] = [{"bearer": []}, {"header": []}]
    return described


def describe_parameter(name: str, place: str, type: str) -> Schema:
    schema: Schema = {"type": type}
    if place == "path":
        schema["minLength"] = 1
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


def describe_success(operation: Operation) -> Schema:
    schemas: dict[str, Schema] = {
        JSON: {"schema": {"type": "object", "required": list(operation.keys)}},
        TEXT: {"schema": {"type": "string"}},
        EVENTS: {},  # OpenAPI 3.1 can't describe events
    }
    content = {kind: schemas[kind] for kind in operation.produces}
    return {"description": "Done", "content": content}


def describe_body(operation: Operation, model: str) -> Schema:
    assert operation.body is not None, "the operation has a body"
    example = dict(operation.example)
    if "model" in example:
        example["model"] = model
    schema = {"$ref": REFERENCE.format(name=operation.body.__name__)}
    return {"required": True, "content": {JSON: {"schema": schema, "example": example}}}
