"""The compiler of grammars: a `GrammarSpec` and a tokenizer in, a `GrammarConstraint` out.

Compiled grammars are cached, so that a schema is compiled once, however many requests have it. A
grammar that can't be used is cached as well, as its error. Threads may share a compiler. llguidance
compiles without the GIL.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend

from fulgurite.errors import ArgumentError
from fulgurite.models.tokenizer import Tokenizer
from fulgurite.serve.engine.grammar import Grammar, GrammarSpec
from fulgurite.serve.structured.backend import llguidance, require_llguidance
from fulgurite.serve.structured.bad_words import BadWords, BadWordsConstraint, TokenBytes
from fulgurite.serve.structured.constraint import (
    MASK_BITS,
    GrammarConstraint,
    MaskLayout,
    clean_message,
)
from fulgurite.serve.structured.limits import (
    COMPILE_THREADS,
    LARK_PARSER_LIMITS,
    MASK_THREADS,
    MAX_CACHED_CHARACTERS,
    MAX_CACHED_GRAMMARS,
    PARSER_LIMITS,
)
from fulgurite.serve.structured.mask_threads import MaskThreads
from fulgurite.serve.structured.schema_rewrite import find_keyword
from fulgurite.serve.structured.sources import JSON_DEFAULTS, JSON_OVERRIDES, check_source
from fulgurite.serve.structured.special_tokens import name_tokens_by_id, rename_special_tokens
from fulgurite.serve.structured.structural_tag import to_lark

END_TOKEN = "<|end of the grammar|>"
NAMES = {
    "json_schema": "JSON schema",
    "json_object": "JSON object",
    "regex": "regex",
    "lark": "Lark grammar",
    "choices": "list of choices",
    "structural_tag": "structural tag",
    "bad_words": "list of bad words",
}
# \d and \w are ASCII, as in JSON Schema: what they match differs between regex libraries.
ASCII_CLASSES = "dw"
COERCE_ONE_OF = ". Enable 'coerce_one_of' option to approximate oneOf with anyOf"
REGEX_ERROR = re.compile(r"^error: (.*)$", re.M)
UNIMPLEMENTED = re.compile(r'Unimplemented keys: \["([^"]+)"')
HELP = {
    "json_schema": "change the schema",
    "regex": "use the syntax of Rust's regex crate: no look-around, no backreferences",
    "lark": "see llguidance's documentation of its Lark dialect",
    "structural_tag": "its schemas and regexes have the limits of json_schema and regex",
}


class CompiledGrammar:
    """A grammar at its beginning, which requests copy; or the error why there is none."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.matcher: Any = None
        self.is_empty = False
        self.words: BadWords | None = None
        self.inner: GrammarSpec | None = None  # beside the words
        self.error: ArgumentError | None = None

    @property
    def is_built(self) -> bool:
        return any(one is not None for one in (self.matcher, self.words, self.error))


