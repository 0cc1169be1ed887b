"""Chat data: exactly the answers have a loss, whatever the template, the turns and the cuts."""

from __future__ import annotations

import gzip
import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from fulgurite.errors import ArgumentError
from fulgurite.models.tokenizer import Tokenizer
from fulgurite.train.batch import IGNORED
from fulgurite.train.config import DataSection, TrainConfig
from fulgurite.train.data.dataset import SPLITS
from fulgurite.train.tune.chat import open_chat_dataset
from fulgurite.train.tune.chat_tokens import encode_chat, encode_completion, mark_generation
from fulgurite.train.tune.rows import RowDataset, pack
from tests.train.tune.chat_files import CHATML, make_tokenizer, message, write_lines

TURNS = [
    message("system", "Be brief."),
    message("user", "Grüß 🐟?"),
    message("assistant", "Hallo 🐟"),
    message("user", "2+2"),
    message("assistant", "4"),
]


def learned_texts(tokenizer: Tokenizer, ids: list[int], flags: list[bool]) -> list[str]:
    """Each run of learned tokens as text."""
    runs: list[list[int]] = []
    for index, (token, flag) in enumerate(zip(ids, flags, strict=True)):
        if flag and (not index or not flags[index - 1]):
            runs.append([])
        if flag:
            runs[-1].append(token)
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


def encode(tokenizer: Tokenizer, messages: list[dict[str, Any]], **values: Any) -> list[list[str]]:
    texts = encode_chat(tokenizer, messages, **values)
    return [learned_texts(tokenizer, text.token_ids, text.is_answer) for text in texts]


def test_answers_of_all_turns_with_their_end_token_are_learned() -> None:
    tokenizer = make_tokenizer()
    assert encode(tokenizer, TURNS) == [["Hallo 🐟<|im_end|>", "4<|im_end|>"]]
    (text,) = encode_chat(tokenizer, TURNS)
    rendered = tokenizer.apply_chat_template(TURNS, add_generation_prompt=False)
    assert text.token_ids == tokenizer.encode(rendered, add_special_tokens=False)
    # the tokens before the first answer are those of a prompt at inference
    prompt = tokenizer.encode(tokenizer.apply_chat_template(TURNS[:2]), add_special_tokens=False)
    assert text.token_ids[: len(prompt)] == prompt and text.is_answer.index(True) == len(prompt)


def test_weights_first_answers_and_tools() -> None:
    tokenizer = make_tokenizer()
    silent = [*TURNS[:2], message("assistant", "Hallo", weight=0), *TURNS[3:]]
    assert encode(tokenizer, silent) == [["4<|im_end|>"]]
    assert encode(tokenizer, TURNS, first_answer=3) == [["4<|im_end|>"]]
    (text,) = encode_chat(tokenizer, TURNS, tools=[{"name": "add"}])
    assert tokenizer.decode(text.token_ids).startswith('tools\n[{"name": "add"}]')
    with pytest.raises(ArgumentError, match="no answer"):
        encode(tokenizer, TURNS[:2])
    with pytest.raises(ArgumentError, match="a message is"):
        encode(tokenizer, [{"content": "hi"}])  # type: ignore[list-item]


@pytest.mark.parametrize(
    "begin, end",
    [
        ("{% generation %}", "{% endgeneration %}"),
        ("{%- generation -%}", "{%- endgeneration -%}"),
        ("\n  {% generation %}\n", "\n  {% endgeneration %}\n"),
    ],
)
def test_generation_blocks_of_a_template(begin: str, end: str) -> None:
    """The text is that of the template without them, for which Jinja has no tag."""
    body = "{{ m['content'] }}<|im_end|>"
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        f"{{% if m['role'] == 'assistant' %}}{begin}{body}{end}{{% else %}}{body}{{% endif %}}\n"
        "{% endfor %}"
    )
    plain = template.replace("endgeneration", "endif").replace("generation", "if true")
    tokenizer, expected = make_tokenizer(template), make_tokenizer(plain)
    (text,) = encode_chat(tokenizer, TURNS)
    rendered = expected.apply_chat_template(TURNS, add_generation_prompt=False)
    assert tokenizer.decode(text.token_ids, skip_special_tokens=False) == rendered
    texts = learned_texts(tokenizer, text.token_ids, text.is_answer)
    assert [one.strip() for one in texts] == ["Hallo 🐟<|im_end|>", "4<|im_end|>"]
    assert "generation" not in mark_generation(template)


