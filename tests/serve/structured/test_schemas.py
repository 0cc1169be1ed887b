"""Random replies of random JSON schemas: whatever tokens come, the text is valid."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from fulgurite.errors import ArgumentError
from fulgurite.serve.engine.grammar import GrammarSpec, encode_json
from fulgurite.serve.structured.compiler import GrammarCompiler
from tests.serve.structured.drivers import sample_reply, smollm2_compiler, tiny_compiler
from tests.serve.structured.schemas import make_schema

jsonschema = pytest.importorskip("jsonschema", reason="it says which documents are valid")
# Of times, Python knows no leap seconds.
FORMATS = jsonschema.FormatChecker(["date", "uuid", "email", "ipv4", "ipv6"])


def check_schemas(compiler: GrammarCompiler, seeds: range) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        schema = make_schema(seed)
        spec = GrammarSpec("json_schema", encode_json("json_schema", schema))
        try:
            texts = [sample_reply(compiler, spec, 7 * seed, bool(use)) for use in (seed % 2, 1)]
        except ArgumentError as error:
            counts["refused"] += 1
            counts[error.what.split(": ", 1)[-1][:60]] += 1
            continue
        for text in texts:
            counts["unfinished" if text is None else "replies"] += 1
            if text is not None:
                check_document(schema, text, seed)
    return counts


def check_document(schema: object, text: str, seed: int) -> None:
    document = json.loads(text)
    validator = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
    errors = [error.message for error in validator.iter_errors(document)]
    assert not errors, f"schema {seed}: {json.dumps(schema)}\n{text}\n{errors}"


def test_replies_match_their_schemas_one_byte_a_token() -> None:
    counts = check_schemas(tiny_compiler(), range(400))
    print(counts)
    assert counts["replies"] > 500 and counts["unfinished"] < 20


def test_replies_match_their_schemas_with_a_real_vocabulary() -> None:
    counts = check_schemas(smollm2_compiler(), range(400, 550))
    print(counts)
    assert counts["replies"] > 180 and counts["unfinished"] < 10
