"""Conversations to tokens: messages in, token ids and which of them are answers out.

The text is what the chat template renders. Which part of it is an answer comes from

- the template's `{% generation %}` blocks, if it has them; otherwise from
- rendered prefixes: an answer begins where the conversation before it, with the generation prompt,
  ends, and it ends where the conversation up to it ends. So role headers are never learned.

A template may render earlier turns in another way than the last one (it drops their reasoning). Then
each answer is an example of its own, with the conversation up to it, as the model will see it.

Within an answer the end-of-turn token is learned, and what a template puts behind it (a newline) is not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from fulgurite.errors import ArgumentError
from fulgurite.models.tokenizer import Message, Tokenizer

ASSISTANT = "assistant"
BEGIN, END = "\ue0f0", "\ue0f1"  # private-use characters; no text has them
_GENERATION = re.compile(r"(?P<before>\{%[-+]?)\s*(?P<end>end)?generation\s*(?P<after>[-+]?%\})")
Span = tuple[int, int]


@dataclass(frozen=True)
class EncodedText:
    """Token ids of a text, and for each whether it belongs to an answer."""

    token_ids: list[int]
    is_answer: list[bool]


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    first_answer: int = 0,
    **values: object,
) -> list[EncodedText]:
    """The examples of a conversation: one, or one an answer.

    first_answer   messages before it are context: their answers are not learned
    values         other variables of the template: `tools`
    """
    check_messages(messages)
    learned = [
        index
        for index, message in enumerate(messages)
        if message["role"] == ASSISTANT and index >= first_answer and message.get("weight", 1)
    ]
    if not learned:
        raise ArgumentError("the conversation has no answer to learn")
    template = tokenizer.chat_template
    if template is not None and _GENERATION.search(template):
        return [_encode_marked(tokenizer, messages, learned, values)]
    ends = [_render_answer(tokenizer, messages, index, values) for index in learned]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=False, **values)
    if all(whole.startswith(text) for text, _ in ends):
        return [encode_spans(tokenizer, whole, [span for _, span in ends])]
    return [encode_spans(tokenizer, text, [span]) for text, span in ends]


def check_messages(messages: object) -> None:
    """ArgumentError unless this is a list of objects with a role."""
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
    if not is_list or not messages:
        raise ArgumentError("messages must be a list that is not empty")
    for message in messages:  # type: ignore[attr-defined]
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ArgumentError(
                f"a message is {str(message)[:60]!r}", next='{"role": "user", "content": "Hello"}'
            )


def _render_answer(
    tokenizer: Tokenizer, messages: Sequence[Message], index: int, values: Mapping[str, object]
) -> tuple[str, Span]:
    """The conversation up to the answer `index`, and where in it the answer is."""
    before = tokenizer.apply_chat_template(messages[:index], add_generation_prompt=True, **values)
    text = tokenizer.apply_chat_template(
        messages[: index + 1], add_generation_prompt=False, **values
    )
    if not text.startswith(before):
        raise ArgumentError(
            f"the chat template renders message {index} with another beginning than its "
            "generation prompt, so it is not known where the answer begins",
            next="mark answers in the template with {% generation %} and {% endgeneration %}",
        )
    return text, (len(before), len(text))


def _encode_marked(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    learned: Sequence[int],
    values: Mapping[str, object],
) -> EncodedText:
    """By the `{% generation %}` blocks of the template: one for each answer."""
    assert tokenizer.chat_template is not None, "the caller has checked it"
    if any(mark in str(message) for message in messages for mark in (BEGIN, END)):
        raise ArgumentError("a message has a private-use character that marks answers")
    marked = replace(tokenizer, chat_template=mark_generation(tokenizer.chat_template))
    text = marked.apply_chat_template(messages, add_generation_prompt=False, **values)
    answers = [index for index, message in enumerate(messages) if message["role"] == ASSISTANT]
    parts = text.split(BEGIN)
    clean, spans = parts[0], []
    for part in parts[1:]:
        answer, _, rest = part.partition(END)
        spans.append((len(clean), len(clean) + len(answer)))
        clean += answer + rest
    if len(spans) != len(answers):
        raise ArgumentError(
            f"the chat template marks {len(spans)} answers; the conversation has {len(answers)}",
            next="put each answer of the template into one {% generation %} block",
        )
    chosen = [span for span, index in zip(spans, answers, strict=True) if index in learned]
    return encode_spans(tokenizer, clean, chosen)


def mark_generation(template: str) -> str:
    """The template with expressions that print `BEGIN` and `END` instead of generation blocks."""

    def replace_tag(match: re.Match[str]) -> str:
        character = END if match["end"] else BEGIN
        left = "{{-" if "-" in match["before"] else "{{"
        right = "-}}" if "-" in match["after"] else "}}"
        return f"{left} '{character}' {right}"

    # The engine trims the line of a block: spaces before it and one newline behind it.
    template = re.sub(r"(?m)^[ \t]+(?=\{%\s*(?:end)?generation\b)", "", template)
    template = re.sub(r"(\{%[-+]?\s*(?:end)?generation\s*%\})\n", r"\1", template)
    return _GENERATION.sub(replace_tag, template)


def encode_spans(tokenizer: Tokenizer, text: str, spans: Sequence[Span]) -> EncodedText:
    """Token ids of a rendered text. A token is an answer's if some of it is within its span."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(f"the text is not valid Unicode: {error.reason}") from error
    ids, offsets = _encode_prompts_alone(tokenizer, text, [start for start, _ in spans])
    is_answer = [False] * len(ids)
    stops, place = frozenset(tokenizer.stop_ids), 0
    for start, end in spans:
        while place < len(ids) and offsets[place][1] <= start:
            place += 1
        while place < len(ids) and offsets[place][0] < end:
            is_answer[place] = True
            place += 1
            if ids[place - 1] in stops:
                break
    return EncodedText(ids, is_answer)


def _encode_prompts_alone(
    tokenizer: Tokenizer, text: str, starts: Sequence[int]
) -> tuple[list[int], list[Span]]:
    """Token ids of a text and their places, with no token across the start of an answer.

    In a reply the model gets the tokens of the text before it, and so does it here: after "answer: "
    comes "4", and not " 4" after "answer:". Some tokenizers can't encode a text in parts, since each
    part would begin with a space.
    """
    whole = tokenizer.backend.encode(text, add_special_tokens=False)
    across = {place for place in starts if any(a < place < b for a, b in whole.offsets)}
    if not across:
        return whole.ids, whole.offsets
    bounds = [0, *sorted(across), len(text)]
    parts = [
        (start, tokenizer.backend.encode(text[start:stop], add_special_tokens=False))
        for start, stop in pairwise(bounds)
    ]
    ids = [id for _, part in parts for id in part.ids]
    offsets = [(start + a, start + b) for start, part in parts for a, b in part.offsets]
    decode = partial(tokenizer.backend.decode, skip_special_tokens=False)
    return (ids, offsets) if decode(ids) == decode(whole.ids) else (whole.ids, whole.offsets)


def encode_completion(tokenizer: Tokenizer, prompt: str, completion: str) -> EncodedText:
    """A prompt and its completion as plain text; the end of the completion is learned, too."""
    first = tokenizer.encode(prompt)
    second = tokenizer.encode(completion, add_special_tokens=False)
    if tokenizer.stop_ids and second[-1:] != [tokenizer.stop_ids[0]]:
        second = [*second, tokenizer.stop_ids[0]]
    return EncodedText([*first, *second], [False] * len(first) + [True] * len(second))
