"""The formats of tool calls, one row each: markers around a call, and the syntax of the call itself.

The prompt side uses `example` where a chat template does not describe tools itself (prompt/tools.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from fulgurite.errors import ArgumentError
from fulgurite.serve.http.parsers.emitter import new_call_id, new_short_call_id
from fulgurite.serve.http.parsers.harmony import HARMONY_MARKERS
from fulgurite.serve.http.parsers.syntax.calls import NOT_IN_NAMES, CallSyntax
from fulgurite.serve.http.parsers.syntax.json_calls import JsonCalls, NamedCalls
from fulgurite.serve.http.parsers.syntax.pythonic_calls import PythonicCalls
from fulgurite.serve.http.parsers.syntax.tagged_calls import TaggedCalls

JSON_EXAMPLE = '{"name": "tool-name", "arguments": {"key": "value"}}'


@dataclass(frozen=True)
class ToolFormat:
    """How a model family writes tool calls.

    opens            markers before a call. Text that follows and is no call stays text, as the marker.
    closes           markers after a call; they may be missing
    syntaxes         how a call is written; tried in order
    bare_opens       first characters of a call that has no marker. Only a name of the request's
                     tools makes it a call.
    at_line_start    a call without a marker stands at the beginning of a line
    ignored          markers that hold no information; special tokens around several calls
    make_id          the id of a call whose format carries none
    example          a call, for prompts
    in_list          calls stand in a list, as `example` shows
    """

    name: str
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    syntaxes: tuple[CallSyntax, ...]
    bare_opens: tuple[str, ...] = ()
    at_line_start: bool = False
    ignored: tuple[str, ...] = ()
    make_id: Callable[[], str] = new_call_id
    example: str = f"<tool_call>\n{JSON_EXAMPLE}\n</tool_call>"
    in_list: bool = False

    @property
    def visible_tokens(self) -> tuple[str, ...]:
        """Texts that must survive detokenization, also where they are special tokens."""
        if self.name == "harmony":
            return HARMONY_MARKERS
        inner = [marker for syntax in self.syntaxes for marker in syntax.markers]
        return tuple(dict.fromkeys((*self.opens, *self.closes, *self.ignored, *inner)))


JSON_CALLS = JsonCalls()
BARE_JSON_CALLS = JsonCalls(needs_arguments=True)
NAME_GROUP = r"(?P<name>[\w.\-/:$@]+?)"
SEPARATOR = "<｜tool▁sep｜>"
CODER_TAGS = TaggedCalls(
    name_open="<function=",
    name_ends=(">",),
    key_open="<parameter=",
    key_end=">",
    value_open="",
    value_close="</parameter>",
    call_close="</function>",
    strips_newlines=True,
)
CODER_EXAMPLE = "<function=tool-name>\n<parameter=key>\nvalue\n</parameter>\n</function>"

FORMATS = (
    ToolFormat("hermes", ("<tool_call>",), ("</tool_call>",), (JSON_CALLS,)),
    # The same, for models that no format is known for: the prompt describes it.
    ToolFormat("generic", ("<tool_call>",), ("</tool_call>",), (JSON_CALLS,)),
    ToolFormat(
        "qwen3_coder",
        ("<tool_call>",),
        ("</tool_call>",),
        (CODER_TAGS,),
        bare_opens=("<function=",),
        example=f"<tool_call>\n{CODER_EXAMPLE}\n</tool_call>",
    ),
    ToolFormat(
        "seed",
        ("<seed:tool_call>",),
        ("</seed:tool_call>",),
        (CODER_TAGS,),
        example=f"<seed:tool_call>\n{CODER_EXAMPLE}\n</seed:tool_call>",
    ),
    ToolFormat(
        "minimax_m2",
        ("<minimax:tool_call>",),
        ("</minimax:tool_call>",),
        (
            TaggedCalls(
                name_open='<invoke name="',
                name_ends=('">',),
                key_open='<parameter name="',
                key_end='">',
                value_open="",
                value_close="</parameter>",
                call_close="</invoke>",
                not_in_name=(*(char for char in NOT_IN_NAMES if char != '"'), "<"),
            ),
        ),
        example='<minimax:tool_call>\n<invoke name="tool-name">\n<parameter name="key">value'
        "</parameter>\n</invoke>\n</minimax:tool_call>",
    ),
    ToolFormat(
        "glm45",
        ("<tool_call>",),
        ("</tool_call>",),
        (
            TaggedCalls(
                name_open="",
                name_ends=("<arg_key>", "</tool_call>"),
                key_open="<arg_key>",
                key_end="</arg_key>",
                value_open="<arg_value>",
                value_close="</arg_value>",
                call_close="",
                not_in_name=tuple(" \t{}\"'`"),
                repeats=False,
            ),
        ),
        example="<tool_call>tool-name\n<arg_key>key</arg_key>\n<arg_value>value</arg_value>\n"
        "</tool_call>",
    ),
    ToolFormat(
        "llama3_json",
        ("<|python_tag|>",),
        (),
        (BARE_JSON_CALLS,),
        bare_opens=("{",),
        ignored=("<|eom_id|>",),
        example='{"name": "tool-name", "parameters": {"key": "value"}}',
    ),
    ToolFormat(
        "llama4_pythonic",
        ("<|python_start|>",),
        ("<|python_end|>",),
        (PythonicCalls(), BARE_JSON_CALLS),
        bare_opens=("[", "{"),
        at_line_start=True,
        ignored=("<|eom|>",),
        example='[tool_name(key="value")]',
        in_list=True,
    ),
    ToolFormat(
        "lfm2",
        ("<|tool_call_start|>",),
        ("<|tool_call_end|>",),
        (PythonicCalls(), JSON_CALLS),
        example='<|tool_call_start|>[tool_name(key="value")]<|tool_call_end|>',
        in_list=True,
    ),
    ToolFormat(
        "olmo3",
        ("<function_calls>",),
        ("</function_calls>",),
        (PythonicCalls(),),
        example='<function_calls>tool_name(key="value")</function_calls>',
    ),
    ToolFormat(
        "mistral",
        ("[TOOL_CALLS]",),
        (),
        (
            JSON_CALLS,
            NamedCalls(
                "[ARGS]",
                re.compile(NAME_GROUP + r"(?:\[CALL_ID\](?P<id>\w+))?"),
                "{name}[ARGS]{arguments}",
                markers=("[ARGS]", "[CALL_ID]"),
            ),
        ),
        make_id=new_short_call_id,
        example=f"[TOOL_CALLS][{JSON_EXAMPLE}]",
        in_list=True,
    ),
    ToolFormat(
        "deepseek",
        ("<｜tool▁call▁begin｜>",),
        ("<｜tool▁call▁end｜>",),
        (
            NamedCalls(  # V3, R1: function<｜tool▁sep｜>name, then a code block
                "\n",
                re.compile(f"function{SEPARATOR}{NAME_GROUP}"),
                f"function{SEPARATOR}{{name}}\n```json\n{{arguments}}\n```",
                between=re.compile(r"[\s`a-z]*"),
                tail=re.compile(r"[\s`]*"),
                markers=(SEPARATOR,),
            ),
            NamedCalls(  # V3.1
                SEPARATOR,
                re.compile(f"(?!function$){NAME_GROUP}"),
                f"{{name}}{SEPARATOR}{{arguments}}",
            ),
        ),
        ignored=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        example=f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function{SEPARATOR}tool-name\n"
        '```json\n{"key": "value"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    ToolFormat(
        "kimi_k2",
        ("<|tool_call_begin|>",),
        ("<|tool_call_end|>",),
        (
            NamedCalls(
                "<|tool_call_argument_begin|>",
                re.compile(rf"(?P<id>(?:functions\.)?{NAME_GROUP}(?::\d+)?)"),
                "functions.{name}:{number}<|tool_call_argument_begin|>{arguments}",
                markers=("<|tool_call_argument_begin|>",),
            ),
        ),
        ignored=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        example="<|tool_calls_section_begin|><|tool_call_begin|>functions.tool-name:0"
        '<|tool_call_argument_begin|>{"key": "value"}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
    ),
    ToolFormat(
        "granite",
        ("<|tool_call|>", "<tool_call>"),
        ("</tool_call>",),
        (JSON_CALLS,),
        example=f"<tool_call>[{JSON_EXAMPLE}]",
        in_list=True,
    ),
    ToolFormat(
        "phi4_mini",
        ("functools", "<|tool_call|>"),
        ("<|/tool_call|>",),
        (JSON_CALLS,),
        example=f"<|tool_call|>[{JSON_EXAMPLE}]<|/tool_call|>",
        in_list=True,
    ),
    ToolFormat(
        "cohere",
        ("<|START_ACTION|>",),
        ("<|END_ACTION|>",),
        (JSON_CALLS,),
        ignored=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        example='<|START_ACTION|>[{"tool_name": "tool-name", "parameters": {"key": "value"}}]'
        "<|END_ACTION|>",
        in_list=True,
    ),
    ToolFormat(
        "hunyuan",
        ("<tool_calls>",),
        ("</tool_calls>",),
        (JSON_CALLS,),
        example=f"<tool_calls>[{JSON_EXAMPLE}]</tool_calls>",
        in_list=True,
    ),
    # Output that a grammar constrains to calls: tool_choice required, or a named tool.
    ToolFormat("json", (), (), (BARE_JSON_CALLS,), bare_opens=("{", "["), example=JSON_EXAMPLE),
    ToolFormat("harmony", (), (), ()),  # parsed by harmony.py, channels and calls together
)
TOOL_FORMATS: dict[str, ToolFormat] = {format.name: format for format in FORMATS}
ALIASES = {  # names of the same formats in other servers
    "qwen3_xml": "qwen3_coder",
    "seed_oss": "seed",
    "minimax": "minimax_m2",
    "llama4_json": "llama3_json",
    "pythonic": "llama4_pythonic",
    "deepseek_v3": "deepseek",
    "deepseek_v31": "deepseek",
    "granite4": "hermes",
    "phi4_mini_json": "phi4_mini",
    "hunyuan_a13b": "hunyuan",
    "ernie45": "hermes",
    "openai": "harmony",
    "gpt_oss": "harmony",
    "qwen25": "hermes",
}


def find_tool_format(name: str) -> ToolFormat:
    """The format of `--tool-call-parser name`."""
    found = TOOL_FORMATS.get(ALIASES.get(name, name))
    if found is None:
        raise ArgumentError(
            f"unknown tool call parser {name!r}",
            next=f"use auto, none or one of {', '.join(TOOL_FORMATS)}",
        )
    return found
