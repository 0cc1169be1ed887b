"""Tokenizers: text to token ids and back, and conversations to text; a checkpoint in, a `Tokenizer`
out.

A tokenizer is read from tokenizer.json (with tokenizer_config.json and chat_template.jinja), or
from the vocabulary, merges and template inside a GGUF file. A chat template is a Jinja program from
the checkpoint; see chat_template.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import processors
from tokenizers.decoders import ByteLevel

from fulgurite.errors import ArgumentError, WeightsError
from fulgurite.models.added_tokens import add_missing_tokens, read_declared_tokens
from fulgurite.models.chat_template import TEMPLATE_ERRORS, render_template
from fulgurite.models.config_fields import ConfigFields
from fulgurite.models.gguf_tokenizer import build_backend
from fulgurite.models.loading import hub
from fulgurite.quant.files.gguf_header import read_gguf_metadata

Message = Mapping[str, object]
TEMPLATE_FOLDER = "additional_chat_templates"  # for tools and others


@dataclass(frozen=True)
class Tokenizer:
    """Encodes and decodes text, and renders chat templates.

    stop_ids         tokens that end a reply
    special_tokens   name -> text of the special tokens, as chat templates use them
    adds_bos         whether `encode` puts the BOS token first
    tool_template    the chat template of conversations with tools, if that is another one
    """

    backend: Backend
    bos_id: int | None
    stop_ids: tuple[int, ...]
    chat_template: str | None
    special_tokens: Mapping[str, str]
    adds_bos: bool = False
    tool_template: str | None = None

    @property
    def vocab_size(self) -> int:
        """The number of token ids, added tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that `decode` leaves out with `skip_special_tokens`."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(id for id, token in added.items() if token.special)

    @cached_property
    def joins_bytes(self) -> bool:
        """Whether `decode` joins the bytes of all tokens first: a character changes none before it."""
        return isinstance(self.backend.decoder, ByteLevel)

    def check_vocab_size(self, model_vocab_size: int) -> None:
        """Raise if the model has no embedding for some of these tokens."""
        if self.vocab_size > model_vocab_size:
            raise WeightsError(
                f"the tokenizer has {self.vocab_size} tokens, more than the model's "
                f"vocab_size={model_vocab_size}",
                next="use the tokenizer that belongs to the model",
            )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; `add_special_tokens` adds those that the tokenizer puts around a text."""
        _check_unicode(text)
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return self._with_bos(ids) if add_special_tokens else ids

    def _with_bos(self, ids: list[int]) -> list[int]:
        """The ids with the BOS token in front, if the tokenizer adds it."""
        if self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def encode_truncated(self, text: str, max_tokens: int) -> list[int]:
        """`encode`, of the beginning of the text that fits into `max_tokens`."""
        ids = self.encode(text)
        if len(ids) <= max_tokens:
            return ids
        encoding = self.backend.encode(text, add_special_tokens=False)
        special = len(ids) - len(encoding.ids)
        if special >= max_tokens:
            raise ArgumentError(f"{max_tokens} tokens hold no text", next="allow more tokens")
        encoding.truncate(max_tokens - special)
        processed: list[int] = self.backend.post_process(encoding, add_special_tokens=True).ids
        return self._with_bos(processed)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_id(self, token: str) -> int | None:
        """The id of the token with exactly this text, or None."""
        found: int | None = self.backend.token_to_id(token)
        return found

    def apply_chat_template(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **values: object
    ) -> str:
        """Render a conversation; `add_generation_prompt` starts the model's next turn.

        The text already contains special tokens: encode it with add_special_tokens=False.
        """
        if self.chat_template is None:
            raise ArgumentError(
                "this model has no chat template", next="pass the whole prompt as text instead"
            )
        try:
            return render_template(
                self.chat_template, self.template_values(messages, add_generation_prompt, values)
            )
        except TEMPLATE_ERRORS as error:
            raise ArgumentError(
                f"the chat template rejects this conversation: {error}",
                next="messages are a list of {'role': ..., 'content': ...}",
            ) from error

    def template_values(
        self, messages: Sequence[Message], add_generation_prompt: bool, values: Mapping[str, object]
    ) -> dict[str, object]:
        """The variables of a chat template. `values` can't replace the messages."""
        return {
            **self.special_tokens,
            **values,
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }


