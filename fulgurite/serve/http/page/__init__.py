"""The chat page: three files that the server sends as they are.

In: the name of a file (`index.html`, `page.js`, `page.css`). Out: its bytes and its headers.

    index.html    what stands on the page           page.css      light, dark, 360 px and wider
    shared.js     elements, numbers, storage        markdown.js   text of the model → elements
    tokens.js     probability of each token         settings.js   the form → fields of a request
    stream.js     one request, server-sent events   messages.js   messages and tool calls as elements
    page.js       the conversation, keys, start

The scripts are sent as one, in the order of `SCRIPTS`. There is no build step, no other host, and no
inline script or style: `CONTENT_SECURITY_POLICY` forbids them.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

from fulgurite.errors import ArgumentError

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
SCRIPTS = (
    "shared.js",
    "markdown.js",
    "tokens.js",
    "settings.js",
    "stream.js",
    "messages.js",
    "page.js",
)
# A file that is served: the files of this folder it consists of.
PARTS: dict[str, tuple[str, ...]] = {
    "index.html": ("index.html",),
    "page.css": ("page.css",),
    "page.js": SCRIPTS,
}
CONTENT_TYPES: dict[str, str] = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
}
# The path of each file below the root of the server.
ROUTES: dict[str, str] = {"/": "index.html", "/page.css": "page.css", "/page.js": "page.js"}


@cache
def read_page(name: str) -> bytes:
    """The bytes of a served file."""
    if name not in PARTS:
        raise ArgumentError(
            f"the chat page has no file {name!r}", next=f"use one of {', '.join(PARTS)}"
        )
    folder = resources.files("fulgurite.serve.http.page")
    return b"\n".join(folder.joinpath(part).read_bytes() for part in PARTS[name])


def make_page_headers(name: str) -> dict[str, str]:
    """The headers of a served file."""
    return {
        "content-type": CONTENT_TYPES[name],
        "content-security-policy": CONTENT_SECURITY_POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",  # the page of a new version shows at the next visit
    }
