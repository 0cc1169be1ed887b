"""Fields beyond OpenAI's on every endpoint that generates, with a tiny real model of bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.http.serving import MODEL, RunningServer
from tests.serve.http.tiny_server import serve_tiny

PATHS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "go"}], "max_tokens": 24},
    "/v1/completions": {"prompt": "go", "max_tokens": 24},
    "/v1/responses": {"input": "go", "max_output_tokens": 24},
    "/v1/messages": {"messages": [{"role": "user", "content": "go"}], "max_tokens": 24},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serve_tiny(tmp_path_factory.mktemp("tiny")) as running:
        yield running


def read_text(path: str, reply: Any) -> str:
    if path == "/v1/chat/completions":
        return reply["choices"][0]["message"]["content"]
    if path == "/v1/completions":
        return reply["choices"][0]["text"]
    return "".join(
        part["text"]
        for item in (reply["output"] if path == "/v1/responses" else [reply])
        for part in item["content"]
    )


def ask(server: RunningServer, path: str, **fields: Any) -> str:
    reply = server.post(path, {"model": MODEL, **PATHS[path], "seed": 3, **fields})
    assert reply.status_code == 200, reply.text
    return read_text(path, reply.json())


def find_ids(server: RunningServer, text: str) -> list[int]:
    body = {"prompt": text, "add_special_tokens": False}
    tokens: list[int] = server.post("/tokenize", body).json()["tokens"]
    return tokens


@pytest.mark.parametrize("path", PATHS)
def test_sampling_extras(tiny: RunningServer, path: str) -> None:
    letters = find_ids(tiny, "abc")
    only = {"allowed_token_ids": letters, "temperature": 1.0}
    free = ask(tiny, path, **only)
    assert len(free) == 24 and {*free} <= {*"abc"}
    banned = [free[2:4], "aa"]
    without = ask(tiny, path, **only, bad_words=banned)
    assert len(without) == 24 and not any(word in without for word in banned)
    ended = ask(tiny, path, **only, stop_token_ids=letters[:1], min_tokens=5)
    assert ended.find("a") < 0 and 5 <= len(ended) <= 24
    biased = ask(tiny, path, **only, logit_bias={str(letters[1]): 100}, top_k=1)
    assert biased == "b" * 24
    again = ask(tiny, path, **only, ignore_eos=True, repetition_penalty=1.5, presence_penalty=1)
    assert len(again) == 24


@pytest.mark.parametrize("path", PATHS)
def test_structured_extras(tiny: RunningServer, path: str) -> None:
    assert ask(tiny, path, structured_outputs={"choice": ["yes", "no"]}) in ("yes", "no")
    tag = {"type": "tag", "begin": "<n>", "end": "</n>"}
    content = {"type": "json_schema", "json_schema": {"enum": [1, 22]}}
    tag["content"] = content  # type: ignore[assignment]
    format = {"structural_tag": {"format": tag}}
    assert ask(tiny, path, structured_outputs=format) in ("<n>1</n>", "<n>22</n>")
    both = ask(tiny, path, structured_outputs={"regex": "[ab]{6}"}, bad_words=["ab", "b"])
    assert both == "aaaaaa"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_response_format_structural_tag(tiny: RunningServer, path: str) -> None:
    format = {
        "type": "structural_tag",
        "structures": [{"begin": "<n>", "schema": {"enum": [1, 22]}, "end": "</n>"}],
        "triggers": ["<"],
    }
    only = find_ids(tiny, "<n>12/ab")
    text = ask(tiny, path, response_format=format, allowed_token_ids=only, temperature=1.0)
    assert "<" not in text.replace("<n>1</n>", "").replace("<n>22</n>", "").rstrip("<n>12/")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "fields, param",
    [
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["a"] * 300}, "bad_words"),
        ({"bad_words": 5}, "bad_words"),
        ({"structured_outputs": {"structural_tag": {}}}, "response_format"),
        ({"structured_outputs": {"structural_tag": "{"}}, "response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": None, "json_object": False}}, "structured_outputs"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
    ],
)
def test_extras_that_cannot_be_used(
    tiny: RunningServer, path: str, fields: dict[str, Any], param: str
) -> None:
    reply = tiny.post(path, {"model": MODEL, **PATHS[path], **fields})
    assert reply.status_code == 400, reply.text
    if path != "/v1/messages":  # Anthropic's errors name no parameter
        wanted = "text.format" if path == "/v1/responses" and param == "response_format" else param
        assert reply.json()["error"]["param"] == wanted


def test_a_bad_schema_of_a_tool_is_an_error_of_tools(tiny: RunningServer) -> None:
    function = {"name": "f", "parameters": {"type": "string", "pattern": "("}}
    fields = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    path = "/v1/chat/completions"
    reply = tiny.post(path, {"model": MODEL, **PATHS[path], **fields})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "tools"


def test_words_that_leave_no_token_are_the_fault_of_the_request(tiny: RunningServer) -> None:
    body = {"model": MODEL, "prompt": "go", "bad_words": ["b"]}
    reply = tiny.post("/v1/completions", {**body, "structured_outputs": {"regex": "abc"}})
    assert reply.status_code == 400 and "bad_words" in reply.json()["error"]["message"]