class GrammarCompiler:
    """Compiles grammars for one tokenizer and the model's vocabulary.

    `eos_token_ids` may follow where a grammar may end. Without any, replies end only where nothing
    else may follow.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int] = ()
    ) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        known = range(min(vocab_size, tokenizer.vocab_size))
        self.eos_token_ids = sorted(token for token in eos_token_ids if token in known)
        num_words = -(-vocab_size // MASK_BITS)
        self.layout = MaskLayout(vocab_size, num_words, tuple(self.eos_token_ids))
        if not self.eos_token_ids:  # llguidance needs one: a token after all others
            hidden = tokenizer.vocab_size
            self.layout = MaskLayout(max(vocab_size, hidden + 1), num_words, (), hidden)
        self.lock, self.tokenizer_lock = threading.Lock(), threading.Lock()
        self.backend: Any = None
        self.grammars: OrderedDict[GrammarSpec, CompiledGrammar] = OrderedDict()
        self.pool = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="fulgurite-grammars")
        self.threads = MaskThreads(MASK_THREADS)

    def warm_up(self) -> None:
        """Build llguidance's tokenizer now: about a second in which other threads of Python wait."""
        with self.tokenizer_lock:
            if self.backend is None:
                self.backend = self._build_tokenizer()

    def start_warm_up(self) -> None:
        """`warm_up` in another thread, if llguidance is there: the first grammar need not wait."""
        if llguidance is not None:
            self.pool.submit(self.warm_up)

    def check(self, spec: GrammarSpec) -> None:
        """ArgumentError if the grammar can't be used; says what is wrong with it, and where."""
        self._find_or_build(spec)

    def compile(self, spec: GrammarSpec) -> Grammar:
        """The grammar at its beginning; ArgumentError as for `check`."""
        return self._make_constraint(self._find_or_build(spec))

    def start(self, spec: GrammarSpec) -> Future[Grammar]:
        """`compile` in another thread. A cached grammar is there at once, or raises its error."""
        require_llguidance()
        with self.lock:
            found = self.grammars.get(spec)
        if found is None or not found.is_built:
            return self.pool.submit(self.compile, spec)
        future: Future[Grammar] = Future()
        future.set_result(self.compile(spec))
        return future

    def close(self) -> None:
        """Wait for the threads. Python does this at exit as well."""
        self.pool.shutdown(wait=True)
        self.threads.close()

    # ---- build -------------------------------------------------------------------------------------

    def _find_or_build(self, spec: GrammarSpec) -> CompiledGrammar:
        require_llguidance()
        with self.lock:
            grammar = self.grammars.setdefault(spec, CompiledGrammar())
            self.grammars.move_to_end(spec)
            self._evict()
        with grammar.lock:  # a second request with this grammar waits for the first
            if not grammar.is_built:
                try:
                    self._build(spec, grammar)
                except ArgumentError as error:
                    grammar.error = error
        if grammar.error is not None:
            raise ArgumentError(grammar.error.what, **grammar.error.details)
        return grammar

    def _evict(self) -> None:
        """Drop the least recently used grammars; requests that run keep theirs."""
        size = sum(len(spec.source) for spec in self.grammars)
        while len(self.grammars) > 1 and (
            len(self.grammars) > MAX_CACHED_GRAMMARS or size > MAX_CACHED_CHARACTERS
        ):
            dropped, _ = self.grammars.popitem(last=False)
            size -= len(dropped.source)

    def _build(self, spec: GrammarSpec, grammar: CompiledGrammar) -> None:
        source = check_source(spec)
        self.warm_up()
        if spec.kind == "bad_words":
            words, inner = source
            if inner is not None:
                self._find_or_build(inner)
            grammar.inner, grammar.words = inner, BadWords(words, self.token_bytes)
            return
        library = require_llguidance()
        limits = LARK_PARSER_LIMITS if spec.kind == "lark" else PARSER_LIMITS
        schemas = [source] if spec.kind == "json_schema" else []
        try:
            if spec.kind == "structural_tag":
                options = {**JSON_DEFAULTS, **JSON_OVERRIDES}
                source, schemas = to_lark(source, self._find_special_tokens(), options)
            elif spec.kind == "lark":
                source = name_tokens_by_id(source, self._find_special_tokens())
            text = to_llguidance(spec.kind, source)
        except ValueError as error:
            raise reject(spec.kind, str(error), schemas) from error
        matcher = library.LLMatcher(
            self.backend,
            text,
            log_level=0,
            limits=library.LLParserLimits(verbose_errors=False, **asdict(limits)),
        )
        if matcher.is_error():
            raise reject(spec.kind, matcher.get_error(), schemas)
        grammar.is_empty = self._is_empty(spec.kind, matcher)
        grammar.matcher = matcher

    def _is_empty(self, kind: str, matcher: Any) -> bool:
        """Whether the grammar allows the end and nothing else; ArgumentError if not even that."""
        layout = replace(self.layout, hidden_token=None)
        probe = GrammarConstraint(matcher.deep_copy(), layout, self.threads)
        probe.compute_mask()
        if matcher_error := probe.matcher.get_error():
            is_dead = "NoExtension" in matcher_error
            raise reject(kind, "no text matches it" if is_dead else matcher_error)
        bits = np.unpackbits(probe.words.view(np.uint8), bitorder="little")
        allowed = {*bits.nonzero()[0].tolist()}
        if not allowed:
            raise reject(kind, "no text matches it")
        return allowed <= {*self.eos_token_ids, self.layout.hidden_token}

    @cached_property
    def token_bytes(self) -> TokenBytes:
        return TokenBytes(self.backend, self.vocab_size)

    def _find_special_tokens(self) -> dict[str, int]:
        added = self.tokenizer.backend.get_added_tokens_decoder()
        return {one.content: token for token, one in added.items() if one.special}

    def _make_constraint(self, grammar: CompiledGrammar) -> Grammar:
        if grammar.words is not None:
            inner = None
            if grammar.inner is not None:
                inner = self._make_matcher(self._find_or_build(grammar.inner))
            return BadWordsConstraint(grammar.words, inner)
        return self._make_matcher(grammar)

    def _make_matcher(self, grammar: CompiledGrammar) -> GrammarConstraint:
        with grammar.lock:
            matcher = grammar.matcher.deep_copy()
        return GrammarConstraint(matcher, self.layout, self.threads, grammar.is_empty)

    def _build_tokenizer(self) -> Any:
        library, text = require_llguidance(), self.tokenizer.backend.to_str()
        eos_token_ids = self.eos_token_ids
        if self.layout.hidden_token is not None:
            backend = Backend.from_str(text)
            backend.add_special_tokens([END_TOKEN])
            text, eos_token_ids = backend.to_str(), [self.layout.hidden_token]
            assert backend.token_to_id(END_TOKEN) == self.layout.hidden_token, (
                "it is the last token"
            )
        try:
            return library.LLTokenizer(
                rename_special_tokens(text),
                n_vocab=self.layout.num_tokens,
                eos_token=eos_token_ids,
            )
        except Exception as error:  # the library raises plain exceptions of several kinds
            raise ArgumentError(
                f"structured output does not support this model's tokenizer: {error}",
                next="use a model with a byte-level or byte-fallback BPE tokenizer",
            ) from error


