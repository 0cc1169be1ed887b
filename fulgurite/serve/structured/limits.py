"""Limits of grammars: what a request may ask to compile. All of them are here.

A grammar within these limits compiles in bounded time and memory, and so does every mask of it. The
figures are of one core with a vocabulary of 49,152 tokens (llguidance 1.9).
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_SCHEMA_CHARACTERS = 128 << 10  # a schema of 4,000 properties; it compiles in about 2 s
MAX_JSON_DEPTH = 64  # nested objects and arrays of a schema's text
MAX_REGEX_CHARACTERS = 16 << 10
MAX_REGEX_SIZE = 50_000  # characters once all {m,n} are written out; a{50000} takes 40 ms to force
MAX_LARK_CHARACTERS = 64 << 10
MAX_LARK_LITERAL = 1_000  # characters of one string in a Lark grammar
MAX_CHOICES = 10_000
MAX_CHOICES_CHARACTERS = 256 << 10
MAX_BAD_WORDS = 256  # each reads the vocabulary once: 3 to 9 ms, before the request runs
MAX_BAD_WORDS_CHARACTERS = 16 << 10
MAX_FORCED_CHARACTERS = 200_000  # that a schema may force: constants, names, minItems; 0.2 s
MAX_ERROR_CHARACTERS = 600  # of llguidance's message in ours

MAX_CACHED_GRAMMARS = 256
MAX_CACHED_CHARACTERS = 2 << 20  # of the sources of all cached grammars
COMPILE_THREADS = 2
MASK_THREADS = 4


@dataclass(frozen=True)
class ParserLimits:
    """Limits of llguidance's lexer and parser (`LLParserLimits`).

    max_items_in_row     Earley items of a row. The time of an ambiguous grammar grows with its square
    step_max_items       Earley items of a mask, and of the tokens that follow by force
    step_lexer_fuel      cost of a mask's new lexer states; 100,000 are about 7 ms
    max_lexer_states     of a grammar; 1 to 2 kB each
    initial_lexer_fuel   cost of building the lexer; 1,000,000 are about 0.1 s
    max_grammar_size     symbols
    """

    max_items_in_row: int
    step_max_items: int
    step_lexer_fuel: int = 100_000
    max_lexer_states: int = 50_000
    initial_lexer_fuel: int = 1_000_000
    max_grammar_size: int = 250_000


# Schemas have no ambiguity: 2,000 items are 500 optional properties of one object.
PARSER_LIMITS = ParserLimits(max_items_in_row=2_000, step_max_items=20_000)
# Lark grammars may be as ambiguous as can be: a mask of 500 items takes 11 ms, one of 2,000 takes 0.6 s.
LARK_PARSER_LIMITS = ParserLimits(max_items_in_row=500, step_max_items=5_000)
