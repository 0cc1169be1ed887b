"""From a name to text, in Python and on the command line."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from pathlib import Path

import pytest

import fulgurite
from fulgurite.cli import main
from fulgurite.errors import ArgumentError, WeightsError
from fulgurite.serve.engine.request import SamplingParams
from tests.serve.tiny_checkpoint import VOCABULARY, save_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def llm(folder: Path):
    return fulgurite.LLM(folder, device="cpu", context=200)


def test_one_prompt_or_many(llm) -> None:
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    one, two = llm.generate(["abc", "xyz"], params)
    assert one.finish_reason == "length" and len(one.token_ids) == 9
    assert llm.generate("abc", params)[0].text == one.text
    assert llm.generate(list(one.prompt_ids), params)[0].token_ids == one.token_ids
    each = llm.generate(["abc", "xyz"], [params, SamplingParams(max_tokens=2, ignore_eos=True)])
    assert [len(result.token_ids) for result in each] == [9, 2]
    with pytest.raises(ArgumentError, match="2 prompts, but 1"):
        llm.generate(["abc", "xyz"], [params])


def test_streamed_text_concatenates_to_the_result(llm) -> None:
    params = SamplingParams(temperature=2.0, seed=5, max_tokens=60, ignore_eos=True)
    updates = list(llm.stream("hello", params))
    result = updates[-1].result
    assert result is not None and "".join(update.text for update in updates) == result.text
    assert [token for update in updates for token in update.token_ids] == result.token_ids


def test_chat_uses_the_chat_template(llm) -> None:
    said = [{"role": "user", "content": "hi"}]
    prompt = "<s>user: hi<s>assistant: "
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    assert llm.tokenizer.decode(llm.encode_chat(said), skip_special_tokens=False) == prompt
    assert llm.chat(said, params).token_ids == llm.generate(prompt, params)[0].token_ids


def test_stop_strings_and_tokens(llm) -> None:
    whole = llm.generate("tell me", SamplingParams(temperature=3.0, seed=2, max_tokens=80))[0]
    stop = whole.text[20:23]
    params = SamplingParams(temperature=3.0, seed=2, max_tokens=80, stop=[stop])
    cut = llm.generate("tell me", params)[0]
    assert cut.finish_reason == "stop" and cut.stopped_by == stop
    assert cut.text == whole.text[: whole.text.find(stop)]
    token = whole.token_ids[6]
    params = SamplingParams(temperature=3.0, seed=2, max_tokens=80, stop_token_ids=[token])
    ended = llm.generate("tell me", params)[0]
    assert ended.stopped_by == token and ended.token_ids[-1] == token
    assert len(ended.token_ids) == whole.token_ids.index(token) + 1


@pytest.mark.parametrize("values", [{"kv_dtype": "int3"}, {"context": 1}, {"context": 10**6}])
def test_settings_are_checked(folder: Path, values: dict) -> None:
    with pytest.raises(ArgumentError):
        fulgurite.LLM(folder, **values)


def test_dense_model_can_be_quantized(folder: Path, llm) -> None:
    packed = fulgurite.LLM(folder, device="cpu", context=64, quantize="q8_0")
    packed.generate("abc", SamplingParams(max_tokens=3, ignore_eos=True))
    assert (
        packed.engine.runner.no_capture_reason is None and 1 in packed.engine.runner.captured_sizes
    )
    assert packed.plan.weights != llm.plan.weights


def test_tokenizer_larger_than_the_vocabulary_raises(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, vocabulary=VOCABULARY - 1)
    with pytest.raises(WeightsError, match=f"{VOCABULARY} tokens, more than"):
        fulgurite.LLM(tmp_path)


def test_a_truncated_file_and_an_unknown_family(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(WeightsError):
        fulgurite.LLM(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "architectures": ["Oracle"]}))
    with pytest.raises(WeightsError, match="Oracle"):
        fulgurite.LLM(tmp_path)


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str], llm) -> None:
    words = ["generate", "hi", "--model", str(folder), "--max-tokens", "8", "--plan"]
    assert main([*words, "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    said = [{"role": "user", "content": "hi"}]
    assert out == llm.chat(said, SamplingParams(max_tokens=8)).text + "\n"
    assert "loading" in err and "compiling" in err and "KV cache" in err
    assert "first token" in err and "tokens/s" in err and err.rstrip().endswith("MB")


def test_the_command_reads_stdin_and_raw_prompts(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, llm
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc"))
    assert main(["generate", "--raw", "--model", str(folder), "--max-tokens", "5"]) == 0
    assert (
        capsys.readouterr().out == llm.generate("abc", SamplingParams(max_tokens=5))[0].text + "\n"
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--top-p", "2"], "top_p=2.0"),
        (["--top-p", "0"], "top_p=0.0"),
        (["--max-tokens", "-3"], "max_tokens=-3"),
        (["--threads", "0"], "--threads 0"),
        (["--context", "12"], "the prompt has"),
        (["--model", "no-such-model"], "model 'no-such-model' not found"),
        (["--quantize", "fp9"], "unknown number format 'fp9'"),
        (["--device", "tpu"], "'tpu' is not a device"),
        (["--device", "meta"], "device meta is not supported"),
        (["--device", "cuda:99"], "there is no device cuda:99"),
    ],
)
def test_invalid_options_give_clear_errors(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert main(["generate", "hello", "--model", str(folder), *words]) == 1
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_empty_prompt_raises_before_loading(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, prompt: str
) -> None:
    assert main(["generate", prompt]) == 1
    monkeypatch.setattr(sys, "stdin", io.StringIO(prompt))
    assert main(["generate"]) == 1
    error = capsys.readouterr().err
    assert error.count("the prompt is empty") == 2 and "loading" not in error


@pytest.mark.parametrize("prompt", [5, 5.5, None, [5.5], [None]])
def test_invalid_prompt_types_raise(llm, prompt: object) -> None:
    with pytest.raises(ArgumentError, match="a prompt can't be"):
        llm.generate(prompt)


def test_ctrl_c_at_the_chat_prompt_and_while_loading(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = iter([KeyboardInterrupt, "/exit"])

    def read(prompt: str) -> str:
        key = next(keys)
        if isinstance(key, str):
            return key
        raise key

    monkeypatch.setattr("builtins.input", read)
    assert main(["chat", "--model", str(folder)]) == 0
    assert capsys.readouterr().err.count("/reset starts a new") == 2

    def interrupted(name: str) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr("fulgurite.models.loading.hub.resolve_model_path", interrupted)
    assert main(["generate", "hi", "--model", str(folder)]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_chat(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, llm
) -> None:
    lines = iter(["hi", "", "more", "/help", "/reset", "hi", "/exit", "never read"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    assert main(["chat", "--model", str(folder), "--max-tokens", "6"]) == 0
    out, err = capsys.readouterr()
    params = SamplingParams(max_tokens=6)
    first = llm.chat([{"role": "user", "content": "hi"}], params).text
    said = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "more"},
    ]
    assert out == f"{first}\n{llm.chat(said, params).text}\n{first}\n"
    assert err.count("/reset starts a new") == 2


def test_ctrl_c_stops_a_reply_and_not_the_chat(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["hi", "again"])
    waiting, pressed = [], []

    def read(prompt: str) -> str:
        waiting.append(prompt)
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    written = sys.stdout.write

    def write(text: str) -> int:
        if len(waiting) == 1 and not pressed:
            pressed.append(text)
            os.kill(os.getpid(), signal.SIGINT)
        return written(text)

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys.stdout, "write", write)
    assert main(["chat", "--model", str(folder), "--max-tokens", "100"]) == 0
    first, second = capsys.readouterr().out.rstrip("\n").split("\n", 1)
    assert len(first) < 10 < len(second) and len(waiting) == 3
