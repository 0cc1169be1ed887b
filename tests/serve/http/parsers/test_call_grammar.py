"""Grammars of strict tools: whatever a model writes, a call that it begins follows its schema."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest

from fulgurite.errors import ArgumentError
from fulgurite.models.tokenizer import Tokenizer
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.http.events import ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from fulgurite.serve.http.parsers import TOOL_FORMATS, OutputParser
from fulgurite.serve.http.parsers.call_grammar import (
    has_strict_tools,
    read_strictly,
    write_call_grammar,
)
from fulgurite.serve.http.parsers.reasoning import REASONING_FORMATS
from fulgurite.serve.http.parsers.syntax.tagged_calls import TaggedCalls
from fulgurite.serve.http.parsers.tool_formats import ToolFormat
from fulgurite.serve.structured.compiler import GrammarCompiler
from tests.serve.tiny_checkpoint import byte_tokenizer

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
        "exact": {"type": "boolean"},
        "places": {"type": "array", "items": {"$ref": "#/$defs/place"}, "maxItems": 2},
        "note": {"type": ["string", "null"], "maxLength": 5},
    },
    "required": ["city", "days", "unit", "places"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
FORMATS = [name for name in TOOL_FORMATS if name not in ("json", "harmony")]
CLOSING = '"}])>'


def make_tool(name: str, parameters: dict[str, Any], strict: bool | None = True) -> dict[str, Any]:
    function = {"name": name, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": function}


TOOLS = [make_tool("get_weather", WEATHER), make_tool("now", EMPTY)]


@cache
def make_compiler(special: tuple[str, ...] = ()) -> GrammarCompiler:
    """One token a byte; these markers are special tokens, as in the models that use them."""
    backend = byte_tokenizer()
    backend.add_special_tokens(list(special))
    tokenizer = Tokenizer(backend, 256, (257,), None, {})
    return GrammarCompiler(tokenizer, tokenizer.vocab_size, [257])


class Reply:
    """A reply under a grammar: text that must be allowed, or random text."""

    def __init__(self, compiler: GrammarCompiler, tag: dict[str, Any]) -> None:
        spec = SamplingParams(structural_tag=tag).grammar_spec
        assert spec is not None
        self.compiler, self.grammar, self.tokens = compiler, compiler.compile(spec), list[int]()

    def allowed(self) -> list[int]:
        self.grammar.start_mask()
        words = self.grammar.allowed_tokens().numpy()  # type: ignore[union-attr]
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        found: list[int] = bits[: self.compiler.vocab_size].nonzero()[0].tolist()
        return found

    def accept(self, token: int) -> None:
        self.grammar.accept_token(token)
        self.tokens.append(token)

    def write(self, text: str) -> bool:
        """Whether the grammar allows the text."""
        for token in self.compiler.tokenizer.encode(text, False):
            if self.grammar.is_complete or token not in self.allowed():
                return False
            self.accept(token)
        return True

    def go_on(self, rng: random.Random, ends: Sequence[str] = (), limit: int = 2000) -> None:
        """Random tokens up to the first place where the reply may end. `ends`: of free text."""
        closing_ids = self.compiler.tokenizer.encode(CLOSING, False)
        newline = self.compiler.tokenizer.encode("\n", False)[0]
        for count in range(limit):
            if self.can_end:
                return
            allowed = self.allowed()
            is_free = newline in allowed and len(allowed) > 90  # JSON has no line breaks in strings
            if is_free and rng.random() < 0.2:
                self.write(rng.choice(ends))
                continue
            closing = [one for one in allowed if one in closing_ids or one > 257]
            if not is_free and closing and (count > 40 or rng.random() < 0.2):
                allowed = closing
            self.accept(rng.choice(allowed))
        raise AssertionError(f"no end: {self.text!r}")

    @property
    def can_end(self) -> bool:
        return self.grammar.is_complete or self.grammar.is_accepting

    @property
    def text(self) -> str:
        return self.compiler.tokenizer.decode(self.tokens, skip_special_tokens=False)


def read_reply(format: ToolFormat, text: str, **options: Any) -> tuple[str, str, list[list[str]]]:
    """Reasoning, text and calls."""
    parser = OutputParser(read_strictly(format), tools=TOOLS, **options)
    events = [*parser.push(text), *parser.finish()]
    calls: list[list[str]] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            calls.append([event.name, ""])
        elif isinstance(event, ToolCallArguments):
            calls[event.index][1] += event.text
    thoughts = "".join(one.text for one in events if isinstance(one, ReasoningDelta))
    return thoughts, "".join(one.text for one in events if isinstance(one, TextDelta)), calls


def find_begins(format: ToolFormat) -> list[str]:
    """What a model writes before a call that the grammar must take over."""
    begins = list(format.opens)
    if "{" in format.bare_opens:
        begins += ['{"name": "get_weather"', '{ "name" :"now"']
    if "[" in format.bare_opens:
        begins += ["[get_weather(", "[now("]
    if "<function=" in format.bare_opens:
        begins += ["<function=get_weather>", "<function=now>"]
    return begins


def find_ends(format: ToolFormat) -> list[str]:
    return [one.value_close for one in format.syntaxes if isinstance(one, TaggedCalls)]


def list_markers(format: ToolFormat) -> tuple[str, ...]:
    return tuple(one for one in format.visible_tokens if len(one) > 2)


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_calls_that_a_model_begins_follow_their_schema(name: str, is_special: bool) -> None:
    format = TOOL_FORMATS[name]
    compiler = make_compiler(list_markers(format) if is_special else ())
    tag = write_call_grammar(format, None, TOOLS, False)
    for seed in range(6):
        for begin in find_begins(format):
            reply = Reply(compiler, tag)
            assert reply.write("Let me see.\n" + begin), (reply.text, begin)
            assert not reply.can_end
            reply.go_on(random.Random(f"{seed} {begin}"), find_ends(format))
            _, text, calls = read_reply(format, reply.text)
            assert text.strip() == "Let me see." and calls, reply.text
            for tool, arguments in calls:
                schema = {"get_weather": WEATHER, "now": EMPTY}[tool]
                jsonschema.validate(json.loads(arguments or "{}"), schema)


@pytest.mark.parametrize("name", FORMATS)
def test_text_without_a_call_is_free(name: str) -> None:
    format = TOOL_FORMATS[name]
    tag = write_call_grammar(format, None, TOOLS, False)
    text = 'Well: [1, 2], {"name": "Bob", "age": 3}, f(x) = <b>\n```json\n{"a": {}}\n```'
    reply = Reply(make_compiler(), tag)
    assert reply.write(text) and reply.can_end
    assert read_reply(format, text) == ("", text, [])


def test_calls_one_after_another_and_text_between_them() -> None:
    format = TOOL_FORMATS["hermes"]
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    reply = Reply(make_compiler(), write_call_grammar(format, None, TOOLS, False))
    assert reply.write(f"First {call}\n{call} and then {call} done") and reply.can_end
    assert len(read_reply(format, reply.text)[2]) == 3
    assert not reply.write('<tool_call>{"name": "later"')


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "now", "arguments": {"x"',
        '<tool_call>{"name": "get_weather", "arguments": {"days"',
        "<tool_call>no",
    ],
)
def test_calls_that_the_schema_does_not_allow(text: str) -> None:
    tag = write_call_grammar(TOOL_FORMATS["hermes"], None, TOOLS, False)
    assert not Reply(make_compiler(), tag).write(text)


def test_tools_that_are_not_strict_take_any_arguments() -> None:
    tools = [TOOLS[1], make_tool("get_weather", WEATHER, None)]
    assert has_strict_tools(tools) and not has_strict_tools(tools[1:])
    for name, text in {
        "hermes": '<tool_call>{"name": "get_weather", "arguments": {"city": 5, "y": []}}</tool_call>',
        "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=days>\nmany\n</parameter>\n"
        "</function>\n</tool_call>",
        "llama4_pythonic": '[get_weather(days="many")]',
    }.items():
        reply = Reply(make_compiler(), write_call_grammar(TOOL_FORMATS[name], None, tools, False))
        assert reply.write(text) and reply.can_end, reply.text


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("is_open", [False, True])
def test_calls_in_the_reasoning_are_reasoning(is_special: bool, is_open: bool) -> None:
    format, reasoning = TOOL_FORMATS["hermes"], REASONING_FORMATS["think"]
    compiler = make_compiler(("<think>", "</think>") if is_special else ())
    tag = write_call_grammar(format, reasoning, TOOLS, is_open)
    thought = ("" if is_open else "<think>") + "a <tool_call> would </think>"
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    reply = Reply(compiler, tag)
    assert reply.write(thought + "Hm. " + call) and reply.can_end
    thoughts, text, calls = read_reply(
        format, reply.text, reasoning_format=reasoning, starts_in_reasoning=is_open
    )
    assert (thoughts, text, calls) == ("a <tool_call> would", "Hm.", [["now", "{}"]])
    assert not Reply(compiler, tag).write(thought + '<tool_call>{"name": "x"')
    unfinished = Reply(compiler, tag)
    assert unfinished.write(thought[: -len("</think>")]) and unfinished.can_end
    if not is_open:
        assert not Reply(compiler, tag).write('Hm. <tool_call>{"name": "x"')
        assert Reply(compiler, tag).write("Hm. " + call)


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "llama4_pythonic", "mistral"])
def test_many_tools_fit(name: str) -> None:
    """The size of a grammar is linear in the tools."""
    tools = [make_tool(f"tool_{index}", WEATHER) for index in range(32)]
    reply = Reply(make_compiler(), write_call_grammar(TOOL_FORMATS[name], None, tools, False))
    assert reply.write("Hi")


HARMONY = TOOL_FORMATS["harmony"]
ANALYSIS = "<|channel|>analysis<|message|>to=functions.now?<|end|>"
COMMENTARY = "<|start|>assistant<|channel|>commentary"


@pytest.mark.parametrize(
    "header",
    [
        f"{COMMENTARY} to=functions.get_weather <|constrain|>json<|message|>",
        f"{COMMENTARY} to=functions.get_weather<|message|>",
        "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>",
    ],
)
def test_calls_of_gpt_oss(header: str) -> None:
    compiler = make_compiler(list_markers(HARMONY))
    tag = write_call_grammar(HARMONY, REASONING_FORMATS["harmony"], TOOLS, False)
    for seed in range(6):
        reply = Reply(compiler, tag)
        assert reply.write(ANALYSIS + header), reply.text
        reply.go_on(random.Random(seed))
        thoughts, text, [[name, arguments]] = read_reply(
            HARMONY, reply.text, reasoning_format=REASONING_FORMATS["harmony"]
        )
        assert (thoughts, text, name) == ("to=functions.now?", "", "get_weather")
        jsonschema.validate(json.loads(arguments), WEATHER)


def test_answers_of_gpt_oss() -> None:
    compiler = make_compiler(list_markers(HARMONY))
    tag = write_call_grammar(HARMONY, REASONING_FORMATS["harmony"], TOOLS, False)
    final = "<|start|>assistant<|channel|>final<|message|>It is to=functions.x {"
    reply = Reply(compiler, tag)
    assert reply.write(ANALYSIS + final) and reply.can_end
    for header in (f"{COMMENTARY} to=functions.other", f"{COMMENTARY} to=python"):
        assert not Reply(compiler, tag).write(ANALYSIS + header + "<|message|>")
    opened = Reply(compiler, write_call_grammar(HARMONY, None, TOOLS, True))
    assert opened.write("thinking<|end|>" + final) and opened.can_end


@pytest.mark.parametrize(
    "name, parameters, message",
    [
        ("qwen3_coder", {"properties": {"a": {"type": "string", "pattern": "x"}}}, "'pattern'"),
        ("llama4_pythonic", {"anyOf": [{}]}, "'anyOf' of the parameters of 'f'"),
        ("hermes", {"type": "array"}, "type 'array'"),
    ],
)
def test_schemas_that_a_format_cannot_enforce(
    name: str, parameters: dict[str, Any], message: str
) -> None:
    tools = [make_tool("f", parameters)]
    with pytest.raises(ArgumentError, match=message):
        write_call_grammar(TOOL_FORMATS[name], None, tools, False)


JUNK = (None, 5, -1, "", "x", [], ["x"], {}, {"type": "regex", "pattern": "("}, True)


def find_places(value: Any) -> list[tuple[Any, Any]]:
    """All containers in a JSON value, with their keys."""
    keys = [*value] if isinstance(value, dict) else range(len(value))
    found = []
    for key in keys if isinstance(value, dict | list) else ():
        found.append((value, key))
        if isinstance(value[key], dict | list):
            found += find_places(value[key])
    return found


@pytest.mark.parametrize("name", ["hermes", "llama4_pythonic", "harmony"])
def test_damaged_grammars_are_refused_or_work(name: str) -> None:
    """A request may send such a structural tag itself: it never fails in another way."""
    compiler, rng = make_compiler(list_markers(HARMONY)), random.Random(5)
    for _ in range(60):
        tag = write_call_grammar(TOOL_FORMATS[name], REASONING_FORMATS["think"], TOOLS[1:], False)
        tag = json.loads(json.dumps(tag))
        container, key = rng.choice(find_places(tag))
        container[key] = rng.choice(JUNK)
        spec = SamplingParams(structural_tag=tag).grammar_spec
        assert spec is not None
        with contextlib.suppress(ArgumentError):
            compiler.check(spec)
