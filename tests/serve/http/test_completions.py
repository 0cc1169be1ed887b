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


def test_echo_with_logprobs_scores_the_prompt(tiny):
    """The log-probability of a prompt's token is that of sampling it after the tokens before."""
    text = "abc é."
    whole = ask(tiny, text, logprobs=2, echo=True, max_tokens=3).choices[0]
    found, count = whole.logprobs, len(text.encode())
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == count + 3
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    ids = tiny.post("/tokenize", {"prompt": text}).json()["tokens"]
    for position in range(1, count):
        body = {"allowed_token_ids": [ids[position]]}
        one = ask(tiny, ids[:position], logprobs=2, max_tokens=1, extra_body=body).choices[0]
        assert found.token_logprobs[position] == one.logprobs.token_logprobs[0]
        assert found.top_logprobs[position] == one.logprobs.top_logprobs[0]
    reply = ask(tiny, text, logprobs=2, max_tokens=3).choices[0].logprobs
    assert found.tokens[count:] == reply.tokens
    assert found.token_logprobs[count:] == reply.token_logprobs


def test_offsets_and_names_of_tokens_inside_of_characters(tiny):
    """Each byte is a token here: offsets are characters of the text, and names differ."""
    found = ask(tiny, "aé😀.", logprobs=3, echo=True, max_tokens=0).choices[0].logprobs
    assert found.text_offset == [0, 1, 1, 2, 2, 2, 2, 3]
    assert found.tokens[:4] == ["a", "bytes:\\xc3", "bytes:\\xa9", "bytes:\\xf0"]
    for token, top in zip(found.tokens[1:], found.top_logprobs[1:]):
        assert token in top and len(top) in (3, 4)  # its own may be a fourth


def test_echo_with_logprobs_in_streams_and_choices(tiny):
    options = {"logprobs": 1, "echo": True, "max_tokens": 3, "n": 3, "temperature": 1, "seed": 5}
    prompts = ["abc", "a longer prompt than that"]
    whole = ask(tiny, prompts, **options)
    parts: dict[int, list[Any]] = {index: [] for index in range(6)}
    for chunk in ask(tiny, prompts, stream=True, **options):
        for choice in chunk.choices:
            parts[choice.index].append(choice)
    for choice in whole.choices:
        own = parts[choice.index]
        assert "".join(one.text for one in own) == choice.text
        assert choice.text.startswith(prompts[choice.index // 3]) and own[-1].finish_reason
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [v for one in own if one.logprobs for v in getattr(one.logprobs, name)]
            assert joined == getattr(choice.logprobs, name), name


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_but_the_score_of_the_prompt(tiny, stream):
    """What evaluation harnesses send: `max_tokens` 0, `echo` and `logprobs`."""
    reply = ask(tiny, "abcd", max_tokens=0, echo=True, logprobs=0, stream=stream)
    chunks = [*reply] if stream else [reply]
    choices = [one for chunk in chunks for one in chunk.choices]
    assert "".join(one.text for one in choices) == "abcd"
    values = [v for one in choices if one.logprobs for v in one.logprobs.token_logprobs]
    assert len(values) == 4 and values[0] is None and all(v < 0 for v in values[1:])
    assert choices[-1].finish_reason == "length"
    if not stream:
        assert reply.usage.completion_tokens == 0 and reply.usage.total_tokens == 4


def test_prompt_logprobs_in_the_form_of_vllm(tiny):
    body = {"prompt": ["abc", "b"], "max_tokens": 1, "prompt_logprobs": 2, "temperature": 0}
    for _ in range(2):  # the second time the prompt is cached
        first, second = tiny.post("/v1/completions", body).json()["choices"]
        assert second["prompt_logprobs"] == [None]
        none, *rest = first["prompt_logprobs"]
        assert none is None and len(rest) == 2
        for token, entry in zip("bc", rest, strict=True):
            (id,) = tiny.post("/tokenize", {"prompt": token}).json()["tokens"]
            own, *others = entry.items()
            assert own[0] == str(id) and own[1]["decoded_token"] == token
            ranks = {value["rank"]: value["logprob"] for value in entry.values()}
            assert {1, 2} <= set(ranks) and [*sorted(ranks)] == sorted(
                ranks, key=lambda rank: -ranks[rank]
            )
    assert "prompt_logprobs" not in tiny.post("/v1/completions", {"prompt": "a"}).json()


def test_prompt_tokens_on_request(tiny):
    body = {"prompt": "abc", "max_tokens": 2, "return_token_ids": True}
    ids = tiny.post("/tokenize", {"prompt": "abc"}).json()["tokens"]
    (choice,) = tiny.post("/v1/completions", body).json()["choices"]
    assert choice["prompt_token_ids"] == ids and len(choice["token_ids"]) == 2


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
    ({"echo": True, "logprobs": 21}, 400, "logprobs"),
    ({"prompt_logprobs": 21}, 400, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, 400, "prompt_logprobs"),
    ({"prompt_logprobs": True}, 400, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": -1, "echo": True}, 400, "max_tokens"),
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
