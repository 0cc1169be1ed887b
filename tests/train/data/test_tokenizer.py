"""The trained tokenizer: any text goes there and back; transformers and our engine load it."""

from __future__ import annotations

import json
import multiprocessing
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from fulgurite.errors import ArgumentError, WeightsError
from fulgurite.models.tokenizer import Tokenizer, from_folder
from fulgurite.train.config import ModelSection, TrainConfig
from fulgurite.train.data.encoding import TextEncoder, token_byte_lengths
from fulgurite.train.data.tokenizer import (
    MIN_VOCAB_SIZE,
    SPECIAL_TOKENS,
    copy_tokenizer,
    prepare_tokenizer,
    restore_tokenizer,
    save_tokenizer,
    train_tokenizer,
)
from tests.train.data.samples import data_config, random_texts, small_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(random_texts(50), 300), path)
    return path


def random_text(seed: int) -> str:
    source = random.Random(seed)
    codes = [source.choice([source.randrange(128), source.randrange(0xD800), 0x1F600, 10, 32, 13])]
    codes += [source.randrange(0xE000, 0x110000) for _ in range(source.randrange(20))]
    codes += [source.choice([32, 10, 9, 39, 65, 48, 0x301]) for _ in range(source.randrange(40))]
    source.shuffle(codes)
    return "".join(map(chr, codes))


@pytest.mark.parametrize("seed", range(30))
def test_any_text_goes_there_and_back(folder: Path, seed: int):
    tokenizer = from_folder(folder)
    text = random_text(seed)
    ids = TextEncoder(tokenizer).encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert token_byte_lengths(tokenizer)[ids].sum() == len(text.encode())


def test_every_byte_is_a_token(folder: Path):
    backend = from_folder(folder).backend
    data = bytes(range(256)).decode("latin-1")
    single = [token for token in backend.get_vocab() if len(token) == 1]
    assert len(single) == 256 and backend.decode(backend.encode(data).ids) == data


def test_special_tokens_in_a_text_are_text(folder: Path):
    tokenizer = from_folder(folder)
    special = {tokenizer.token_id(token) for token in SPECIAL_TOKENS}
    assert special == {0, 1, 2, 3}
    for token in SPECIAL_TOKENS:
        ids = TextEncoder(tokenizer).encode(f"a{token}b")
        assert not special.intersection(ids)
        assert tokenizer.decode(ids, skip_special_tokens=False) == f"a{token}b"


def test_huge_texts_are_encoded_in_pieces(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fulgurite.train.data.encoding.PIECE_CHARS", 50)
    encoder = TextEncoder(from_folder(folder))
    for text in ["alpha beta\n" * 100, "x" * 501, "\n" * 200, "", "東京" * 99]:
        assert encoder.tokenizer.decode(encoder.encode(text), skip_special_tokens=False) == text


def test_transformers_loads_it(folder: Path):
    transformers = pytest.importorskip("transformers", reason="transformers is the reference")
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    ours = from_folder(folder)
    assert (auto.eos_token, auto.pad_token) == ("<|endoftext|>", "<|pad|>")
    assert len(auto) == ours.vocab_size == 300
    for text in random_texts(5, seed=9):
        assert auto(text)["input_ids"] == ours.encode(text)
        assert auto.decode(ours.encode(text)) == text
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    rendered = ours.apply_chat_template(messages)
    expected = auto.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert (
        rendered
        == expected
        == (
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
    )
    assert ours.encode(rendered, add_special_tokens=False)[0] == 2


def test_a_reply_stops_at_the_end_of_a_text_and_of_a_turn(folder: Path):
    assert from_folder(folder).stop_ids == (0, 3)


def test_training_twice_gives_the_same_tokenizer():
    texts = random_texts(50)
    assert train_tokenizer(texts, 350).to_str() == train_tokenizer(iter(texts), 350).to_str()


def test_a_text_with_few_words_gives_a_smaller_vocabulary():
    assert train_tokenizer(["ab"], 5000).get_vocab_size() == MIN_VOCAB_SIZE


def test_a_vocabulary_without_room_for_bytes():
    with pytest.raises(ArgumentError, match="at least 260"):
        train_tokenizer(["x"], 259)


def test_byte_lengths_of_a_sentencepiece_vocabulary():
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    backend = Backend(models.BPE({"▁the": 0, "<0x0A>": 1, "ä": 2, "▁": 3}, []))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = Tokenizer(backend, None, (0,), None, {})
    assert token_byte_lengths(tokenizer).tolist() == [4, 1, 2, 1]


# ---- prepare_tokenizer ---------------------------------------------------------------------------


def make_text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(random_texts(60)))
    return path


def test_a_trained_tokenizer_is_kept_with_the_run(tmp_path: Path):
    config = data_config(make_text(tmp_path), vocab_size=290)
    first = prepare_tokenizer(config, tmp_path / "run")
    assert first.vocab_size == 290
    again = prepare_tokenizer(data_config("nowhere", vocab_size=400), tmp_path / "run")
    assert again.backend.to_str() == first.backend.to_str()


@pytest.mark.parametrize("use_file", [True, False])
def test_a_given_tokenizer_is_copied(tmp_path: Path, folder: Path, use_file: bool):
    name = folder / "tokenizer.json" if use_file else folder
    config = data_config("demo", tokenizer=str(name))
    tokenizer = prepare_tokenizer(config, tmp_path / "run")
    assert tokenizer.vocab_size == 300 and tokenizer.chat_template
    copied = {file.name for file in (tmp_path / "run/tokenizer").iterdir()}
    assert copied == {file.name for file in folder.iterdir()}


def test_the_tokenizer_of_the_first_weights_is_copied(tmp_path: Path, folder: Path):
    config = TrainConfig(model=ModelSection(init_from=str(folder)))
    assert prepare_tokenizer(config, tmp_path).vocab_size == 300


def test_the_folder_of_a_run_is_no_checkpoint(tmp_path: Path):
    (tmp_path / "old" / "export").mkdir(parents=True)
    (tmp_path / "old" / "export" / "config.json").write_text("{}")
    config = TrainConfig(model=ModelSection(init_from=str(tmp_path / "old")))
    with pytest.raises(WeightsError, match="own folder: .*export"):
        prepare_tokenizer(config, tmp_path / "run")


def test_token_files_need_their_tokenizer(tmp_path: Path):
    (tmp_path / "a.bin").write_bytes(b"\0" * 20)
    with pytest.raises(ArgumentError, match="token files only"):
        prepare_tokenizer(data_config(tmp_path / "a.bin"), tmp_path / "run")
    assert not (tmp_path / "run/tokenizer").exists()
    with pytest.raises(ArgumentError, match="data.vocab_size is not set"):
        prepare_tokenizer(data_config("demo", vocab_size=None), tmp_path / "run")


def _prepare(arguments: tuple[str, str]) -> str:
    text, output = arguments
    return prepare_tokenizer(data_config(text, vocab_size=290), Path(output)).backend.to_str()


def test_many_processes_prepare_one_tokenizer(tmp_path: Path):
    arguments = [(str(make_text(tmp_path)), str(tmp_path / "run"))] * 4
    with multiprocessing.get_context("fork").Pool(4) as pool:
        found = pool.map(_prepare, arguments, chunksize=1)
    assert len(set(found)) == 1
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"tokenizer", ".tokenizer.lock"}


