"""Files become documents; what can't be read is skipped, counted and named."""

from __future__ import annotations

import gzip
import importlib
import json
import zlib
from pathlib import Path

import pytest

from fulgurite.errors import ArgumentError
from fulgurite.train.data.sources import (
    PART_BYTES,
    BadSamples,
    Source,
    find_sources,
    hash_sources,
    read_documents,
)
from fulgurite.train.data.token_format import MAGIC


def read(path: Path, limit: int = 100, field: str = "text") -> tuple[list[str], BadSamples]:
    bad = BadSamples(limit)
    documents = read_documents(find_sources([str(path)]), field, bad)
    return [document.text for document in documents], bad


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


# ---- finding -------------------------------------------------------------------------------------


def test_a_folder_has_its_known_files_in_order_of_names(tmp_path: Path):
    for name in ["b.txt", "a.md", "sub/c.py", "d.jsonl", "e.parquet", "z.txt.gz"]:
        write(tmp_path / name, b"x")
    for name in [".hidden.txt", ".git/config.txt", "weights.bin", "photo.jpg", "sub/.x/y.txt"]:
        write(tmp_path / name, b"x" * 20)
    write(tmp_path / "t.bin", MAGIC)
    found = [(source.kind, source.path.name) for source in find_sources([str(tmp_path)])]
    assert found == [
        ("text", "a.md"),
        ("text", "b.txt"),
        ("jsonl", "d.jsonl"),
        ("parquet", "e.parquet"),
        ("text", "c.py"),
        ("tokens", "t.bin"),
        ("text", "z.txt.gz"),
    ]


def test_patterns_and_repeated_files(tmp_path: Path):
    for name in ["a.txt", "b.txt", "deep/er/c.txt"]:
        write(tmp_path / name, b"x")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    patterns = [str(tmp_path / "**/*.txt"), str(tmp_path / "a.txt"), str(tmp_path)]
    assert [one.path.name for one in find_sources(patterns)] == ["a.txt", "b.txt", "c.txt"]


def test_a_named_file_may_have_any_suffix(tmp_path: Path):
    assert read(write(tmp_path / "notes.log", b"hello"))[0] == ["hello"]
    assert read(write(tmp_path / "name [1].txt", b"brackets"))[0] == ["brackets"]


@pytest.mark.parametrize("pattern", ["nothing.txt", "*.nothing", "empty"])
def test_a_pattern_without_files(tmp_path: Path, pattern: str):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArgumentError, match="no files to read at"):
        find_sources([str(tmp_path / pattern)])


def test_no_patterns():
    with pytest.raises(ArgumentError, match="no files to read"):
        find_sources([])


def test_the_hash_depends_on_content_and_order_not_on_names(tmp_path: Path):
    a, b = write(tmp_path / "a.txt", b"one"), write(tmp_path / "b.txt", b"two")
    c = write(tmp_path / "c.txt", b"one")
    pair = hash_sources(find_sources([str(a), str(b)]))
    assert pair == hash_sources(find_sources([str(c), str(b)]))
    assert pair != hash_sources(find_sources([str(b), str(a)]))
    write(b, b"twO")
    assert pair != hash_sources(find_sources([str(a), str(b)]))


# ---- text ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", ["", "x", "\n", "no end", "ä\r\nb\rc\n", "\x00\x01", "a\u2028b\x0cc\x85d\n"]
)
def test_a_short_text_file_is_one_document(tmp_path: Path, content: str):
    texts, bad = read(write(tmp_path / "a.txt", content.encode()))
    assert texts == ([content] if content else []) and bad.count == 0


def test_a_byte_order_mark_is_no_text(tmp_path: Path):
    assert read(write(tmp_path / "a.txt", b"\xef\xbb\xbfhello"))[0] == ["hello"]


