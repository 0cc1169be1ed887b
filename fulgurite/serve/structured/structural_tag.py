"""Structural tags: free text with tagged parts that follow a schema. A JSON text in, a Lark grammar out.

Two forms, those of vLLM and xgrammar:

    {"structures": [{"begin", "schema", "end"}], "triggers": [...]}    text; after a trigger, a structure
    {"format": {"type": ...}}                                          formats, which can be nested

A format is const_string, json_schema, regex, any_text, sequence, or, tag, triggered_tags or
tags_with_separator. Strict tools use three more (call_text.py), and `ref` for one of the tag's
`definitions`. Text before a tag ends where a trigger does: no reply has a trigger in its text
without a tag. Begins, ends and triggers may be special tokens, alone or at their beginning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from fulgurite.errors import ArgumentError
from fulgurite.serve.structured.backend import require_llguidance
from fulgurite.serve.structured.call_text import add_harmony_calls, add_list, add_text_with_calls
from fulgurite.serve.structured.limits import MAX_JSON_DEPTH, MAX_LARK_LITERAL
from fulgurite.serve.structured.schema_rewrite import rewrite_schema
from fulgurite.serve.structured.schema_size import check_regex_size, check_schema_size
from fulgurite.serve.structured.tag_fields import (
    quote,
    read_ends,
    read_list,
    read_object,
    read_text,
)

# As for a schema alone (sources.py); a schema in a Lark grammar brings its own options.
ANY_TEXT = r"/(.|\n)*/"
FORMS = "give 'structures' with 'triggers', or 'format'"


class LarkBuilder:
    """Rules of a Lark grammar so far. Each `add_...` returns the name of a rule, or an expression.

    `special_ids`: texts of special tokens → their ids.
    """

    def __init__(self, special_ids: Mapping[str, int], json_options: Mapping[str, Any]) -> None:
        self.special_ids, self.json_options = special_ids, json_options
        self.rules: list[str] = []
        self.schemas: list[Any] = []
        self.definitions: dict[str, Any] = {}
        self.references: dict[str, str] = {}  # their rules
        texts = sorted(special_ids, key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, texts))) if texts else None

    def add_rule(self, expression: str, attributes: str = "") -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {expression}")
        return name

    def build(self, start: str) -> str:
        return "\n".join(["%llguidance {}", f"start: {start}", f"TEXT: {ANY_TEXT}", *self.rules])

    # ---- parts -------------------------------------------------------------------------------------

    def split(self, text: str) -> list[str]:
        """The text as terms of a rule: strings, and special tokens by their ids."""
        if len(text) > MAX_LARK_LITERAL:
            raise ArgumentError(
                f"a text of the structural tag has {len(text):,} characters",
                next=f"use at most {MAX_LARK_LITERAL:,}",
            )
        terms, end = [], 0
        for found in self.special.finditer(text) if self.special is not None else ():
            terms += [quote(text[end : found.start()]), f"<[{self.special_ids[found[0]]}]>"]
            end = found.end()
        return [term for term in (*terms, quote(text[end:])) if term]

    def add_literal(self, text: str) -> str:
        return " ".join(self.split(text)) or '""'

    def add_text_until(self, text: str, before: str = "TEXT") -> str:
        """Free text up to the first place that has `text`, which is a part of it."""
        terms = self.split(text)
        if not terms:
            raise ArgumentError("a trigger of the structural tag is empty")
        if terms[0].startswith("<["):  # a special token is never in a text
            return " ".join(["TEXT", *terms])
        head = self.add_rule(f"{before} {terms[0]}", "[lazy]")
        return " ".join([head, *terms[1:]])

    def add_text_until_match(self, pattern: str) -> str:
        """Free text up to the first place that a regex matches, which is a part of it."""
        check_regex_size(pattern, "regex of the structural tag")
        text = require_llguidance().regex_to_lark(pattern, "dw")
        return self.add_rule(f"/(.|\\n)*({text})/", "[lazy]")

    def is_special(self, text: str) -> bool:
        """Whether a text begins with a special token, which is never a part of other text."""
        return self.special is not None and self.special.match(text) is not None

    def add_json(self, schema: Any) -> str:
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise ArgumentError("a schema of the structural tag is not an object")
        check_schema_size(schema)
        self.schemas.append(schema)
        schema = rewrite_schema(schema)
        options = {**self.json_options, **read_object(schema, "x-guidance", {})}
        return self.add_rule("%json " + json.dumps({**schema, "x-guidance": options}))

    def add_regex(self, pattern: str, ascii_classes: str) -> str:
        check_regex_size(pattern, "regex of the structural tag")
        text = require_llguidance().regex_to_lark(pattern, ascii_classes)
        return self.add_rule(f"/{text}/" if text else '""')

    # ---- formats -----------------------------------------------------------------------------------

    def add_format(self, format: Any, depth: int = 0, is_last: bool = True) -> str:
        """The expression of a format. `is_last`: nothing comes after it."""
        if depth > MAX_JSON_DEPTH:
            raise ArgumentError("the structural tag is nested too deeply")
        kind = format.get("type") if isinstance(format, dict) else None
        add = FORMATS.get(kind) if isinstance(kind, str) else None
        if add is None:
            raise ArgumentError(
                f"the structural tag has a format of type {str(kind)[:100]!r}",
                next=f"use {', '.join(FORMATS)}",
            )
        return add(self, format, depth, is_last)

    def add_reference(self, format: Any, depth: int, is_last: bool) -> str:
        """One of the tag's `definitions`, whose rule is shared."""
        name = read_text(format, "name")
        if name not in self.references:
            definition = self.definitions.pop(name, None)  # one that refers to itself is not found
            if definition is None:
                raise ArgumentError(f"the structural tag has no definition {name[:100]!r}")
            expression = self.add_format(definition, depth + 1, False)
            self.references[name] = self.add_rule(expression)
        return self.references[name]

    def add_const_string(self, format: Any, depth: int, is_last: bool) -> str:
        return self.add_literal(read_text(format, "value"))

    def add_json_schema(self, format: Any, depth: int, is_last: bool) -> str:
        return self.add_json(format.get("json_schema"))

    def add_pattern(self, format: Any, depth: int, is_last: bool) -> str:
        return self.add_regex(read_text(format, "pattern"), "dw")

    def add_any_text(self, format: Any, depth: int, is_last: bool) -> str:
        if format.get("excludes"):
            raise ArgumentError("'excludes' of any_text is not supported in a structural tag")
        if not is_last:
            raise ArgumentError(
                "any_text must be the last format of a structural tag, or the content of a tag: "
                "its end could not be found"
            )
        return "TEXT"

    def add_sequence(self, format: Any, depth: int, is_last: bool) -> str:
        elements = read_list(format, "elements")
        count = len(elements)
        parts = [
            self.add_format(one, depth + 1, is_last and index == count - 1)
            for index, one in enumerate(elements)
        ]
        return self.add_rule(" ".join(parts))

    def add_or(self, format: Any, depth: int, is_last: bool) -> str:
        elements = read_list(format, "elements")
        return self.add_rule(
            " | ".join(self.add_format(one, depth + 1, is_last) for one in elements)
        )

    def add_tag(self, format: Any, depth: int, is_last: bool, skipped: str = "") -> str:
        """`begin`, the content and `end`. `skipped`: the part of `begin` that is there already."""
        begin, ends = read_text(format, "begin"), read_ends(format)
        content = format.get("content")
        if isinstance(content, dict) and content.get("type") == "any_text" and any(ends):
            body = " | ".join(map(self.add_text_until, ends))
        else:
            inner = self.add_format(content, depth + 1, is_last and not any(ends))
            body = f"{inner} ({' | '.join(map(self.add_literal, ends))})"
        return self.add_rule(f"{self.add_literal(begin[len(skipped) :])} ({body})")

    def add_triggered_tags(self, format: Any, depth: int, is_last: bool) -> str:
        triggers, tags = read_list(format, "triggers"), read_list(format, "tags")
        if not all(isinstance(one, str) and one for one in triggers):
            raise ArgumentError("'triggers' of a structural tag must be non-empty strings")
        groups: dict[str, list[str]] = {}
        for tag in tags:
            begin = read_text(tag, "begin")
            found = [one for one in triggers if begin.startswith(one)]
            if not found:
                raise ArgumentError(
                    f"no trigger is the beginning of {begin[:100]!r} in the structural tag"
                )
            trigger = min(found, key=len)  # a text ends with the first trigger that it has
            groups.setdefault(trigger, []).append(self.add_tag(tag, depth + 1, False, trigger))
        if not is_last and not format.get("stop_after_first"):
            raise ArgumentError(
                "triggered_tags must be the last format of a structural tag: text follows its tags"
            )
        options = [
            f"{self.add_text_until(trigger)} ({' | '.join(bodies)})"
            for trigger, bodies in groups.items()
        ]
        tagged = self.add_rule(" | ".join(options))
        if format.get("stop_after_first"):
            return tagged if format.get("at_least_one") else self.add_rule(f"{tagged} | TEXT")
        count = "+" if format.get("at_least_one") else "*"
        return self.add_rule(f"{tagged}{count} TEXT")

    def add_separated_tags(self, format: Any, depth: int, is_last: bool) -> str:
        tags = [self.add_tag(one, depth + 1, False) for one in read_list(format, "tags")]
        one = self.add_rule(" | ".join(tags))
        many = one
        if not format.get("stop_after_first"):
            many = f"{one} ({self.add_literal(read_text(format, 'separator'))} {one})*"
        return self.add_rule(many if format.get("at_least_one") else f"({many})?")


