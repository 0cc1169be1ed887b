"""Sources of grammars: a `GrammarSpec` in, checked text for llguidance out.

json_schema, json_object ─▶ JSON schema, no free whitespace between tokens
regex, choices           ─▶ regex
lark                     ─▶ Lark, in llguidance's dialect
structural_tag           ─▶ the same (structural_tag.py)
bad_words                ─▶ words, and the grammar beside them (bad_words.py)
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fulgurite.errors import ArgumentError
from fulgurite.serve.engine.grammar import GrammarSpec
from fulgurite.serve.structured.limits import (
    MAX_BAD_WORDS,
    MAX_BAD_WORDS_CHARACTERS,
    MAX_CHOICES,
    MAX_CHOICES_CHARACTERS,
    MAX_LARK_CHARACTERS,
    MAX_LARK_LITERAL,
    MAX_REGEX_SIZE,
    MAX_SCHEMA_CHARACTERS,
)
from fulgurite.serve.structured.regex_classes import narrow_classes
from fulgurite.serve.structured.regex_size import lark_terminal_sizes, longest_lark_string
from fulgurite.serve.structured.schema_rewrite import rewrite_schema
from fulgurite.serve.structured.schema_size import check_regex_size, check_schema_size

# One way to write a document: small models write whitespace without end where they may. Users can
# change it by "x-guidance" in the schema.
JSON_DEFAULTS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
JSON_OVERRIDES = {"lenient": False, "coerce_one_of": False}  # nothing of a schema is ignored
ANY_OBJECT = {"type": "object"}
REGEX_SPECIAL = frozenset(r"\.+*?()|[]{}^$#&-~/")


def check_source(spec: GrammarSpec) -> Any:
    """What is compiled: a schema as a dict, or text. ArgumentError if it is too large or no text."""
    check_unicode(spec)
    return CHECKS[spec.kind](spec.source)


def check_unicode(spec: GrammarSpec) -> None:
    try:
        spec.source.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(
            f"{spec.kind}: character {error.start}, {spec.source[error.start]!r}, is not valid "
            "Unicode",
            next="pass text decoded from UTF-8",
        ) from error


def check_length(name: str, source: str, maximum: int) -> None:
    if len(source) > maximum:
        raise ArgumentError(
            f"the {name} has {len(source):,} characters", next=f"use at most {maximum:,}"
        )


def check_json_schema(source: str) -> dict[str, Any]:
    check_length("JSON schema", source, MAX_SCHEMA_CHARACTERS)
    schema = parse_json("JSON schema", source)
    if schema is True:
        return {}
    if schema is False:
        raise ArgumentError("the JSON schema is false, which nothing matches")
    if not isinstance(schema, dict):
        raise ArgumentError(
            f"the JSON schema is a JSON {type(schema).__name__}", next="a schema is an object"
        )
    check_schema_size(schema)
    return rewrite_schema(schema)


def parse_json(name: str, source: str) -> Any:
    def reject(text: str) -> object:
        raise ValueError(f"{text} is not JSON")

    try:
        return json.loads(source, parse_constant=reject)
    except RecursionError as error:
        raise ArgumentError(f"the {name} is nested too deeply") from error
    except ValueError as error:
        raise ArgumentError(f"the {name} is not valid JSON: {error}") from error


def check_regex(source: str) -> str:
    check_regex_size(source, "regex")
    if (len(source) - len(source.rstrip("\\"))) % 2:
        raise ArgumentError("the regex ends with a backslash", next=r"write \\ for a backslash")
    return narrow_classes(source)


def check_lark(source: str) -> str:
    check_length("Lark grammar", source, MAX_LARK_CHARACTERS)
    try:
        sizes = lark_terminal_sizes(source)
    except RecursionError as error:
        raise ArgumentError("the definitions of the Lark grammar are nested too deeply") from error
    for name, size in sizes.items():
        if size > MAX_REGEX_SIZE:
            raise ArgumentError(
                f"the repetitions of {name} in the Lark grammar match {size:,} characters",
                next=f"use * or +, or repeat at most {MAX_REGEX_SIZE:,} characters",
            )
    if longest_lark_string(source) > MAX_LARK_LITERAL:
        raise ArgumentError(
            f"a string of the Lark grammar has more than {MAX_LARK_LITERAL:,} characters",
            next="split it",
        )
    return source


def check_choices_source(source: str) -> str:
    """The regex of a JSON list of choices."""
    check_length("list of choices", source, MAX_CHOICES_CHARACTERS)
    choices = parse_json("list of choices", source)
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise ArgumentError("choices must be a list of strings")
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise ArgumentError(
            f"there are {len(choices):,} choices", next=f"use 1 to {MAX_CHOICES:,} choices"
        )
    return "|".join(escape_regex(choice) for choice in dict.fromkeys(choices))


def escape_regex(text: str) -> str:
    """A regex that matches exactly this text."""
    return "".join(map(escape_character, text))


def escape_character(character: str) -> str:
    if character in REGEX_SPECIAL:
        return f"\\{character}"
    if ord(character) < 0x20 or 0x7F <= ord(character) < 0xA0 or character in "\u2028\u2029":
        return f"\\x{{{ord(character):x}}}"
    return character


def check_structural_tag(source: str) -> Any:
    check_length("structural tag", source, MAX_SCHEMA_CHARACTERS)
    return parse_json("structural tag", source)


def check_bad_words(source: str) -> tuple[list[str], GrammarSpec | None]:
    """The words, and the grammar beside them."""
    words, inner = json.loads(source)
    if len(words) > MAX_BAD_WORDS:
        raise ArgumentError(
            f"bad_words has {len(words):,} words", next=f"use {MAX_BAD_WORDS} or fewer"
        )
    if sum(map(len, words)) > MAX_BAD_WORDS_CHARACTERS:
        raise ArgumentError(
            f"bad_words has more than {MAX_BAD_WORDS_CHARACTERS:,} characters", next="use fewer"
        )
    for word in words:
        check_unicode(GrammarSpec("bad_words", word))
    return words, None if inner is None else GrammarSpec(*inner)


CHECKS: dict[str, Callable[[str], Any]] = {
    "json_schema": check_json_schema,
    "json_object": lambda source: ANY_OBJECT,
    "regex": check_regex,
    "lark": check_lark,
    "choices": check_choices_source,
    "structural_tag": check_structural_tag,
    "bad_words": check_bad_words,
}
