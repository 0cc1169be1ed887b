"""What llguidance reads less exactly than validators do, written in other words: a schema in and out.

    format                 schema_formats.py: patterns, or nothing where JSON Schema says nothing
    names of properties    schema_names.py
    uniqueItems, contains  schema_arrays.py
    \\W, \\D, \\S in patterns  regex_classes.py: what all libraries match
    bounds of numbers      at most ±10^15, for integers 2^63 - 1: llguidance refuses more

A rewritten schema allows nothing that the original does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fulgurite.serve.structured.regex_classes import narrow_classes
from fulgurite.serve.structured.schema_arrays import rewrite_arrays
from fulgurite.serve.structured.schema_formats import rewrite_format
from fulgurite.serve.structured.schema_names import rewrite_names

INTEGERS = -(2**63 - 1024), 2**63 - 1  # llguidance rounds to float64, and can't use -2^63
NUMBERS = -(10**15), 10**15
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")

# Keywords whose values are schemas, lists of schemas, and schemas by name. Others are data.
SCHEMAS = frozenset(
    ("items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not", "if")
    + ("then", "else", "unevaluatedItems", "unevaluatedProperties")
)
LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
NAMED = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
)


def rewrite_schema(schema: Any) -> Any:
    """The schema in words that llguidance reads exactly. Its nesting was checked."""
    return rewrite_part(schema, schema)


def rewrite_part(schema: Any, root: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    named = dict(schema)
    rewrite_names(named, root)
    rewrite_arrays(named, root)
    rewritten = {name: rewrite_value(name, value, root) for name, value in named.items()}
    clamp_bounds(rewritten)
    if isinstance(rewritten.get("pattern"), str):
        rewritten["pattern"] = narrow_classes(rewritten["pattern"])
    rewrite_format(rewritten)
    return rewritten


def rewrite_value(name: str, value: Any, root: Any) -> Any:
    if name in LISTS and isinstance(value, list):
        return [rewrite_part(one, root) for one in value]
    if name in NAMED and isinstance(value, Mapping):
        rename = narrow_classes if name == "patternProperties" else str
        return {rename(key): rewrite_part(one, root) for key, one in value.items()}
    return rewrite_part(value, root) if name in SCHEMAS else value


def find_keyword(schema: Any, keyword: str) -> str | None:
    """The path of the first schema that has this keyword: #/properties/tags."""
    stack: list[tuple[str, Any]] = [("#", schema)]
    while stack:
        path, part = stack.pop()
        if not isinstance(part, dict):
            continue
        if keyword in part:
            return path
        for name, value in part.items():
            if name in LISTS and isinstance(value, list):
                stack += [(f"{path}/{name}/{index}", one) for index, one in enumerate(value)]
            elif name in NAMED and isinstance(value, Mapping):
                stack += [(f"{path}/{name}/{key}", one) for key, one in value.items()]
            elif name in SCHEMAS:
                stack.append((f"{path}/{name}", value))
    return None


def clamp_bounds(schema: dict[str, Any]) -> None:
    """Narrow the bounds that are further than llguidance's."""
    least, most = INTEGERS if schema.get("type") == "integer" else NUMBERS
    for name in (*LOWER, *UPPER):
        value = schema.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if name in LOWER and value < least:
            schema[name] = least
        elif name in UPPER and value > most:
            schema[name] = most
