"""Which special tokens must stay in the text for a parser: a tokenizer and formats in, a plan out.

Detokenization removes special tokens. Some markers are special tokens: `[TOOL_CALLS]`,
`<|python_tag|>`, harmony's channels. Then special tokens are kept, and all that are no markers are
removed by their id before detokenization, or by their text after it.
"""

from __future__ import annotations

from dataclasses import dataclass

from fulgurite.models.tokenizer import Tokenizer
from fulgurite.serve.http.parsers.reasoning import ReasoningFormat
from fulgurite.serve.http.parsers.tool_formats import ToolFormat


@dataclass(frozen=True)
class DetokenizePlan:
    """How to decode replies.

    skip_special_tokens   for `Tokenizer.decode`
    hidden_ids            tokens to leave out if special tokens are not skipped
    hidden_texts          their texts
    """

    skip_special_tokens: bool
    hidden_ids: frozenset[int] = frozenset()
    hidden_texts: tuple[str, ...] = ()


def plan_detokenization(
    tokenizer: Tokenizer, *formats: ToolFormat | ReasoningFormat | None
) -> DetokenizePlan:
    """Keep special tokens if a marker of the formats is one."""
    visible = {text for format in formats if format is not None for text in format.visible_tokens}
    special = {
        id: token.content
        for id, token in tokenizer.backend.get_added_tokens_decoder().items()
        if token.special
    }
    if visible.isdisjoint(special.values()):
        return DetokenizePlan(skip_special_tokens=True)
    hidden = {id: text for id, text in special.items() if text not in visible}
    return DetokenizePlan(False, frozenset(hidden), tuple(dict.fromkeys(hidden.values())))
