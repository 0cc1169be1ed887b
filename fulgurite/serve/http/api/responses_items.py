"""`GET /v1/responses/{id}/input_items`: what a response was made from, in pages.

These are the items of its own input, after the inputs and outputs of the responses that it continues.
Items get ids when the response is stored, so that pages can begin after one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fulgurite.serve.http.errors import ApiError, invalid
from fulgurite.serve.http.response_store import StoredResponse
from fulgurite.serve.http.server import new_id

ID_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
}
DEFAULT_LIMIT, MAX_LIMIT = 20, 100
ORDERS = ("asc", "desc")


def collect_items(
    given: str | Sequence[Mapping[str, Any]], previous: StoredResponse | None
) -> tuple[Mapping[str, Any], ...]:
    """All items before a reply, the oldest first. `given`: the input of the request, checked."""
    own = [{"role": "user", "content": given}] if isinstance(given, str) else given
    before: Sequence[Mapping[str, Any]] = ()
    if previous is not None:
        before = (*previous.input_items, *previous.response["output"])
    return (*before, *map(complete_item, own))


def complete_item(item: Mapping[str, Any]) -> dict[str, Any]:
    """An item of a request with its type, id and status, and its content as parts."""
    kind = item.get("type") or "message"
    completed = {**item, "type": kind}
    if not isinstance(item.get("id"), str) or not item["id"]:
        completed["id"] = new_id(ID_PREFIXES[kind])
    if not isinstance(item.get("status"), str):
        completed["status"] = "completed"
    if kind == "message" and isinstance(item.get("content"), str):
        part = "output_text" if item["role"] == "assistant" else "input_text"
        completed["content"] = [{"type": part, "text": item["content"]}]
        if part == "output_text":
            completed["content"][0]["annotations"] = []
    return completed


def describe_page(items: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """A page of items; the newest come first unless `order` is asc."""
    limit, order, after = query.get("limit", ""), query.get("order", "desc"), query.get("after")
    if order not in ORDERS:
        raise invalid(f"'order' must be {' or '.join(ORDERS)}", "order")
    count = read_limit(limit)
    ordered = list(items) if order == "asc" else list(reversed(items))
    start = 0
    if after is not None:
        found = [index for index, item in enumerate(ordered) if item["id"] == after]
        if not found:
            raise ApiError(404, f"there is no item '{after[:100]}' in this response", param="after")
        start = found[0] + 1
    page = ordered[start : start + count]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + count < len(ordered),
    }


def read_limit(text: str) -> int:
    if not text:
        return DEFAULT_LIMIT
    is_number = text.isascii() and text.isdigit() and len(text) < 10
    if not is_number or not 1 <= int(text) <= MAX_LIMIT:
        raise invalid(f"'limit' must be 1 to {MAX_LIMIT}", "limit")
    return int(text)
