"""Grammars that force the text of a special token: it is text, not the token."""

from __future__ import annotations

import json

import pytest

from fulgurite.errors import ArgumentError
from fulgurite.serve.engine.grammar import GrammarSpec
from fulgurite.serve.structured.special_tokens import (
    MARK,
    name_tokens_by_id,
    rename_special_tokens,
)
from tests.serve.structured.drivers import sample_reply, smollm2_compiler

OBJECT = {"type": "object", "properties": {"<|im_end|>": {"const": "<|im_start|>"}}}
CASES = [
    ("choices", json.dumps(["<|im_end|>"]), "<|im_end|>"),
    ("choices", json.dumps(["a <|endoftext|> b"]), "a <|endoftext|> b"),
    ("regex", r"x<\|im_end\|>y", "x<|im_end|>y"),
    ("lark", 'start: "a<|im_end|>b"', "a<|im_end|>b"),
    ("json_schema", json.dumps({"const": "<|im_end|>"}), '"<|im_end|>"'),
    (
        "json_schema",
        json.dumps({**OBJECT, "required": [*OBJECT["properties"]], "additionalProperties": False}),
        '{"<|im_end|>": "<|im_start|>"}',
    ),
]


@pytest.mark.covering
@pytest.mark.parametrize("use_forced", [True, False])
@pytest.mark.parametrize("kind, source, text", CASES)
def test_the_name_of_a_special_token_is_text(
    kind: str, source: str, text: str, use_forced: bool
) -> None:
    assert sample_reply(smollm2_compiler(), GrammarSpec(kind, source), 1, use_forced) == text


def test_lark_grammars_name_special_tokens() -> None:
    compiler = smollm2_compiler()
    grammar = compiler.compile(GrammarSpec("lark", 'start: "a" <|im_start|> "b"'))
    ids = compiler.tokenizer.encode("a<|im_start|>b", False)
    assert grammar.forced_tokens() == ids and len(ids) == 3
    with pytest.raises(ArgumentError, match=r'unknown special token: "<\|nope\|>"') as caught:
        compiler.check(GrammarSpec("lark", "start: <|nope|>"))
    assert MARK not in str(caught.value)


def test_names_in_strings_regexes_and_comments_stay() -> None:
    text = 'start: <a> "<a>" /<a>/ <[7]> <b> // <a>\n# <a>\nx: "\\"<a>" <a>'
    expected = 'start: <[3]> "<a>" /<a>/ <[7]> <b> // <a>\n# <a>\nx: "\\"<a>" <[3]>'
    assert name_tokens_by_id(text, {"<a>": 3}) == expected


@pytest.mark.parametrize("vocab", [{"<u>": 0, "a": 1}, [["<u>", 0.0], ["a", -1.0]]])
def test_all_places_of_a_name_are_renamed(vocab: object) -> None:
    added = [
        {"id": 0, "content": "<u>", "special": True},
        {"id": 1, "content": "a", "special": False},
    ]
    tokenizer = {"added_tokens": added, "model": {"vocab": vocab, "unk_token": "<u>"}}
    renamed = json.loads(rename_special_tokens(json.dumps(tokenizer)))
    name = f"{MARK}<u>"
    assert [one["content"] for one in renamed["added_tokens"]] == [name, "a"]
    assert renamed["model"]["unk_token"] == name
    assert [*dict(renamed["model"]["vocab"])] == [name, "a"]
