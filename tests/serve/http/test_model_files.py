"""What a model's own files say about requests: sampling defaults, and a chat template for tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fulgurite.errors import ArgumentError
from fulgurite.serve.http.sampling_defaults import read_sampling_defaults
from tests.serve.http.serving import RunningServer
from tests.serve.http.tiny_server import serve_tiny, tiny_config
from tests.serve.tiny_checkpoint import TEMPLATE

HI = [{"role": "user", "content": "Hi"}]
CLOCK = {"type": "function", "function": {"name": "get_time"}}
TOOL_TEMPLATE = "{{ tools[0].function.name }}: <tool_call>" + TEMPLATE


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    tiny_config(folder)  # saves it
    file = folder / "tokenizer_config.json"
    templates = [
        {"name": "default", "template": TEMPLATE},
        {"name": "tool_use", "template": TOOL_TEMPLATE},
    ]
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": templates}))
    (folder / "generation_config.json").write_text('{"do_sample": true, "top_k": 1, "top_p": 0.5}')
    with serve_tiny(folder) as running:
        yield running


def ask(server: RunningServer, **fields: Any) -> str:
    body = {"messages": HI, "max_tokens": 12, "seed": 3, **fields}
    reply = server.post("/v1/chat/completions", body)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


def test_requests_sample_as_the_model_recommends(server: RunningServer) -> None:
    greedy = ask(server, temperature=0)
    assert ask(server) == greedy  # top_k is 1
    assert ask(server, top_k=0, top_p=1.0, temperature=5.0) != greedy
    body = {"prompt": "Hi", "max_tokens": 12, "seed": 3}
    texts = [
        server.post("/v1/completions", {**body, **more}).json()["choices"][0]["text"]
        for more in ({}, {"temperature": 0})
    ]
    assert texts[0] == texts[1]
    response = server.post("/v1/responses", {"input": "Hi", "max_output_tokens": 2}).json()
    assert (response["temperature"], response["top_p"]) == (1.0, 0.5)


def test_conversations_with_tools_have_their_own_template(server: RunningServer) -> None:
    def render(**fields: Any) -> str:
        tokens = server.post("/tokenize", {"messages": HI, **fields}).json()["tokens"]
        return str(server.post("/detokenize", {"tokens": tokens}).json()["prompt"])

    assert render() == "<s>user: Hi<s>assistant: "
    assert render(tools=[CLOCK]) == "get_time: <tool_call>" + render()


def test_sampling_defaults_of_a_file(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == {}
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.6, "top_k": 20, "top_p": null, "eos_token_id": [1, 2]}')
    assert read_sampling_defaults(tmp_path) == {"temperature": 0.6, "top_k": 20}
    file.write_text('{"top_p": 3}')
    with pytest.raises(ArgumentError, match=r"generation_config.json: top_p=3 must be"):
        read_sampling_defaults(tmp_path)
