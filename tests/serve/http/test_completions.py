"""`/v1/completions` with the openai client: texts, token ids, batches, echo, logprobs, streams."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.serve.http.serving import MODEL, RunningServer, mock_config, script, serve
from tests.serve.http.tiny_server import serve_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    with serve_tiny(tmp_path_factory.mktemp("tiny")) as running:
        yield running


def ask(server: RunningServer, prompt: Any, **options: Any) -> Any:
    options = {"max_tokens": 8, "temperature": 0, **options}
    return server.openai().completions.create(model=MODEL, prompt=prompt, **options)


def texts(reply: Any) -> list[str]:
    return [choice.text for choice in reply.choices]


def join_stream(chunks: Any, count: int) -> list[str]:
    parts = [""] * count
    for chunk in chunks:
        for choice in chunk.choices:
            parts[choice.index] += choice.text
    return parts


def test_text_and_token_ids_give_the_same(tiny):
    ids = tiny.post("/tokenize", {"prompt": "Once upon"}).json()["tokens"]
    by_text, by_ids = ask(tiny, "Once upon"), ask(tiny, ids)
    assert texts(by_text) == texts(by_ids)
    assert by_text.object == "text_completion" and by_text.id.startswith("cmpl-")
    assert by_text.usage.prompt_tokens == len(ids) and by_text.usage.completion_tokens == 8


def test_default_is_sixteen_tokens(server):
    assert ask(server, "x", max_tokens=None).usage.completion_tokens == 16


def test_batch_gives_what_single_prompts_give(tiny):
    prompts = ["one", "two, longer", "three"]
    single = [texts(ask(tiny, prompt))[0] for prompt in prompts]
    batch = ask(tiny, prompts)
    assert texts(batch) == single
    assert [choice.index for choice in batch.choices] == [0, 1, 2]
    ids = [tiny.post("/tokenize", {"prompt": prompt}).json()["tokens"] for prompt in prompts]
    assert texts(ask(tiny, ids)) == single
    assert batch.usage.prompt_tokens == sum(map(len, ids))
    assert join_stream(ask(tiny, prompts, stream=True), 3) == single


def test_n_of_each_prompt_of_a_batch(tiny):
    prompts = ["one", "two"]
    whole = ask(tiny, prompts, n=2, temperature=1, seed=3)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    streamed = ask(tiny, prompts, n=2, temperature=1, seed=3, stream=True)
    assert join_stream(streamed, 4) == texts(whole)


def test_echo(tiny):
    plain = texts(ask(tiny, ["a b", "c"]))
    assert texts(ask(tiny, ["a b", "c"], echo=True)) == ["a b" + plain[0], "c" + plain[1]]
    assert join_stream(ask(tiny, ["a b", "c"], echo=True, stream=True), 2) == [
        "a b" + plain[0],
        "c" + plain[1],
    ]
    ids = tiny.post("/tokenize", {"prompt": "a b"}).json()["tokens"]
    assert texts(ask(tiny, ids, echo=True)) == ["a b" + plain[0]]


def test_logprobs(tiny):
    choice = ask(tiny, "abc", logprobs=2, max_tokens=6).choices[0]
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 6
    assert logprobs.text_offset[0] == 0
    assert all(token in top for token, top in zip(logprobs.tokens, logprobs.top_logprobs))
    parts = [
        one.choices[0].logprobs
        for one in ask(tiny, "abc", logprobs=2, max_tokens=6, stream=True)
        if one.choices[0].logprobs
    ]
    assert [token for part in parts for token in part.tokens] == logprobs.tokens
    assert [value for part in parts for value in part.text_offset] == logprobs.text_offset


def test_impossible_tokens_have_a_finite_logprob(tiny):
    """`allowed_token_ids` does not change raw log-probabilities; JSON has no infinity anyway."""
    reply = ask(tiny, "abc", logprobs=1, extra_body={"allowed_token_ids": [65, 66]})
    assert all(isinstance(value, float) for value in reply.choices[0].logprobs.token_logprobs)


def test_stop_token_ids(tiny):
    ids = ask(tiny, "abc", extra_body={"return_token_ids": True}).choices[0].token_ids
    reply = ask(tiny, "abc", extra_body={"stop_token_ids": [ids[3]]})
    assert reply.choices[0].finish_reason == "stop" and reply.choices[0].stop_reason == ids[3]
    assert reply.usage.completion_tokens == ids.index(ids[3]) + 1


def test_stop_strings_in_streams(server):
    prompt = script("alpha beta STOP gamma")
    assert texts(ask(server, prompt, stop=["STOP"], max_tokens=50)) == ["alpha beta "]
    streamed = ask(server, prompt, stop=["STOP"], max_tokens=50, stream=True)
    assert join_stream(streamed, 1) == ["alpha beta "]


def test_usage_in_streams(server):
    *others, last = ask(server, "x", stream=True, stream_options={"include_usage": True})
    assert last.choices == [] and last.usage.completion_tokens == 8
    assert all(chunk.usage is None for chunk in others)


def test_structured_completion(tiny):
    reply = ask(tiny, "pick", extra_body={"guided_choice": ["red", "blue"]})
    assert texts(reply)[0] in ("red", "blue")


def test_tokens_of_special_texts_are_hidden_unless_asked_for(tiny):
    body = {"allowed_token_ids": [256], "ignore_eos": True}
    assert texts(ask(tiny, "x", max_tokens=2, extra_body=body)) == [""]
    shown = ask(tiny, "x", max_tokens=2, extra_body={**body, "skip_special_tokens": False})
    assert texts(shown) == ["<s><s>"]


def test_big_batch_passes_through_a_small_engine():
    """More prompts than places: all of them are answered, and nothing is held at the end."""
    with serve(mock_config(mock_options={"max_sequences": 2, "tokens_per_step": 2})) as small:
        prompts = [script(f"reply {number}") for number in range(50)]
        assert texts(ask(small, prompts)) == [f"reply {number}" for number in range(50)]
        streamed = ask(small, prompts, stream=True)
        assert join_stream(streamed, 50) == [f"reply {number}" for number in range(50)]
        assert small.leaks() == {}


ERRORS: list[tuple[dict[str, Any], int, str | None]] = [
    ({"prompt": None}, 400, "prompt"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [[]]}, 400, "prompt"),
    ({"prompt": [""]}, 400, "prompt"),
    ({"prompt": ["a", 1]}, 400, "prompt"),
    ({"prompt": [1, [2]]}, 400, "prompt"),
    ({"prompt": [-1]}, 400, "prompt"),
    ({"prompt": [1 << 70]}, 400, "prompt"),
    ({"prompt": [True]}, 400, "prompt[0]"),
    ({"prompt": ["a"] * 257}, 400, "prompt"),
    ({"prompt": ["a"] * 100, "n": 3}, 400, "n"),
    ({"prompt": {"text": "a"}}, 400, "prompt"),
    ({"suffix": "x"}, 400, "suffix"),
    ({"best_of": 4}, 400, "best_of"),
    ({"logprobs": 21}, 400, "logprobs"),
    ({"logprobs": -1}, 400, "logprobs"),
    ({"echo": True, "logprobs": 1}, 400, "echo"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_completion_tokens": 5}, 400, "max_completion_tokens"),
    ({"messages": []}, 400, "messages"),
    ({"min_tokens": 10}, 400, "min_tokens"),
    ({"stream_options": {}}, 400, "stream_options"),
    ({"allowed_token_ids": []}, 400, "allowed_token_ids"),
    ({"model": "other"}, 404, "model"),
]


@pytest.mark.parametrize(("fields", "status", "param"), ERRORS, ids=lambda value: str(value)[:50])
def test_errors_name_the_field(server, fields, status, param):
    reply = server.post("/v1/completions", {"prompt": "x", "max_tokens": 2, **fields})
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error


def test_openai_client_raises_its_own_errors(server):
    with pytest.raises(openai.NotFoundError) as missing:
        server.openai().completions.create(model="other", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        ask(server, "x", temperature=-1)
