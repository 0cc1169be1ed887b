"""The files of the chat page: well formed, self-contained, and within the Content-Security-Policy."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fulgurite.errors import ArgumentError
from fulgurite.serve.http import page
from fulgurite.serve.http.page import CONTENT_SECURITY_POLICY, PARTS, ROUTES, SCRIPTS, read_page
from tests.report.support import Element, Page

FOLDER = Path(page.__file__).parent
NAMESPACE = "http://www.w3.org/2000/svg"  # a name in the icon, never requested
SINKS = [
    "innerHTML",
    "outerHTML",
    "insertAdjacentHTML",
    "document.write",
    "DOMParser",
    "createContextualFragment",
    "eval(",
    "new Function",
    "setHTML",
    "srcdoc",
]


@pytest.fixture(scope="module")
def root() -> Element:
    return Page(read_page("index.html").decode()).root


def read_text(name: str) -> str:
    return read_page(name).decode()


def test_every_file_of_the_folder_is_served() -> None:
    """A script that is left out of `SCRIPTS` would be missed only by who uses it."""
    served = {part for parts in PARTS.values() for part in parts}
    assert served == {
        path.name for path in FOLDER.iterdir() if path.suffix in (".js", ".css", ".html")
    }
    assert set(ROUTES.values()) == set(PARTS) == set(page.CONTENT_TYPES)


def test_scripts_are_sent_as_one_in_their_order() -> None:
    text = read_text("page.js")
    places = [text.index((FOLDER / name).read_text()) for name in SCRIPTS]
    assert places == sorted(places)
    assert text.startswith('"use strict";')


@pytest.mark.parametrize("name", ["", "../errors.py", "shared.js", "/page.js", "page.js\0"])
def test_other_files_are_not_served(name: str) -> None:
    with pytest.raises(ArgumentError, match="has no file"):
        read_page(name)


def test_policy_forbids_all_but_own_files() -> None:
    rules = dict(rule.split(" ", 1) for rule in CONTENT_SECURITY_POLICY.split("; "))
    assert rules == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "connect-src": "'self'",
        "img-src": "'self' data:",
        "form-action": "'none'",
        "base-uri": "'none'",
        "frame-ancestors": "'none'",
    }
    for name in PARTS:
        headers = page.make_page_headers(name)
        assert headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", PARTS)
def test_nothing_comes_from_another_host(name: str) -> None:
    text = read_text(name).replace(NAMESPACE, "")
    assert not re.findall(r"(?:https?:|wss?:)?//[\w.-]+\.\w{2,}", text)
    assert not re.search(r"@import|\burl\(|\bimport\b *[({\"']", text)


def test_markup_has_no_inline_script_style_or_handler(root: Element) -> None:
    elements = root.all()
    assert elements
    for element in elements:
        assert element.tag not in ("style", "base", "iframe", "object", "embed")
        handlers = [name for name in element.attributes if name.startswith("on") or name == "style"]
        assert not handlers, (element.tag, handlers)
        assert not (element.attributes.get("href") or "").startswith("javascript:")
        if element.tag == "script":
            assert element.attributes == {"src": "page.js"} and not element.text


def test_text_of_the_model_is_never_read_as_html() -> None:
    text = read_text("page.js")
    assert [sink for sink in SINKS if sink in text] == []
    assert not re.search(r"setAttribute\(\s*[\"'](style|on\w+)", text)


def test_references_of_the_page_exist(root: Element) -> None:
    """Ids the script looks up, fields of the form it reads, and what labels point at."""
    ids = [e.attributes["id"] for e in root.all() if "id" in e.attributes]
    assert len(ids) == len(set(ids))
    script = read_text("page.js")
    assert set(re.findall(r'one\("#([\w-]+)"\)', script)) <= set(ids)
    named = {e.attributes["name"] for e in root.all() if e.tag in ("input", "select", "textarea")
             and "name" in e.attributes}  # fmt: skip
    assert set(re.findall(r"form\.elements\.(\w+)", script)) <= named
    formats = {e.attributes["value"] for e in root.all("option") if "value" in e.attributes}
    (table,) = re.findall(r"const FORMATS = \{(.*?)\n\};", script, re.DOTALL)
    assert formats == set(re.findall(r"^  (\w+):", table, re.MULTILINE))


def test_every_control_has_a_name(root: Element) -> None:
    labelled = {id(control) for label in root.all("label") for control in label.all()}
    for control in [*root.all("input"), *root.all("select"), *root.all("textarea")]:
        assert id(control) in labelled or control.attributes.get("aria-label"), control.attributes
    for button in root.all("button"):
        assert button.text.strip()


def test_classes_of_the_style_sheet_are_used() -> None:
    """A class that nothing has any more is a left-over rule."""
    used = read_text("index.html") + read_text("page.js")
    sheet = re.sub(r"/\*.*?\*/|\{[^}]*\}", " ", read_text("page.css"), flags=re.DOTALL)
    classes = set(re.findall(r"\.([a-z][\w-]*)", sheet))
    assert {
        name for name in classes if not re.search(rf"\b{re.sub(r'-[0-9]$', '', name)}\b", used)
    } == set()


def test_colours_are_named_once() -> None:
    sheet = read_text("page.css")
    rules = sheet.split("}", 1)[1]
    assert not re.findall(r"#[0-9a-f]{3,8}\b(?=[; ,)])", rules)
    names = set(re.findall(r"var\((--[\w-]+)", sheet))
    assert names <= set(re.findall(r"(--[\w-]+):", sheet))
    assert sheet.count("{") == sheet.count("}")


def test_script_parses(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node on this machine")
    path = tmp_path / "page.js"
    path.write_bytes(read_page("page.js"))
    done = subprocess.run([node, "--check", str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
