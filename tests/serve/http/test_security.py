"""What strangers can't do: no route without a key, no internals in errors, no input that hangs or kills."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from fulgurite.serve.http import request_template
from fulgurite.serve.http.app import ENDPOINTS, OPEN_PATHS
from fulgurite.serve.http.body import check_depth
from fulgurite.serve.http.config import Limits
from fulgurite.serve.http.errors import ApiError
from fulgurite.serve.http.page import ROUTES
from tests.serve.http.serving import MODEL, PLAIN, RunningServer, mock_config, script, serve

KEYS = ("first-key", "schlüssel")
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
INTERNALS = re.compile(r"Traceback|\.py\b|/work|/root|/tmp|/home|0x[0-9a-f]{6,}|site-packages")


@pytest.fixture(scope="module")
def locked() -> Iterator[RunningServer]:
    with serve(mock_config(api_keys=KEYS)) as running:
        yield running
        assert running.leaks() == {}


def send_raw(server: RunningServer, data: bytes, silence: float = 30.0) -> bytes:
    """What the server answers to these bytes until it closes, or is silent after its first answer."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30.0) as sock:
        sock.sendall(data)
        parts = []
        try:
            while part := sock.recv(65536):
                parts.append(part)
                sock.settimeout(silence)
        except (TimeoutError, ConnectionResetError):
            pass
        return b"".join(parts)


def read_status(reply: bytes) -> int:
    return int(reply.split(b" ", 2)[1]) if reply else 0


# ---- keys -----------------------------------------------------------------------------------------

ROUTE_LIST = [*ENDPOINTS, *(("GET", path) for path in ROUTES)]


@pytest.mark.parametrize(("method", "path"), ROUTE_LIST)
def test_every_route_needs_a_key(locked, method, path):
    url = locked.url + re.sub(r"\{.*?\}", "x", path)
    replies = [
        PLAIN.request(method, url, headers=headers)
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "Bearer"},
            {"authorization": "first-key"},
            {"authorization": "Basic first-key"},
            {"x-api-key": "first-key2"},
            {"x-api-key": "first-ke"},
        )
    ]
    if path in OPEN_PATHS:
        assert {reply.status_code for reply in replies} == {200}
        return
    for reply in replies:
        assert reply.status_code == 401
        assert reply.headers["www-authenticate"] == "Bearer"
        assert "first-key" not in reply.text
    error = replies[0].json()["error"]
    assert error["type"] == "authentication_error"


def test_open_routes_are_the_documented_ones():
    assert {"/health", "/ping", "/", "/page.css", "/page.js"} == OPEN_PATHS


@pytest.mark.parametrize("path", ["/v1/nothing", "/docs", "/v1/models/../../audit", "//audit"])
def test_unknown_paths_need_a_key_too(locked, path):
    assert PLAIN.get(locked.url + path).status_code == 401
    assert PLAIN.delete(locked.url + "/v1/models").status_code == 401


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", ["authorization", "x-api-key", "lower"])
def test_any_key_opens_all(locked, key, name):
    value = {"authorization": f"Bearer {key}", "x-api-key": key, "lower": f"bearer {key}"}[name]
    header = "x-api-key" if name == "x-api-key" else "authorization"
    reply = PLAIN.get(locked.url + "/v1/models", headers=[(header.encode(), value.encode())])
    assert reply.status_code == 200


def test_a_key_is_checked_before_the_body_is_read(locked):
    reply = send_raw(
        locked, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n", 1.0
    )
    assert read_status(reply) == 401


# ---- odd values -----------------------------------------------------------------------------------

ODD = [
    None, True, False, 0, -1, 1, -0.0, 0.5, 1e308, -1e308, 5e-324, 1 << 31, -(1 << 63), 1 << 64,
    10**30, "", "x", "\x00", "\ufeff", "😀" * 10, "x" * 10_000, [], {}, [None], [[]], [{}], {"": None},
    {"a": {"b": [1]}}, [1, "a"], ["\x00"], "NaN", "none", "../../etc/passwd", "{{ 7*7 }}", "%s%n",
]  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 2},
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/embeddings": {"input": "x"},
    "/v1/messages": {"messages": HI, "max_tokens": 2, "model": MODEL},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}


def list_fields(server: RunningServer, path: str) -> list[str]:
    """The names of a body's fields, from the server's own description."""
    document = server.get("/openapi.json").json()
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return list(schema["properties"])


@pytest.mark.parametrize("path", BODIES)
def test_odd_values_in_every_field(server, path):
    """An answer or a refusal that tells no internals; never a failure."""
    send_odd_values(server, path, 8)


