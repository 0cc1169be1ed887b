"""The ASGI application: routes, keys, limits, request ids, errors, access log.

Every request passes `handle`: it checks the API key in constant time, runs the endpoint, and turns
errors into JSON. Nothing unexpected reaches the client but a request id.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from fulgurite.logs import LOG
from fulgurite.serve.http.access_log import AccessLog
from fulgurite.serve.http.api import chat_completions, completions, messages, operations, responses
from fulgurite.serve.http.api.openapi import openapi
from fulgurite.serve.http.api.sampling import REQUEST_ID_PATTERN
from fulgurite.serve.http.asgi import Disconnected, error_response
from fulgurite.serve.http.config import ServerConfig
from fulgurite.serve.http.errors import ANTHROPIC_PATH, ID_HEADERS, ApiError, to_api_error
from fulgurite.serve.http.page import ROUTES as PAGE_ROUTES
from fulgurite.serve.http.page import make_page_headers, read_page
from fulgurite.serve.http.server import ClientFactory, Server, new_id
from fulgurite.serve.http.tracing import Tracer
from fulgurite.serve.remote.launch import LaunchedEngine

Endpoint = Callable[[Request, Server], Awaitable[Response]]

ENDPOINTS: dict[tuple[str, str], Endpoint] = {
    ("POST", "/v1/chat/completions"): chat_completions.create_chat_completion,
    ("POST", "/v1/completions"): completions.create_completion,
    ("POST", "/v1/responses"): responses.create_response,
    ("POST", "/v1/responses/input_tokens"): responses.count_input_tokens,
    ("GET", "/v1/responses/{id}"): responses.get_response,
    ("DELETE", "/v1/responses/{id}"): responses.delete_response,
    ("POST", "/v1/responses/{id}/cancel"): responses.cancel_response,
    ("GET", "/v1/responses/{id}/input_items"): responses.list_input_items,
    ("POST", "/v1/messages"): messages.create_message,
    ("POST", "/v1/messages/count_tokens"): messages.count_tokens,
    ("POST", "/v1/embeddings"): operations.create_embeddings,
    ("GET", "/v1/models"): operations.list_models,
    ("GET", "/v1/models/{model:path}"): operations.get_model,
    ("POST", "/tokenize"): operations.tokenize,
    ("POST", "/detokenize"): operations.detokenize,
    ("GET", "/metrics"): operations.metrics,
    ("GET", "/audit"): operations.audit,
    ("GET", "/version"): operations.version,
    ("GET", "/openapi.json"): openapi,
    ("GET", "/health"): operations.health,
    ("GET", "/ping"): operations.health,
}
# Without a key: they tell nothing about requests, and load balancers and browsers need them.
OPEN_PATHS = frozenset({"/health", "/ping", *PAGE_ROUTES})
REQUEST_ID = re.compile(REQUEST_ID_PATTERN)


class KeyChecker:
    """Compares keys in constant time: digests, and with every key, whatever the first ones gave."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self.keys = [hashlib.sha256(key.encode()).digest() for key in keys]

    def check(self, request: Request) -> str:
        """The name of the key for fair queueing; ApiError 401 if there is none."""
        if not self.keys:
            return request.client.host if request.client is not None else ""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else ""
        given = given or request.headers.get("x-api-key", "")
        digest = hashlib.sha256(given.encode("latin-1")).digest()  # headers were decoded as latin-1
        found = -1
        for index, key in enumerate(self.keys):
            if hmac.compare_digest(key, digest):
                found = index
        if found < 0:
            raise ApiError(
                401,
                "Incorrect API key provided. Send 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return f"key {found}"


class Handler:
    """Runs one endpoint as an ASGI application."""

    def __init__(self, app: App, path: str, endpoint: Endpoint) -> None:
        self.app, self.path, self.endpoint = app, path, endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        start, status = time.perf_counter(), 0
        id = read_request_id(request)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                ids = [(name.encode(), id.encode()) for name in ID_HEADERS]
                message["headers"] = [*message["headers"], *ids]
            await send(message)

        with self.app.tracer.span(request, self.path, id) as span:
            try:
                response = await self._respond(request, id)
                await response(scope, receive, send_with_id)
            except Disconnected:
                status = status or 499
                self.app.server.metrics.disconnects.inc()
            except Exception as error:  # the client gets an id, the log the error
                LOG.exception("%s %s %s failed: %s", request.method, self.path, id, error)
                if status == 0:
                    await self._fail(request, id)(scope, receive, send_with_id)
            span.set_status(status)
        seconds = time.perf_counter() - start
        self.app.access_log.write(request, self.path, id, status, seconds)

    async def _respond(self, request: Request, id: str) -> Response:
        is_anthropic = self.path.startswith(ANTHROPIC_PATH)
        try:
            if self.path not in OPEN_PATHS:
                request.state.key = self.app.keys.check(request)
            request.state.id = id
            return await self.endpoint(request, self.app.server)
        except Exception as error:  # what a request can cause has a status; the rest goes on
            failure = to_api_error(error)
            if failure is None:
                raise
            return error_response(failure, id, is_anthropic)

    def _fail(self, request: Request, id: str) -> Response:
        failure = ApiError(500, f"internal error; the server's log has it under request {id}")
        return error_response(failure, id, self.path.startswith(ANTHROPIC_PATH))


def read_request_id(request: Request) -> str:
    given = request.headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else new_id("req-")


class App:
    """The server with its routes. `asgi` is what uvicorn runs."""

    def __init__(
        self,
        config: ServerConfig,
        make_client: ClientFactory | None = None,
        launched: Sequence[LaunchedEngine] = (),
    ) -> None:
        self.config = config
        self.server = Server(config, make_client, launched)
        self.keys = KeyChecker(config.api_keys)
        self.access_log = AccessLog(config.access_log)
        self.tracer = Tracer()
        routes = [
            Route(path, Handler(self, path, endpoint), methods=[method])
            for (method, path), endpoint in ENDPOINTS.items()
        ]
        routes += [
            Route(path, Handler(self, path, partial(send_page, name)), methods=["GET"])
            for path, name in PAGE_ROUTES.items()
        ]
        middleware = []
        if config.allow_origins:
            cors = Middleware(
                CORSMiddleware,
                allow_origins=list(config.allow_origins),
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=[*ID_HEADERS, "retry-after", "x-should-retry"],
            )
            middleware.append(cors)
        self.asgi = Starlette(
            routes=routes,
            middleware=middleware,
            lifespan=self.lifespan,
            exception_handlers={HTTPException: self.handle_http_error},
        )
        self.asgi.router.redirect_slashes = False  # a redirect would name the host of the request

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Engines are loaded before the first request is read, and closed after the last one."""
        await self.server.start()
        try:
            yield
        finally:
            await asyncio.shield(self.server.close())

    async def handle_http_error(self, request: Request, error: Exception) -> Response:
        """Unknown paths and methods, in the same shape as other errors; keys are checked first."""
        assert isinstance(error, HTTPException), "registered for HTTPException"
        id = read_request_id(request)
        path = request.url.path
        text = f"{request.method} {path[:100]} is not served here{suggest_base_url(path)}"
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "").replace("GET, HEAD", "GET")
            text += f"; use {allowed}" if allowed else ""
        failure = ApiError(error.status_code, text)
        try:
            if path not in OPEN_PATHS:
                self.keys.check(request)
        except ApiError as refused:
            failure = refused
        if error.headers:
            failure.headers.update(error.headers)
        failure.headers.update(dict.fromkeys(ID_HEADERS, id))
        return error_response(failure, id, path.startswith(ANTHROPIC_PATH))


def suggest_base_url(path: str) -> str:
    """What to change if only the client's base URL, or a slash, is wrong."""
    plain = "/" + "/".join(filter(None, path.split("/")))
    if plain != path and any(plain == known for _, known in ENDPOINTS):
        return f": the path is {plain}, without other slashes"
    if any(f"/v1{path}" == known for _, known in ENDPOINTS):
        return ": add /v1 to the client's base URL"
    if any(path == f"/v1{known}" for _, known in ENDPOINTS if known.startswith("/v1")):
        return ": leave /v1 out of the client's base URL"
    return ""


async def send_page(name: str, request: Request, server: Server) -> Response:
    return Response(read_page(name), headers=make_page_headers(name))


def create_app(
    config: ServerConfig,
    make_client: ClientFactory | None = None,
    launched: Sequence[LaunchedEngine] = (),
) -> App:
    """`make_client`: where the engines are; None: on this machine. `launched`: those that load already."""
    return App(config, make_client, launched)
