"""Tokenizers from folders and GGUF files, and chat templates in their sandbox."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from fulgurite.errors import ArgumentError, WeightsError
from fulgurite.models.gguf_tokenizer import PRE_TOKENIZER_PATTERNS, build_backend, compute_merges
from fulgurite.models.tokenizer import from_folder, load_tokenizer

TEXTS = (
    "Hello world! 12345 it's  fine\n\n  yes",
    "日本語 ünïcode 🎉 don't I'LL",
    "def f(x):\n\treturn x + 1  # 3.14\r\n",
    "<|im_start|>user\nhi<|im_end|>",
    "",
    " ",
)
SPECIAL = ["<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def trained() -> Backend:
    """A byte-level BPE trained on TEXTS."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([text * 3 for text in TEXTS], trainer)
    return backend


@pytest.fixture
def folder(trained: Backend, tmp_path: Path) -> Path:
    trained.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": {"content": SPECIAL[0]}, "eos_token": SPECIAL[1]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def to_gguf_metadata(trained: Backend, pre: str) -> dict[str, object]:
    """The same vocabulary as GGUF metadata."""
    state = json.loads(trained.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in state["merges"]],
    }


@pytest.mark.parametrize("text", TEXTS)
def test_folder_and_gguf_tokenizers_agree(trained: Backend, folder: Path, text: str) -> None:
    from_json, (rebuilt, _) = (
        from_folder(folder),
        build_backend(to_gguf_metadata(trained, "gpt-2"), "here"),
    )
    ids = from_json.encode(text)
    assert rebuilt.encode(text).ids == ids
    assert from_json.decode(ids, skip_special_tokens=False) == text
    assert rebuilt.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("pre", PRE_TOKENIZER_PATTERNS)
def test_every_pre_tokenizer_round_trips(trained: Backend, pre: str) -> None:
    backend, _ = build_backend(to_gguf_metadata(trained, pre), "here")
    for text in TEXTS:
        assert backend.decode(backend.encode(text).ids, skip_special_tokens=False) == text


def test_pre_tokenizers_split_digits(trained: Backend) -> None:
    def split(pre: str) -> list[str]:
        backend, _ = build_backend(to_gguf_metadata(trained, pre), "here")
        return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("a 12345")]

    assert split("gpt-2") == ["a", "Ġ12345"]
    assert split("llama-bpe") == ["a", "Ġ", "123", "45"]
    assert split("qwen2") == ["a", "Ġ", "1", "2", "3", "4", "5"]
    assert split("smollm") == ["a", "Ġ", "1", "2", "3", "4", "5"]


@pytest.mark.parametrize(
    "pre, expected",
    [
        ("deepseek-llm", "Year's| x|=|f|(|y|)| |1|2|3|4| |你好|\n|\n| ok| "),
        ("deepseek-coder", "Year's| x|=|f|(|y|)| |1|2|3|4| |你好|\n|\n| ok| "),
        ("deepseek-v3", "Year|'s| x|=f|(y|)| |123|4| |你好|\n\n| ok| "),
        ("deepseek-r1-qwen", "Year|'s| x|=f|(y|)| |1|2|3|4| 你好|\n\n| ok| "),
    ],
)
def test_deepseek_pre_tokenizers(trained: Backend, pre: str, expected: str) -> None:
    """Digits alone or in groups of three; punctuation alone or with the next word."""
    backend, _ = build_backend(to_gguf_metadata(trained, pre), "here")
    splits = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated")
            for pattern in PRE_TOKENIZER_PATTERNS[pre]
        ]
    )
    text = "Year's x=f(y) 1234 你好\n\n ok "
    actual = [piece for piece, _ in splits.pre_tokenize_str(text)]
    assert actual == expected.replace("Year's", "Year|'|s").split("|")
    assert backend.decode(backend.encode(text).ids, skip_special_tokens=False) == text


def test_unsupported_tokenizers_are_errors(trained: Backend) -> None:
    with pytest.raises(WeightsError, match="pre-tokenizer 'mystery' is not supported"):
        build_backend(to_gguf_metadata(trained, "mystery"), "here")
    with pytest.raises(WeightsError, match="tokenizer model 'bert' is not supported"):
        build_backend(
            {**to_gguf_metadata(trained, "gpt-2"), "tokenizer.ggml.model": "bert"}, "here"
        )
    with pytest.raises(WeightsError, match="no tokenizer.ggml.tokens"):
        build_backend({}, "here")


def test_sentencepiece_merges_follow_from_scores() -> None:
    split = ["<unk>", "<s>", "a", "b", "c", "ab", "abc", "bc", "▁", "▁ab"]
    scores = [0.0, 0.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, -9.0, -4.0]
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": split + bytes_,
        "tokenizer.ggml.scores": scores + [0.0] * 256,
        "tokenizer.ggml.token_type": [2, 3] + [1] * 8 + [6] * 256,
    }
    vocabulary = {piece: id for id, piece in enumerate(split)}
    merges = compute_merges(vocabulary, scores)
    assert merges == [("a", "bc"), ("ab", "c"), ("a", "b"), ("b", "c"), ("▁", "ab")]
    backend, _ = build_backend(metadata, "here")
    for text, expected in (
        ("ab", ["▁ab"]),
        ("abc ab", ["▁", "abc", "▁ab"]),
        ("cab", ["▁", "c", "ab"]),
    ):
        assert backend.encode(text).tokens == expected
        assert backend.decode(backend.encode(text).ids) == text
    assert backend.decode(backend.encode("é!").ids) == "é!"


