"""Grammars of tool calls: a tool in, formats of structural tags out (structured/structural_tag.py).

Each syntax writes what it reads: `CallSyntax.write_call`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fulgurite.errors import ArgumentError

Format = dict[str, Any]
# Keywords of a schema that constrain nothing.
ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly")
    + ("$schema", "$id", "$comment")
)
# Keywords of arguments that are written one by one.
SPLITTABLE = ANNOTATIONS | {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "$defs",
    "definitions",
}


@dataclass(frozen=True)
class Argument:
    """An argument that a format writes by itself."""

    name: str
    schema: Mapping[str, Any]
    is_required: bool


@dataclass(frozen=True)
class WrittenTool:
    """A tool whose calls a grammar writes. `schema`: of its arguments, as one object."""

    name: str
    schema: Mapping[str, Any]

    @property
    def properties(self) -> tuple[Argument, ...]:
        """The arguments one by one; ArgumentError if the schema says more than that."""
        others = {*self.schema} - SPLITTABLE
        if others:
            raise ArgumentError(
                f"this model's tool calls can't enforce {min(others)!r} of the parameters of "
                f"{self.name!r}",
                next="use properties and required, or set strict to false",
            )
        required = self.schema.get("required") or ()
        return tuple(
            Argument(name, self.resolve(schema), name in required)
            for name, schema in (self.schema.get("properties") or {}).items()
        )

    def resolve(self, schema: Any) -> Mapping[str, Any]:
        """The schema of one argument, with the definitions that it may refer to."""
        found = schema if isinstance(schema, dict) else {}
        kept = {key: self.schema[key] for key in ("$defs", "definitions") if key in self.schema}
        return {**found, **kept} if kept and "$ref" in str(found) else found


def constant(text: str) -> Format:
    return {"type": "const_string", "value": text}


def regex(pattern: str) -> Format:
    return {"type": "regex", "pattern": pattern}


def json_value(schema: Mapping[str, Any]) -> Format:
    return {"type": "json_schema", "json_schema": dict(schema)}


def sequence(*parts: Format) -> Format:
    return {"type": "sequence", "elements": list(parts)}


def either(*parts: Format) -> Format:
    return {"type": "or", "elements": list(parts)}


def optional(part: Format) -> Format:
    return either(part, constant(""))


def any_text_until(end: str) -> Format:
    return {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": end}


def separated(part: Format, separator: str) -> Format:
    """One or more."""
    tag = {"begin": "", "content": part, "end": ""}
    return {
        "type": "tags_with_separator",
        "tags": [tag],
        "separator": separator,
        "at_least_one": True,
    }


def reference(name: str) -> Format:
    """A format of the tag's `definitions`."""
    return {"type": "ref", "name": name}


def escape_name(name: str) -> str:
    """A regex of a tool's name, which has letters, digits and _.-/:$@."""
    return "".join(rf"\{char}" if char in ".-/$" else char for char in name)
