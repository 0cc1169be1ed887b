"""Fields of a structural tag, checked: a JSON value in, texts and lists out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fulgurite.errors import ArgumentError


def quote(text: str) -> str:
    """A string of a Lark grammar; empty for no text."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def read_object(value: Mapping[str, Any], name: str, default: Any) -> Mapping[str, Any]:
    found = value.get(name, default)
    return found if isinstance(found, Mapping) else {}


def read_text(value: Any, name: str) -> str:
    text = value.get(name) if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise ArgumentError(f"a part of the structural tag has no '{name}', which is a text")
    return text


def read_ends(tag: Mapping[str, Any]) -> list[str]:
    """The texts of which one ends a tag."""
    ends = tag.get("end")
    if isinstance(ends, list) and ends and all(isinstance(one, str) for one in ends):
        return ends
    return [read_text(tag, "end")]


def read_list(value: Any, name: str) -> Sequence[Any]:
    found = value.get(name)
    if not isinstance(found, list) or not found:
        raise ArgumentError(f"a part of the structural tag has no '{name}', which is a list")
    return found
