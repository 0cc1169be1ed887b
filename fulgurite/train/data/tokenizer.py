"""The tokenizer of a run: a config in, a `Tokenizer` and the folder `OUTPUT/tokenizer` out.

It is copied from `data.tokenizer` or `model.init_from`, or trained on `data.train`: byte-level BPE by the
`tokenizers` package, so any text, also in bytes that no training text has, is encoded without loss. The
folder loads in transformers (`AutoTokenizer`) and in our engine. It appears whole or not at all, and a
run that goes on uses the one that is there.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from fulgurite.errors import ArgumentError
from fulgurite.logs import LOG
from fulgurite.models.loading import hub
from fulgurite.models.loading.checkpoint import read_config_file
from fulgurite.models.tokenizer import (
    TEMPLATE_FOLDER,
    Tokenizer,
    from_folder,
    from_gguf,
    save_backend,
)
from fulgurite.quant.files.gguf_header import read_gguf_metadata
from fulgurite.train.config import TrainConfig
from fulgurite.train.data.encoding import PIECE_CHARS
from fulgurite.train.data.records import BadSamples
from fulgurite.train.data.sources import (
    TOKENS,
    find_sources,
    no_text_error,
    read_documents,
)

FOLDER = "tokenizer"
LOCK = ".tokenizer.lock"
EOS, PAD, TURN_START, TURN_END = "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (EOS, PAD, TURN_START, TURN_END)
MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
TRAINING_CHARS = 256 << 20  # of text that BPE is trained on; the first documents
COPIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
# Words with the space before them, at most three digits, punctuation with the line breaks after it,
# and spaces, of which the last one stays with the next word.
WORDS = (
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}[\p{L}\p{M}]*| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Conversations as ChatML: each turn between two special tokens.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def prepare_tokenizer(config: TrainConfig, output: Path) -> Tokenizer:
    """The tokenizer of a run. The first process writes `output/tokenizer`; all others read it."""
    folder = output / FOLDER
    output.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            lock = stack.enter_context(open(output / LOCK, "wb"))
        except OSError:  # a run on a read-only disk, to be verified
            if (folder / "tokenizer.json").is_file():
                return from_folder(folder)
            raise
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            LOG.warning("%s can't be locked; processes may write the tokenizer twice", output)
        if not (folder / "tokenizer.json").is_file():
            _write_whole(folder, lambda target: _make_tokenizer(config, target))
    return from_folder(folder)


def _make_tokenizer(config: TrainConfig, target: Path) -> None:
    name = config.data.tokenizer or config.model.init_from
    if name is not None:
        path = hub.resolve_model_path(name)
        has_none = path.is_dir() and not (path / "tokenizer.json").is_file()
        if has_none and name != config.data.tokenizer:
            read_config_file(path)  # raises for a folder that is no checkpoint, and names one
        copy_tokenizer(name, target)
    elif config.data.vocab_size is None:
        raise ArgumentError(
            "there is no tokenizer, and data.vocab_size is not set",
            next="set data.vocab_size to train one, or data.tokenizer to use one",
        )
    else:
        backend = train_tokenizer(_training_texts(config), config.data.vocab_size)
        save_tokenizer(backend, target)


def _write_whole(folder: Path, write: Callable[[Path], None]) -> None:
    """Write a folder under another name and rename it."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".tokenizer-") as temporary:
        target = Path(temporary) / FOLDER
        target.mkdir()
        write(target)
        for file in target.rglob("*"):
            if file.is_file():
                with open(file, "rb") as opened:
                    os.fsync(opened.fileno())
        if folder.exists():  # left by something else: it has no tokenizer.json
            shutil.copytree(target, folder, dirs_exist_ok=True)
        else:
            os.replace(target, folder)


def restore_tokenizer(tokenizer: Tokenizer, output: Path) -> None:
    """Write `output/tokenizer` again if somebody has removed it in the course of a run."""
    folder = output / FOLDER
    if (folder / "tokenizer.json").is_file():
        return
    LOG.warning("%s was removed, and is written again", folder)
    _write_whole(folder, lambda target: save_tokenizer(tokenizer, target))


