"""Schemas whose words llguidance reads less exactly than validators do."""

from __future__ import annotations

import datetime
import json
from typing import Any

import jsonschema
import pytest

from fulgurite.errors import ArgumentError
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
    names = {"properties": {"format": {"format": "email"}, "const": {"format": "date"}}}
    rewritten = rewrite_schema(names)["properties"]
    assert rewritten["format"] == {"format": "email"} and "pattern" in rewritten["const"]
    assert rewrite_schema({"exclusiveMinimum": True, "format": 5}) == {
        "exclusiveMinimum": True,
        "format": 5,
    }


FORMATS: dict[str, tuple[list[str], list[str]]] = {
    "json-pointer": (["", "/a/~0~1/0"], ["a", "/~2", "/~"]),
    "relative-json-pointer": (["0", "1/a", "12#"], ["01", "-1", "#"]),
    "regex": (["^a+$", r"\d[a-z]", "(ab|c)?x"], ["(", "[", "*a", "a**"]),
    "uri-template": (["/a/{id}", "x"], ["{", "{}", "a}"]),
    "idn-email": (["a@b.org"], ["a", "@"]),
    "uri-reference": (["http://a.b/c"], ["\\"]),
    "uuid": (["01234567-89ab-cdef-0123-456789abcdef"], ["01234567-89ab-cdef-0123-456789abcde"]),
    "uuid4": (["01234567-89ab-4def-8123-456789abcdef"], ["01234567-89ab-cdef-0123-456789abcdef"]),
    "base64": (["", "YQ==", "YWI=", "YWJj"], ["YQ", "YR==", "YWJ=", "a-=="]),
    "ipv4network": (["10.0.0.255/32"], ["256.0.0.1/32", "10.0.0.1/8"]),
    "password": (["anything"], []),
    "int32": (["anything"], []),
    "x-made-up": (["anything"], []),
}


@pytest.mark.parametrize("format", FORMATS)
def test_formats(format: str) -> None:
    schema = {"type": "string", "format": format}
    good, bad = FORMATS[format]
    assert all(accepts(schema, one) for one in good)
    assert not any(accepts(schema, one) for one in bad)


