"""Errors of the HTTP interface: an `ApiError` in, a JSON body in OpenAI's or Anthropic's shape out.

Messages say what is wrong and what to do. They have no internals: an unexpected error is logged with
its traceback, and the client gets its request id.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fulgurite.errors import ArgumentError
from fulgurite.serve.remote.client import EngineError, RequestRejected
from fulgurite.serve.remote.messages import Finish

TYPES = {  # by status
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    501: "not_implemented_error",
    503: "overloaded_error",
    504: "timeout_error",
}
ID_HEADERS = ("x-request-id", "request-id")  # where the clients of OpenAI and Anthropic look for it
ANTHROPIC_PATH = "/v1/messages"  # errors of these paths have Anthropic's shape
# The openai and anthropic clients retry 408, 409, 429 and 5xx unless this header says otherwise.
NO_RETRY = {"x-should-retry": "false"}


class ApiError(Exception):
    """A refused or failed request."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """`details`: what Anthropic's clients read to go on in another way."""
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})
        self.details = details

    @property
    def type(self) -> str:
        return TYPES.get(self.status, "server_error")

    def to_openai(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def to_anthropic(self, request_id: str) -> dict[str, Any]:
        kinds = {"server_error": "api_error", "conflict_error": "invalid_request_error"}
        kind = "request_too_large" if self.status == 413 else kinds.get(self.type, self.type)
        error: dict[str, Any] = {"type": kind, "message": self.message}
        if self.details is not None:
            error["details"] = self.details
        return {"type": "error", "error": error, "request_id": request_id}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Status 400: the request can't be right."""
    return ApiError(400, message, param=param, code=code)


def to_api_error(error: Exception) -> ApiError | None:
    """The ApiError of an error that a request can cause; None: a bug, or a failure of the server."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestRejected | ArgumentError):
        return ApiError(400, error.one_line())
    if isinstance(error, EngineError):
        return ApiError(503, error.one_line(), code="engine_error", headers={"retry-after": "1"})
    return None


def finish_error(finish: Finish) -> ApiError:
    """The error of a generation that ended without a reply, by its cause."""
    message = finish.error or f"the request was {finish.reason}"
    if finish.cause == "request":  # the same request would fail again
        return ApiError(400, message)
    if finish.cause == "ranks":  # they are restarted
        return ApiError(503, message, code="engine_error", headers={"retry-after": "1"})
    return ApiError(500, message, code="engine_error")


def too_late(message: str) -> ApiError:
    """Status 504: a deadline has passed. A retry would come too late, too."""
    return ApiError(504, message, code="deadline_exceeded", headers=NO_RETRY)


def overloaded(message: str, retry_after: float, code: str = "overloaded") -> ApiError:
    """Status 429, with the seconds after which the request may be sent again."""
    seconds = max(1, min(600, round(retry_after + 0.5)))
    return ApiError(429, message, code=code, headers={"retry-after": str(seconds)})
