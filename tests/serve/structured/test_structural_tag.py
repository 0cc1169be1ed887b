"""Structural tags: free text, and parts of it that follow schemas."""

from __future__ import annotations

from typing import Any

import pytest

from fulgurite.errors import ArgumentError
from fulgurite.serve.engine.grammar import GrammarSpec
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.structured.compiler import GrammarCompiler
from tests.serve.structured.drivers import smollm2_compiler, tiny_compiler

NUMBER = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
CALLS = {
    "structures": [
        {"begin": "<f=x>", "schema": NUMBER, "end": "</f>"},
        {"begin": "<f=y>", "schema": {"enum": [1]}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


def make_json_part(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema}


def make_tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def match(tag: Any, text: str, compiler: GrammarCompiler | None = None) -> str:
    """Whether a reply with this text is complete, may go on, or is refused."""
    compiler = tiny_compiler() if compiler is None else compiler
    spec = SamplingParams(structural_tag=tag).grammar_spec
    assert spec is not None and spec.kind == "structural_tag"
    grammar = compiler.compile(spec)
    for token in compiler.tokenizer.encode(text, False):
        words = grammar.allowed_tokens().numpy()  # type: ignore[union-attr]
        if not words[token // 32] >> token % 32 & 1:
            return "refused"
        grammar.accept_token(token)
    return "complete" if grammar.is_accepting or grammar.is_complete else "open"


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("", "complete"),
        ("some text <f", "complete"),
        ("a <f=", "open"),
        ("a <f=z", "refused"),
        ('a <f=x>{"a": 3}', "open"),
        ('a <f=x>{"a": 3}</f> and\nmore', "complete"),
        ('a <f=x>{"a": "b', "refused"),
        ('<f=y>1</f><f=x>{"a": -3}</f>', "complete"),
        ("<f=y>2", "refused"),
    ],
)
def test_text_with_structures(text: str, wanted: str) -> None:
    assert match(CALLS, text) == wanted


@pytest.mark.parametrize(
    "format, complete, refused",
    [
        (
            make_tag("<", make_json_part({"type": "integer"}), [">", "!"]),
            ["<1>", "<1!"],
            ["1", "<1?"],
        ),
        (make_tag("<t>", {"type": "any_text"}, "</t>"), ["<t>a < b</t>"], ["<t>a</t>b"]),
        (
            {
                "type": "sequence",
                "elements": [
                    {"type": "const_string", "value": 'say "/": '},
                    {
                        "type": "or",
                        "elements": [
                            {"type": "regex", "pattern": r"\d{2}"},
                            make_json_part({"type": "boolean"}),
                        ],
                    },
                ],
            },
            ['say "/": 12', 'say "/": true'],
            ['say "/": x', "12"],
        ),
        (
            {
                "type": "tags_with_separator",
                "tags": [make_tag("<a>", make_json_part({"type": "integer"}), "</a>")],
                "separator": ", ",
                "at_least_one": True,
            },
            ["<a>1</a>", "<a>1</a>, <a>22</a>"],
            ["<a>1</a><a>", "x"],
        ),
        (
            {
                "type": "triggered_tags",
                "triggers": ["[", "[call"],
                "tags": [make_tag("[call:", make_json_part({"type": "integer"}), "]")],
                "at_least_one": True,
                "stop_after_first": True,
            },
            ["text [call:5]"],
            ["[x", "[call:5]x"],
        ),
    ],
)
def test_formats(format: Any, complete: list[str], refused: list[str]) -> None:
    assert {text: match({"format": format}, text) for text in complete} == dict.fromkeys(
        complete, "complete"
    )
    assert {text: match({"format": format}, text) for text in refused} == dict.fromkeys(
        refused, "refused"
    )


def test_tags_of_special_tokens() -> None:
    compiler = smollm2_compiler()
    tag = make_tag("<file_sep>call", make_json_part(NUMBER), "<repo_name>")
    triggered = {"format": {"type": "triggered_tags", "triggers": ["<file_sep>"], "tags": [tag]}}
    assert match(triggered, 'hi<file_sep>call{"a": 1}<repo_name> bye', compiler) == "complete"
    assert match(triggered, "hi<file_sep>cool", compiler) == "refused"
    assert match(triggered, "hi", compiler) == "complete"


@pytest.mark.parametrize(
    "tag, message",
    [
        ({}, "no form that is known"),
        ({"structures": [], "triggers": ["<"]}, "structures"),
        ({"structures": [{"begin": "a", "schema": {}, "end": "b"}]}, "triggers"),
        (
            {"structures": [{"begin": "a", "schema": {}, "end": "b"}], "triggers": ["x"]},
            "no trigger",
        ),
        ({"structures": [{"begin": "a", "end": "b", "schema": 5}], "triggers": ["a"]}, "schema"),
        ({"structures": [{"begin": "a", "schema": {}}], "triggers": ["a"]}, "'end'"),
        ({"format": {"type": "grammar", "grammar": "root ::= x"}}, "type 'grammar'"),
        ({"format": 5}, "type 'None'"),
        ({"format": {"type": "regex", "pattern": "("}}, "unclosed"),
        ({"format": {"type": "const_string", "value": "a" * 5000}}, "5,000 characters"),
        ({"format": make_json_part({"not": {}})}, "'not' at # is not supported"),
        (
            {"format": {"type": "sequence", "elements": [{"type": "any_text"}] * 2}},
            "any_text must be the last",
        ),
    ],
)
def test_tags_that_cannot_be_used(tag: Any, message: str) -> None:
    spec = SamplingParams(structural_tag=tag).grammar_spec
    assert spec is not None
    with pytest.raises(ArgumentError, match=message):
        tiny_compiler().check(spec)


def test_a_tag_that_is_nested_too_deeply() -> None:
    format: Any = {"type": "any_text"}
    for _ in range(200):
        format = {"type": "sequence", "elements": [format]}
    spec = SamplingParams(structural_tag={"format": format}).grammar_spec
    assert spec is not None
    with pytest.raises(ArgumentError, match="nested"):
        tiny_compiler().check(spec)


def test_text_that_is_no_json() -> None:
    with pytest.raises(ArgumentError, match="not valid JSON"):
        tiny_compiler().check(GrammarSpec("structural_tag", "{"))