def _check_unicode(text: str) -> None:
    """Raise for lone surrogates, which Python makes from bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(
            f"character {error.start} of the text, {text[error.start]!r}, is not valid Unicode",
            next="pass text decoded from UTF-8",
        ) from error


def load_tokenizer(name: str | Path) -> Tokenizer:
    """Load the tokenizer of a folder, a file or a name on the Hub (see hub.py)."""
    path = hub.resolve_model_path(name)
    if path.suffix == ".gguf":
        return from_gguf(read_gguf_metadata(path), str(path))
    return from_folder(path.parent if path.is_file() else path)


def find_tokenizer(name: str | Path) -> Tokenizer | None:
    """`load_tokenizer`, or None for a folder without a tokenizer.json."""
    path = hub.resolve_model_path(name)
    folder = path.parent if path.is_file() else path
    has_file = path.suffix == ".gguf" or (folder / "tokenizer.json").is_file()
    return load_tokenizer(path) if has_file else None


def from_folder(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise WeightsError(
            "this folder has no tokenizer.json",
            where=str(folder),
            next="save a fast tokenizer: AutoTokenizer.from_pretrained(...).save_pretrained(folder)",
        )
    backend = _read_backend(file)
    settings = _read_json(folder / "tokenizer_config.json")
    older = _read_json(folder / "special_tokens_map.json")  # for settings that name none
    special_tokens = {
        name: text
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        if (text := _token_text(settings.values.get(name) or older.values.get(name))) is not None
    }
    generation = _read_json(folder / "generation_config.json")
    model = _read_json(folder / "config.json")
    declared = read_declared_tokens(settings, older, _read_json(folder / "added_tokens.json"))
    add_missing_tokens(backend, declared, _read_vocab_size(model))
    stop_ids = []
    if "eos_token" in special_tokens:
        stop_ids.append(backend.token_to_id(special_tokens["eos_token"]))
    stop_ids += generation.get_ints("eos_token_id") or model.get_ints("eos_token_id")
    bos = special_tokens.get("bos_token")
    templates = _read_chat_templates(folder, settings)
    return Tokenizer(
        backend=backend,
        bos_id=None if bos is None else backend.token_to_id(bos),
        stop_ids=tuple(dict.fromkeys(id for id in stop_ids if id is not None)),
        chat_template=templates.get("default"),
        special_tokens=special_tokens,
        tool_template=templates.get("tool_use"),
    )


def _read_backend(file: Path) -> Backend:
    try:
        text = file.read_text(encoding="utf-8")
        if not text.rstrip().endswith("}"):
            raise ValueError("the file is truncated")
        backend = Backend.from_str(text)
        backend.no_padding()  # some files pad or cut every text to the length of training
        backend.no_truncation()
        return backend
    except Exception as error:  # the library raises plain Exception
        raise WeightsError(
            f"cannot parse tokenizer.json: {error}", where=str(file), next="download it again"
        ) from error


def from_gguf(metadata: Mapping[str, object], where: str) -> Tokenizer:
    """The tokenizer in the metadata of a GGUF file; `where` names the file in errors."""
    backend, tokens = build_backend(metadata, where)

    def find_token_id(key: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{key}_token_id")
        return value if isinstance(value, int) else None

    keys = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    ids = {name: found for name, key in keys.items() if (found := find_token_id(key)) is not None}
    stops = (find_token_id("eos"), find_token_id("eot"), find_token_id("eom"))
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend=backend,
        bos_id=find_token_id("bos"),
        stop_ids=tuple(dict.fromkeys(stop for stop in stops if stop is not None)),
        chat_template=template if isinstance(template, str) else None,
        special_tokens={name: tokens[id] for name, id in ids.items() if id < len(tokens)},
        adds_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", _adds_bos_by_default(metadata))),
    )


def save_backend(tokenizer: Tokenizer, file: Path) -> None:
    """Write tokenizer.json. The BOS token that `encode` puts first is a post-processor there."""
    backend = Backend.from_str(tokenizer.backend.to_str())
    bos = tokenizer.special_tokens.get("bos_token")
    if tokenizer.adds_bos and bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos}:0 $A:0",
            pair=f"{bos}:0 $A:0 {bos}:1 $B:1",
            special_tokens=[(bos, tokenizer.bos_id)],
        )
    # `backend.save` would raise no OSError for a full disk
    file.write_text(backend.to_str(pretty=True), encoding="utf-8")


def _adds_bos_by_default(metadata: Mapping[str, object]) -> bool:
    """SentencePiece tokenizers add BOS unless the file says otherwise."""
    return metadata.get("tokenizer.ggml.model") == "llama"


def _read_json(file: Path) -> ConfigFields:
    if not file.is_file():
        return ConfigFields({}, str(file))
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"cannot parse {file.name}: {error}", where=str(file)) from error
    if not isinstance(values, dict):
        raise WeightsError(f"{file.name} is not a JSON object", where=str(file))
    return ConfigFields(values, str(file))


def _read_vocab_size(model: ConfigFields) -> int | None:
    """The number of embeddings; None if config.json does not say."""
    text = model.get_section("text_config")
    return (text if "vocab_size" in text else model).get_optional_int("vocab_size")


def _token_text(value: object) -> str | None:
    """A special token is stored as its text, or as an object with its text in `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_chat_templates(folder: Path, settings: ConfigFields) -> dict[str, str]:
    """The chat templates by name: "default", and in some checkpoints "tool_use" and others.

    They are files, a text or a list in tokenizer_config.json, or in the chat_template.json of a
    multimodal processor.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        others = sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))
        named = {one.stem: one.read_text(encoding="utf-8") for one in others}
        return {**named, "default": file.read_text(encoding="utf-8")}
    template = settings.values.get("chat_template")
    if template is None:
        template = _read_json(folder / "chat_template.json").values.get("chat_template")
    entries = (
        template if isinstance(template, list) else [{"name": "default", "template": template}]
    )
    return {
        str(entry.get("name")): text
        for entry in entries
        if isinstance(entry, Mapping) and isinstance(text := entry.get("template"), str)
    }
