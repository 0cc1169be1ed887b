"""Random JSON schemas of many kinds, from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
NAMES = (
    "id",
    "name",
    "äöü",
    "日本",
    "a b",
    'quo"te',
    "back\\slash",
    "x-y",
    "emoji😀",
    "",
    "/",
    "~",
)
PATTERNS = ("^[a-z]{2,5}$", "^[0-9]{3}-[0-9]{4}$", "^(yes|no)$", "^[A-Z][a-z]*$", "ab+c", "^é?x$")
FORMATS = (
    "date",
    "uuid",
    "email",
    "date-time",
    "time",
    "ipv4",
    "ipv6",
    "hostname",
    "duration",
    "uri",
)
VALUES: tuple[Any, ...] = (
    0,
    -3,
    2.5,
    True,
    None,
    "text",
    'ü\n\t"',
    [],
    [1, "a"],
    {},
    {"k": [None]},
)


def make_schema(seed: int) -> Schema:
    """The schema of a seed; some have recursive definitions."""
    rng = random.Random(seed)
    if seed % 10 == 9:
        return make_recursive(rng)
    return make_value(rng, rng.randrange(4))


def make_value(rng: random.Random, depth: int) -> Schema:
    simple = (string, number, integer, constant, enumeration, nullable, boolean)
    nested = (obj, obj, array, tuple_array, any_of, one_of, all_of, map_of, patterned, extended)
    kind: Callable[[random.Random, int], Schema] = rng.choice(nested if depth > 0 else simple)
    return kind(rng, depth - 1)


def string(rng: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "string"}
    kind = rng.randrange(5)
    if kind == 0:
        schema["minLength"] = rng.randrange(4)
        schema["maxLength"] = schema["minLength"] + rng.randrange(6)
    elif kind == 1:
        schema["pattern"] = rng.choice(PATTERNS)
    elif kind == 2:
        schema["format"] = rng.choice(FORMATS)
    elif kind == 3:
        schema["maxLength"] = rng.randrange(12)
    return schema


def number(rng: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "number"}
    low = rng.choice((-10.5, -1, 0, 0.25, 3))
    if rng.random() < 0.7:
        schema[rng.choice(("minimum", "exclusiveMinimum"))] = low
    if rng.random() < 0.7:
        schema[rng.choice(("maximum", "exclusiveMaximum"))] = low + rng.choice((1, 2.5, 100))
    return schema


def integer(rng: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "integer"}
    low = rng.randrange(-200, 200)
    if rng.random() < 0.7:
        schema["minimum"] = low
    if rng.random() < 0.7:
        schema["maximum"] = low + rng.randrange(10, 1000)
    if rng.random() < 0.2:
        schema["multipleOf"] = rng.choice((2, 5, 7))
    return schema


def boolean(rng: random.Random, depth: int) -> Schema:
    return {"type": rng.choice(("boolean", "null"))}


def constant(rng: random.Random, depth: int) -> Schema:
    return {"const": rng.choice(VALUES)}


def enumeration(rng: random.Random, depth: int) -> Schema:
    return {"enum": rng.sample(VALUES, rng.randrange(1, 5))}


def nullable(rng: random.Random, depth: int) -> Schema:
    return {"type": ["null", rng.choice(("string", "integer", "boolean", "number"))]}


def obj(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randrange(5))
    schema: Schema = {
        "type": "object",
        "properties": {name: make_value(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
    }
    kind = rng.randrange(4)
    if kind < 2:
        schema["additionalProperties"] = bool(kind)
    elif kind == 2:
        schema["additionalProperties"] = make_value(rng, 0)
    return schema


def array(rng: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "array", "items": make_value(rng, depth)}
    if rng.random() < 0.5:
        schema["minItems"] = rng.randrange(3)
    if rng.random() < 0.7:
        schema["maxItems"] = schema.get("minItems", 0) + rng.randrange(3)
    return schema


def tuple_array(rng: random.Random, depth: int) -> Schema:
    items = [make_value(rng, depth) for _ in range(rng.randrange(1, 4))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [make_value(rng, depth) for _ in range(rng.randrange(1, 4))]}


def one_of(rng: random.Random, depth: int) -> Schema:
    return {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 5}, obj(rng, depth)]}


def all_of(rng: random.Random, depth: int) -> Schema:
    first, second = obj(rng, depth), obj(rng, depth)
    return {
        "allOf": [{**first, "additionalProperties": True}, {**second, "additionalProperties": True}]
    }


def map_of(rng: random.Random, depth: int) -> Schema:
    return {"type": "object", "additionalProperties": make_value(rng, depth), "minProperties": 1}


def patterned(rng: random.Random, depth: int) -> Schema:
    pattern = rng.choice(("^[a-c]+$", "^x_"))
    return {
        "type": "object",
        "patternProperties": {pattern: make_value(rng, depth)},
        "additionalProperties": False,
    }


def extended(rng: random.Random, depth: int) -> Schema:
    """Keywords that some implementations refuse."""
    key, value = rng.choice(
        (
            ("not", {"type": "string"}),
            ("uniqueItems", True),
            ("if", {"type": "integer"}),
            ("propertyNames", {"maxLength": 3}),
            ("dependentRequired", {"a": ["b"]}),
            ("contains", {"type": "null"}),
            ("description", "only words"),
        )
    )
    return {**make_value(rng, depth), key: value}


def make_recursive(rng: random.Random) -> Schema:
    """Linked lists and trees."""
    value = make_value(rng, 0)
    node = {"$ref": "#/$defs/node"}
    link: Schema = rng.choice(
        ({"anyOf": [{"type": "null"}, node]}, {"type": "array", "items": node, "maxItems": 3})
    )
    definition = {
        "type": "object",
        "properties": {"value": value, "next": link},
        "required": rng.choice((["value", "next"], ["next"], [])),
        "additionalProperties": False,
    }
    return {"$defs": {"node": definition}, **node}
