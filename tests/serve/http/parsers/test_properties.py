"""What holds for any text: parsers never raise, pieces do not matter, work is linear."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fulgurite.serve.http.parsers import REASONING_FORMATS, TOOL_FORMATS
from fulgurite.serve.http.parsers.cursor import MAX_HELD_CHARS, Cursor
from tests.serve.http.parsers.transcripts import TRANSCRIPTS, build_parser, cut, run, summarize

FORMATS = list(TOOL_FORMATS)
REASONING = [None, *REASONING_FORMATS]
TAGS = ("name_open", "key_open", "key_end", "value_open", "value_close", "call_close", "header_end")
BITS = [
    *"{}[]\"',:;()=\\\n <a1é",
    *(
        "get_weather",
        '"name": "get_weather"',
        '"arguments": {',
        '"parameters":',
        "function",
        "true",
    ),
    *("\\u00", '\\"', "```", '"""', "to=functions.f", "analysis", "final", "city", "<|", "</"),
]


def fragments_of(format: str) -> list[str]:
    row = TOOL_FORMATS[format]
    tags = [getattr(syntax, tag, "") for syntax in row.syntaxes for tag in TAGS]
    markers = [text for text in (*row.visible_tokens, *row.bare_opens, *tags) if text]
    return [*markers * 3, *(marker[: len(marker) // 2] for marker in markers), *BITS]


def make_reply(format: str, seed: int) -> str:
    """Fragments of the format in any order, or a transcript with a few changes."""
    generator = random.Random(f"{format} {seed}")
    fragments = fragments_of(format)
    if seed % 2:
        return "".join(generator.choices(fragments, k=generator.randrange(1, 25)))
    text = generator.choice([one.text for one in TRANSCRIPTS if one.format == format])
    for _ in range(generator.randrange(1, 5)):
        start = generator.randrange(len(text) + 1)
        end = start + generator.choice([0, 0, 1, 3, 10])
        text = text[:start] + generator.choice([*fragments, ""]) + text[end:]
    return text


@pytest.mark.parametrize("format", FORMATS)
def test_pieces_of_damaged_replies_do_not_matter(format: str) -> None:
    for seed in range(150):
        text = make_reply(format, seed)
        options: dict[str, Any] = {"starts_in_reasoning": seed % 3 == 0}
        reasoning = REASONING[seed % len(REASONING)]
        whole, chars, pieces = (
            summarize(run(build_parser(format, reasoning, **options), cuts))
            for cuts in ([text], list(text), cut(text, seed))
        )
        assert whole == chars == pieces, (seed, text)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from(FORMATS),
    st.sampled_from(REASONING),
    st.lists(st.text(max_size=8) | st.sampled_from(BITS), max_size=12),
    st.booleans(),
    st.booleans(),
)
def test_any_text_can_be_parsed(
    format: str, reasoning: str | None, pieces: list[str], is_open: bool, parses: bool
) -> None:
    options = {"starts_in_reasoning": is_open, "parse_reasoning": parses}
    events = summarize(run(build_parser(format, reasoning, **options), pieces))
    assert events == summarize(run(build_parser(format, reasoning, **options), "".join(pieces)))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.text()))
def test_without_formats_the_text_is_the_input(pieces: list[str]) -> None:
    events = summarize(run(build_parser(None), pieces))
    assert "".join(text for _, text in events) == "".join(pieces)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.sampled_from(FORMATS), st.lists(st.text(alphabet="ab\n .|>=</-é"), max_size=20))
def test_text_without_markers_is_the_input(format: str, pieces: list[str]) -> None:
    events = summarize(run(build_parser(format, "think"), pieces))
    assert "".join(text for _, text in events) == "".join(pieces)


LONG = {
    "text": ("hermes", "plain < text <tool "),
    "spaces": ("hermes", " "),
    "arguments": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', 'x\\n{" : "'),
    "markers": ("hermes", "<tool_call>"),
    "arguments first": ("hermes", '<tool_call>{"arguments": {"a": "', "x"),
    "candidates": ("hermes", '<tool_call>{"arguments": {"a": "'),
    "bare candidates": ("llama3_json", '\n{"parameters": {"a": "'),
    "lists": ("llama4_pythonic", "\n[get_weather(a='"),
    "python": ("llama4_pythonic", "[get_weather(a=", "[(1,'"),
    "string tag": ("qwen3_coder", "<tool_call><function=get_weather><parameter=city>", "a\n</p"),
    "guessed tag": ("qwen3_coder", "<tool_call><function=get_weather><parameter=x>", "1\n</p"),
    "keys": ("glm45", "<tool_call>f<arg_key>", "<arg_key>"),
    "headers": ("mistral", "[TOOL_CALLS]a[CALL_ID]"),
    "harmony header": ("harmony", "<|channel|>", "<|message"),
    "harmony": ("harmony", "<|channel|>commentary to=f<|message|>", "<|end"),
    "reasoning": ("hermes", "<think>", " </thin"),
}


@pytest.mark.parametrize("name", list(LONG))
def test_work_is_linear(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each push scans what was not consumed yet. Their sum grows with the length of the reply."""
    scanned = 0
    original = Cursor.feed

    def feed(self: Cursor, text: str) -> None:
        nonlocal scanned
        original(self, text)
        scanned += len(self.buffer) - self.position

    monkeypatch.setattr(Cursor, "feed", feed)
    format, *parts = LONG[name]
    num_chars = 100_000 if name in ("text", "arguments", "arguments first") else 30_000
    text = (parts[0] if len(parts) == 2 else "") + parts[-1] * (num_chars // len(parts[-1]))
    parser = build_parser(format, "think")
    for char in text:
        parser.push(char)
    parser.finish()
    assert scanned < 40 * num_chars
    assert len(parser._cursor.buffer) <= MAX_HELD_CHARS + 1000
