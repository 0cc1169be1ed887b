"""Special tokens and text that reads like them: a tokenizer's JSON in, one that keeps both apart out.

A grammar may force the text `<|im_end|>`, in a constant for example. A tokenizer encodes that text as the
special token, which the grammar does not allow and which may end the reply. llguidance therefore gets a
tokenizer whose special tokens have names that no text has. Lark grammars name special tokens; their names
become ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from fulgurite.serve.structured.regex_size import LARK_COMMENT, LARK_REGEX, LARK_STRING

MARK = "\U000f0000"  # a private character, before the names
LARK_SPECIAL = re.compile(r"<(?!\[)[^<>\s]+>")
LARK_PIECE = re.compile(
    "|".join(f"(?:{one.pattern})" for one in (LARK_COMMENT, LARK_STRING, LARK_REGEX, LARK_SPECIAL))
)


def rename_special_tokens(text: str) -> str:
    """The JSON of a tokenizer, with `MARK` before the names of its special tokens."""
    tokenizer: dict[str, Any] = json.loads(text)
    names = {one["content"] for one in tokenizer["added_tokens"] if one["special"]}

    def rename(name: str) -> str:
        return MARK + name if name in names else name

    for one in tokenizer["added_tokens"]:
        if one["special"]:
            one["content"] = rename(one["content"])
    model = tokenizer["model"]
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {rename(name): token for name, token in vocab.items()}
    elif isinstance(vocab, list):  # pairs of name and score
        model["vocab"] = [[rename(name), score] for name, score in vocab]
    if model.get("unk_token") is not None:
        model["unk_token"] = rename(model["unk_token"])
    tokenizer["post_processor"] = None  # it adds special tokens, which a grammar has no use for
    return json.dumps(tokenizer, ensure_ascii=False)


def name_tokens_by_id(lark: str, ids: Mapping[str, int]) -> str:
    """A Lark grammar with `<[2]>` for `<|im_end|>`. Names in strings, regexes and comments are text."""

    def replace(found: re.Match[str]) -> str:
        return f"<[{ids[found[0]]}]>" if found[0] in ids else found[0]

    return LARK_PIECE.sub(replace, lark)