FORMATS: dict[str, Callable[[LarkBuilder, Any, int, bool], str]] = {
    "const_string": LarkBuilder.add_const_string,
    "json_schema": LarkBuilder.add_json_schema,
    "regex": LarkBuilder.add_pattern,
    "any_text": LarkBuilder.add_any_text,
    "sequence": LarkBuilder.add_sequence,
    "or": LarkBuilder.add_or,
    "tag": LarkBuilder.add_tag,
    "triggered_tags": LarkBuilder.add_triggered_tags,
    "tags_with_separator": LarkBuilder.add_separated_tags,
    "ref": LarkBuilder.add_reference,
    "list": add_list,
    "text_with_calls": add_text_with_calls,
    "harmony_calls": add_harmony_calls,
}


def read_format(tag: Any) -> Any:
    """The format of a structural tag; the older form is one of triggered tags."""
    if not isinstance(tag, dict):
        raise ArgumentError("the structural tag is not a JSON object", next=FORMS)
    if ("format" in tag) == ("structures" in tag):
        raise ArgumentError("the structural tag has no form that is known", next=FORMS)
    if "format" in tag:
        return tag["format"]
    tags = []
    for structure in read_list(tag, "structures"):
        content = {"type": "json_schema", "json_schema": None}
        if isinstance(structure, dict):
            content["json_schema"] = structure.get("schema", True)
        begin, end = read_text(structure, "begin"), read_text(structure, "end")
        tags.append({"begin": begin, "content": content, "end": end})
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


def to_lark(
    tag: Any, special_ids: Mapping[str, int], json_options: Mapping[str, Any]
) -> tuple[str, list[Any]]:
    """The Lark grammar of a structural tag, and the schemas in it; ArgumentError if it is wrong."""
    builder = LarkBuilder(special_ids, json_options)
    if isinstance(tag, dict):
        builder.definitions = dict(read_object(tag, "definitions", {}))
    return builder.build(builder.add_format(read_format(tag))), builder.schemas
