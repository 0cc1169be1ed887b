"""Hostile grammars: each is a clean error, soon, or a grammar whose masks stay cheap."""

from __future__ import annotations

import json
import time

import pytest

from fulgurite.errors import ArgumentError, FulguriteError
from fulgurite.serve.engine.grammar import GrammarSpec
from fulgurite.serve.structured.limits import MAX_ERROR_CHARACTERS, MAX_REGEX_SIZE
from fulgurite.serve.structured.regex_size import expanded_size, lark_terminal_sizes
from tests.serve.structured.drivers import read_mask, tiny_compiler

DEEP = '{"items":' * 100 + "{}" + "}" * 100
HUGE_LITERAL = json.dumps({"type": "array", "minItems": 5000, "items": {"const": "x" * 9000}})
FAN_OUT = json.dumps(
    {
        "$defs": {
            f"d{index}": {"type": "array", "minItems": 50, "items": {"$ref": f"#/$defs/d{index + 1}"}}
            for index in range(9)
        }
        | {"d9": {"const": "leaf"}},
        "$ref": "#/$defs/d0",
    }
)  # fmt: skip
REJECTED = (
    ("json_schema", "", "not valid JSON"),
    ("json_schema", "{", "not valid JSON"),
    ("json_schema", '{"a": NaN}', "NaN is not JSON"),
    ("json_schema", "[]", "JSON list"),
    ("json_schema", "null", "JSON NoneType"),
    ("json_schema", "false", "nothing matches"),
    ("json_schema", "[" * 100_000, "nested too deeply"),
    ("json_schema", DEEP, "more than 64 levels"),
    ("json_schema", '{"$ref": "#"}', "no text matches"),
    ("json_schema", '{"$ref": "#/$defs/none"}', "does not exist"),
    ("json_schema", '{"$ref": "http://example.com/schema"}', "not present"),
    ("json_schema", '{"allOf": [{"$ref": "#"}]}', "no text matches"),
    ("json_schema", '{"type": "text"}', "Invalid type: text"),
    ("json_schema", '{"type": 3}', "type must be a string"),
    ("json_schema", '{"enum": []}', "can't be used"),
    ("json_schema", '{"not": {"type": "null"}}', "'not' at # is not supported"),
    (
        "json_schema",
        '{"properties": {"not": {"items": {"uniqueItems": true, "type": "array"}}}}',
        "'uniqueItems' at #/properties/not/items is not supported",
    ),
    (
        "json_schema",
        '{"anyOf": [{"type": "null"}, {"if": {"const": 1}, "then": false}]}',
        "'if' at #/anyOf/1 is not supported",
    ),
    ("json_schema", '{"type": "string", "pattern": "(?=a)b"}', "look-around"),
    ("json_schema", '{"type": "string", "pattern": "(a{1000}){1000}"}', "1,000,000 characters"),
    ("json_schema", '{"type": "string", "format": 5}', "Expected string for 'format'"),
    ("json_schema", '{"type": "array", "minItems": 1000000000}', "forces"),
    ("json_schema", '{"minimum": 3, "maximum": 1, "type": "integer"}', "greater than maximum"),
    ("json_schema", '{"const": "\ud800"}', "not valid Unicode"),
    ("json_schema", '{"const": "\\ud800"}', "can't be used"),
    ("json_schema", json.dumps({"enum": ["x" * 200_000]}), "has 200,"),
    ("json_schema", HUGE_LITERAL, "the schema forces 45,020,000 characters"),
    ("json_schema", FAN_OUT, "the schema forces"),
    ("json_schema", '{"x-guidance": {"lenient": true}, "not": {}}', "'not' at #"),
    ("regex", "(" * 60_000 + ")" * 60_000, "has 120,000 characters"),
    ("regex", "(" * 2_000 + "a" + ")" * 2_000, "nested parentheses"),
    ("regex", "(a{1000}){1000}", "match 1,000,000 characters"),
    ("regex", "((a?){1000}){1000}", "match 1,000,000 characters"),
    ("regex", "a{99999999999999999999999999}", "characters"),
    ("regex", "a{9999}" * 50, "characters"),
    ("regex", "(a", "unclosed group"),
    ("regex", "a\\", "ends with a backslash"),
    ("regex", r"(a)\1", "backreferences"),
    ("regex", r"[^\s\S]", "no text matches"),
    ("regex", "\udfff", "not valid Unicode"),
    ("lark", "start: A\nA: B{100}\nB: C{100}\nC: /a{100}/", "repetitions of A"),
    ("lark", "start: /(a{1000}){1000}/", "repetitions of start"),
    ("lark", 'start: "' + "a" * 5_000 + '"', "1,000 characters"),
    ("lark", "start: A0\n" + "\n".join(f"A{n}: A{n + 1}" for n in range(5_000)), "nested too deeply"),
    ("lark", 'start: "a"\n' * 10_000, "has 110,000 characters"),
    ("choices", "{}", "list of strings"),
    ("choices", "[]", "0 choices"),
    ("choices", '["a", 3]', "list of strings"),
    ("choices", json.dumps([str(number) for number in range(10_001)]), "10,001 choices"),
    ("choices", '["\ud800"]', "not valid Unicode"),
)  # fmt: skip
ACCEPTED = (
    ("json_schema", json.dumps({"enum": [f"value {number}" for number in range(3000)]})),
    ("json_schema", json.dumps({"properties": {f"p{n}": {"type": "string"} for n in range(300)}})),
    ("json_schema", '{"type": "string", "maxLength": 1000000000}'),
    ("json_schema", '{"type": "array", "items": {"type": "null"}, "maxItems": 1000000000}'),
    ("json_schema", '{"type": "array", "items": {"$ref": "#"}}'),
    ("regex", f"a{{{MAX_REGEX_SIZE}}}"),
    ("regex", "(a|b)*a(a|b){20}"),
    ("regex", "((a|b){0,100}){0,100}"),
    ("regex", "(x+x+)+y"),
    ("lark", 'start: e\ne: e e | "a" | "b" | e "a" e'),
    ("lark", 'start: "a" start'),
    ("lark", 'start: ((/[ab]/{0,1000}){0,1000}){0,1000}'),
    ("choices", json.dumps([f"choice {number}" for number in range(10_000)])),
)  # fmt: skip


