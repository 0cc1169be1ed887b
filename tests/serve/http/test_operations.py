"""Models, tokens, embeddings, health, metrics, audit; errors of paths, methods and content types."""

from __future__ import annotations

import base64

import anthropic
import httpx
import numpy as np
import openai
import pytest

from tests.serve.http.serving import MODEL, PLAIN, mock_config, script, serve
from tests.serve.http.tiny_server import serve_tiny

POST_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/tokenize",
    "/detokenize",
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    with serve_tiny(tmp_path_factory.mktemp("tiny")) as running:
        yield running


# ---- models ---------------------------------------------------------------------------------------


def test_models(server):
    client = server.openai()
    [model] = client.models.list().data
    assert model.id == MODEL and model.object == "model"
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("other/model")
    assert missing.value.code == "model_not_found"
    assert server.get("/v1/models/").status_code == 404


def test_models_for_the_anthropic_client(server):
    client = server.anthropic()
    page = client.models.list()
    assert [model.id for model in page.data] == [MODEL] and page.has_more is False
    model = client.models.retrieve(MODEL)
    assert (model.type, model.display_name) == ("model", MODEL) and model.created_at.year >= 2026


def test_models_do_not_tell_where_they_are_stored(tiny):
    folder = tiny.app.config.model
    assert folder not in tiny.get("/v1/models").text


def test_several_names_of_one_model():
    with serve(mock_config(served_names=("a", "b/c"))) as running:
        names = [model.id for model in running.openai().models.list().data]
        assert names == ["a", "b/c"] and running.openai().models.retrieve("b/c").id == "b/c"
        for name in names:
            reply = running.openai().completions.create(model=name, prompt="x", max_tokens=1)
            assert reply.model == name


# ---- tokens ---------------------------------------------------------------------------------------

TEXTS = ["Hello", " leading", "日本語 😀", "tabs\tand\nlines", "\u0000", "<s>x</s>", "x" * 2000]


@pytest.mark.parametrize("text", TEXTS)
def test_tokenize_and_detokenize(tiny, text):
    reply = tiny.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
    assert tiny.post("/detokenize", {"tokens": reply["tokens"]}).json() == {"prompt": text}


def test_tokenize_messages_counts_what_a_chat_uses(server):
    messages = [{"role": "user", "content": "Hello"}]
    count = server.post("/tokenize", {"messages": messages}).json()["count"]
    reply = server.openai().chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    assert reply.usage.prompt_tokens == count


@pytest.mark.parametrize(
    "body",
    [{}, {"prompt": "a", "messages": []}, {"prompt": 1}, {"messages": [{"content": "x"}]}]
    + [{"prompt": "a", "surprise": 1}, {"prompt": "a", "model": "other"}],
)
def test_tokenize_errors(server, body):
    assert server.post("/tokenize", body).status_code in (400, 404)


@pytest.mark.parametrize("tokens", [[-1], [1 << 40], ["a"], [True], None, [1.5]])
def test_detokenize_errors(server, tokens):
    assert server.post("/detokenize", {"tokens": tokens}).status_code == 400


def test_detokenize_nothing(server):
    assert server.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}


# ---- embeddings -----------------------------------------------------------------------------------


def test_embeddings(tiny):
    create = tiny.openai().embeddings.create
    one = create(model=MODEL, input="Hello").data[0].embedding
    plain = create(model=MODEL, input=["Hello", "Bye"], encoding_format="float")
    assert [entry.index for entry in plain.data] == [0, 1]
    np.testing.assert_allclose(plain.data[0].embedding, one, rtol=1e-4, atol=1e-5)
    ids = tiny.post("/tokenize", {"prompt": "Hello"}).json()["tokens"]
    by_ids = create(model=MODEL, input=ids).data[0].embedding
    np.testing.assert_allclose(by_ids, one, rtol=1e-5)
    assert create(model=MODEL, input=[ids, ids]).usage.prompt_tokens == 2 * len(ids)


def test_base64_embeddings_are_the_floats(server):
    body = {"model": MODEL, "input": "x"}
    floats = server.post("/v1/embeddings", body).json()["data"][0]["embedding"]
    packed = server.post("/v1/embeddings", {**body, "encoding_format": "base64"}).json()
    unpacked = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4")
    np.testing.assert_array_equal(np.array(floats, dtype="<f4"), unpacked)


