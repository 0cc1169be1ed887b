"""Schemas whose words llguidance reads less exactly than validators do."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest

from fulgurite.serve.engine.grammar import GrammarSpec
from fulgurite.serve.structured.schema_rewrite import rewrite_schema
from tests.serve.structured.drivers import tiny_compiler


def accepts(schema: Any, value: Any) -> bool:
    """Whether a reply of this schema can be this value."""
    compiler = tiny_compiler()
    grammar = compiler.compile(GrammarSpec("json_schema", json.dumps(schema)))
    for token in compiler.tokenizer.encode(json.dumps(value), False):
        words = grammar.allowed_tokens().numpy()  # type: ignore[union-attr]
        if not words[token // 32] >> token % 32 & 1:
            return False
        grammar.accept_token(token)
    return grammar.is_accepting or grammar.is_complete


def is_date(text: str) -> bool:
    try:
        return bool(datetime.date.fromisoformat(text))
    except ValueError:
        return False


@pytest.mark.parametrize("year", ["0000", "0001", "0004", "1900", "2000", "2023", "2024", "9999"])
def test_dates_are_those_of_the_calendar(year: str) -> None:
    dates = [f"{year}-02-{day}" for day in (28, 29, 30)]
    dates += [f"{year}-{rest}" for rest in ("01-31", "04-30", "04-31", "12-31", "13-01", "00-10")]
    schema = {"type": "string", "format": "date"}
    assert [accepts(schema, one) for one in dates] == [is_date(one) for one in dates]


@pytest.mark.parametrize(
    "format, good, bad",
    [
        ("time", ["00:00:00Z", "23:59:59.25+05:30"], ["23:59:60Z", "24:00:00Z", "10:00:00"]),
        ("date-time", ["2024-02-29T00:00:00Z"], ["2023-02-29T00:00:00Z", "2024-01-01T00:00:60Z"]),
    ],
)
def test_times_of_day(format: str, good: list[str], bad: list[str]) -> None:
    schema = {"type": "string", "format": format}
    assert all(accepts(schema, one) for one in good)
    assert not any(accepts(schema, one) for one in bad)


def test_a_date_with_a_pattern_follows_both() -> None:
    schema = {"type": "string", "format": "date", "pattern": "^2", "allOf": [{"minLength": 1}]}
    assert accepts(schema, "2020-01-01")
    assert not accepts(schema, "1020-01-01") and not accepts(schema, "2023-02-29")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
        {"type": "integer", "exclusiveMinimum": -1e300, "exclusiveMaximum": 2**70},
        {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
        {"type": ["integer", "null"], "minimum": -(2**63)},
        {"type": "number", "maximum": 10**20},
    ],
)
def test_bounds_of_number_types(schema: Any) -> None:
    assert accepts(schema, 5) and accepts(schema, 2**71) == ("maximum" not in str(schema).lower())


def test_values_are_not_rewritten() -> None:
    data = {"format": "date", "maximum": 1e30, "allOf": [{"format": "time"}]}
    for schema in ({"const": data}, {"enum": [data]}, {"default": data, "examples": [data]}):
        assert rewrite_schema(schema) == schema
    names = {"properties": {"format": {"format": "uuid"}, "const": {"format": "date"}}}
    rewritten = rewrite_schema(names)["properties"]
    assert rewritten["format"] == {"format": "uuid"} and "pattern" in rewritten["const"]
    assert rewrite_schema({"exclusiveMinimum": True, "format": 5}) == {
        "exclusiveMinimum": True,
        "format": 5,
    }