@pytest.mark.parametrize(("kind", "source", "message"), REJECTED)
def test_bad_grammars_are_argument_errors(kind: str, source: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as caught:
        tiny_compiler().compile(GrammarSpec(kind, source))
    assert len(str(caught.value)) < MAX_ERROR_CHARACTERS + 400


@pytest.mark.parametrize(("kind", "source"), ACCEPTED)
def test_large_grammars_stay_cheap_or_fail_alone(kind: str, source: str) -> None:
    """No mask takes seconds. A grammar that grows too complex raises; it never allows all tokens."""
    compiler = tiny_compiler()
    grammar = compiler.compile(GrammarSpec(kind, source))
    started = time.thread_time()
    try:
        for _ in range(60):
            if grammar.is_complete:
                break
            grammar.forced_tokens()
            allowed = read_mask(grammar, compiler.vocab_size)
            assert len(allowed) < 258
            texts = [token for token in allowed.tolist() if token != 257]
            if not texts:
                break
            grammar.accept_token(texts[len(texts) // 2])
    except FulguriteError as error:
        assert "the grammar failed" in str(error)
    assert time.thread_time() - started < 30, "of processor time; usually below 1 s"


@pytest.mark.parametrize(
    ("regex", "size"),
    [
        ("", 0),
        ("abc", 3),
        ("a{3}b", 4),
        ("(ab){10}", 20),
        ("((ab){2,5}c){3}", 33),
        ("[a-z]{4}|\\d+", 6),
        ("[\\]}]{3}", 3),
        ("(?:a|b){0,7}", 28),
        ("a{}", 1),
        ("a{2}{3}", 6),
        (")(", 0),
        ("(a{9}", 9),
    ],
)
def test_size_of_a_regex(regex: str, size: int) -> None:
    assert expanded_size(regex) == size


def test_sizes_of_lark_terminals() -> None:
    sizes = lark_terminal_sizes(
        'start: a B\na: /x{9}/ "/y{99}/"\nB: "ab"{3} C // D{99}\nC: /z/{5}\n'
    )
    assert sizes["a"] == 9 and sizes["C"] == 5
    assert sizes["B"] == 4 * 3 + 5
