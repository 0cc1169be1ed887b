"""Bad words: no reply has one, however it is split into tokens; with and without a grammar."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from fulgurite.errors import ArgumentError, FulguriteError
from fulgurite.serve.engine.grammar import Grammar, GrammarSpec, ban_words
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.structured.bad_words import BadWords, BadWordsConstraint, TokenBytes
from fulgurite.serve.structured.compiler import GrammarCompiler
from tests.serve.structured.drivers import read_mask, smollm2_compiler, tiny_compiler


class Vocabulary:
    """What `TokenBytes` needs of llguidance's tokenizer."""

    def __init__(self, tokens: list[bytes], special: set[int]) -> None:
        self.tokens, self.special = tokens, special
        self.vocab_size = len(tokens)

    def is_special_token(self, token: int) -> bool:
        return token in self.special

    def decode_bytes(self, tokens: list[int]) -> bytes:
        return b"".join(self.tokens[token] for token in tokens)


def make_words(tokens: list[str], words: list[str], special: set[int] | None = None) -> BadWords:
    vocabulary = Vocabulary([token.encode() for token in tokens], special or set())
    return BadWords(words, TokenBytes(vocabulary, len(tokens) + 3))


def allowed_after(words: BadWords, tail: str) -> list[int]:
    bits = np.unpackbits(words.make_mask(tail.encode()).view(np.uint8), bitorder="little")
    return bits.nonzero()[0].tolist()


def test_tokens_that_complete_a_word_are_banned() -> None:
    tokens = ["r", "e", "d", "red", "Fred", "ed", "edge", "re", "cat", "<red>", "é"]
    words = make_words(tokens, ["red"], special={9})
    everything = [*range(14)]  # tokens that only the model has are not banned
    assert allowed_after(words, "") == [one for one in everything if one not in (3, 4)]
    assert allowed_after(words, "xr") == [one for one in everything if one not in (3, 4, 5, 6)]
    assert allowed_after(words, "re") == [one for one in everything if one not in (2, 3, 4)]
    assert allowed_after(words, "read") == allowed_after(words, "")


@pytest.mark.parametrize("seed", range(20))
def test_random_replies_have_no_word(seed: int) -> None:
    random_source = random.Random(seed)
    pieces = ["a", "b", "c", "ab", "ba", "abc", "cab", "bb", "é", "\u00e9a"]
    vocabulary = [piece.encode() for piece in pieces] + [b"\xc3", b"\xa9"]
    count = random_source.randint(1, 4)
    words = [
        "".join(random_source.choices("abcé", k=random_source.randint(1, 4))) for _ in range(count)
    ]
    tokens = TokenBytes(Vocabulary(vocabulary, set()), len(vocabulary))
    constraint = BadWordsConstraint(BadWords(words, tokens), None)
    reply = b""
    for _ in range(60):
        allowed = read_mask(constraint, len(vocabulary)).tolist()  # type: ignore[arg-type]
        wanted = [
            token
            for token, data in enumerate(vocabulary)
            if not any(word.encode() in reply + data for word in words)
        ]
        assert allowed == wanted
        if not allowed:
            return
        token = random_source.choice(allowed)
        constraint.accept_token(token)
        reply += vocabulary[token]


def compile_words(
    compiler: GrammarCompiler, words: list[str], spec: GrammarSpec | None = None
) -> Grammar:
    found = ban_words(words, spec)
    assert found is not None, "there are words"
    return compiler.compile(found)


def token_of(character: str) -> int:
    (token,) = tiny_compiler().tokenizer.encode(character, False)
    return token


def test_without_a_grammar_nothing_is_forced_and_nothing_ends() -> None:
    grammar = compile_words(tiny_compiler(), ["ab"])
    assert isinstance(grammar, Grammar) and grammar.forced_tokens() == []
    assert not grammar.is_accepting and not grammar.is_complete and not grammar.eos_token_ids
    assert len(read_mask(grammar, 258)) == 258  # type: ignore[arg-type]
    grammar.accept_token(token_of("a"))
    assert token_of("b") not in read_mask(grammar, 258)  # type: ignore[arg-type]
    with pytest.raises(FulguriteError, match="bad_words"):
        grammar.accept_token(token_of("b"))


def test_a_grammar_and_words_hold_both() -> None:
    grammar = compile_words(tiny_compiler(), ["b", "cc"], GrammarSpec("regex", "[abc]{3}"))
    assert read_mask(grammar, 258).tolist() == [token_of("a"), token_of("c")]  # type: ignore[arg-type]
    grammar.accept_token(token_of("c"))
    assert read_mask(grammar, 258).tolist() == [token_of("a")]  # type: ignore[arg-type]


def test_forced_tokens_end_before_a_word() -> None:
    spec = GrammarSpec("regex", "[xy]abcd")
    grammar = compile_words(tiny_compiler(), ["bc"], spec)
    grammar.accept_token(token_of("x"))
    assert tiny_compiler().tokenizer.decode(grammar.forced_tokens()) == "ab"


def test_other_splits_of_a_word_are_banned() -> None:
    compiler = smollm2_compiler()
    grammar = compile_words(compiler, [" Paris"])
    (whole,) = compiler.tokenizer.encode(" Paris", False)
    assert whole not in read_mask(grammar, compiler.vocab_size)  # type: ignore[arg-type]
    for token in compiler.tokenizer.encode(" Par", False):
        grammar.accept_token(token)
    (rest,) = compiler.tokenizer.encode("is", False)
    assert rest not in read_mask(grammar, compiler.vocab_size)  # type: ignore[arg-type]


def test_bad_words_that_are_not_usable() -> None:
    for bad in (5, [""], [1], b"a"):
        with pytest.raises(ArgumentError, match="bad_words"):
            SamplingParams(bad_words=bad)  # type: ignore[arg-type]
    for words in (["a"] * 300, ["a" * 20_000], ["\ud800"]):
        with pytest.raises(ArgumentError, match="bad_words"):
            compile_words(tiny_compiler(), words)
    with pytest.raises(ArgumentError, match="unclosed"):
        compile_words(tiny_compiler(), ["a"], GrammarSpec("regex", "("))


def test_params_describe_words_and_grammar_in_one_spec() -> None:
    assert SamplingParams(bad_words="x").bad_words == ("x",)
    spec = SamplingParams(bad_words=["x", "y"], regex="a+").grammar_spec
    assert spec is not None and spec.kind == "bad_words"
    assert json.loads(spec.source) == [["x", "y"], ["regex", "a+"]]
    assert SamplingParams().grammar_spec is None
