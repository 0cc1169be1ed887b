"""Replies in the formats of model families, and what is in them.

A reply's events are written as tuples, deltas merged, without ids:
("text", …), ("reasoning", …), ("call", name, JSON text of the arguments).
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import NamedTuple

from fulgurite.serve.http.events import (
    ParserEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from fulgurite.serve.http.parsers import REASONING_FORMATS, TOOL_FORMATS, OutputParser

Summary = list[tuple[str, ...]]

STRING = {"type": "string"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": STRING,
                    "days": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "tags": {"type": "array", "items": STRING},
                    "where": {"type": "object"},
                    "note": {"anyOf": [STRING, {"type": "null"}]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "get_time"}},
]
# Braces, brackets, quotes, escapes and closing markers inside of strings; nested values; no ASCII.
NASTY = (
    r'{"city": "a}\"]{ \\ </tool_call> [TOOL_CALLS] \u00e9 日本 👩‍👧", '
    r'"where": {"x": [1, -2.5e3, {"y": []}], "z": null}, "tags": ["{", "\\"], "": ""}'
)
PARIS = '{"city": "Paris"}'


class Transcript(NamedTuple):
    name: str
    format: str
    text: str
    events: Summary


def call(arguments: str, name: str = "get_weather") -> tuple[str, ...]:
    return ("call", name, arguments)


def hermes(arguments: str, name: str = "get_weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def coder(body: str, name: str = "get_weather") -> str:
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def parameter(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def glm(*pairs: tuple[str, str], name: str = "get_weather") -> str:
    body = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in pairs
    )
    return f"<tool_call>{name}\n{body}</tool_call>"


def kimi(arguments: str, name: str = "get_weather", index: int = 0) -> str:
    return (
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>"
        f"{arguments}<|tool_call_end|>"
    )


def deepseek(arguments: str, name: str = "get_weather") -> str:
    return (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
        "<｜tool▁call▁end｜>"
    )


def deepseek_v31(arguments: str, name: str = "get_weather") -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def json_call(arguments: str, name: str = "get_weather", key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def llama(arguments: str, name: str = "get_weather") -> str:
    return json_call(arguments, name, "parameters")


CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
TWO_CALLS: Summary = [call(PARIS), call("{}", "get_time")]
TWO_JSON = f"[{json_call(PARIS)}, {json_call('{}', 'get_time')}]"
AROUND: Summary = [("text", "Let me see."), call(PARIS), ("text", "Done.")]

HERMES = [
    Transcript("one", "hermes", hermes(PARIS), [call(PARIS)]),
    Transcript("nasty", "hermes", hermes(NASTY), [call(NASTY)]),
    Transcript("empty", "hermes", hermes("{}", "get_time"), [call("{}", "get_time")]),
    Transcript("no arguments", "hermes", '<tool_call>{"name": "f"}</tool_call>', [call("{}", "f")]),
    Transcript("null", "hermes", hermes("null"), [call("{}")]),
    Transcript("around", "hermes", f"Let me see.\n\n{hermes(PARIS)}\n\nDone.", AROUND),
    Transcript("two", "hermes", f"{hermes(PARIS)}\n{hermes('{}', 'get_time')}\n", TWO_CALLS),
    Transcript("two in one", "hermes", f"<tool_call>{TWO_JSON}</tool_call>", TWO_CALLS),
    Transcript(
        "two lines in one",
        "hermes",
        f"<tool_call>\n{json_call(PARIS)}\n{json_call('{}', 'get_time')}\n</tool_call>",
        TWO_CALLS,
    ),
    Transcript(
        "between",
        "hermes",
        f"{hermes(PARIS)} and {hermes('{}', 'get_time')}",
        [call(PARIS), ("text", "and"), call("{}", "get_time")],
    ),
    Transcript(
        "arguments first",
        "hermes",
        f'<tool_call>{{"arguments": {NASTY}, "name": "get_weather"}}</tool_call>',
        [call(NASTY)],
    ),
    Transcript(
        "arguments as text",
        "hermes",
        hermes(r'"{\"city\": \"Paris\", \"x\": \"\ud83d\ude00\"}"'),
        [call('{"city": "Paris", "x": "😀"}')],
    ),
    Transcript(
        "wrapped",
        "hermes",
        '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {}}}</tool_call>x',
        [call("{}", "f"), ("text", "x")],
    ),
    Transcript("a brace too many", "hermes", hermes(PARIS + "}"), [call(PARIS)]),
    Transcript(
        "braces too few",
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": [1</tool_call>\nDone.',
        [call('{"a": [1', "f"), ("text", "Done.")],
    ),
    Transcript(
        "no JSON inside arguments",
        "hermes",
        hermes("{city: Paris}"),
        [call("{city: Paris}")],
    ),
    Transcript(
        "no end", "hermes", f'<tool_call>{{"name": "f", "arguments": {PARIS}', [call(PARIS, "f")]
    ),
    Transcript(
        "next call without an end",
        "hermes",
        f'<tool_call>{{"name": "f", "arguments": {{"a": 1<tool_call>{json_call(PARIS)}',
        [call('{"a": 1', "f"), call(PARIS)],
    ),
    *[
        Transcript(f"no call {index}", "hermes", text, [("text", text)])
        for index, text in enumerate(
            [
                "<tool_call> is a marker. So is </tool_call>.",
                "<tool_call>\n\n</tool_call>",
                "<tool_call>{}</tool_call>",
                "<tool_call>[]</tool_call>",
                '<tool_call>{"name": 5}</tool_call>',
                '<tool_call>{"name": ""}</tool_call>',
                '<tool_call>{"name": "two words", "arguments": {}}</tool_call>',
                r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>',
                '<tool_call>{"arguments": {"a": 1}}</tool_call>',
                '<tool_call>{"arguments": {"a": 1}, nonsense',
                '<tool_call>{"city": "Paris"}</tool_call>',
                '<tool_call>{"name" "f"}</tool_call>',
                "<tool_call",
                "a < b, <tool>, <<tool_cal> and <tool_call",
                "  only \n text, with white space \n\n",
                "\n \t",
                "",
            ]
        )
    ],
    Transcript(
        "no call, then one",
        "hermes",
        f"Use <tool_call> like this: {hermes(PARIS)}",
        [("text", "Use <tool_call> like this:"), call(PARIS)],
    ),
    Transcript("list", "generic", f"<tool_call>{TWO_JSON}</tool_call>", TWO_CALLS),
]
CODER_NASTY = 'if (a < b) { "x" }\n</param>\n<parameter=z>\\\n'
TAGS = [
    Transcript("one", "qwen3_coder", coder(parameter("city", "Paris")), [call(PARIS)]),
    Transcript("empty", "qwen3_coder", coder("", "get_time"), [call("{}", "get_time")]),
    Transcript(
        "types",
        "qwen3_coder",
        coder(
            parameter("city", "12")
            + parameter("days", " 12 ")
            + parameter("exact", "True")
            + parameter("tags", '["a", "</x>"]')
            + parameter("note", "None")
            + parameter("note", "12")
            + parameter("where", "not JSON")
            + parameter("tags", "5")
            + parameter("unknown", "1.50")
            + parameter("unknown text", "Paris")
        ),
        [
            call(
                '{"city": "12", "days": 12, "exact": true, "tags": ["a", "</x>"], "note": null, '
                '"note": "12", "where": "not JSON", "tags": "5", "unknown": 1.50, "unknown text": "Paris"}'
            )
        ],
    ),
    Transcript(
        "nasty",
        "qwen3_coder",
        coder(parameter("city", CODER_NASTY) + parameter("note", "\n\n")),
        [
            call(
                r'{"city": "if (a < b) { \"x\" }\n</param>\n<parameter=z>\\\n", "note": "\n\n"}',
            )
        ],
    ),
    Transcript(
        "on one line",
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=city>Paris</parameter></function></tool_call>",
        [call(PARIS)],
    ),
    Transcript(
        "around",
        "qwen3_coder",
        f"Let me see.\n{coder(parameter('city', 'Paris'))}\nDone.",
        AROUND,
    ),
    Transcript(
        "two",
        "qwen3_coder",
        f"{coder(parameter('city', 'Paris'))}\n{coder('', 'get_time')}",
        TWO_CALLS,
    ),
    Transcript(
        "two in one",
        "qwen3_coder",
        coder(parameter("city", "Paris") + "</function>\n<function=get_time>\n"),
        TWO_CALLS,
    ),
    Transcript(
        "no opening marker",
        "qwen3_coder",
        "<function=get_time>\n</function>\n</tool_call>",
        [call("{}", "get_time")],
    ),
    Transcript(
        "no opening marker, unknown name",
        "qwen3_coder",
        "<function=f>\n</function>",
        [("text", "<function=f>\n</function>")],
    ),
    Transcript(
        "no call",
        "qwen3_coder",
        "<tool_call> and <function=> or <function=a b> </function>",
        [("text", "<tool_call> and <function=> or <function=a b> </function>")],
    ),
    Transcript(
        "one",
        "seed",
        "Hm.<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n"
        "</function>\n</seed:tool_call>",
        [("text", "Hm."), call(PARIS)],
    ),
    Transcript(
        "two",
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '</invoke>\n<invoke name="get_time">\n</invoke>\n</minimax:tool_call>',
        TWO_CALLS,
    ),
    Transcript(
        "no call",
        "minimax_m2",
        '<minimax:tool_call> <invoke name="">',
        [("text", '<minimax:tool_call> <invoke name="">')],
    ),
    Transcript("one", "glm45", glm(("city", "Paris")), [call(PARIS)]),
    Transcript(
        "types",
        "glm45",
        glm(("city", "1\n2"), ("days", "3"), ("where", NASTY), ("exact", "maybe")),
        [call(f'{{"city": "1\\n2", "days": 3, "where": {NASTY}, "exact": "maybe"}}')],
    ),
    Transcript("around", "glm45", f"Let me see.\n{glm(('city', 'Paris'))}\nDone.", AROUND),
    Transcript(
        "two",
        "glm45",
        f"{glm(('city', 'Paris'))}\n<tool_call>get_time</tool_call>",
        TWO_CALLS,
    ),
    Transcript(
        "no call",
        "glm45",
        "<tool_call>is a marker\n<tool_call>word\nword</tool_call>",
        [("text", "<tool_call>is a marker\n<tool_call>word\nword</tool_call>")],
    ),
]
# Longer than a key may be: the call ends there.
TAGS += [
    Transcript(
        "long key",
        "glm45",
        "<tool_call>f<arg_key>" + "k" * 260 + "</arg_key>",
        [call("{}", "f"), ("text", "kkkk</arg_key>")],
    ),
    Transcript(
        "long key",
        "hermes",
        '<tool_call>{"name": "f", "' + "k" * 260 + '": 1}</tool_call>',
        [call("{}", "f"), ("text", 'kkkkk": 1}</tool_call>')],
    ),
]
LLAMA = [
    Transcript("one", "llama3_json", llama(PARIS), [call(PARIS)]),
    Transcript("nasty", "llama3_json", llama(NASTY), [call(NASTY)]),
    Transcript("tag", "llama3_json", f"<|python_tag|>{llama(PARIS)}<|eom_id|>", [call(PARIS)]),
    Transcript(
        "tag, unknown name", "llama3_json", f"<|python_tag|>{llama('{}', 'f')}", [call("{}", "f")]
    ),
    Transcript("two", "llama3_json", f"{llama(PARIS)}; {llama('{}', 'get_time')}", TWO_CALLS),
    Transcript("around", "llama3_json", f"Let me see. {llama(PARIS)}\nDone.", AROUND),
    Transcript(
        "type",
        "llama3_json",
        '{"type": "function", "name": "get_time", "parameters": {}}',
        [call("{}", "get_time")],
    ),
    *[
        Transcript(f"no call {index}", "llama3_json", text, [("text", text)])
        for index, text in enumerate(
            [
                llama(PARIS, "unknown"),
                '{"name": "get_weather"}',
                '{"name": "get_weather", "age": 5}',
                '{"a": {"name": "get_weather", "b": {}}}',
                "{ { {{ } {} function() { return {}; }",
                '<|python_tag|>brave_search.call(query="x")',
                '{"name": "get_weather", "parameters"',
            ]
        )
    ],
    Transcript("one", "llama4_pythonic", '[get_weather(city="Paris")]', [call(PARIS)]),
    Transcript(
        "two",
        "llama4_pythonic",
        "<|python_start|>[get_weather(city='Paris'), get_time()]<|python_end|><|eom|>",
        TWO_CALLS,
    ),
    Transcript(
        "literals",
        "llama4_pythonic",
        """[get_weather(city="a\\"b\\n\\x41\\u00e9\\U0001F600\\q\\xz", days=-1_000, exact=True, tags=['[', (1, 2.5,), {"k": None, 'l': []},],
          note='''it's''', where=word, f=.5, e="", h=0x10, n=nan)]""",
        [
            call(
                r'{"city": "a\"b\n\u0041\u00e9😀\\q\\xz", "days": -1000, "exact": true, "tags": '
                r'["[", [1, 2.5], {"k": null, "l": []}], "note": "it'
                + "'"
                + r's", "where": "word", '
                r'"f": 0.5, "e": "", "h": 16, "n": "nan"}'
            )
        ],
    ),
    Transcript(
        "positional",
        "llama4_pythonic",
        '[get_weather("Paris", 3, exact=False)]',
        [call('{"city": "Paris", "days": 3, "exact": false}')],
    ),
    Transcript(
        "around", "llama4_pythonic", 'Let me see.\n[get_weather(city="Paris")]\nDone.', AROUND
    ),
    Transcript("JSON", "llama4_pythonic", llama(PARIS), [call(PARIS)]),
    *[
        Transcript(f"no call {index}", "llama4_pythonic", text, [("text", text)])
        for index, text in enumerate(
            [
                "See [get_weather(city)] in the manual.",
                "[link](https://example.com)\n[1, 2, [3]]",
                "[unknown(a=1)]",
                "[get_weather",
            ]
        )
    ],
    Transcript(
        "two",
        "lfm2",
        '<|tool_call_start|>[get_weather(city="Paris"), get_time()]<|tool_call_end|>Done.',
        [*TWO_CALLS, ("text", "Done.")],
    ),
    Transcript(
        "two",
        "olmo3",
        '<function_calls>get_weather(city="Paris")\nget_time()</function_calls>',
        TWO_CALLS,
    ),
]
MARKERS = [
    Transcript("list", "mistral", f"[TOOL_CALLS] {TWO_JSON}", TWO_CALLS),
    Transcript("named", "mistral", f"[TOOL_CALLS]get_weather[ARGS]{NASTY}", [call(NASTY)]),
    Transcript(
        "two named",
        "mistral",
        f"[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]get_time[CALL_ID]a1B2c3D4e[ARGS]{{}}",
        TWO_CALLS,
    ),
    Transcript(
        "around", "mistral", f"Let me see.[TOOL_CALLS]get_weather[ARGS]{PARIS} Done.", AROUND
    ),
    Transcript(
        "no call",
        "mistral",
        "[TOOL_CALLS] is a marker, [TOOL_CALLS][1] no call, [TOOL_CALLS]name",
        [("text", "[TOOL_CALLS] is a marker, [TOOL_CALLS][1] no call, [TOOL_CALLS]name")],
    ),
    Transcript("one", "deepseek", f"{CALLS}{deepseek(PARIS)}{CALLS_END}", [call(PARIS)]),
    Transcript("nasty", "deepseek", f"{CALLS}{deepseek(NASTY)}{CALLS_END}", [call(NASTY)]),
    Transcript(
        "two",
        "deepseek",
        f"{CALLS}{deepseek(PARIS)}\n{deepseek('{}', 'get_time')}{CALLS_END}",
        TWO_CALLS,
    ),
    Transcript(
        "two of V3.1",
        "deepseek",
        f"{CALLS}{deepseek_v31(PARIS)}{deepseek_v31('{}', 'get_time')}{CALLS_END}",
        TWO_CALLS,
    ),
    Transcript(
        "around", "deepseek", f"Let me see.\n{CALLS}{deepseek(PARIS)}{CALLS_END}\nDone.", AROUND
    ),
    Transcript(
        "no call",
        "deepseek",
        "<｜tool▁call▁begin｜>no call<｜tool▁sep｜>",
        [("text", "<｜tool▁call▁begin｜>no call<｜tool▁sep｜>")],
    ),
    Transcript("one", "kimi_k2", f"{SECTION}{kimi(NASTY)}{SECTION_END}", [call(NASTY)]),
    Transcript(
        "two",
        "kimi_k2",
        f"{SECTION}{kimi(PARIS)}{kimi('{}', 'get_time', 1)}{SECTION_END}",
        TWO_CALLS,
    ),
    Transcript("around", "kimi_k2", f"Let me see.{SECTION}{kimi(PARIS)}{SECTION_END}Done.", AROUND),
    Transcript(
        "no call",
        "kimi_k2",
        "<|tool_call_begin|>what?<|tool_call_end|>",
        [("text", "<|tool_call_begin|>what?<|tool_call_end|>")],
    ),
    Transcript("old marker", "granite", f"<|tool_call|>{TWO_JSON}", TWO_CALLS),
    Transcript("new marker", "granite", f"<tool_call>{TWO_JSON}", TWO_CALLS),
    Transcript("around", "granite", f"Let me see.<|tool_call|>[{json_call(PARIS)}] Done.", AROUND),
    Transcript("word", "phi4_mini", f"functools{TWO_JSON}", TWO_CALLS),
    Transcript("marker", "phi4_mini", f"<|tool_call|>{TWO_JSON}<|/tool_call|>", TWO_CALLS),
    Transcript(
        "no call",
        "phi4_mini",
        "import functools\nfunctools.partial(f), functools[0]",
        [("text", "import functools\nfunctools.partial(f), functools[0]")],
    ),
    Transcript(
        "two",
        "cohere",
        '<|START_ACTION|>[\n  {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
        f'{PARIS}}},\n  {{"tool_call_id": "1", "tool_name": "get_time", "parameters": {{}}}}\n]'
        "<|END_ACTION|>",
        TWO_CALLS,
    ),
    Transcript("text", "cohere", "<|START_RESPONSE|>Hi.<|END_RESPONSE|>", [("text", "Hi.")]),
    Transcript("two", "hunyuan", f"<tool_calls>{TWO_JSON}</tool_calls>", TWO_CALLS),
    Transcript("one", "json", json_call(NASTY), [call(NASTY)]),
    Transcript("two", "json", TWO_JSON, TWO_CALLS),
    Transcript("compact", "json", '[{"name":"get_time","arguments":{}}]', [call("{}", "get_time")]),
    Transcript("no call", "json", '{"answer": [1, {}]}', [("text", '{"answer": [1, {}]}')]),
]
ANALYSIS = "<|channel|>analysis<|message|>Hm, weather.\n<|end|>"
TURN = "<|start|>assistant"
COMMENTARY = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
THOUGHT = ("reasoning", "Hm, weather.")
HARMONY = [
    Transcript(
        "final",
        "harmony",
        f"{ANALYSIS}{TURN}<|channel|>final<|message|>Rain, I think.<|return|>",
        [THOUGHT, ("text", "Rain, I think.")],
    ),
    Transcript(
        "call", "harmony", f"{ANALYSIS}{TURN}{COMMENTARY}{NASTY}<|call|>", [THOUGHT, call(NASTY)]
    ),
    Transcript(
        "recipient in the role",
        "harmony",
        f"{TURN} to=functions.get_time<|channel|>commentary json<|message|>{{}}<|call|>",
        [call("{}", "get_time")],
    ),
    Transcript(
        "preamble, two calls",
        "harmony",
        f"<|channel|>commentary<|message|>Let me see.<|end|>{TURN}{COMMENTARY}{PARIS}<|call|>"
        f"{TURN}<|channel|>commentary to=functions.get_time<|message|><|call|>",
        [("text", "Let me see."), *TWO_CALLS],
    ),
    Transcript("no channel", "harmony", "plain text ", [("text", "plain text ")]),
    Transcript(
        "no end",
        "harmony",
        f"<|channel|>analysis<|message|>Hm, weather.{TURN}<|channel|>final<|message|>Rain.",
        [THOUGHT, ("text", "Rain.")],
    ),
]
TRANSCRIPTS = [*HERMES, *TAGS, *LLAMA, *MARKERS, *HARMONY]


def build_parser(format: str | None, reasoning: str | None = None, **options: bool) -> OutputParser:
    return OutputParser(
        None if format is None else TOOL_FORMATS[format],
        None if reasoning is None else REASONING_FORMATS[reasoning],
        tools=TOOLS,
        **options,
    )


def run(parser: OutputParser, pieces: Iterable[str]) -> list[ParserEvent]:
    events = [event for piece in pieces for event in parser.push(piece)]
    return events + parser.finish()


def summarize(events: Iterable[ParserEvent]) -> Summary:
    """Merged deltas without ids. Checks indices."""
    summary: list[list[str]] = []
    num_calls = 0
    for event in events:
        if isinstance(event, ToolCallStart):
            assert event.index == num_calls
            num_calls += 1
            summary.append(["call", event.name, ""])
            continue
        assert event.text
        if isinstance(event, ToolCallArguments):
            assert summary[-1][0] == "call" and event.index == num_calls - 1
            summary[-1][2] += event.text
            continue
        kind = {TextDelta: "text", ReasoningDelta: "reasoning"}[type(event)]
        if summary and summary[-1][0] == kind:
            summary[-1][1] += event.text
        else:
            summary.append([kind, event.text])
    return [tuple(entry) for entry in summary]


def cut(text: str, seed: int) -> list[str]:
    """The text in pieces of random lengths, some empty."""
    generator = random.Random(seed)
    pieces, start = [], 0
    while start < len(text):
        end = start + generator.choice([0, 1, 1, 2, 3, 5, 8, 21])
        pieces.append(text[start:end])
        start = end
    return pieces
