"""Calls of every format are found, however the reply is cut into pieces, and wherever it ends."""

from __future__ import annotations

import json
import re

import pytest

from fulgurite.errors import ArgumentError
from fulgurite.serve.http.events import (
    ParserEvent,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from fulgurite.serve.http.parsers import TOOL_FORMATS, find_tool_format
from fulgurite.serve.http.parsers.cursor import MAX_HELD_CHARS, Markers
from fulgurite.serve.http.parsers.tool_formats import ALIASES
from tests.serve.http.parsers.transcripts import (
    NASTY,
    PARIS,
    TRANSCRIPTS,
    Transcript,
    build_parser,
    cut,
    hermes,
    json_call,
    kimi,
    run,
    summarize,
)

IDS = [f"{one.format}-{one.name}" for one in TRANSCRIPTS]


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=IDS)
def test_events_of_a_whole_reply(transcript: Transcript) -> None:
    events = run(build_parser(transcript.format), [transcript.text])
    assert summarize(events) == [event for event in transcript.events if event != ("text", "")]


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=IDS)
def test_pieces_do_not_matter(transcript: Transcript) -> None:
    whole = summarize(run(build_parser(transcript.format), [transcript.text]))
    for pieces in (list(transcript.text), *(cut(transcript.text, seed) for seed in range(10))):
        assert summarize(run(build_parser(transcript.format), pieces)) == whole


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=IDS)
def test_a_truncated_reply_has_the_first_calls(transcript: Transcript) -> None:
    calls = [event for event in transcript.events if event[0] == "call"]
    for end in range(len(transcript.text)):
        text = transcript.text[:end]
        whole = summarize(run(build_parser(transcript.format), [text]))
        assert summarize(run(build_parser(transcript.format), text)) == whole
        found = [event for event in whole if event[0] == "call"]
        assert [name for _, name, _ in found] == [name for _, name, _ in calls[: len(found)]]
        assert found[:-1] == calls[: max(0, len(found) - 1)]
        if found:
            assert calls[len(found) - 1][2].startswith(found[-1][2])


@pytest.mark.parametrize("format", [name for name in TOOL_FORMATS if name != "harmony"])
def test_every_format_has_transcripts_and_an_example_it_parses(format: str) -> None:
    assert any(one.format == format for one in TRANSCRIPTS)
    parser = build_parser(format)
    parser.tools = {}  # then formats without markers take any name
    summary = summarize(run(parser, [TOOL_FORMATS[format].example]))
    assert [event[0] for event in summary] == ["call"]
    assert re.fullmatch("tool.name", summary[0][1])
    assert json.loads(summary[0][2]) == {"key": "value"}


@pytest.mark.parametrize("format", list(TOOL_FORMATS))
def test_no_marker_begins_another_one(format: str) -> None:
    markers = (*TOOL_FORMATS[format].visible_tokens, *TOOL_FORMATS[format].bare_opens)
    outer = {
        *TOOL_FORMATS[format].opens,
        *TOOL_FORMATS[format].closes,
        *TOOL_FORMATS[format].ignored,
    }
    for one in outer:
        assert not any(
            other != one and other.startswith(one) for other in markers if other in outer
        )


def push_all(format: str, *pieces: str) -> list[ParserEvent]:
    parser = build_parser(format)
    return [event for piece in pieces for event in parser.push(piece)]


def test_a_name_is_emitted_as_soon_as_it_is_known() -> None:
    events = push_all("hermes", 'Hi. <tool_call>{"name": "get_weather"')
    assert [type(event) for event in events] == [TextDelta, ToolCallStart]
    assert summarize(push_all("qwen3_coder", "<tool_call>\n<function=get_weather>")) == [
        ("call", "get_weather", "")
    ]
    assert summarize(push_all("kimi_k2", kimi("").removesuffix("<|tool_call_end|>"))) == [
        ("call", "get_weather", "")
    ]