def copy_tokenizer(name: str, target: Path) -> None:
    """Copy the tokenizer files of a folder, file or Hub name; of a GGUF file, convert them."""
    path = hub.resolve_model_path(name)
    if path.suffix == ".gguf":
        tokenizer = from_gguf(read_gguf_metadata(path), str(path))
        save_tokenizer(tokenizer, target)
        return
    folder = path if path.is_dir() else path.parent
    tokenizer = from_folder(folder)  # raises if it can't be read
    for file in COPIED_FILES:
        if (folder / file).is_file():
            shutil.copyfile(folder / file, target / file)
    if (folder / TEMPLATE_FOLDER).is_dir():
        shutil.copytree(folder / TEMPLATE_FOLDER, target / TEMPLATE_FOLDER)
    if from_folder(target).stop_ids != tokenizer.stop_ids:  # config.json has some: it is not copied
        path = target / "generation_config.json"
        values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        _write_json(path, {**values, "eos_token_id": list(tokenizer.stop_ids)})


# ---- training ------------------------------------------------------------------------------------


def _training_texts(config: TrainConfig) -> Iterator[str]:
    """Texts of `data.train`, up to a limit, in pieces that bound memory."""
    sources = [one for one in find_sources(config.data.train) if one.kind != TOKENS]
    if not sources:
        raise ArgumentError(
            "data.train has token files only, and no tokenizer belongs to them",
            next="set data.tokenizer to the tokenizer that wrote them",
        )
    bad = BadSamples(config.data.max_bad_samples)
    total = 0
    for document in read_documents(sources, config.data.text_field, bad):
        for start in range(0, len(document.text), PIECE_CHARS):
            yield document.text[start : start + PIECE_CHARS]
        total += len(document.text)
        if total >= TRAINING_CHARS:
            return
    if not total:  # a tokenizer of nothing would stay in the folder of the run
        raise no_text_error(config.data.train, bad.named, bad.advice)


def train_tokenizer(texts: Iterator[str] | Sequence[str], vocab_size: int) -> Backend:
    """A byte-level BPE tokenizer with at most `vocab_size` tokens, special ones included."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise ArgumentError(
            f"data.vocab_size={vocab_size} is too small: 256 bytes and {len(SPECIAL_TOKENS)} special "
            f"tokens need {MIN_VOCAB_SIZE}",
            next=f"set it to at least {MIN_VOCAB_SIZE}",
        )
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=2,
        show_progress=False,
    )
    backend.train_from_iterator(iter(texts), trainer)
    found = backend.get_vocab_size(with_added_tokens=True)
    if found < vocab_size:
        LOG.warning("the text has only %d tokens for data.vocab_size=%d", found, vocab_size)
    return backend


def save_tokenizer(tokenizer: Backend | Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json`, the chat template and its stop tokens.

    A `Backend` is one of `train_tokenizer`.
    """
    added: dict[str, object] = {}
    if isinstance(tokenizer, Backend):
        tokenizer = _describe_trained(tokenizer)
        added = {"additional_special_tokens": [TURN_START, TURN_END]}
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 20,
        **tokenizer.special_tokens,
        **added,
    }
    template = tokenizer.chat_template
    if template is not None:
        config["chat_template"] = template
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    save_backend(tokenizer, folder / "tokenizer.json")
    _write_json(folder / "tokenizer_config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": list(tokenizer.stop_ids)})


def _describe_trained(backend: Backend) -> Tokenizer:
    """The tokenizer around what `train_tokenizer` returns."""
    ids = (backend.token_to_id(token) for token in (EOS, TURN_END))
    stops = tuple(id for id in ids if id is not None)
    special = {"eos_token": EOS, "pad_token": PAD}
    return Tokenizer(backend, None, stops, CHAT_TEMPLATE, special)


def _write_json(path: Path, values: dict[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