@pytest.mark.parametrize("separator", ["\n\n", "\n", ""])
def test_a_long_text_file_is_split_and_nothing_is_lost(tmp_path: Path, separator: str):
    content = "".join(f"paragraph {n} ü{separator}" for n in range(40_000))
    texts, _ = read(write(tmp_path / "a.txt", content.encode()))
    assert "".join(texts) == content
    sizes = [len(text.encode()) for text in texts]
    assert len(texts) == 1 if not separator else max(sizes) <= 2 * PART_BYTES + 100
    if separator == "\n\n":
        assert all(text.endswith("\n\n") and len(text) >= PART_BYTES // 2 for text in texts[:-1])


def test_separator_lines_end_documents(tmp_path: Path):
    text = "one\n<|endoftext|>\n<|endoftext|>\ntwo <|endoftext|> still\n"
    assert read(write(tmp_path / "a.txt", text.encode()))[0] == [
        "one\n",
        "two <|endoftext|> still\n",
    ]


def test_invalid_utf8_is_named_with_its_line(tmp_path: Path):
    path = write(tmp_path / "a.txt", b"good\n<|endoftext|>\nfine\nb\xffd\n<|endoftext|>\nlast")
    texts, bad = read(path)
    assert texts == ["good\n", "last"]
    assert bad.count == 1 and bad.named[0].startswith(f"{path}:4: not UTF-8")


def test_compressed_files(tmp_path: Path):
    path = write(tmp_path / "a.txt.gz", gzip.compress(b"packed"))
    assert read(path)[0] == ["packed"]
    rows = "".join(json.dumps({"text": str(n)}) + "\n" for n in range(2000)).encode()
    damaged = write(tmp_path / "b.jsonl.gz", gzip.compress(rows)[:-20])
    texts, bad = read(damaged)
    assert texts == [str(n) for n in range(len(texts))] and bad.count == 1
    assert "can't be read" in bad.named[0]


# ---- JSONL ---------------------------------------------------------------------------------------

BAD_LINES = {
    b"{broken": "not JSON",
    b'{"text": "\xff"}': "not JSON in UTF-8",
    b'["list"]': "not a JSON object but list",
    b'{"body": "x", "id": 1}': "no field 'text' (data.text_field); fields: body, id",
    b"{}": "fields: none",
    b'{"text": 5}': "int, not a string",
    b'{"text": null}': "NoneType, not a string",
    b'{"text": "\\ud800"}': "half a surrogate pair",
    b"[" * 100_000: "not JSON",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:20])
def test_a_bad_line_is_skipped_and_named(tmp_path: Path, line: bytes):
    path = write(tmp_path / "a.jsonl", b'{"text": "one"}\n\n' + line + b'\n{"text": "two"}')
    texts, bad = read(path)
    assert texts == ["one", "two"] and bad.count == 1
    assert bad.named[0].startswith(f"{path}:3: ") and BAD_LINES[line] in bad.named[0]


def test_the_limit_of_bad_samples(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", b'{"text": "one"}\n' + b"bad\n" * 5)
    assert read(path, limit=5)[1].count == 5
    with pytest.raises(ArgumentError, match="5 samples can't be read") as raised:
        read(path, limit=4)
    assert f"{path}:2" in str(raised.value) and "data.max_bad_samples=4" in str(raised.value)


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        (b'{"messages": []}', "set tune.task=chat"),
        (b'{"prompt": "a", "completion": "b"}', "set tune.task=chat"),
        (b'{"prompt": "a", "chosen": "b", "rejected": "c"}', "set tune.task=dpo"),
        (b'{"id": 1, "body": "x"}', "set data.text_field=body"),
        (b'{"title": "x", "body": "x"}', "set data.text_field=title or body"),
        (b'{"id": 1, "doc": {"body": "x"}}', "set data.text_field=doc.body"),
        (b'{"id": 1}', "raise data.max_bad_samples"),
    ],
)
def test_records_of_another_kind_come_with_advice(tmp_path: Path, line: bytes, advice: str):
    with pytest.raises(ArgumentError, match=advice):
        read(write(tmp_path / "a.jsonl", line), limit=0)


