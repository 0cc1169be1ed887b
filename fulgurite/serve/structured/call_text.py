"""Replies that may have tool calls: three formats of structural tags, for strict tools.

    list              elements with a separator between them, some of them optional
    text_with_calls   reasoning, then text; after a trigger, calls and one of `ends`
    harmony_calls     messages of gpt-oss; one to a function has arguments of its schema

Free text stays free. Once a call has begun, it follows its schema up to its end. A reply ends after a
call that is not closed, if the format allows that: a parser would read what follows as another call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fulgurite.errors import ArgumentError
from fulgurite.serve.structured.schema_size import as_list
from fulgurite.serve.structured.sources import escape_regex
from fulgurite.serve.structured.tag_fields import read_list, read_object, read_text

if TYPE_CHECKING:
    from fulgurite.serve.structured.structural_tag import LarkBuilder

HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")


def read_texts(value: Any, name: str) -> Sequence[str]:
    texts = value.get(name) or []
    if not isinstance(texts, list) or not all(isinstance(one, str) and one for one in texts):
        raise ArgumentError(f"'{name}' of the structural tag must be a list of non-empty texts")
    return texts


def add_list(builder: LarkBuilder, format: Any, depth: int, is_last: bool) -> str:
    """`elements`: `content`, and `required` or not; `separator`. The size is linear."""
    separator = builder.add_literal(read_text(format, "separator"))
    head = tail = '""'  # of what is left, without and with an element before it
    for one in reversed(as_list(format.get("elements"))):
        if not isinstance(one, dict):
            raise ArgumentError("an element of a list in the structural tag is not an object")
        element = builder.add_format(one.get("content"), depth + 1, False)
        is_required = one.get("required") is True
        head = builder.add_rule(f"{element} {tail}" + ("" if is_required else f" | {head}"))
        tail = builder.add_rule(
            f"{separator} {element} {tail}" + ("" if is_required else f" | {tail}")
        )
    return head


def add_text_with_calls(builder: LarkBuilder, format: Any, depth: int, is_last: bool) -> str:
    """`calls`: `triggers`, or `pattern` for a regex; `content`; `repeat` and `tail`; `ends`.

    `repeat` is the index of one of `repeats`: formats of further calls, which come before `tail`.
    `must_close`: a call without one of its `ends` is not complete.
    `reasoning`: `opens` and `closes`, and `is_open` if the prompt has opened it. `ignored`: special
    tokens that may stand in the text.
    """
    if not is_last:
        raise ArgumentError("text_with_calls must be the last format of a structural tag")
    ignored = [
        builder.add_literal(one) for one in read_texts(format, "ignored") if builder.is_special(one)
    ]
    repeats = [builder.add_format(one, depth + 1, False) for one in as_list(format.get("repeats"))]
    calls = [
        call
        for one in read_list(format, "calls")
        for call in read_calls(builder, one, repeats, depth)
    ]
    opens = read_texts(read_object(format, "reasoning", {}), "opens")
    text_opens = [one for one in opens if not builder.is_special(one)]
    rest = add_segments(builder, calls, ignored, "TEXT")
    if not opens:
        return rest
    reasoning = read_object(format, "reasoning", {})
    closes = read_texts(reasoning, "closes")
    if reasoning.get("is_open"):
        close = " | ".join(map(builder.add_text_until, closes))
        has_special_calls = all(builder.is_special(call.trigger) for call in calls)
        without = rest if has_special_calls else "TEXT"  # calls in the reasoning are text
        return builder.add_rule(f"({close}) {rest} | {without}")
    thoughts = []
    for one in opens:
        if one in text_opens:
            begin = rf"/[ \n]*{escape_regex(one)}/"
            inner = [add_thought(builder, begin, close) for close in closes]
        else:
            inner = [f"{builder.add_literal(one)} {builder.add_text_until(end)}" for end in closes]
            thoughts.append(f"{builder.add_literal(one)} TEXT")
        thoughts += [f"{thought} {rest}" for thought in inner]
    first = rest
    if text_opens:  # the text before the first call does not begin as reasoning does
        pattern = "|".join(map(escape_regex, text_opens))
        builder.rules.append(rf"NO_THOUGHT: TEXT & ~/[ \n]*({pattern})(.|\n)*/")
        first = add_segments(builder, calls, ignored, "NO_THOUGHT", rest)
    return builder.add_rule(" | ".join([*thoughts, first]))


def add_thought(builder: LarkBuilder, begin: str, close: str) -> str:
    terms = builder.split(close)
    if terms[0].startswith("<["):
        return f"{begin} TEXT {' '.join(terms)}"
    name = f"THOUGHT{len(builder.rules)}"
    builder.rules.append(f"{name}: {begin} TEXT {terms[0]}")
    return " ".join([builder.add_rule(name, "[lazy]"), *terms[1:]])


class CallRules:
    """Rules of one kind of call. `trigger` is empty where a regex finds it."""

    def __init__(self, trigger: str, pattern: str, body: str, ends: str, must_close: bool) -> None:
        self.trigger, self.pattern, self.body, self.ends = trigger, pattern, body, ends
        self.must_close = must_close

    def add_head(self, builder: LarkBuilder, before: str) -> str:
        if self.pattern:
            return builder.add_text_until_match(self.pattern)
        return builder.add_text_until(self.trigger, before)


def read_calls(
    builder: LarkBuilder, call: Any, repeats: Sequence[str], depth: int
) -> list[CallRules]:
    """The rules of a call, for each of its triggers."""
    if not isinstance(call, dict):
        raise ArgumentError("a call of the structural tag is not an object")
    triggers = read_texts(call, "triggers")
    content = builder.add_format(call.get("content"), depth + 1, False)
    ends = read_texts(call, "ends")
    closing = builder.add_rule(" | ".join(map(builder.add_literal, ends))) if ends else ""
    must_close = bool(closing and call.get("must_close"))
    if "repeat" in call:
        index = call["repeat"]
        if not isinstance(index, int) or index not in range(len(repeats)):
            raise ArgumentError("'repeat' of the structural tag is no index of 'repeats'")
        tail = builder.add_format(call.get("tail"), depth + 1, False)
        content = builder.add_rule(f"{content} ({repeats[index]})* {tail}")
    elif triggers and not closing:
        markers = " | ".join(map(builder.add_literal, triggers))
        content = builder.add_rule(f"{content} (({markers}) {content})*")
    if not triggers:
        return [CallRules("", read_text(call, "pattern"), content, closing, must_close)]
    return [CallRules(one, "", content, closing, must_close) for one in triggers]


def add_segments(
    builder: LarkBuilder,
    calls: Sequence[CallRules],
    ignored: Sequence[str],
    before: str,
    rest: str = "",
) -> str:
    """Text and calls. `rest`: what follows the first call; else more of the same."""
    heads = [(call.add_head(builder, before), call) for call in calls]
    closed = [f"{head} {call.body} {call.ends}" for head, call in heads if call.ends]
    closed += [f"TEXT {one}" for one in ignored]
    last = ["TEXT", *(f"{head} {call.body}" for head, call in heads if not call.must_close)]
    if rest:
        return builder.add_rule(" | ".join([*(f"{one} {rest}" for one in closed), *last]))
    many = f"({' | '.join(closed)})* " if closed else ""
    return builder.add_rule(f"{many}({' | '.join(last)})")


def add_harmony_calls(builder: LarkBuilder, format: Any, depth: int, is_last: bool) -> str:
    """`calls`: `name` and `content`. `is_open`: the reply begins inside a message."""
    if not is_last or not all(map(builder.is_special, HARMONY)):
        raise ArgumentError(
            "harmony_calls needs the special tokens of gpt-oss, and nothing may follow it",
            next="use text_with_calls",
        )
    start, channel, constrain, message, end = map(builder.add_literal, HARMONY)
    builder.rules.append(r"HEADER: /[^<]*/ & ~/(.|\n)*to=(.|\n)*/")  # without a recipient
    bodies = [f"HEADER {channel} HEADER ({constrain} HEADER)? {message} TEXT"]
    for call in read_list(format, "calls"):
        recipient = escape_regex("functions." + read_text(call, "name"))
        content = builder.add_format(call.get("content"), depth + 1, False)
        before = rf"/[^<=]*[ >]?to={recipient}/ {channel} HEADER"
        after = rf"HEADER {channel} /[^<=]* to={recipient} ?/"
        bodies.append(f"({before} | {after}) ({constrain} HEADER)? {message} {content}")
    body = builder.add_rule(" | ".join(bodies))
    first = "TEXT" if format.get("is_open") else f"({body} | TEXT)"
    return builder.add_rule(f"{first} ({end} {start} {body})*")