FLAG = {"type": "boolean"}
NAMES: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    (
        {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": FLAG},
        [{}, {"a": True}, {"a": True, "b": False}],
        [{"c": True}, {"a": 1}],
    ),
    (
        {"propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"const": "k"}}},
        [{}, {"k": 1}],
        [{"a": 1}],
    ),
    (
        {"propertyNames": {"enum": ["a", "b"]}, "properties": {"a": FLAG, "c": FLAG}},
        [{"a": True, "b": 1}],
        [{"a": 1}, {"c": True}],
    ),
    (
        {"propertyNames": {"pattern": "^x"}, "additionalProperties": FLAG},
        [{}, {"x1": True}],
        [{"y": True}],
    ),
    ({"propertyNames": {"format": "uuid"}}, [{}], [{"a": 1}]),
    ({"propertyNames": {"minLength": 2, "maxLength": 3}}, [{"ab": 1}], [{"a": 1}, {"abcd": 1}]),
    ({"propertyNames": {"type": "string"}, "additionalProperties": FLAG}, [{"a": True}], []),
    (
        {"properties": {"a": FLAG, "b": FLAG}, "dependentRequired": {"a": ["b"]}},
        [{}, {"b": True}, {"a": True, "b": True}],
        [{"a": True}],
    ),
    (
        {
            "properties": {"a": FLAG, "b": FLAG, "c": FLAG},
            "dependencies": {"a": ["b"], "b": ["c"]},
            "allOf": [{"required": ["c"]}],
        },
        [{"c": True}, {"b": True, "c": True}],
        [{}, {"a": True, "c": True}],
    ),
]


@pytest.mark.parametrize("rules, good, bad", NAMES)
def test_names_of_properties(rules: dict[str, Any], good: list[Any], bad: list[Any]) -> None:
    schema = {"type": "object", **rules}
    validator = jsonschema.Draft202012Validator(
        {name: value for name, value in schema.items() if name != "dependencies"}
    )
    assert all(validator.is_valid(one) for one in good)
    assert all(accepts(schema, one) for one in good)
    assert not any(accepts(schema, one) for one in bad)


@pytest.mark.parametrize(
    "rules",
    [
        {"propertyNames": {"not": {"const": "a"}}},
        {"propertyNames": {"pattern": "a", "maxLength": 3}},
        {"propertyNames": {"pattern": "a"}, "properties": {"b": {}}},
        {"dependentSchemas": {"a": {"required": ["b"]}}},
    ],
)
def test_rules_that_can_not_be_written_are_refused(rules: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="can't be used"):
        accepts({"type": "object", **rules}, {})


def test_the_schema_of_a_request_is_not_changed() -> None:
    schema = {"type": "object", "propertyNames": {"const": "a"}, "dependentRequired": {"a": ["b"]}}
    before = json.dumps(schema)
    rewrite_schema(schema)
    assert json.dumps(schema) == before


COLORS = {"enum": ["red", "green", "blue"], "type": "string"}
UNIQUE = {"type": "array", "items": COLORS, "uniqueItems": True}
ARRAYS = ([], ["red"], ["blue", "green"], ["red", "red"], ["green", "red", "blue"], ["red"] * 4)


@pytest.mark.parametrize(
    "schema",
    [
        UNIQUE,
        {**UNIQUE, "minItems": 1, "maxItems": 2},
        {**UNIQUE, "items": {"$ref": "#/$defs/c"}, "$defs": {"c": COLORS}},
        {**UNIQUE, "uniqueItems": False},
        {"type": "array", "items": COLORS, "maxItems": 1, "uniqueItems": True},
    ],
)
def test_unique_items(schema: dict[str, Any]) -> None:
    """Exactly the arrays of the schema."""
    validator = jsonschema.Draft202012Validator(schema)
    for value in ARRAYS:
        assert accepts(schema, value) == validator.is_valid(value), value


@pytest.mark.parametrize(
    "schema, values",
    [
        ({"type": "array", "contains": {"const": 1}}, [[1], [1, "x", None]]),
        (
            {"type": "array", "items": {"type": "integer"}, "contains": {"minimum": 5}},
            [[5], [9, 1, 2]],
        ),
        ({"type": "array", "contains": {"const": 1}, "minContains": 2, "maxItems": 3}, [[1, 1, 2]]),
        (
            {"type": "array", "prefixItems": [{"type": "null"}], "contains": {"const": 1}},
            [[None, 1], [None, 1, 5]],
        ),
        ({"type": "array", "contains": {"const": 1}, "minContains": 0}, [[], [2]]),
    ],
)
def test_contains(schema: dict[str, Any], values: list[Any]) -> None:
    """What is allowed is valid: the items that are asked for come first."""
    validator = jsonschema.Draft202012Validator(schema)
    assert all(accepts(schema, one) and validator.is_valid(one) for one in values)
    for value in ([], [2], [2, 3], [None], [None, 2], ["x"], [4], [1], [2, 1], [1, 2], [[1]]):
        assert not accepts(schema, value) or validator.is_valid(value), value


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True},
        {"type": "array", "items": {"enum": list("abcdefgh")}, "uniqueItems": True},
        {"type": "array", "items": {"enum": [1, 1.0]}, "uniqueItems": True},
        {"uniqueItems": True},
        {"type": "array", "contains": {"const": 1}, "maxContains": 1},
        {"contains": {"const": 1}},
    ],
)
def test_rules_of_arrays_that_cannot_be_written(schema: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="at # is not supported"):
        tiny_compiler().check(GrammarSpec("json_schema", json.dumps(schema)))
