"""Rules about property names that llguidance does not know, in words that it knows.

    propertyNames: {enum: [a, b]}        properties: a, b; no others
    propertyNames: {pattern: p}          patternProperties: p; no others
    dependentRequired: {a: [b]}          anyOf: no a, or b is required; also as `dependencies`

What can't be written so stays, and llguidance refuses it.
"""

from __future__ import annotations

from typing import Any

from fulgurite.serve.structured.schema_formats import rewrite_format

NAME_KEYWORDS = {"pattern", "format", "minLength", "maxLength", "enum", "const", "type", "title"}
MAX_NAMES = 1_000


def rewrite_names(schema: dict[str, Any], root: Any) -> None:
    """`root`: the whole schema, for references."""
    if isinstance(schema.get("propertyNames"), dict) and "patternProperties" not in schema:
        rules = find_reference(schema["propertyNames"], root)
        if {*rules} <= NAME_KEYWORDS:
            rewrite_property_names(schema, rules)
    elif schema.get("propertyNames") is True:
        del schema["propertyNames"]
    for keyword in ("dependentRequired", "dependencies"):
        needs = schema.get(keyword)
        if isinstance(needs, dict) and all(isinstance(one, list) for one in needs.values()):
            del schema[keyword]
            either = [
                {"anyOf": [{"properties": {name: False}}, {"required": others}]}
                for name, others in needs.items()
            ]
            schema["allOf"] = [*(schema.get("allOf") or []), *either]


def find_reference(schema: dict[str, Any], root: Any) -> dict[str, Any]:
    """The schema that a reference alone names, if it is one of the root's definitions."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or len(schema) > 1:
        return schema
    found = root
    for step in reference.removeprefix("#/").split("/"):
        found = found.get(step) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else schema


def rewrite_property_names(schema: dict[str, Any], rules: dict[str, Any]) -> None:
    if not {*rules} - {"type", "title"} and rules.get("type", "string") == "string":
        del schema["propertyNames"]
        return
    names = list_names(rules)
    others = schema.get("additionalProperties", True)
    properties = schema.get("properties") or {}
    if names is not None and len(names) <= MAX_NAMES and isinstance(properties, dict):
        kept = {name: one for name, one in properties.items() if name in names}
        schema["properties"] = kept | {name: others for name in names if name not in kept}
    elif not properties and (pattern := write_pattern(rules)) is not None:
        schema["patternProperties"] = {pattern: others}
    else:
        return
    del schema["propertyNames"]
    schema["additionalProperties"] = False


def list_names(rules: dict[str, Any]) -> list[str] | None:
    """The names of an enum or a constant; None without one, or with other rules beside it."""
    values = [rules["const"]] if "const" in rules else rules.get("enum")
    if not isinstance(values, list) or {"pattern", "format", "minLength", "maxLength"} & {*rules}:
        return None
    return [name for name in values if isinstance(name, str)]


def write_pattern(rules: dict[str, Any]) -> str | None:
    """One pattern for all of the rules; None if there are several."""
    rules = {name: value for name, value in rules.items() if name not in ("type", "title")}
    if {*rules} <= {"minLength", "maxLength"}:
        pattern = f"^.{{{rules.get('minLength', 0)},{rules.get('maxLength', '')}}}$"
        return pattern
    strings: dict[str, Any] = dict(rules)
    rewrite_format(strings)
    found = strings.pop("pattern", None)
    return found if not strings and isinstance(found, str) else None
