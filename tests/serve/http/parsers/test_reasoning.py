"""Reasoning is separated from the answer, however the reply is cut into pieces."""

from __future__ import annotations

import pytest

from fulgurite.serve.http.parsers import REASONING_FORMATS, starts_in_reasoning
from tests.serve.http.parsers.transcripts import (
    PARIS,
    SECTION,
    Summary,
    build_parser,
    call,
    cut,
    deepseek,
    hermes,
    kimi,
    run,
    summarize,
)

WHY, ANSWER = ("reasoning", "Why?\nBecause."), ("text", "Because of <think>.")

# format of reasoning, of calls, whether the prompt opened the reasoning, reply, events
CASES: list[tuple[str, str | None, bool, str, Summary]] = [
    ("think", None, False, "<think>\nWhy?\nBecause.\n</think>\n\nBecause of <think>.", [WHY, ANSWER]),
    ("think", None, True, "Why?\nBecause.\n</think>\n\nBecause of <think>.", [WHY, ANSWER]),
    ("think", None, True, "<think>\nWhy?\nBecause.</think>Because of <think>.", [WHY, ANSWER]),
    ("think", None, False, "\n <think>Why?\nBecause.", [WHY]),
    ("think", None, True, "Why?\nBecause.\n", [WHY]),
    ("think", None, True, "Why?\nBecause.\n</thi", [("reasoning", "Why?\nBecause.\n</thi")]),
    ("think", None, False, "<think>\n\n</think>\n\nHi ", [("text", "Hi ")]),
    ("think", None, False, "Because of <think>.", [ANSWER]),
    ("think", None, False, " \n Hi.</think>", [("text", " \n Hi.</think>")]),
    ("think", None, False, " \n ", [("text", " \n ")]),
    ("think", None, False, "<thi", [("text", "<thi")]),
    ("think", None, True, "", []),
    ("think", "hermes", True, f"a {hermes(PARIS)} b</think>\n{hermes(PARIS)}", [("reasoning", f"a {hermes(PARIS)} b"), call(PARIS)]),
    ("think", "hermes", False, f"Hi.\n{hermes(PARIS)}", [("text", "Hi."), call(PARIS)]),
    ("think", "kimi_k2", True, f"Why?\nBecause. {SECTION}{kimi(PARIS)}", [WHY, call(PARIS)]),
    ("think", "json", True, f'Why?\nBecause.</think>{{"name": "f", "arguments": {PARIS}}}', [WHY, ("text", f'{{"name": "f", "arguments": {PARIS}}}')]),
    ("mistral", "mistral", False, f"[THINK]Why?\nBecause.[/THINK]Hi.[TOOL_CALLS]f[ARGS]{PARIS}", [WHY, ("text", "Hi."), call(PARIS, "f")]),
    ("granite", None, False, "Here is my thought process: Why?\nBecause.\n\nHere is my response: Hi.", [WHY, ("text", "Hi.")]),
    ("granite", None, False, "Here's my thought process:\nWhy?\nBecause.\nHere's my response:\nHi.", [WHY, ("text", "Hi.")]),
    ("granite", None, False, "Here is my advice.", [("text", "Here is my advice.")]),
    ("seed", "seed", False, "<seed:think>Why?\nBecause.</seed:think>Hi.", [WHY, ("text", "Hi.")]),
    ("cohere", "cohere", True, "Why?\nBecause.<|END_THINKING|><|START_RESPONSE|>Hi.<|END_RESPONSE|>", [WHY, ("text", "Hi.")]),
    ("harmony", None, False, "<|channel|>analysis<|message|>Why?\nBecause.<|end|><|start|>assistant<|channel|>final<|message|>Hi.", [WHY, ("text", "Hi.")]),
    ("harmony", "harmony", True, "Why?\nBecause.<|end|><|start|>assistant<|channel|>final<|message|>Hi.", [WHY, ("text", "Hi.")]),
    ("harmony", None, False, "<|channel|>analysis<|message|>Why?\nBecause.\n", [WHY]),
    ("harmony", None, False, "<|channel|>anal", []),
    ("harmony", None, False, "<|channel|>analysis<|message|>Why?\nBecause.\n<|channel|>final<|message|>\nHi.", [WHY, ("text", "Hi.")]),
    ("think", "deepseek", True, f"Why?\nBecause.\n{deepseek(PARIS)}", [WHY, call(PARIS)]),
]  # fmt: skip


@pytest.mark.parametrize(("reasoning", "format", "is_open", "text", "events"), CASES)
def test_reasoning_and_answer(
    reasoning: str, format: str | None, is_open: bool, text: str, events: Summary
) -> None:
    for pieces in ([text], list(text), *(cut(text, seed) for seed in range(10))):
        parser = build_parser(format, reasoning, starts_in_reasoning=is_open)
        assert summarize(run(parser, pieces)) == events


@pytest.mark.parametrize(("reasoning", "format", "is_open", "text", "events"), CASES)
def test_a_truncated_reply(
    reasoning: str, format: str | None, is_open: bool, text: str, events: Summary
) -> None:
    for end in range(len(text)):
        summaries = [
            summarize(run(build_parser(format, reasoning, starts_in_reasoning=is_open), pieces))
            for pieces in ([text[:end]], list(text[:end]))
        ]
        assert summaries[0] == summaries[1]


@pytest.mark.parametrize("is_open", [False, True])
def test_reasoning_that_is_not_parsed_is_text(is_open: bool) -> None:
    text = f" <think>\nWhy? {hermes(PARIS)}\n</think>\n\nHi.\n{hermes(PARIS)}"
    for pieces in ([text], list(text)):
        parser = build_parser("hermes", "think", starts_in_reasoning=is_open, parse_reasoning=False)
        kept = f" <think>\nWhy? {hermes(PARIS)}\n</think>\n\nHi."
        assert summarize(run(parser, pieces)) == [("text", kept), call(PARIS)]
    text = (
        "<|channel|>analysis<|message|>Why?<|end|><|start|>assistant<|channel|>final<|message|>Hi."
    )
    parser = build_parser(None, "harmony", parse_reasoning=False)
    assert summarize(run(parser, text)) == [("text", "Why?Hi.")]


def test_reasoning_is_streamed() -> None:
    parser = build_parser("hermes", "think")
    assert summarize(parser.push("<think>\nWh")) == [("reasoning", "Wh")]
    assert summarize(parser.push("y </thi")) == [("reasoning", "y")]
    assert summarize(parser.push("nk> H")) == [("text", "H")]


def test_whether_a_prompt_opened_the_reasoning() -> None:
    think, harmony = REASONING_FORMATS["think"], REASONING_FORMATS["harmony"]
    assert starts_in_reasoning("<|im_start|>assistant\n<think>\n", think)
    assert starts_in_reasoning("<｜Assistant｜><think>", think)
    assert not starts_in_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n", think)
    assert not starts_in_reasoning("Say <think> to me<|im_start|>assistant\n", think)
    assert not starts_in_reasoning("<think>", None)
    assert not starts_in_reasoning("<|start|>assistant", harmony)
    assert starts_in_reasoning("<|start|>assistant<|channel|>analysis<|message|>", harmony)
    for format in REASONING_FORMATS.values():
        assert not starts_in_reasoning("", format)
