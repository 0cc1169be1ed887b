"""Classes of regexes: replies match for Python, and for ECMAScript."""

from __future__ import annotations

import json
import re

import pytest

from fulgurite.serve.engine.grammar import GrammarSpec
from fulgurite.serve.structured.regex_classes import narrow_classes
from tests.serve.structured.drivers import sample_reply, tiny_compiler

REGEXES = [r"\W{3}", r"\D{3}", r"\S{3}", r"[^\w]{3}", r"[^\d\s]{3}", r"[a\W]{3}", r"\w{2}\d\s"]


@pytest.mark.parametrize("regex", REGEXES)
def test_replies_match_with_and_without_unicode(regex: str) -> None:
    as_regex = GrammarSpec("regex", regex)
    as_schema = GrammarSpec("json_schema", json.dumps({"type": "string", "pattern": f"^{regex}$"}))
    for seed in range(40):
        texts = [sample_reply(tiny_compiler(), as_regex, seed)]
        quoted = sample_reply(tiny_compiler(), as_schema, seed)
        assert texts[0] is not None and quoted is not None
        texts.append(json.loads(quoted))
        for text in texts:
            assert re.fullmatch(regex, text) and re.fullmatch(regex, text, re.ASCII), repr(text)


def test_other_text_stays() -> None:
    for regex in (r"\\W", r"[^\W]", r"a\]b", r"[]a]", r"\p{L}[\d-]", "]\\"):
        assert narrow_classes(regex) == regex