def to_llguidance(kind: str, source: Any) -> str:
    """The grammar in llguidance's own format."""
    library = require_llguidance()
    text: str
    if kind in ("json_schema", "json_object"):
        text = library.LLMatcher.grammar_from_json_schema(source, JSON_DEFAULTS, JSON_OVERRIDES)
    elif kind in ("lark", "structural_tag"):
        text = library.LLMatcher.grammar_from_lark(source)
    elif source == "":
        text = library.LLMatcher.grammar_from_regex(source)
    else:
        regex = library.regex_to_lark(source, ASCII_CLASSES if kind == "regex" else "")
        text = library.LLMatcher.grammar_from_lark(f"start: /{regex}/")
    return text


def reject(kind: str, message: str, schemas: Sequence[Any] = ()) -> ArgumentError:
    """The error of a grammar that llguidance does not take. `schemas`: those in it."""
    if found := UNIMPLEMENTED.search(message):
        keyword = found[1]
        path = next(filter(None, (find_keyword(one, keyword) for one in schemas)), None)
        return ArgumentError(
            f"the JSON schema can't be used: {keyword!r} at {path or '#'} is not supported",
            next="write it in other words, or leave it out and check the reply yourself",
        )
    if kind in ("regex", "choices") and (found := REGEX_ERROR.search(message)):
        message = found.group(1)  # the rest repeats the whole regex
    message = message.replace(COERCE_ONE_OF, " where two may match; write anyOf")
    return ArgumentError(
        f"the {NAMES[kind]} can't be used: {clean_message(message)}", next=HELP.get(kind)
    )