@pytest.mark.slow
@pytest.mark.parametrize("path", BODIES)
def test_all_odd_values_in_every_field(server, path):
    send_odd_values(server, path, len(ODD))


def send_odd_values(server: RunningServer, path: str, count: int) -> None:
    """`count` values a field, of a seed."""
    rng = random.Random(path)

    async def run() -> None:
        limits = httpx.Limits(max_connections=8)
        async with httpx.AsyncClient(
            verify=False, base_url=server.url, timeout=60, limits=limits
        ) as client:

            async def one(name: str, value: Any) -> None:
                reply = await client.post(path, json={**BODIES[path], name: value})
                what = f"{name}={value!r:.60}: {reply.text[:300]}"
                assert reply.status_code in (200, 400, 404, 429, 504), what
                assert reply.status_code == 200 or not INTERNALS.search(reply.text), what

            names = list_fields(server, path)
            cases = ((name, value) for name in names for value in rng.sample(ODD, count))
            await asyncio.gather(*(one(*case) for case in cases))

    asyncio.run(run())


RAW_BODIES = [
    b"", b" ", b"null", b"[]", b'"x"', b"1", b"{", b"{}x", b'{"messages": [}', b"\xef\xbb\xbf{}",
    b'{"prompt": NaN}', b'{"prompt": Infinity}', b'{"prompt": "x", "temperature": 1e999}',
    b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", b'{"prompt": "\\ud800"}',
    b'{"prompt": "\\ud800\\udc00 \\udfff"}', b'{"prompt": "\xff"}', b'{"prompt": "\xed\xa0\x80"}',
    b'{"\xff": 1}', b"[" * 100_000, b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000,
    b'{"messages": ' + b"[" * 60 + b"]" * 60 + b"}", b'{"prompt": "' + b"\\" * 99_999 + b'"}',
    b"\x00", b"\x1f\x8b\x08\x00", b'{"prompt": "a\nb"}', b"'{}'", b'{"prompt": "x",}',
]  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
def test_bodies_that_are_no_json(server, path):
    with httpx.Client(verify=False, base_url=server.url, timeout=30) as client:
        for body in RAW_BODIES:
            reply = client.post(path, content=body, headers={"content-type": "application/json"})
            assert reply.status_code == 400, (body[:60], reply.text)
            assert not INTERNALS.search(reply.text), reply.text


def test_the_last_of_duplicate_keys_counts(server):
    body = b'{"prompt": "x", "max_tokens": 5, "max_tokens": 2}'
    headers = {"content-type": "application/json"}
    reply = PLAIN.post(server.url + "/v1/completions", content=body, headers=headers)
    assert reply.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("text", ["a\x00b", "\u202e", "\ufffd", "\U0010ffff", "<|im_end|>", "\r\n"])
def test_odd_texts_are_answered(server, text):
    reply = server.post(CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 2})
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("body", "is_deep"),
    [
        (b"[" * 64 + b"]" * 64, False),
        (b"[" * 65 + b"]" * 65, True),
        (b'{"a":' * 65 + b"1" + b"}" * 65, True),
        (b"[" + b"[],{}," * 500 + b"[]]", False),
        (b'"' + b"[" * 500 + b'"', False),
        (b'"\\"' + b"[" * 500 + b'"', False),
        (b'"\\\\"' + b"[" * 500, True),
        (b'[["]]"' * 100, True),
    ],
)
def test_depth_is_counted_outside_of_strings(body, is_deep):
    if is_deep:
        with pytest.raises(ApiError):
            check_depth(body, 64)
    else:
        check_depth(body, 64)


def test_depth_of_large_bodies_takes_no_memory():
    """Four million characters of strings and escapes: quick, and without a stack."""
    for body in (
        b'"' + b"a" * (4 << 20) + b'"',
        b'"' + b"\\a" * (2 << 20) + b'"',
        b"[]," * (1 << 20),
    ):
        start = time.process_time()
        check_depth(b"[" + body + b"[[]]" * 100 + b"]", 64)
        assert time.process_time() - start < 2.0  # 30 times what it takes


# ---- limits ---------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
DEEP: dict[str, Any] = {}
for _ in range(100):
    DEEP = {"items": DEEP}