@pytest.mark.parametrize("content", [b"", b"[1, 2]\n", b"\xff\xfe\n"])
def test_files_without_text_leave_no_tokenizer(tmp_path: Path, content: bytes):
    """Otherwise the next run of the folder would use one that was trained on nothing."""
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match="there is no text in") as caught:
        prepare_tokenizer(data_config(str(path), vocab_size=290), tmp_path / "run")
    assert (f"{path}:1: not" in str(caught.value)) == bool(content)
    assert not (tmp_path / "run" / "tokenizer").exists()


def test_settings_are_json(folder: Path):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<|endoftext|>" and "chat_template" in settings
    assert small_tokenizer().vocab_size <= 300


def test_stop_tokens_of_a_model_config_are_copied(folder: Path, tmp_path: Path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    (source / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (source / "config.json").write_text('{"eos_token_id": 7}')
    (source / "generation_config.json").write_text('{"temperature": 0.5}')
    copy_tokenizer(str(source), target)
    assert from_folder(target).stop_ids == from_folder(source).stop_ids == (7,)
    assert json.loads((target / "generation_config.json").read_text())["temperature"] == 0.5


def test_the_tokenizer_of_a_run_that_can_not_be_written_is_read(tmp_path: Path, folder: Path):
    shutil.copytree(folder, tmp_path / "tokenizer")
    (tmp_path / ".tokenizer.lock").mkdir()  # as a lock that can't be opened, for root too
    assert prepare_tokenizer(TrainConfig(), tmp_path).vocab_size == 300


def test_a_tokenizer_of_a_gguf_file_keeps_its_bos(folder: Path, tmp_path: Path):
    """There `add_bos_token` is a field of the file; in tokenizer.json it is a post-processor."""
    source = from_folder(folder)
    special = {**source.special_tokens, "bos_token": "<|im_start|>"}
    bos = source.token_id("<|im_start|>")
    adding = replace(source, bos_id=bos, special_tokens=special, adds_bos=True)
    save_tokenizer(adding, tmp_path)
    loaded = from_folder(tmp_path)
    assert loaded.encode("a b") == adding.encode("a b") == [bos, *source.encode("a b")]
    assert source.encode("a b")[0] != bos  # the source is as it was
    assert loaded.stop_ids == source.stop_ids


def test_templates_of_other_files_are_copied(folder: Path, tmp_path: Path):
    source = tmp_path / "source"
    shutil.copytree(folder, source)
    (source / "chat_template.jinja").unlink()
    settings = json.loads((source / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    (source / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    for name in ("with_json", "with_folder"):
        (tmp_path / name).mkdir()
    copy_tokenizer(str(source), tmp_path / "with_json")
    assert from_folder(tmp_path / "with_json").chat_template == "{{ messages }}"
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    copy_tokenizer(str(source), tmp_path / "with_folder")
    assert from_folder(tmp_path / "with_folder").tool_template == "{{ tools }}"


def test_a_tokenizer_that_was_removed_is_written_again(folder: Path, tmp_path: Path):
    source = from_folder(folder)
    restore_tokenizer(source, tmp_path)
    assert from_folder(tmp_path / "tokenizer").encode("a b") == source.encode("a b")
    assert from_folder(tmp_path / "tokenizer").stop_ids == source.stop_ids
    file = tmp_path / "tokenizer" / "tokenizer.json"
    before = file.stat()
    restore_tokenizer(source, tmp_path)
    assert file.stat() == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path):
    (tmp_path / "tokenizer.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        save_tokenizer(train_tokenizer(["a"], MIN_VOCAB_SIZE), tmp_path)
