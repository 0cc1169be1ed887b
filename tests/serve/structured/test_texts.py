"""Random replies of regexes, Lark grammars and choices match them."""

from __future__ import annotations

import json
import re

import pytest

from fulgurite.errors import ArgumentError
from fulgurite.serve.engine.grammar import GrammarSpec
from tests.serve.structured.drivers import sample_reply, smollm2_compiler, tiny_compiler

REGEXES = (
    r"\d{4}-\d{2}-\d{2}",
    r"(yes|no|maybe later)",
    r"[a-f0-9]{8}",
    r"[^\n]{1,20}",
    r"(\w{1,6} ){1,4}end\.",
    r"a/b(c/d)*",
    r"é{2,3}|漢字|😀+",
    r"-?(0|[1-9]\d*)(\.\d+)?",
    r"line one\nline two",
    r"[\[\]{}()\\/^$.|?*+-]+",
    r"(?i)hello",
    r"x?y?z?",
    r"a{0,0}b",
    r"[A-Z][a-z]{0,10}(, [A-Z][a-z]{0,10}){0,3}",
)
CHOICES = (
    ["yes"],
    ["yes", "no"],
    ["a", "ab", "abc"],
    ["", "x"],
    ["a/b", "a\nb", "\\", "<|im_end|>", "é漢😀", "a b", "\u2028", "\x7f", "[x]", "a-b&c~d#", "<x>"],
    [f"option {number}" for number in range(500)],
    ["\t", "\x00", "\x85", '"', "'", "(?i)", "\\d"],
)
LARK = (
    ('start: "a" b+ "!"\nb: /[xyz]/ | "(" b ")"', r"a[xyz()]+!"),
    ('start: greeting " " NAME\ngreeting: "Hi" | "Bye"\nNAME: /[A-Z][a-z]{2,5}/', r"(Hi|Bye) [A-Z][a-z]{2,5}"),
    ('start: pair ("," pair)*\npair: KEY "=" /[0-9]+/\nKEY: ("a".."f"){2}', r"[a-f]{2}=\d+(,[a-f]{2}=\d+)*"),
    ('start: | "x" start', r"x*"),
    ('start: "é" | "日本"', r"é|日本"),
)  # fmt: skip


@pytest.mark.parametrize("regex", REGEXES)
@pytest.mark.parametrize("make_compiler", [tiny_compiler, smollm2_compiler])
def test_replies_match_the_regex(make_compiler, regex: str) -> None:
    compiler = make_compiler()
    for seed in range(6):
        text = sample_reply(compiler, GrammarSpec("regex", regex), seed, use_forced=seed % 2 > 0)
        assert text is not None and re.fullmatch(regex, text), repr(text)


@pytest.mark.parametrize("choices", CHOICES, ids=lambda choices: str(len(choices)))
@pytest.mark.parametrize("make_compiler", [tiny_compiler, smollm2_compiler])
def test_replies_are_one_of_the_choices(make_compiler, choices: list[str]) -> None:
    compiler, spec = make_compiler(), GrammarSpec("choices", json.dumps(choices))
    found = {sample_reply(compiler, spec, seed, use_forced=seed % 2 > 0) for seed in range(30)}
    assert found <= {*choices}
    assert len(found) > len(choices) // 3 or len(found) > 10


@pytest.mark.parametrize(("lark", "wanted"), LARK)
@pytest.mark.parametrize("make_compiler", [tiny_compiler, smollm2_compiler])
def test_replies_follow_the_lark_grammar(make_compiler, lark: str, wanted: str) -> None:
    compiler = make_compiler()
    for seed in range(6):
        text = sample_reply(compiler, GrammarSpec("lark", lark), seed, use_forced=seed % 2 > 0)
        assert text is not None and re.fullmatch(wanted, text), repr(text)


def test_forced_tokens_are_those_of_the_tokenizer() -> None:
    """The forced text is tokenized as the tokenizer does it, up to where more may follow."""
    compiler = smollm2_compiler()
    wanted = '{"first name": "the quick brown fox", "last name":'
    properties = {"first name": {"const": "the quick brown fox"}, "last name": {"type": "string"}}
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    grammar = compiler.compile(GrammarSpec("json_schema", json.dumps(schema)))
    forced = grammar.forced_tokens()
    assert compiler.tokenizer.decode(forced) == wanted
    assert forced == compiler.tokenizer.encode(wanted)


@pytest.mark.parametrize(
    ("lark", "where"),
    [
        ('start: "a" b', r'1\(8\): unknown name: "b"'),
        ('start: "a"\n\nb: (', r"3\(5\): Expected token '\)'"),
        ('start: "a"\nb: "x', r"2\("),
        ("", "Empty grammar"),
        ("foo: 'x'", "lexer error"),
        ("start: start", "no text matches"),
    ],
)
def test_lark_errors_say_where(lark: str, where: str) -> None:
    with pytest.raises(ArgumentError, match=where):
        tiny_compiler().check(GrammarSpec("lark", lark))
