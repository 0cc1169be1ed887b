"""Parsers of model output and the prompt side of tools: families' formats in, chat events out.

output_parser.py   `OutputParser`: the text of one reply → events
choice.py          `choose_formats`: chat template and family → formats
special_tokens.py  `plan_detokenization`: which special tokens a format needs to see
reasoning.py       the formats of reasoning; `starts_in_reasoning` of a rendered prompt
tool_formats.py    the formats of tool calls, one row each
tool_calls.py      text → calls, over the syntaxes in syntax/
harmony.py         gpt-oss: reasoning, text and calls as channels
cursor.py          text that arrives in pieces, markers, going back; emitter.py: events
prompt/            `render_tools`, `normalize_messages`, `tool_choice`, the JSON Schema of calls
"""

from fulgurite.serve.http.parsers.choice import (
    ParserChoice,
    choose_formats,
    find_reasoning_format,
)
from fulgurite.serve.http.parsers.output_parser import OutputParser
from fulgurite.serve.http.parsers.prompt.messages import normalize_messages
from fulgurite.serve.http.parsers.prompt.tool_choice import (
    ToolChoice,
    read_tool_choice,
    read_tools,
    tool_call_schema,
)
from fulgurite.serve.http.parsers.prompt.tools import RenderedTools, render_tools
from fulgurite.serve.http.parsers.reasoning import (
    REASONING_FORMATS,
    ReasoningFormat,
    starts_in_reasoning,
)
from fulgurite.serve.http.parsers.special_tokens import DetokenizePlan, plan_detokenization
from fulgurite.serve.http.parsers.tool_formats import TOOL_FORMATS, ToolFormat, find_tool_format

__all__ = [
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "DetokenizePlan",
    "OutputParser",
    "ParserChoice",
    "ReasoningFormat",
    "RenderedTools",
    "ToolChoice",
    "ToolFormat",
    "choose_formats",
    "find_reasoning_format",
    "find_tool_format",
    "normalize_messages",
    "plan_detokenization",
    "read_tool_choice",
    "read_tools",
    "render_tools",
    "starts_in_reasoning",
    "tool_call_schema",
]