def test_json_is_a_list_of_records_or_a_text(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    rows = b'\xef\xbb\xbf [\n {"text": "x"}, 3, {"text": "y"}]'
    texts, bad = read(write(tmp_path / "a.json", rows))
    assert texts == ["x", "y"] and bad.named == [
        f"{tmp_path / 'a.json'}:2: not a JSON object but int"
    ]
    assert read(write(tmp_path / "b.json", b'{"text": "x"}'))[0] == ['{"text": "x"}']
    assert "is no list of objects" in caplog.text
    texts, bad = read(write(tmp_path / "c.json", b'[{"text": "x"}'))
    assert texts == [] and "not JSON in UTF-8" in bad.named[0]


def test_fields_of_objects_have_dotted_names(tmp_path: Path):
    lines = b'{"doc": {"text": "x"}}\n{"doc.text": "y"}\n{"doc": 3}\n{"doc": {}}\n'
    texts, bad = read(write(tmp_path / "a.jsonl", lines), field="doc.text")
    assert texts == ["x", "y"] and bad.count == 2
    assert "no field 'doc.text'" in bad.named[0]


def test_empty_rows_are_no_documents(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", b'{"text": ""}\n{"text": "x"}\n')
    assert read(path) == (["x"], BadSamples(100))


def test_another_field(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", '{"body": "ü\\n"}'.encode())
    assert read(path, field="body")[0] == ["ü\n"]


# ---- parquet -------------------------------------------------------------------------------------


def test_parquet_rows(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow", reason="it writes the parquet files")
    parquet = importlib.import_module("pyarrow.parquet")
    table = pyarrow.table({"text": ["one", None, "", "ä"], "id": [1, 2, 3, 4]})
    path = tmp_path / "a.parquet"
    parquet.write_table(table, path)
    texts, bad = read(path)
    assert texts == ["one", "ä"]
    assert bad.named == [f"{path}:2: the text is NoneType, not a string"]
    with pytest.raises(ArgumentError, match="no column 'body'; columns: text, id"):
        read(path, field="body")
    nested = tmp_path / "nested.parquet"
    parquet.write_table(pyarrow.table({"doc": [{"text": "x", "n": 1}, None]}), nested)
    texts, bad = read(nested, field="doc.text")
    assert texts == ["x"] and bad.count == 1


def test_a_damaged_parquet_file_is_skipped(tmp_path: Path):
    pytest.importorskip("pyarrow", reason="it writes the parquet files")
    texts, bad = read(write(tmp_path / "a.parquet", b"not parquet"))
    assert texts == [] and "not a parquet file" in bad.named[0]


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = importlib.import_module

    def without_pyarrow(name: str, package: str | None = None):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without_pyarrow)
    with pytest.raises(ArgumentError, match=r"needs the pyarrow package[\s\S]*pip install pyarrow"):
        read(write(tmp_path / "a.parquet", b"x"))


def test_the_demo_text_is_a_source():
    [source] = find_sources(["demo", "demo"])
    assert source == Source("text") and source.name == "demo"


def test_a_damaged_archive_ends_where_it_is_damaged(tmp_path: Path):
    packer = zlib.compressobj(wbits=31)
    packed = packer.compress(b'{"text": "whole"}\n') + packer.flush(zlib.Z_FULL_FLUSH)
    no_block = b"\x07"  # of the kind 3, which does not exist
    texts, bad = read(write(tmp_path / "a.jsonl.gz", packed + no_block * 8))
    assert texts in ([], ["whole"]) and bad.count == 1
    assert "the rest of the file can't be read" in bad.named[0]


@pytest.mark.parametrize("name", ["tokens.bin.gz", "rows.parquet.gz"])
def test_only_text_is_unpacked(tmp_path: Path, name: str):
    with pytest.raises(ArgumentError, match="only text is unpacked"):
        find_sources([str(write(tmp_path / name, gzip.compress(b"1234")))])
