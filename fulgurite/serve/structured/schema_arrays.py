"""Rules about items of arrays that llguidance does not know, in words that it knows.

    uniqueItems: true      with an enum of few values as items: the arrays, written out
    contains: s            the items after `prefixItems` begin with `minContains` items of s

What can't be written so stays, and llguidance refuses it.
"""

from __future__ import annotations

from itertools import permutations
from math import perm
from typing import Any

from fulgurite.serve.structured.schema_names import find_reference

MAX_ARRAYS = 2_000  # that are written out: those of 6 values


def rewrite_arrays(schema: dict[str, Any], root: Any) -> None:
    """`root`: the whole schema, for references."""
    if schema.get("type") != "array":
        return
    if schema.get("uniqueItems") is False or is_short(schema):
        schema.pop("uniqueItems", None)
    rewrite_contains(schema)
    if schema.get("uniqueItems") is True:
        rewrite_unique_items(schema, root)


def is_short(schema: dict[str, Any]) -> bool:
    """Whether arrays have one item at most."""
    return schema.get("maxItems") in (0, 1) and schema.get("uniqueItems") is True


def rewrite_contains(schema: dict[str, Any]) -> None:
    count = schema.get("minContains", 1)
    if "contains" not in schema or "maxContains" in schema or not isinstance(count, int):
        return
    wanted, items, prefix = schema["contains"], schema.get("items", True), schema.get("prefixItems")
    if isinstance(items, list) or not isinstance(prefix or [], list) or count > MAX_ARRAYS:
        return
    del schema["contains"]
    schema.pop("minContains", None)
    if count <= 0:
        return
    both = wanted if items is True else {"allOf": [wanted, items]}
    schema["prefixItems"] = [*(prefix or []), *[both] * count]
    least, given = len(schema["prefixItems"]), schema.get("minItems")
    schema["minItems"] = max(least, given) if isinstance(given, int) else least


def rewrite_unique_items(schema: dict[str, Any], root: Any) -> None:
    items = schema.get("items")
    values = list_values(find_reference(items, root)) if isinstance(items, dict) else None
    others = {*schema} - {"type", "items", "uniqueItems", "minItems", "maxItems", "$defs"}
    if values is None or others - {"title", "description", "default"}:
        return
    least, most = schema.get("minItems", 0), schema.get("maxItems", len(values))
    if not isinstance(least, int) or not isinstance(most, int):
        return
    lengths = range(max(least, 0), min(most, len(values)) + 1)
    if sum(perm(len(values), length) for length in lengths) > MAX_ARRAYS:
        return
    arrays = [list(one) for length in lengths for one in permutations(values, length)]
    for name in ("type", "items", "uniqueItems", "minItems", "maxItems"):
        schema.pop(name, None)
    schema["enum"] = arrays


def list_values(items: dict[str, Any]) -> list[Any] | None:
    """The different texts of an enum; None without one, or with other rules or values beside it."""
    if items.get("type") == "boolean" and "enum" not in items:
        return [True, False]
    values, others = items.get("enum"), {*items} - {"type", "enum", "title", "description"}
    if others or not isinstance(values, list) or items.get("type", "string") != "string":
        return None
    return [*dict.fromkeys(values)] if all(isinstance(one, str) for one in values) else None