def test_a_template_that_drops_earlier_reasoning_gives_an_example_an_answer() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    turns = [
        message("user", "a"),
        message("assistant", "<think>x</think>b"),
        message("user", "c"),
        message("assistant", "<think>y</think>d"),
    ]
    found = encode(make_tokenizer(template), turns)
    assert found == [["<think>x</think>b<|im_end|>"], ["<think>y</think>d<|im_end|>"]]


def test_a_generation_prompt_that_the_answer_lacks_is_an_error() -> None:
    template = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    with pytest.raises(ArgumentError, match="not known where the answer begins"):
        encode(make_tokenizer(template), TURNS)


WORDS = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
WORDS += "{% if add_generation_prompt %}assistant: {% endif %}"


def merging_tokenizer(pre_tokenizer: Any, decoder: Any, space: str) -> Tokenizer:
    """One that makes one token of a space and the digit behind it."""
    tokenizer = make_tokenizer(WORDS)
    letters = sorted({*"asuernti:.", *"0123456789", space})
    vocabulary = {text: id for id, text in enumerate([*letters, f"{space}4"])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [(space, "4")]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizer, decoder
    backend.add_special_tokens(["<|im_end|>"])
    return replace(tokenizer, backend=backend, stop_ids=(len(vocabulary),))


def test_a_token_across_the_beginning_of_an_answer() -> None:
    """It would leave a short answer without a token to learn, or with one that no prompt allows."""
    turns = [message("user", "2"), message("assistant", "4"), *TURNS[3:]]
    levels = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    tokenizer = merging_tokenizer(*levels, "Ġ")
    assert tokenizer.encode(" 4", add_special_tokens=False) == [tokenizer.backend.token_to_id("Ġ4")]
    (text,) = encode_chat(tokenizer, turns)
    assert learned_texts(tokenizer, text.token_ids, text.is_answer) == ["4<|im_end|>"] * 2
    prompt = tokenizer.encode(tokenizer.apply_chat_template(turns[:1]), add_special_tokens=False)
    assert text.token_ids[: len(prompt)] == prompt and text.is_answer.index(True) == len(prompt)


def test_a_tokenizer_that_begins_each_text_with_a_space() -> None:
    turns = [message("user", "2"), message("assistant", "4"), *TURNS[3:]]
    tokenizer = merging_tokenizer(
        pre_tokenizers.Metaspace(prepend_scheme="always"), decoders.Metaspace(), "▁"
    )
    (text,) = encode_chat(tokenizer, turns)
    whole = tokenizer.apply_chat_template(turns, add_generation_prompt=False)
    assert text.token_ids == tokenizer.encode(whole, add_special_tokens=False)
    learned = learned_texts(tokenizer, text.token_ids, text.is_answer)
    assert [one.strip() for one in learned] == ["4<|im_end|>"] * 2


def test_prompt_and_completion() -> None:
    tokenizer = make_tokenizer()
    text = encode_completion(tokenizer, "2+2=", "4")
    assert learned_texts(tokenizer, text.token_ids, text.is_answer) == ["4<|im_end|>"]
    assert encode_completion(tokenizer, "2+2=", "4<|im_end|>") == text


# ---- datasets --------------------------------------------------------------------------------------


def open_dataset(
    folder: Path, lines: list[object], split: str = "train", **data: Any
) -> RowDataset:
    file = write_lines(folder / "chats.jsonl", lines)
    section = DataSection(**{"train": (file,), "sequence_length": 64, "holdout": 2**62, **data})
    return open_chat_dataset(TrainConfig(data=section), make_tokenizer(), split)


def test_samples_are_packed_documents_with_shifted_labels(tmp_path) -> None:
    lines = [{"prompt": "a" * n, "completion": "b" * 5} for n in (3, 40, 10, 20, 7)]
    dataset = open_dataset(tmp_path, [*lines, lines[0]], validation=("x.jsonl",))
    seen = []
    for number in range(len(dataset)):
        sample = dataset.sample(number)
        assert {len(x) for x in (sample.tokens, sample.labels, sample.positions)} == {64}
        documents = sample.documents
        assert documents is not None
        for document in range(documents.max() + 1):
            tokens, labels = (x[documents == document] for x in (sample.tokens, sample.labels))
            assert list(sample.positions[documents == document]) == list(range(len(tokens)))
            assert list(labels[:-6]) == [IGNORED] * (len(tokens) - 6)  # 5 bytes and the end token
            assert list(labels[-6:-1]) == list(tokens[-5:])
            seen.append(len(tokens))
        padding = documents == -1
        assert (sample.positions[padding] == -1).all() and (sample.labels[padding] == IGNORED).all()
    assert sorted(seen) == sorted(len(e) for e in dataset.examples) and len(seen) == 6
    assert dataset.num_labels == 36 and len(dataset) < 6


def test_packing_is_best_fit_and_keeps_all() -> None:
    lengths = [5, 9, 1, 4, 10, 6, 3, 2]
    rows = pack(lengths, 10)
    assert sorted(index for row in rows for index in row) == list(range(8))
    assert all(sum(lengths[i] for i in row) <= 10 for row in rows) and len(rows) == 4


def test_cuts_bad_lines_and_holdout(tmp_path) -> None:
    long = {"prompt": "q", "completion": "b" * 100}
    hopeless = {"prompt": "q" * 100, "completion": "b"}
    lines: list[object] = [
        long, hopeless, "{not json", '["list"]', {"text": "a"}, {"messages": []},
        {"prompt": "\ud800", "completion": "x"}, {"prompt": "q", "completion": "fine"},
    ]  # fmt: skip
    dataset = open_dataset(tmp_path, lines, validation=("x.jsonl",))
    assert [len(example) for example in dataset.examples] == [64, 5]
    assert dataset.examples[0].num_labels == 64
    with pytest.raises(ArgumentError, match="more than data.max_bad_samples=3") as error:
        open_dataset(tmp_path, lines, validation=("x.jsonl",), max_bad_samples=3)
    assert "chats.jsonl:3" in str(error.value)
    with pytest.raises(ArgumentError, match="nothing to learn"):
        open_dataset(tmp_path, [hopeless], validation=("x.jsonl",))
    many: list[object] = [{"prompt": f"{n}", "completion": "b"} for n in range(40)]
    sizes = [
        len(open_dataset(tmp_path, many, split, holdout=4).examples)
        for split in ("train", "validation")
    ]
    assert sum(sizes) == 40 and 2 <= sizes[1] <= 20
    sizes = [len(open_dataset(tmp_path, many[:3], s).examples) for s in ("train", "validation")]
    assert sizes == [2, 1]
    text = write_lines(tmp_path / "a.txt", ["x"])
    with pytest.raises(ArgumentError, match="has no records"):
        open_dataset(tmp_path, lines, train=(text,))


def test_labels_of_bytes_are_counted_for_bits_per_byte(tmp_path) -> None:
    dataset = open_dataset(tmp_path, [{"prompt": "a", "completion": "bcd"}], validation=("x",))
    assert dataset.byte_lengths is not None
    mean = dataset.mean_bytes_per_token()
    assert mean is not None and 0.7 < mean <= 1.0
    assert dataset.hashes().keys() == {str(tmp_path / "chats.jsonl")}
    assert np.array_equal(dataset.sample(0).tokens, dataset.sample(0).tokens)
    with pytest.raises(ArgumentError, match="there is no sample 1"):
        dataset.sample(1)
    with pytest.raises(ArgumentError, match="sequence_length"):
        section = DataSection(train=("x.jsonl",))
        open_chat_dataset(replace(TrainConfig(), data=section), make_tokenizer(), "train")


def test_records_of_other_files_are_the_same(tmp_path) -> None:
    lines = [{"prompt": f"{n}+1=", "completion": f"{n + 1}"} for n in range(9)]
    plain = open_dataset(tmp_path, lines, validation=("x",))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "README.md").write_text("no record")
    text = "".join(json.dumps(line) + "\r\n" for line in lines).encode()
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(text))
    array = tmp_path / "a.json"
    array.write_bytes(b"\xef\xbb\xbf" + json.dumps(lines, indent=1).encode())
    for source in (folder, array):
        found = open_dataset(tmp_path, [], train=(str(source),), validation=("x",))
        assert [e.tokens.tolist() for e in found.examples] == [
            e.tokens.tolist() for e in plain.examples
        ]


def test_parquet_rows_are_records(tmp_path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="it writes the parquet file")
    parquet = importlib.import_module("pyarrow.parquet")
    lines = [{"prompt": f"{n}+1=", "completion": f"{n + 1}"} for n in range(9)]
    parquet.write_table(pyarrow.Table.from_pylist(lines), tmp_path / "a.parquet")
    train = (str(tmp_path / "a.parquet"),)
    sizes = [len(open_dataset(tmp_path, [], s, train=train).examples) for s in SPLITS]
    assert sum(sizes) == 9 and sizes[1]


def test_advice_for_pairs_and_single_lines(tmp_path) -> None:
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(ArgumentError, match="set tune.task=dpo"):
        open_dataset(tmp_path, [pair], validation=("x",))
    with pytest.raises(ArgumentError, match="add lines to data.train"):
        open_dataset(tmp_path, [{"prompt": "a", "completion": "b"}], "validation")