@pytest.mark.parametrize(
    ("format", "text", "arguments"),
    [
        ("hermes", hermes(NASTY).partition("日")[0], NASTY.partition("日")[0]),
        ("json", json_call(NASTY).partition("日")[0], NASTY.partition("日")[0]),
        ("qwen3_coder", "<tool_call><function=get_weather><parameter=city>Par", '{"city": "Par'),
        ("llama4_pythonic", '[get_weather(city="Par', '{"city": "Par'),
        ("harmony", '<|channel|>commentary to=f<|message|>{"a": 1', '{"a": 1'),
    ],
)
def test_arguments_are_streamed(format: str, text: str, arguments: str) -> None:
    events = push_all(format, *text)
    assert summarize(events)[-1][2] == arguments
    assert len([event for event in events if isinstance(event, ToolCallArguments)]) > 3


def test_text_is_streamed_and_only_a_possible_marker_waits() -> None:
    assert summarize(push_all("hermes", "a <b <tool_ca")) == [("text", "a <b")]
    assert summarize(push_all("hermes", "a <tool_ca", "t")) == [("text", "a <tool_cat")]
    assert summarize(push_all("hermes", "a ")) == [("text", "a")]
    assert summarize(push_all("hermes", "a ", "b")) == [("text", "a b")]
    text = '<tool_call>{"arguments": {"a": what}'  # no JSON, and no name yet
    assert summarize(push_all("hermes", text)) == [("text", text)]


def ids_of(format: str, text: str) -> list[str]:
    events = run(build_parser(format), [text])
    return [event.id for event in events if isinstance(event, ToolCallStart)]


def test_ids_of_calls() -> None:
    ids = ids_of("hermes", hermes(PARIS) * 3)
    assert len(set(ids)) == 3
    assert all(re.fullmatch(r"call_[A-Za-z0-9_-]{24}", id) for id in ids)
    assert ids_of("kimi_k2", kimi(PARIS, index=7)) == ["functions.get_weather:7"]
    ids = ids_of("mistral", "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{}")
    assert re.fullmatch(r"[A-Za-z0-9]{9}", ids[0]) and ids[1] == "a1B2c3D4e"
    text = '<|START_ACTION|>{"tool_call_id": "0", "tool_name": "f", "parameters": {}}<|END_ACTION|>'
    assert ids_of("cohere", text) == ["0"]


def test_arguments_before_the_name_are_held_up_to_a_limit() -> None:
    def write(num_chars: int) -> str:
        value = "x" * num_chars
        return f'<tool_call>{{"arguments": {{"a": "{value}"}}, "name": "f"}}</tool_call>!'

    short, long = write(MAX_HELD_CHARS - 1000), write(MAX_HELD_CHARS)
    assert [event[0] for event in summarize(run(build_parser("hermes"), [short]))] == [
        "call",
        "text",
    ]
    whole = summarize(run(build_parser("hermes"), [long]))
    assert whole == [("text", long)]
    pieces = [long[start : start + 999] for start in range(0, len(long), 999)]
    assert summarize(run(build_parser("hermes"), pieces)) == whole


def test_number_of_calls() -> None:
    parser = build_parser("hermes")
    run(parser, [hermes(PARIS) * 2])
    assert parser.num_calls == 2


def test_formats_are_found_by_name() -> None:
    assert find_tool_format("deepseek_v31") is TOOL_FORMATS["deepseek"]
    assert set(ALIASES.values()) <= set(TOOL_FORMATS)
    with pytest.raises(ArgumentError, match="nope"):
        find_tool_format("nope")


def test_partial_markers() -> None:
    markers = Markers(("<a>", "\n<b", "<ab"))
    lengths = {"x": 0, "<": 1, "x<a": 2, "<<": 1, "\n<": 2, "\n": 1, "<a<": 1, "\n<a": 2}
    for text, length in lengths.items():
        assert markers.partial_length(text, 0) == length, text
    assert markers.partial_length("<a", 1) == 0
