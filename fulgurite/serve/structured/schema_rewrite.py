"""What llguidance reads less exactly than validators do, written in other words: a schema in and out.

    format: date, time, date-time    patterns: no February 29 without a leap year, no year 0, no second 60
    bounds of numbers                at most ±10^15, for integers 2^63 - 1: llguidance refuses more

A rewritten schema allows nothing that the original does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

YEAR = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
MONTH_AND_DAY = (
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
FOURS = "(0[48]|[2468][048]|[13579][26])"  # two digits that 4 divides, without 00
LEAP_DAY = f"([0-9]{{2}}{FOURS}|{FOURS}00)-02-29"
DATE = f"({YEAR}-{MONTH_AND_DAY}|{LEAP_DAY})"
HOUR_AND_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"
TIME = rf"{HOUR_AND_MINUTE}:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+-]{HOUR_AND_MINUTE})"
PATTERNS = {"date": f"^{DATE}$", "time": f"^{TIME}$", "date-time": f"^{DATE}T{TIME}$"}

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
    if not isinstance(schema, dict):
        return schema
    rewritten = {name: rewrite_value(name, value) for name, value in schema.items()}
    clamp_bounds(rewritten)
    format = rewritten.get("format")
    pattern = PATTERNS.get(format) if isinstance(format, str) else None
    if pattern is not None:
        del rewritten["format"]
        if "pattern" not in rewritten:
            rewritten["pattern"] = pattern
        else:
            others = rewritten.get("allOf")
            others = others if isinstance(others, list) else []
            rewritten["allOf"] = [*others, {"pattern": pattern}]
    return rewritten


def rewrite_value(name: str, value: Any) -> Any:
    if name in LISTS and isinstance(value, list):
        return [rewrite_schema(one) for one in value]
    if name in NAMED and isinstance(value, Mapping):
        return {key: rewrite_schema(one) for key, one in value.items()}
    return rewrite_schema(value) if name in SCHEMAS else value


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
