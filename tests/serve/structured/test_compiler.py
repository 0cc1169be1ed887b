"""The compiler: its cache, threads, end tokens, vocabularies, and life without llguidance."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from fulgurite.errors import ArgumentError, FulguriteError
from fulgurite.models.tokenizer import Tokenizer
from fulgurite.serve.engine.grammar import Grammar, GrammarSpec
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.structured import backend, compiler
from fulgurite.serve.structured.compiler import GrammarCompiler
from tests.serve.structured.drivers import read_mask, sample_reply, tiny_compiler, tiny_tokenizer

SPEC = GrammarSpec("regex", "[ab]{2,3}")


@pytest.fixture
def fresh() -> GrammarCompiler:
    return GrammarCompiler(tiny_tokenizer(), 258, [257])


def test_a_grammar_is_built_once(fresh: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    real = compiler.to_llguidance

    def count(kind: str, source: str) -> str:
        built.append(source)
        return real(kind, source)

    monkeypatch.setattr(compiler, "to_llguidance", count)
    with ThreadPoolExecutor(4) as pool:
        grammars = list(pool.map(fresh.compile, [SPEC] * 12))
    assert built == [SPEC.source]
    grammars[0].accept_token(tiny_tokenizer().encode("a")[0])
    assert not grammars[1].is_accepting and isinstance(grammars[0], Grammar)
    for _ in range(2):  # errors are cached, too
        with pytest.raises(ArgumentError, match="unclosed"):
            fresh.check(GrammarSpec("regex", "(("))
    assert built == [SPEC.source, "(("]


def test_the_least_recently_used_grammar_is_dropped(
    fresh: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "MAX_CACHED_GRAMMARS", 2)
    first, second, third = (GrammarSpec("regex", text) for text in "xyz")
    for spec in (first, second, first, third):
        fresh.check(spec)
    assert [*fresh.grammars] == [first, third]
    monkeypatch.setattr(compiler, "MAX_CACHED_CHARACTERS", 3)
    fresh.check(GrammarSpec("regex", "abc"))
    assert [spec.source for spec in fresh.grammars] == ["abc"]


def test_start_gives_a_known_grammar_at_once(fresh: GrammarCompiler) -> None:
    assert fresh.start(SPEC).result().forced_tokens() == []
    assert fresh.start(SPEC).done()
    bad = GrammarSpec("regex", "(")
    with pytest.raises(ArgumentError, match="unclosed"):
        fresh.start(bad).result()
    with pytest.raises(ArgumentError, match="unclosed"):
        fresh.start(bad)


def test_without_llguidance(fresh: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "llguidance", None)
    for call in (fresh.check, fresh.compile, fresh.start):
        with pytest.raises(ArgumentError, match=r"pip install 'fulgurite\[serve\]'"):
            call(SPEC)


def test_a_tokenizer_that_is_not_supported_is_an_argument_error() -> None:
    words = Tokenizer(
        Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="a")), None, (), None, {}
    )
    with pytest.raises(ArgumentError, match="does not support this model's tokenizer"):
        GrammarCompiler(words, 2).check(SPEC)


@pytest.mark.parametrize("vocab_size", [258, 288, 300])
def test_only_tokens_of_the_tokenizer_are_allowed(vocab_size: int) -> None:
    for has_eos in (True, False):
        grammar = tiny_compiler(vocab_size, has_eos).compile(GrammarSpec("regex", "[^x]*"))
        mask = grammar.allowed_tokens()
        assert len(mask) == -(-vocab_size // 32)
        allowed = read_mask(grammar, len(mask) * 32)
        assert len(allowed) > 100 and allowed.max() <= 257
        assert (257 in allowed) == has_eos


def test_without_an_end_token_replies_end_with_the_grammar() -> None:
    text = sample_reply(tiny_compiler(258, has_eos=False), GrammarSpec("regex", "[ab]{4}"), 1)
    assert text is not None and len(text) == 4


@pytest.mark.parametrize(("regex", "is_complete"), [("", True), ("a*", False), ("a{0,0}", True)])
def test_a_grammar_may_be_complete_from_the_start(regex: str, is_complete: bool) -> None:
    grammar = tiny_compiler().compile(GrammarSpec("regex", regex))
    assert grammar.is_accepting and grammar.is_complete == is_complete


def test_a_token_that_is_not_allowed_raises_and_so_does_all_that_follows() -> None:
    grammar = tiny_compiler().compile(SPEC)
    with pytest.raises(FulguriteError, match="the grammar failed"):
        grammar.accept_token(tiny_tokenizer().encode("z")[0])
    assert not grammar.is_complete and not grammar.is_accepting
    for method in (grammar.allowed_tokens, grammar.forced_tokens):
        with pytest.raises(FulguriteError, match="the grammar failed"):
            method()


# ---- SamplingParams --------------------------------------------------------------------------------


def test_params_make_one_spec() -> None:
    schema = {"type": "object", "properties": {"é": {"const": 1}}}
    params = SamplingParams(json_schema=schema)
    schema.clear()
    wanted = '{"type": "object", "properties": {"é": {"const": 1}}}'
    assert params.grammar_spec == GrammarSpec("json_schema", wanted)
    assert SamplingParams(json_schema=wanted).grammar_spec == params.grammar_spec
    assert SamplingParams(json_schema=True).grammar_spec == GrammarSpec("json_schema", "true")
    assert SamplingParams(json_object=True).grammar_spec == GrammarSpec("json_object")
    assert SamplingParams(regex="a").grammar_spec == GrammarSpec("regex", "a")
    assert SamplingParams(grammar="start:").grammar_spec == GrammarSpec("lark", "start:")
    choices = SamplingParams(choices=iter(["b", "é", "b"])).grammar_spec
    assert choices is not None and json.loads(choices.source) == ["b", "é"]
    assert SamplingParams().grammar_spec is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"json_schema": 3}, "json_schema=3"),
        ({"json_schema": [1]}, "json_schema"),
        ({"json_schema": {"a": object()}}, "can't be written as JSON"),
        ({"json_schema": {"a": float("nan")}}, "can't be written as JSON"),
        ({"json_object": 1}, "json_object=1"),
        ({"json_object": None}, "json_object=None"),
        ({"regex": b"a"}, "regex=b'a'"),
        ({"grammar": 3}, "grammar=3"),
        ({"choices": "abc"}, "choices='abc'"),
        ({"choices": {"a": 1}}, "choices"),
        ({"choices": ["a", 1]}, "choices contains 1"),
        ({"choices": []}, "choices is empty"),
        ({"choices": 5}, "choices=5"),
        ({"regex": "a", "choices": ["a"]}, "regex and choices are given"),
        ({"regex": "", "json_object": True}, "regex and json_object are given"),
    ],
)
def test_wrong_options_are_argument_errors(options: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        SamplingParams(**options)  # type: ignore[arg-type]


def test_a_schema_that_contains_itself_is_an_argument_error() -> None:
    schema: dict[str, object] = {}
    schema["items"] = schema
    with pytest.raises(ArgumentError, match="can't be written as JSON"):
        SamplingParams(json_schema=schema)


@pytest.mark.parametrize(("kind", "source"), [("xml", ""), ("regex", None), ("regex", b"")])
def test_wrong_specs_are_argument_errors(kind: str, source: object) -> None:
    with pytest.raises(ArgumentError):
        GrammarSpec(kind, source)  # type: ignore[arg-type]


def test_masks_of_two_threads_are_those_of_one() -> None:
    """Jobs that come late, or while the next token is accepted, change nothing."""
    compiler, text = tiny_compiler(), "ab" * 300
    early, plain = (compiler.compile(GrammarSpec("regex", "(ab|a|b|[^x]b)*")) for _ in range(2))
    for token in tiny_tokenizer().encode(text):
        early.start_mask()
        if token % 3:
            assert early.allowed_tokens().equal(plain.allowed_tokens())
        early.accept_token(token)
        plain.accept_token(token)
        early.start_mask()
    assert early.is_accepting
