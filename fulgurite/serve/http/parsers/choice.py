"""Which formats a model writes: its chat template and family in, a `ParserChoice` out.

A template that shows calls names their markers. They decide, because fine-tuned models of one
architecture write different formats. A template that does not know tools at all gets the generic
format, which our prompt describes (prompt/tools.py). Otherwise the family decides.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fulgurite.errors import ArgumentError
from fulgurite.serve.http.parsers.prompt.templates import uses_tools
from fulgurite.serve.http.parsers.reasoning import REASONING_FORMATS, ReasoningFormat
from fulgurite.serve.http.parsers.tool_formats import TOOL_FORMATS, ToolFormat, find_tool_format


@dataclass(frozen=True)
class ParserChoice:
    """The formats of a model's replies. None: the model has no such thing, or it is switched off."""

    tool_format: ToolFormat | None
    reasoning_format: ReasoningFormat | None


# Strings of a chat template → format. The first row whose strings are all there decides.
TEMPLATE_TOOL_FORMATS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|message|>"), "harmony"),
    (("<|tool_call_argument_begin|>",), "kimi_k2"),
    (("<｜tool▁call▁begin｜>",), "deepseek"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<seed:tool_call>",), "seed"),
    (("<|START_ACTION|>",), "cohere"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<function_calls>",), "olmo3"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<arg_key>",), "glm45"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<tool_calls>",), "hunyuan"),
    (("<|python_start|>",), "llama4_pythonic"),
    (("<|tool_call|>", "<|/tool_call|>"), "phi4_mini"),
    (("<|tool|>", "<|/tool|>"), "phi4_mini"),
    (("<|tool_call|>",), "granite"),
    (("<tool_call>[",), "granite"),
    (("<|python_tag|>",), "llama3_json"),
    (('"name": function name, "parameters"',), "llama3_json"),
    (("<tool_call>",), "hermes"),
)
TEMPLATE_REASONING_FORMATS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "analysis"), "harmony"),
    (("<seed:think>",), "seed"),
    (("[THINK]",), "mistral"),
    (("<|START_THINKING|>",), "cohere"),
    (("Here is my thought process:",), "granite"),
    (("</think>",), "think"),
)
# The beginning of an architecture or model type, letters and digits only → format.
FAMILY_TOOL_FORMATS = {
    "gptoss": "harmony",
    "kimik2": "kimi_k2",
    "deepseek": "deepseek",
    "minimax": "minimax_m2",
    "seedoss": "seed",
    "cohere": "cohere",
    "commandr": "cohere",
    "lfm2": "lfm2",
    "olmo3": "olmo3",
    "mistral": "mistral",
    "ministral": "mistral",
    "mixtral": "mistral",
    "glm4moe": "glm45",
    "qwen3next": "qwen3_coder",
    "qwen35": "qwen3_coder",
    "qwen": "hermes",
    "hunyuan": "hunyuan",
    "llama4": "llama4_pythonic",
    "llama": "llama3_json",
    "granite": "granite",
    "phi": "phi4_mini",
    "exaone": "hermes",
    "ernie45": "hermes",
    "smollm3": "hermes",
}
FAMILY_REASONING_FORMATS = {"gptoss": "harmony", "seedoss": "seed"}


def choose_formats(
    chat_template: str | None,
    model_type: str,
    tool_parser: str = "auto",
    reasoning_parser: str = "auto",
) -> ParserChoice:
    """The formats of a model.

    Args:
        chat_template: the Jinja text.
        model_type: an architecture (`Qwen3ForCausalLM`), a `model_type` (`qwen3`) or a GGUF
            architecture (`gpt-oss`).
        tool_parser, reasoning_parser: `auto`, `none`, or the name of a format.
    """
    template = chat_template or ""
    return ParserChoice(
        _choose_tool_format(template, model_type, tool_parser),
        _choose_reasoning_format(template, model_type, reasoning_parser),
    )


def shows_known_calls(template: str) -> bool:
    """Whether a template has the markers of calls in one of our formats."""
    return _find_by_template(TEMPLATE_TOOL_FORMATS, template) is not None


def _choose_tool_format(template: str, model_type: str, name: str) -> ToolFormat | None:
    if name == "none":
        return None
    if name != "auto":
        return find_tool_format(name)
    family = _find_by_family(FAMILY_TOOL_FORMATS, model_type)
    if family != "harmony":
        family = family if uses_tools(template) else "generic"
    found = _find_by_template(TEMPLATE_TOOL_FORMATS, template) or family or "generic"
    return TOOL_FORMATS[found]


def _choose_reasoning_format(template: str, model_type: str, name: str) -> ReasoningFormat | None:
    if name == "none":
        return None
    if name != "auto":
        return find_reasoning_format(name)
    found = _find_by_template(TEMPLATE_REASONING_FORMATS, template)
    found = found or _find_by_family(FAMILY_REASONING_FORMATS, model_type)
    return None if found is None else REASONING_FORMATS[found]


REASONING_ALIASES = {  # names of the same formats in other servers
    "deepseek_r1": "think",
    "deepseek_v3": "think",
    "qwen3": "think",
    "glm45": "think",
    "kimi_k2": "think",
    "minimax_m2": "think",
    "hunyuan_a13b": "think",
    "ernie45": "think",
    "olmo3": "think",
    "seed_oss": "seed",
    "openai_gptoss": "harmony",
}


def find_reasoning_format(name: str) -> ReasoningFormat:
    """The format of `--reasoning-parser name`."""
    found = REASONING_FORMATS.get(REASONING_ALIASES.get(name, name))
    if found is None:
        raise ArgumentError(
            f"unknown reasoning parser {name!r}",
            next=f"use auto, none or one of {', '.join(REASONING_FORMATS)}",
        )
    return found


def _find_by_template(rows: tuple[tuple[tuple[str, ...], str], ...], template: str) -> str | None:
    for needles, name in rows:
        if all(needle in template for needle in needles):
            return name
    return None


def _find_by_family(formats: dict[str, str], model_type: str) -> str | None:
    """The format of the longest beginning of the family's name that the table has."""
    family = re.sub(r"[^a-z0-9]", "", model_type.lower())
    found = [beginning for beginning in formats if family.startswith(beginning)]
    return formats[max(found, key=len)] if found else None