TOO_MUCH: dict[str, dict[str, Any]] = {
    "n": {"n": 129},
    "stops": {"stop": ["x"] * 17},
    "long stop": {"stop": "x" * 257},
    "logprobs": {"logprobs": True, "top_logprobs": 21},
    "tools": {"tools": [TOOL] * 129},
    "twice the same tool": {"tools": [TOOL] * 2},
    "deep schema": {"guided_json": DEEP},
    "large schema": {"guided_json": {"enum": ["x" * 200_000]}},
    "long regex": {"guided_regex": "a" * 20_000},
    "regex that explodes": {"guided_regex": "((a{1000}){1000}){1000}"},
    "nested groups": {"guided_regex": "(" * 3000 + ")" * 3000},
    "broken regex": {"guided_regex": "(((("},
    "broken grammar": {"guided_grammar": "start: ("},
    "grammar without an end": {"guided_grammar": 'start: start "a"'},
    "reference to itself": {"guided_json": {"$ref": "#"}},
    "reference elsewhere": {"guided_json": {"$ref": "http://127.0.0.1:9/x"}},
    "reference to a file": {"guided_json": {"$ref": "file:///etc/passwd"}},
    "too many choices": {"guided_choice": [str(i) for i in range(20_000)]},
    "no choices": {"guided_choice": []},
    "salt": {"cache_salt": "x" * 257},
    "priority": {"priority": 1 << 31},
    "bias of all tokens": {"logit_bias": {str(i): 1e9 for i in range(10)}},
    "values that replace messages": {"chat_template_kwargs": {"messages": []}},
    "values that replace tools": {"chat_template_kwargs": {"tools": []}},
    "values named self": {"chat_template_kwargs": {"self": 1}},
    "a template": {"chat_template": "x"},
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_too_much_is_refused(server, name):
    reply = server.post(CHAT, {"messages": HI, "max_tokens": 2, **TOO_MUCH[name]})
    assert reply.status_code == 400, reply.text[:500]
    assert not INTERNALS.search(reply.text), reply.text


def test_a_bad_grammar_after_a_good_one(server):
    for regex, status in (("ab", 200), ("(", 400), ("ab", 200), ("((a{999}){999}){999}", 400)):
        reply = server.post(CHAT, {"messages": HI, "max_tokens": 2, "guided_regex": regex})
        assert reply.status_code == status


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_media_are_refused_and_not_fetched(server, kind):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        part = {"type": kind, kind: {"url": url, "data": url}}
        reply = server.post(CHAT, {"messages": [{"role": "user", "content": [part]}]})
        assert reply.status_code == 400
        with pytest.raises(TimeoutError):
            listener.accept()


# ---- chat templates -------------------------------------------------------------------------------

HOSTILE_TEMPLATES = {
    "a loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a large range": "{% for i in range(10**9) %}x{% endfor %}",
    "a long text": "{{ 'x' * 10**11 }}",
    "a long text that is built": "{% set x = namespace(t='x') %}{% for i in range(99) %}"
    "{% set x.t = x.t ~ x.t %}{% endfor %}{{ x.t }}",
    "a large number": "{{ 9 ** (9 ** (9 ** 9)) }}",
    "a large number in a test": "{% if 9 ** (9 ** (9 ** 9)) %}x{% endif %}",
    "a filter with much work": "{{ 'x' | center(10**11) }}",
    "a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "an attribute by filter": "{{ messages | attr('__class__') | attr('__mro__') }}{{ 1/0 }}",
    "a format string": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}{{ 1/0 }}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "an import": "{% import 'os' as os %}",
    "an include": "{% include '/etc/passwd' %}",
    "no template": "{% for %}",
    "a long number": "{{ " + "9" * 5000 + " }}",
    "deep brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}


@pytest.fixture(scope="module")
def open_server() -> Iterator[RunningServer]:
    """A server that accepts templates of requests."""
    with serve(mock_config(allow_request_template=True)) as running:
        yield running
        assert running.leaks() == {}


def test_templates_of_requests(open_server):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    body = {"messages": [{"role": "user", "content": script("ok")}], "chat_template": template}
    reply = open_server.post(CHAT, body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"] == "ok"
    raising = {**body, "chat_template": "{{ raise_exception('no such role') }}"}
    assert "no such role" in open_server.post(CHAT, raising).text


def test_hostile_templates_neither_hang_nor_kill(open_server, monkeypatch):
    """They end with an error, while other requests are answered."""
    monkeypatch.setattr(request_template, "MAX_SECONDS", 1)

    async def run() -> None:
        limits = httpx.Timeout(120.0)
        async with httpx.AsyncClient(
            verify=False, base_url=open_server.url, timeout=limits
        ) as client:
            hostile = {
                name: asyncio.ensure_future(
                    client.post(CHAT, json={"messages": HI, "chat_template": template})
                )
                for name, template in HOSTILE_TEMPLATES.items()
            }
            answered = 0
            while not all(task.done() for task in hostile.values()):
                body = {"messages": [{"role": "user", "content": script("ok")}]}
                reply = await client.post(CHAT, json=body, timeout=30)
                assert reply.json()["choices"][0]["message"]["content"] == "ok"
                answered += 1
                await asyncio.sleep(0.05)
            for name, task in hostile.items():
                reply = task.result()
                assert reply.status_code == 400, (name, reply.text[:300])
                assert not INTERNALS.search(reply.text), (name, reply.text[:300])
            assert answered > 3

    asyncio.run(run())


# ---- HTTP -----------------------------------------------------------------------------------------


def test_no_cors_by_default(server):
    headers = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    for reply in (
        PLAIN.options(server.url + CHAT, headers=headers),
        PLAIN.get(server.url + "/health", headers=headers),
    ):
        assert not [name for name in reply.headers if name.startswith("access-control")]


def test_cors_of_listed_origins_only():
    with serve(mock_config(allow_origins=("http://good.example",))) as running:
        for origin, allowed in (("http://good.example", True), ("http://evil.example", False)):
            reply = PLAIN.get(running.url + "/health", headers={"origin": origin})
            assert ("access-control-allow-origin" in reply.headers) == allowed
            if allowed:
                exposed = reply.headers["access-control-expose-headers"]
                assert "x-request-id" in exposed and "retry-after" in exposed


@pytest.mark.parametrize(
    "path",
    ["/../config.py", "/page/../../server.py", "/..%2f..%2fetc/passwd", "/page.js/../server.py"]
    + ["/%2e%2e/%2e%2e/etc/passwd", "/page.js%00.html", "/index.html", "/\\..\\x", "/page.js/"],
)
def test_no_other_files_are_served(server, path):
    request = f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode()
    assert read_status(send_raw(server, request)) in (400, 404)


def test_pages_forbid_scripts_of_others(server):
    for path in ROUTES:
        headers = server.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


@pytest.fixture(scope="module")
def strict() -> Iterator[RunningServer]:
    """A server with small limits."""
    limits = Limits(read_seconds=1.5, header_bytes=4096, body_bytes=10_000)
    with serve(mock_config(limits=limits)) as running:
        yield running
        assert running.leaks() == {}
        assert not running.app.server.admission.entered


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
BODY = b'{"prompt": "x", "max_tokens": 1}'
SMUGGLED = b"GET /audit HTTP/1.1\r\nhost: x\r\n\r\n"
RAW_REQUESTS: dict[str, tuple[bytes, set[int]]] = {
    "many headers": (
        b"GET /health HTTP/1.1\r\n" + b"x: %s\r\n" % (b"v" * 100) * 60 + b"\r\n",
        {431},
    ),
    "a long header": (b"GET /health HTTP/1.1\r\nx: " + b"v" * 5000, {431, 408}),
    "a long path": (b"GET /" + b"v" * 5000 + b" HTTP/1.1\r\n\r\n", {431}),
    "trailers": (
        HEAD
        + b"transfer-encoding: chunked\r\n\r\n0\r\n"
        + b"x: %s\r\n" % (b"v" * 100) * 60
        + b"\r\n",
        {431, 400, 0},
    ),
    "length and chunks": (
        HEAD + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        {400},
    ),
    "two lengths": (
        HEAD + b"content-length: 32\r\ncontent-length: 5\r\n\r\n" + BODY + SMUGGLED,
        {400},
    ),
    "a negative length": (HEAD + b"content-length: -1\r\n\r\n", {400}),
    "a length that is no number": (HEAD + b"content-length: 3x\r\n\r\n", {400}),
    "a huge length": (HEAD + b"content-length: " + b"9" * 30 + b"\r\n\r\n", {400, 413}),
    "an unknown encoding": (HEAD + b"transfer-encoding: gzip\r\n\r\n" + BODY, {400}),
    "an obfuscated encoding": (
        HEAD + b"transfer-encoding: xchunked\r\ncontent-length: 32\r\n\r\n" + BODY,
        {400},
    ),
    "a space before a colon": (b"GET /health HTTP/1.1\r\nhost : x\r\n\r\n", {400}),
    "a folded header": (b"GET /health HTTP/1.1\r\nx: a\r\n b\r\n\r\n", {200, 400}),
    "a lone line feed": (b"GET /health HTTP/1.1\nhost: x\n\n", {200, 400}),
    "a NUL in a header": (b"GET /health HTTP/1.1\r\nx: a\x00b\r\n\r\n", {400}),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00", {400}),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400}),
    "another method": (b"BREW /coffee HTTP/1.1\r\n\r\n", {400}),
    "a path without a slash": (b"GET health HTTP/1.1\r\n\r\n", {400}),
    "a star": (b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n", {400, 404, 405}),
    "an upgrade": (
        b"GET /health HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: x\r\n\r\n",
        {200, 400},
    ),
}


@pytest.mark.parametrize("name", RAW_REQUESTS)
def test_raw_requests(strict, name):
    data, statuses = RAW_REQUESTS[name]
    reply = send_raw(strict, data, silence=1.0)
    assert read_status(reply) in statuses, reply[:500]
    assert reply.count(b"HTTP/1.1 ") <= 1 or name == "an upgrade", "a smuggled request was answered"
    assert not INTERNALS.search(reply.decode(errors="replace"))


def test_a_client_that_still_sends_gets_the_answer(strict):
    """A connection that is closed while bytes arrive is reset, and a reset takes the answer away."""
    host, port = strict.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30.0) as sock:
        sock.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        for _ in range(200):
            sock.sendall(b"400\r\n" + b"x" * 1024 + b"\r\n")
            time.sleep(0.001)
        reply = sock.recv(65536)
    assert read_status(reply) == 413


def test_raw_errors_are_json(strict):
    reply = send_raw(strict, b"\x16\x03\x01\r\n\r\n")
    head, _, body = reply.partition(b"\r\n\r\n")
    assert b"application/json" in head and b"connection: close" in head
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def test_headers_in_two_parts_before_a_large_body(strict):
    """The body's bytes don't count as headers."""
    body = json.dumps({"prompt": "x", "max_tokens": 1, "user": "u" * 8000}).encode()
    request = HEAD + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body
    host, port = strict.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(request[:30])
        time.sleep(0.1)
        sock.sendall(request[30:])
        assert read_status(sock.recv(65536)) == 200


SLOW = {
    "nothing": b"",
    "a part of the line": b"GET /he",
    "a part of the headers": b"GET /health HTTP/1.1\r\nx: ",
    "a part of the body": HEAD + b"content-length: 32\r\n\r\n" + BODY[:10],
    "a part of a chunk": HEAD + b"transfer-encoding: chunked\r\n\r\n20\r\n" + BODY[:10],
    "empty lines": b"\r\n",
    "a part of the next request": b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /he",
}


@pytest.mark.parametrize("name", SLOW)
def test_slow_requests_time_out(strict, name):
    """A client that sends a byte now and then does not hold its connection."""
    host, port = strict.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(SLOW[name])
        end = time.monotonic() + 10
        received = b""
        sock.settimeout(0.1)
        while time.monotonic() < end:
            try:
                part = sock.recv(65536)
                received += part
                if not part:
                    break
            except TimeoutError:
                if SLOW[name] and not SLOW[name].startswith(b"\r"):
                    sock.sendall(b"x")  # one more byte
            except (ConnectionResetError, BrokenPipeError):
                break
        else:
            raise AssertionError("the connection is still open")
    assert read_status(received[received.rfind(b"HTTP/1.1") :]) in (408, 400, 0)


def test_a_stream_is_not_disturbed_by_bytes_after_the_request():
    """Some old clients send an empty line after a body; the read timeout is not for them."""
    limits = Limits(read_seconds=0.5)
    options = {"tokens_per_step": 1, "step_seconds": 0.02}
    with serve(mock_config(mock_options=options, limits=limits)) as running:
        body = b'{"prompt": "x", "max_tokens": 30, "ignore_eos": true, "stream": true}'
        head = HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        reply = send_raw(running, head + body + b"\r\n")
        assert read_status(reply) == 200 and b"[DONE]" in reply


def test_a_disconnect_after_a_pipelined_request_ends_the_first():
    """The client has sent a second request, then leaves while the first one runs."""
    options = {"tokens_per_step": 1, "step_seconds": 0.01}
    with serve(mock_config(mock_options=options)) as running:
        body = b'{"prompt": "x", "max_tokens": 8000, "ignore_eos": true}'
        request = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as sock:
            sock.sendall(request + request)
            end = time.monotonic() + 10
            while not running.app.server.clients[0].num_requests and time.monotonic() < end:
                time.sleep(0.01)
        assert running.leaks() == {}  # 8,000 steps would take 80 s; `leaks` waits for 10
