"""What the engine knows of structured output: options of a request in, a `GrammarSpec` out.

`serve/structured` compiles a `GrammarSpec` to a `Grammar`, with llguidance. The engine only uses the
interfaces below, so it runs without llguidance.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from fulgurite.errors import ArgumentError

if TYPE_CHECKING:  # the server imports this module, and no torch
    from torch import Tensor

GRAMMAR_KINDS = (
    "json_schema",
    "json_object",
    "regex",
    "lark",
    "choices",
    "structural_tag",
    "bad_words",
)


@dataclass(frozen=True)
class GrammarSpec:
    """A grammar as plain text.

    Attributes:
        kind: one of `GRAMMAR_KINDS`.
        source: the JSON text of the schema, the regex, the Lark text, a JSON list of the choices, or
            the JSON text of the structural tag. Empty for json_object. For bad_words the JSON list of
            the words, and kind and source of the grammar beside them, or null.
    """

    kind: str
    source: str = ""

    def __post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS:
            raise ArgumentError(
                f"kind={self.kind!r} is not a kind of grammar",
                next=f"use {', '.join(GRAMMAR_KINDS)}",
            )
        if not isinstance(self.source, str):
            raise ArgumentError(f"the source of a grammar must be text, not {self.source!r}")


@runtime_checkable
class Grammar(Protocol):
    """A `Constraint` that also forces tokens, knows its end, and computes masks ahead of time."""

    def allowed_tokens(self) -> Tensor | None:
        """See `Constraint`. Waits for the mask, or computes it."""
        ...

    def accept_token(self, token: int) -> None:
        """Advance by a token of the reply. Raises if the grammar does not allow it."""
        ...

    def start_mask(self) -> None:
        """Start to compute the next mask in another thread."""
        ...

    def forced_tokens(self) -> list[int]:
        """The tokens that must come next, tokenized as the tokenizer would; often none."""
        ...

    @property
    def eos_token_ids(self) -> Collection[int]:
        """The tokens that the mask allows where the reply may end."""
        ...

    @property
    def is_accepting(self) -> bool:
        """Whether the reply may end here."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the reply must end here: nothing but an end token may follow."""
        ...


class GrammarCompiler(Protocol):
    """Compiles grammars for one tokenizer."""

    def check(self, spec: GrammarSpec) -> None:
        """ArgumentError if the grammar can't be used."""
        ...

    def compile(self, spec: GrammarSpec) -> Grammar:
        """A grammar at its beginning; ArgumentError as for `check`."""
        ...

    def start(self, spec: GrammarSpec) -> Future[Grammar]:
        """`compile` in another thread. What was compiled before is there at once, or raises."""
        ...


def encode_json(name: str, value: object) -> str:
    """The JSON text of an option: a dict, a bool, or the text itself."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping | bool):
        raise ArgumentError(f"{name}={value!r:.200} must be a dict, a bool, or its JSON text")
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(
            f"{name} can't be written as JSON: {error}",
            next="use dicts, lists, strings, numbers, booleans and None only",
        ) from error


def check_choices(choices: object) -> tuple[str, ...]:
    """The choices as a tuple without duplicates; ArgumentError unless they are strings."""
    if not isinstance(choices, Iterable) or isinstance(choices, str | bytes | Mapping):
        raise ArgumentError(f"choices={choices!r:.200} must be a list of strings")
    values = tuple(dict.fromkeys(choices))
    invalid = [choice for choice in values if not isinstance(choice, str)]
    if invalid:
        raise ArgumentError(f"choices contains {invalid[0]!r:.200}", next="choices are strings")
    if not values:
        raise ArgumentError("choices is empty", next="list at least one string")
    return values


def make_grammar_spec(
    json_schema: str | None,
    json_object: bool,
    regex: str | None,
    grammar: str | None,
    choices: tuple[str, ...] | None,
    structural_tag: str | None = None,
) -> GrammarSpec | None:
    """The grammar of these options of `SamplingParams`; None if there is none."""
    if json_schema is not None:
        return GrammarSpec("json_schema", json_schema)
    if json_object:
        return GrammarSpec("json_object")
    if regex is not None:
        return GrammarSpec("regex", regex)
    if grammar is not None:
        return GrammarSpec("lark", grammar)
    if choices is not None:
        return GrammarSpec("choices", json.dumps(choices, ensure_ascii=False))
    if structural_tag is not None:
        return GrammarSpec("structural_tag", structural_tag)
    return None


def ban_words(words: Sequence[str], spec: GrammarSpec | None) -> GrammarSpec | None:
    """The grammar of replies that follow `spec`, if it is given, and have none of these words."""
    if not words:
        return spec
    inner = None if spec is None else (spec.kind, spec.source)
    return GrammarSpec("bad_words", json.dumps((words, inner)))


def check_grammar_options(
    json_schema: object,
    json_object: object,
    regex: object,
    grammar: object,
    choices: object,
    structural_tag: object = None,
) -> tuple[str | None, tuple[str, ...] | None, str | None]:
    """The texts of the schema, the choices and the structural tag.

    ArgumentError for wrong types, or for two grammars.
    """
    if not isinstance(json_object, bool):
        raise ArgumentError(f"json_object={json_object!r} must be True or False")
    for name, value in (("regex", regex), ("grammar", grammar)):
        if value is not None and not isinstance(value, str):
            raise ArgumentError(f"{name}={value!r:.200} must be a string")
    given = {
        "json_schema": json_schema,
        "regex": regex,
        "grammar": grammar,
        "choices": choices,
        "structural_tag": structural_tag,
    }
    names = [name for name, value in given.items() if value is not None]
    names += ["json_object"] * json_object
    if len(names) > 1:
        raise ArgumentError(
            f"{' and '.join(names)} are given, but a reply follows one grammar",
            next="give one of them",
        )
    schema = None if json_schema is None else encode_json("json_schema", json_schema)
    tag = None if structural_tag is None else encode_json("structural_tag", structural_tag)
    return schema, None if choices is None else check_choices(choices), tag
