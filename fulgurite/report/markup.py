"""HTML and SVG elements as strings, escaped by construction.

In: names, attributes, children. Out: `Markup`, a string known to be HTML; any other string given as a child is
text and is escaped, so a user's source line can't become part of the page's structure.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any

VOID = {"meta", "input", "br", "hr", "col"}


class Markup(str):
    """A string that is already escaped HTML."""


def escape_text(value: object) -> Markup:
    """Escape a value. A character that UTF-8 can't encode becomes a question mark."""
    if isinstance(value, Markup):
        return value
    printable = str(value).encode("utf-8", "replace").decode("utf-8")
    return Markup(html.escape(printable, quote=True))


def join_markup(parts: Iterable[object], between: str = "") -> Markup:
    return Markup(between.join(map(escape_text, parts)))


def make_element(tag: str, /, *children: object, **attributes: object) -> Markup:
    """`<tag attributes>children</tag>`.

    `class_` is `class`, `data_line` is `data-line`; True gives a bare attribute, None and False give none.
    """
    spelled = "".join(_attribute(key, value) for key, value in attributes.items())
    if tag in VOID:
        assert not children, f"<{tag}> has no content"
        return Markup(f"<{tag}{spelled}>")
    return Markup(f"<{tag}{spelled}>{join_markup(children)}</{tag}>")


def _attribute(key: str, value: object) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape_text(value)}"'


def make_json_script(identity: str, value: Any) -> Markup:
    """A JSON script element; no character in it can close the element."""
    content = json.dumps(value, separators=(",", ":"))
    for character in "<>&":
        content = content.replace(character, f"\\u{ord(character):04x}")
    return Markup(
        f'<script type="application/json" id="{escape_text(identity)}">{content}</script>'
    )
