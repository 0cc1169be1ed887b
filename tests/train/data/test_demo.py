"""The demo text exists in a plain install and is the same every time."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy

from fulgurite.train.data.demo import collect_package, demo_documents


def test_there_are_megabytes_of_text_from_each_package():
    sizes: dict[str, int] = {}
    for name, text in demo_documents():
        package = name.split(":")[0]
        sizes[package] = sizes.get(package, 0) + len(text)
    assert set(sizes) == {"python", "torch", "numpy"}
    assert min(sizes.values()) > 500_000 and 3_000_000 < sum(sizes.values()) < 20_000_000


def test_names_are_unique_and_texts_are_clean():
    documents = demo_documents()
    assert len({name for name, _ in documents}) == len(documents) > 500
    for name, text in documents:
        assert text.strip() and text.endswith("\n") and text.encode().decode() == text, name


def test_no_path_of_this_machine_is_in_the_text():
    prefix = sys.prefix
    assert not [name for name, text in demo_documents() if prefix in text or prefix in name]


def test_what_is_collected_again_is_what_was_cached():
    cached = [pair for pair in demo_documents() if pair[0].startswith("numpy:")]
    assert list(collect_package("numpy", Path(numpy.__file__).parent)) == cached


def test_files_that_cannot_be_parsed_and_private_names_are_left_out(tmp_path: Path):
    long = "word " * 200
    (tmp_path / "a.py").write_text(
        f'"""{long}"""\ndef _f():\n    """hidden"""\nclass C:\n'
        f'    def g(self, x=1):\n        """seen"""\n'
    )
    (tmp_path / "b.py").write_text('"""broken')
    (tmp_path / "c.py").write_bytes(b'"""\xff"""')
    (tmp_path / "short.py").write_text('"""short"""')
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "d.py").write_text(f'"""{long}"""')
    [(name, text)] = collect_package("p", tmp_path)
    assert name == "p:a.py" and text.startswith("p.a\n\nword")
    assert "class C\n\nC.g(self, x=1)\n\nseen" in text and "hidden" not in text
