"""JSON Schemas of what the Structs of bodies leave open: messages, tools, input items; and of errors.

A schema here accepts all that the endpoint accepts, so that what it excludes is refused.
"""

from __future__ import annotations

from typing import Any

from fulgurite.serve.http.parsers.syntax.calls import NAME

Schema = dict[str, Any]

TEXT_PART: Schema = {
    "type": "object",
    "properties": {
        "type": {"enum": ["text", "input_text", "output_text"]},
        "text": {"type": "string"},
    },
    "required": ["type", "text"],
}
REFUSAL_PART: Schema = {
    "type": "object",
    "properties": {"type": {"const": "refusal"}, "refusal": {"type": "string"}},
    "required": ["type", "refusal"],
}
PARTS: Schema = {
    "type": "array",
    "items": {"anyOf": [TEXT_PART, REFUSAL_PART, {"type": "string"}]},
}
CONTENT: Schema = {"anyOf": [{"type": "string"}, PARTS]}
CHAT_MESSAGE: Schema = {
    "type": "object",
    "description": "A message of the system, developer, user, assistant or tool.",
    "properties": {
        "role": {"type": "string", "examples": ["user", "assistant", "system", "tool"]},
        "content": {"anyOf": [*CONTENT["anyOf"], {"type": "null"}]},
    },
    "required": ["role"],
}
CHAT_TOOL: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": f"^{NAME.pattern}$"},
                "parameters": {"type": ["object", "null"]},
            },
            "required": ["name"],
        },
    },
    "required": ["function"],
}


def describe_item(type: str, *texts: str, **properties: Schema) -> Schema:
    """An input item with these fields that are texts, and others."""
    fields = {name: {"type": "string"} for name in texts}
    return {
        "type": "object",
        "properties": {"type": {"const": type}, **fields, **properties},
        "required": ["type", *texts],
    }


ROLE: Schema = {"enum": ["user", "assistant", "system", "developer"]}
ITEM_MESSAGE: Schema = {
    "type": "object",
    "properties": {"type": {"const": "message"}, "role": ROLE, "content": CONTENT},
    "required": ["role", "content"],
}
REASONING_PARTS: Schema = {"type": ["array", "null"], "items": {"type": "object"}}
FUNCTION_CALL_OUTPUT: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "function_call_output"},
        "call_id": {"type": "string"},
        "output": CONTENT,
    },
    "required": ["type", "call_id", "output"],
}
INPUT_ITEM: Schema = {
    "anyOf": [
        ITEM_MESSAGE,
        describe_item("function_call", "call_id", "name", "arguments"),
        FUNCTION_CALL_OUTPUT,
        describe_item("reasoning", summary=REASONING_PARTS, content=REASONING_PARTS),
    ]
}
# Struct, field → the schema of one element of its list.
DETAILS: dict[tuple[str, str], Schema] = {
    ("ChatCompletionRequest", "messages"): CHAT_MESSAGE,
    ("ChatCompletionRequest", "tools"): CHAT_TOOL,
    ("TokenizeRequest", "messages"): CHAT_MESSAGE,
    ("TokenizeRequest", "tools"): CHAT_TOOL,
    ("ResponseRequest", "input"): INPUT_ITEM,
}
OPENAI_ERROR: Schema = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
ANTHROPIC_ERROR: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {
                "type": {"type": "string"},
                "message": {"type": "string"},
                "details": {"type": "object"},
            },
            "required": ["type", "message"],
        },
        "request_id": {"type": "string"},
    },
    "required": ["type", "error", "request_id"],
}