def test_embeddings_have_length_one(tiny):
    """As OpenAI's: clients take dot products for cosines."""
    reply = tiny.openai().embeddings.create(model=MODEL, input=["Hello", "Bye"])
    for entry in reply.data:
        assert abs(np.linalg.norm(entry.embedding) - 1) < 1e-5


def test_fewer_dimensions_have_length_one(server):
    reply = server.openai().embeddings.create(model=MODEL, input="x", dimensions=4)
    vector = np.array(reply.data[0].embedding)
    assert vector.shape == (4,) and abs(np.linalg.norm(vector) - 1) < 1e-5


@pytest.mark.parametrize(
    "fields",
    [{"input": ""}, {"input": []}, {"input": [[]]}, {"input": None}, {"input": [1 << 40]}]
    + [{"dimensions": 0}, {"dimensions": 10**9}, {"encoding_format": "hex"}, {"deadline": -1}]
    + [{"truncate_prompt_tokens": 0}, {"surprise": 1}, {"input": ["x"] * 257}],
)
def test_embedding_errors(server, fields):
    reply = server.post("/v1/embeddings", {"model": MODEL, "input": "x", **fields})
    assert reply.status_code == 400, reply.text


# ---- health, metrics ------------------------------------------------------------------------------


def test_health_is_fed_by_the_engine(server):
    for path in ("/health", "/ping"):
        reply = server.get(path)
        assert reply.status_code == 200 and reply.json()["status"] in ("idle", "busy")
        [engine] = reply.json()["engines"]
        assert engine["restarts"] == 0 and engine["seconds_since_report"] < 60


def test_metrics_count_requests_and_tokens(server):
    def read() -> dict[str, float]:
        lines = (line for line in server.get("/metrics").text.splitlines() if line[0] != "#")
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}

    name = f'{{model_name="{MODEL}"}}'
    before = read()
    server.openai().completions.create(model=MODEL, prompt=script("ok"), max_tokens=5)
    after = read()
    key = f"vllm:generation_tokens_total{name}"
    assert after[key] - before.get(key, 0) == 2  # a token, and the one that ends the reply
    assert all(value == 0 for key, value in after.items() if "audit_leaks" in key)


def test_metrics_of_a_request_with_choices(server):
    def read(name: str) -> dict[str, float]:
        text = server.get("/metrics").text
        names = (f"{name}_count", f"{name}_sum")
        lines = [line for line in text.splitlines() if line.partition("{")[0] in names]
        return {
            line.partition("{")[0].rpartition("_")[2]: float(line.split()[-1]) for line in lines
        }

    wanted = {  # of one request with three choices: observations, and their sum if it is known
        "request_params_n": (1, 3.0),
        "request_params_max_tokens": (1, 9.0),
        "request_max_num_generation_tokens": (1, 9.0),
        "request_generation_tokens": (3, 27.0),
        "request_time_per_output_token_seconds": (3, None),
        "request_inference_time_seconds": (3, None),
        "request_queue_time_seconds": (3, None),
    }
    before = {name: read(f"vllm:{name}") for name in wanted}
    server.openai().completions.create(
        model=MODEL, prompt="go", max_tokens=9, n=3, extra_body={"ignore_eos": True}
    )
    for name, (count, total) in wanted.items():
        after = read(f"vllm:{name}")
        assert after["count"] - before[name]["count"] == count, name
        if total is not None:
            assert after["sum"] - before[name]["sum"] == total, name


def test_audit_and_version(server):
    assert server.leaks() == {}
    assert set(server.get("/audit").json()) == {"server", "engine 0"}
    assert server.get("/version").json()["version"]


# ---- paths, methods, content types ----------------------------------------------------------------


def check_error(reply: httpx.Response, status: int) -> None:
    assert reply.status_code == status, reply.text
    body = reply.json()
    if reply.request.url.path.startswith("/v1/messages"):
        assert body["type"] == "error" and set(body["error"]) == {"type", "message"}
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    assert reply.headers["x-request-id"]


def test_unknown_paths(server):
    for path in ("/v1", "/v2/models", "/v1/chat/completions/", "/health/", "/%2e%2e/etc/passwd"):
        check_error(server.get(path), 404)