def test_special_tokens_and_stop_ids(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_id, tokenizer.stop_ids) == (0, (1, 7))
    assert tokenizer.token_id("<|im_end|>") == 1 and tokenizer.token_id("no such") is None
    assert tokenizer.decode(tokenizer.encode("<|im_start|>hi")) == "hi"


def test_chat_template_sources(folder: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    for template in (TEMPLATE, [{"name": "default", "template": TEMPLATE}]):
        settings["chat_template"] = template
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        assert load_tokenizer(folder).apply_chat_template(messages) == expected
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages | length }}{{ extra }}")
    assert load_tokenizer(folder).apply_chat_template(messages, extra="!") == "<|im_start|>1!"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages.__init__.__globals__ }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ raise_exception('no') }}",
        "{{ broken",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ 'a' * 10**15 }}",
    ],
)
def test_chat_template_sandbox(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ArgumentError, match="rejects"):
        load_tokenizer(folder).apply_chat_template([{"role": "user", "content": "hi"}])


def test_missing_and_damaged_tokenizers_are_errors(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    tokenizer.check_vocab_size(tokenizer.vocab_size)
    with pytest.raises(WeightsError, match="vocab_size=99"):
        tokenizer.check_vocab_size(99)
    with pytest.raises(ArgumentError, match="no chat template"):
        tokenizer.apply_chat_template([])
    file = folder / "tokenizer.json"
    file.write_text(file.read_text()[:1000])
    with pytest.raises(WeightsError, match=r"cannot parse tokenizer\.json: the file is truncated"):
        load_tokenizer(folder)
    for damaged in (b"{}", b'{"model": {}}', b"5}", b"\xff}"):
        file.write_bytes(damaged)
        with pytest.raises(WeightsError, match=r"cannot parse tokenizer\.json"):
            load_tokenizer(folder)
    file.unlink()
    with pytest.raises(WeightsError, match=r"no tokenizer\.json"):
        load_tokenizer(folder)


@pytest.mark.parametrize("template", [[{}], [5], {"a": 1}, [{"name": "default", "template": 5}]])
def test_invalid_chat_template_is_ignored(folder: Path, template: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert load_tokenizer(folder).chat_template is None


@pytest.mark.parametrize(
    ("model", "name", "value"),
    [
        ("gpt2", "merges", ["a"]),
        ("gpt2", "merges", ["a nowhere"]),
        ("gpt2", "tokens", 5),
        ("llama", "scores", ["x"] * 3),
        ("llama", "scores", [0.0]),
        ("llama", "unknown_token_id", 99),
        ("llama", "unknown_token_id", -1),
    ],
)
def test_damaged_gguf_tokenizer(model: str, name: str, value: object) -> None:
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0],
    }
    assert build_backend(metadata, "x.gguf")[0].encode("ab").ids
    with pytest.raises(WeightsError, match="tokenizer"):
        build_backend({**metadata, f"tokenizer.ggml.{name}": value}, "x.gguf")


def test_invalid_unicode(folder: Path) -> None:
    with pytest.raises(ArgumentError, match="character 1 of the text"):
        load_tokenizer(folder).encode("a\udc80b")


def test_templates_for_tools_and_of_processors(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": named}))
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.chat_template, tokenizer.tool_template) == ("plain", "tools")
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "processor"}))
    assert load_tokenizer(folder).chat_template == "processor"
    (folder / "chat_template.jinja").write_text("file")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("other file")
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.chat_template, tokenizer.tool_template) == ("file", "other file")


def test_special_tokens_of_an_older_file(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    expected = load_tokenizer(folder)
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    older = {name: settings.pop(name) for name in names if name in settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text(json.dumps(older))
    found = load_tokenizer(folder)
    assert found.special_tokens == expected.special_tokens and expected.special_tokens
    assert found.stop_ids == expected.stop_ids


def test_tokens_that_only_the_settings_have(folder: Path) -> None:
    """As transformers adds them; not those without an embedding, or with another id than the next."""
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    next_id = load_tokenizer(folder).vocab_size
    tokens = {
        str(next_id): {"content": "<tool>", "special": True},
        str(next_id + 1): {"content": "<note>", "special": False},
        str(next_id + 9): {"content": "<far>", "special": True},
    }
    added = {
        "added_tokens_decoder": tokens,
        "additional_special_tokens": ["<tool>", "<more>", "<no>"],
    }
    file.write_text(json.dumps({**settings, **added}))
    (folder / "config.json").write_text(json.dumps({"vocab_size": next_id + 3}))
    tokenizer = load_tokenizer(folder)
    names = ("<tool>", "<note>", "<more>", "<no>", "<far>")
    found = [tokenizer.token_id(name) for name in names]
    assert found == [next_id, next_id + 1, next_id + 2, None, None]
    ids = tokenizer.encode("a<tool>b<note>", add_special_tokens=False)
    assert {next_id, next_id + 1} < set(ids) and tokenizer.decode(ids) == "ab<note>"
