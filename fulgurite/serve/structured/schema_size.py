"""Limits of a JSON schema that llguidance does not have: patterns, and how much text it can force.

A schema forces text by constants, names of properties and `minItems`: a constant of 10,000 characters
in an array of at least 10,000 items is 100 million characters, and no token is ever sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from fulgurite.errors import ArgumentError
from fulgurite.serve.structured.limits import (
    MAX_FORCED_CHARACTERS,
    MAX_JSON_DEPTH,
    MAX_REGEX_CHARACTERS,
    MAX_REGEX_SIZE,
)
from fulgurite.serve.structured.regex_size import HUGE, expanded_size

Path = tuple[str, ...]


def check_schema_size(schema: Any) -> None:
    """ArgumentError for a schema that is too deep, or too large once it is written out."""
    for path, value in walk(schema):
        check_patterns(path, value)
    forced = ForcedText(schema).measure(schema)
    if forced > MAX_FORCED_CHARACTERS:
        raise ArgumentError(
            f"the schema forces {min(forced, HUGE):,} characters of text by constants, names and "
            "minItems",
            next=f"use smaller values of minItems or shorter constants: at most "
            f"{MAX_FORCED_CHARACTERS:,} characters",
        )


def walk(schema: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    """All objects in a schema with their paths, without recursion."""
    stack: list[tuple[Path, Any]] = [((), schema)]
    while stack:
        path, value = stack.pop()
        if len(path) > MAX_JSON_DEPTH:
            raise ArgumentError(
                f"the schema is nested more than {MAX_JSON_DEPTH} levels deep",
                where=format_path(path[:6]) + "/…",
                next="use $defs and $ref",
            )
        if isinstance(value, dict):
            yield path, value
            stack += [((*path, key), child) for key, child in value.items()]
        elif isinstance(value, list):
            stack += [((*path, str(index)), child) for index, child in enumerate(value)]


def check_patterns(path: Path, schema: Mapping[str, Any]) -> None:
    by_pattern = schema.get("patternProperties")
    patterns = [schema.get("pattern"), *(by_pattern if isinstance(by_pattern, dict) else ())]
    for pattern in patterns:
        if isinstance(pattern, str):
            check_regex_size(pattern, f"pattern of {format_path(path)}")


def check_regex_size(regex: str, name: str) -> None:
    """ArgumentError for a regex that is too long, or whose repetitions are."""
    if len(regex) > MAX_REGEX_CHARACTERS:
        raise ArgumentError(
            f"the {name} has {len(regex):,} characters",
            next=f"use at most {MAX_REGEX_CHARACTERS:,}",
        )
    size = expanded_size(regex)
    if size > MAX_REGEX_SIZE:
        raise ArgumentError(
            f"the repetitions of the {name} match {size:,} characters: {regex[:80]!r}",
            next=f"use * or +, or repeat at most {MAX_REGEX_SIZE:,} characters",
        )


def format_path(path: Path) -> str:
    return "#/" + "/".join(path) if path else "#"


class ForcedText:
    """The most text that parts of a schema can force. Recursive references count once."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.sizes: dict[str, int] = {}  # by $ref

    def measure(self, schema: Any) -> int:
        if not isinstance(schema, dict):
            return 0
        size = 0
        if "const" in schema:
            size += len(json.dumps(schema["const"]))
        if isinstance(schema.get("enum"), list):
            size += max((len(json.dumps(value)) for value in schema["enum"]), default=0)
        if isinstance(schema.get("$ref"), str):
            size += self.measure_reference(schema["$ref"])
        size += self.measure_properties(schema) + self.measure_items(schema)
        for key in ("anyOf", "oneOf"):
            size += max((self.measure(one) for one in as_list(schema.get(key))), default=0)
        size += sum(self.measure(one) for one in as_list(schema.get("allOf")))
        return min(size, HUGE)

    def measure_properties(self, schema: Mapping[str, Any]) -> int:
        properties, required = schema.get("properties"), as_list(schema.get("required"))
        names = {name for name in required if isinstance(name, str)}
        size = sum(len(name) + 4 for name in names)
        if isinstance(properties, dict):
            size += sum(self.measure(properties[name]) for name in names & properties.keys())
        return size

    def measure_items(self, schema: Mapping[str, Any]) -> int:
        size = sum(self.measure(one) for one in as_list(schema.get("prefixItems")))
        minimum = schema.get("minItems")
        if isinstance(minimum, int) and minimum > 0:
            size += minimum * (self.measure(schema.get("items")) + 2)
        return size

    def measure_reference(self, reference: str) -> int:
        if reference not in self.sizes:
            self.sizes[reference] = 0  # of a recursive reference
            self.sizes[reference] = self.measure(self.resolve(reference))
        return self.sizes[reference]

    def resolve(self, reference: str) -> Any:
        """What a local reference points to; None: llguidance says what is wrong with it."""
        found = self.root
        for part in unquote(reference).removeprefix("#").split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict):
                found = found.get(key)
            elif isinstance(found, list) and key.isdigit() and int(key[:9]) < len(found):
                found = found[int(key)]
            else:
                return None
        return found


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
