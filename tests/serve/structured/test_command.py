"""The options of `fulgurite generate` for structured output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fulgurite.cli import main
from tests.serve.tiny_checkpoint import save_checkpoint

SCHEMA = '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("small"))


def generate(folder: Path, *words: str) -> int:
    return main(["generate", "hello", "--model", str(folder), "--max-tokens", "200", *words])


def test_replies_follow_the_grammar(folder: Path, capsys, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(SCHEMA.replace("}}", '}}, "additionalProperties": false'))
    (tmp_path / "grammar.lark").write_text('start: "f" /[xy]{3}/ "!"')
    schema, grammar = str(tmp_path / "schema.json"), str(tmp_path / "grammar.lark")
    for words, is_right in (
        (("--choices", "yes,no"), lambda text: text in ("yes", "no")),
        (("--choices", '["a,b", "c"]'), lambda text: text in ("a,b", "c")),
        (("--regex", r"\d{3}"), lambda text: len(text) == 3 and int(text) >= 0),
        (("--json-schema", schema), lambda text: json.loads(text)["a"] in (1, 2)),
        (("--json-schema", SCHEMA[:-1] + ', "additionalProperties": false}'), json.loads),
        (("--grammar", grammar), lambda text: text[0] == "f" and text[4:] == "!"),
    ):
        assert generate(folder, *words) == 0
        assert is_right(capsys.readouterr().out.rstrip("\n")), words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--regex", "(a"), "unclosed group"),
        (("--json-schema", "/no/such/file"), "can't read /no/such/file: No such file"),
        (("--json-schema", '{"not": {}}'), "'not' at # is not supported"),
        (("--grammar", "."), "can't read .: Is a directory"),
        (("--choices", "[1]"), "choices contains 1"),
        (("--choices", "[1"), "not a JSON list"),
    ],
)
def test_bad_grammars_are_errors(
    folder: Path, capsys, words: tuple[str, ...], message: str
) -> None:
    assert generate(folder, *words) == 1
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""


def test_two_grammars_are_an_error(folder: Path, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        generate(folder, "--regex", "a", "--json-object")
    assert ended.value.code == 2 and "not allowed with" in capsys.readouterr().err