def test_wrong_methods_name_the_right_ones(server):
    for path in POST_PATHS:
        reply = server.get(path)
        check_error(reply, 405)
        assert "POST" in reply.headers["allow"]
        assert reply.json()["error"]["message"].endswith("is not served here; use POST")
    check_error(PLAIN.delete(server.url + "/health"), 405)


@pytest.mark.parametrize("path", POST_PATHS)
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "x/y"])
def test_other_content_types_are_refused_everywhere(server, path, kind):
    """Web pages of other origins can send these without asking first."""
    headers = {"content-type": kind} if kind else {}
    check_error(PLAIN.post(server.url + path, content=b"{}", headers=headers), 415)


@pytest.mark.parametrize("path", POST_PATHS)
def test_json_with_a_charset_is_accepted(server, path):
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    check_error(PLAIN.post(server.url + path, content=b"[]", headers=headers), 400)


@pytest.mark.parametrize("path", POST_PATHS)
def test_unknown_fields_are_refused_everywhere(server, path):
    bodies = {
        "/v1/completions": {"prompt": "x"},
        "/v1/embeddings": {"input": "x"},
        "/v1/responses": {"input": "x"},
        "/tokenize": {"prompt": "x"},
        "/detokenize": {"tokens": [1]},
    }
    messages = {"messages": [{"role": "user", "content": "x"}], "model": MODEL}
    if path == "/v1/messages":
        messages["max_tokens"] = 1
    reply = server.post(path, {**bodies.get(path, messages), "surprise": 1})
    check_error(reply, 400)
    assert "surprise" in reply.text


@pytest.mark.parametrize("path", POST_PATHS)
def test_bodies_that_are_too_large(server, path):
    limit = server.app.config.limits.body_bytes
    headers = {"content-type": "application/json"}
    check_error(PLAIN.post(server.url + path, content=b" " * (limit + 1), headers=headers), 413)

    def chunks():
        for _ in range(limit // 65536 + 1):
            yield b" " * 65536

    check_error(PLAIN.post(server.url + path, content=chunks(), headers=headers), 413)


def test_errors_within_a_stream_come_before_it(server):
    """What can be refused is refused with a status, not with an event."""
    body = {"prompt": "x", "stream": True, "temperature": -1}
    check_error(server.post("/v1/completions", body), 400)


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("/chat/completions", "add /v1 to the client's base URL"),
        ("/v1/v1/messages", "leave /v1 out of the client's base URL"),
        ("/v2/messages", "is not served here"),
        ("/v1/chat/completions/", "the path is /v1/chat/completions, without other slashes"),
        ("/v1//embeddings", "the path is /v1/embeddings, without other slashes"),
    ],
)
def test_a_wrong_base_url_is_named(server, path, advice):
    reply = server.post(path, {})
    assert reply.status_code == 404 and advice in reply.text
    assert ("base URL" in reply.text) == ("base URL" in advice)


def test_models_with_a_slash_at_the_end(server):
    reply = server.get("/v1/models/")
    assert reply.status_code == 404 and "list them with /v1/models" in reply.text


def test_a_byte_order_mark_is_ignored(server):
    """Clients of Windows write it before UTF-8."""
    body = b'\xef\xbb\xbf{"prompt": "x", "max_tokens": 1}'
    headers = {"content-type": "application/json"}
    reply = PLAIN.post(server.url + "/v1/completions", content=body, headers=headers)
    assert reply.status_code == 200, reply.text


def test_clients_find_the_id_of_their_request(server):
    """The openai client reads one header, the anthropic client another."""
    messages = [{"role": "user", "content": "Hi"}]
    chat = server.openai().chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    message = server.anthropic().messages.create(model=MODEL, messages=messages, max_tokens=1)
    assert chat._request_id.startswith("req-") and message._request_id.startswith("req-")
    with pytest.raises(anthropic.BadRequestError) as refused:
        server.anthropic().messages.create(model=MODEL, messages=[], max_tokens=1)
    assert refused.value.request_id.startswith("req-")
    for path in ("/v1/models", "/nothing"):
        headers = server.get(path).headers
        assert headers["request-id"] == headers["x-request-id"]


def test_a_request_without_a_body_is_told_so(server):
    headers = {"content-type": "application/json"}
    reply = PLAIN.post(server.url + "/v1/completions", headers=headers)
    assert reply.status_code == 400 and "the body is empty" in reply.text
