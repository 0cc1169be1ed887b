"""Text to token ids and back, conversations to text: a checkpoint in, its `Tokenizer` out.

Comes from tokenizer.json (with tokenizer_config.json and chat_template.jinja beside it) or from the
vocabulary, merges and template inside a GGUF file. A chat template is a Jinja program from the
checkpoint; it runs in Jinja's immutable sandbox, which has no access to Python.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import jinja2
import jinja2.sandbox
from tokenizers import Tokenizer as Backend

from fulgurite.errors import ArgumentError, WeightsError
from fulgurite.models import hub
from fulgurite.models.config import Fields
from fulgurite.models.gguf_file import GGUFFile
from fulgurite.models.gguf_tokenizer import build_backend

Message = Mapping[str, object]

# What an expression in a template may raise: 1 + 'a', messages[9]['role'], 1 / 0, range(10**9), a macro
# that calls itself, 'a' * 10**12.
TEMPLATE_FAILURES = (
    TypeError,
    LookupError,
    ArithmeticError,
    ValueError,
    RecursionError,
    MemoryError,
)


@dataclass(frozen=True)
class Tokenizer:
    """`stop_ids` are the tokens that end a reply."""

    backend: Backend
    bos_id: int | None
    stop_ids: tuple[int, ...]
    chat_template: str | None
    template_names: Mapping[str, str]
    adds_bos: bool = False

    @property
    def size(self) -> int:
        """The number of token ids, added ones included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def check_fits(self, vocabulary: int) -> None:
        """Refuse a model that has no embedding for some of these tokens."""
        if self.size > vocabulary:
            raise WeightsError(
                f"the tokenizer has {self.size} tokens and the model embeds {vocabulary}",
                next="take the tokenizer that came with the model",
            )

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids; `special` adds what the tokenizer puts around a text (a first token, say)."""
        _check_unicode(text)
        ids: list[int] = self.backend.encode(text, add_special_tokens=special).ids
        if special and self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def token_id(self, token: str) -> int | None:
        """The id of a token's exact text, if it is one."""
        found: int | None = self.backend.token_to_id(token)
        return found

    def chat(self, messages: Sequence[Message], reply: bool = True, **values: object) -> str:
        """The conversation as the model's template writes it; `reply` opens the model's next turn.

        The text already holds its special tokens: encode it with special=False.
        """
        if self.chat_template is None:
            raise ArgumentError(
                "this model has no chat template", next="give the whole prompt as text instead"
            )
        try:
            template = _environment().from_string(self.chat_template)
            return template.render(
                messages=list(messages),
                add_generation_prompt=reply,
                **{**self.template_names, **values},
            )
        except (jinja2.TemplateError, *TEMPLATE_FAILURES) as error:
            raise ArgumentError(
                f"the chat template refuses this conversation: {error}",
                next="messages are a list of {'role': ..., 'content': ...}",
            ) from error


def _check_unicode(text: str) -> None:
    """Bytes that were no UTF-8 arrive as halves of surrogate pairs, which are no characters."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(
            f"character {error.start} of the text, {text[error.start]!r}, is none of Unicode",
            next="give text in UTF-8",
        ) from error


def load_tokenizer(name: str | Path) -> Tokenizer:
    """The tokenizer of a folder, a file or a name (see hub.py)."""
    path = hub.resolve(name)
    if path.suffix == ".gguf":
        return from_gguf(GGUFFile(path))
    return from_folder(path.parent if path.is_file() else path)


def from_folder(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise WeightsError(
            "there is no tokenizer.json here",
            where=str(folder),
            next="save the tokenizer in the fast format: AutoTokenizer...save_pretrained(folder)",
        )
    backend = _read_backend(file)
    settings = _read_json(folder / "tokenizer_config.json")
    names = {
        name: text
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        if (text := _token_text(settings.values.get(name))) is not None
    }
    generation = _read_json(folder / "generation_config.json")
    model = _read_json(folder / "config.json")
    stop_ids = [backend.token_to_id(names["eos_token"])] if "eos_token" in names else []
    stop_ids += generation.integers("eos_token_id") or model.integers("eos_token_id")
    bos = names.get("bos_token")
    return Tokenizer(
        backend=backend,
        bos_id=None if bos is None else backend.token_to_id(bos),
        stop_ids=tuple(dict.fromkeys(id for id in stop_ids if id is not None)),
        chat_template=_folder_template(folder, settings),
        template_names=names,
    )


def _read_backend(file: Path) -> Backend:
    try:
        written = file.read_text(encoding="utf-8")
        if not written.rstrip().endswith("}"):
            raise ValueError("it is cut short")
        return Backend.from_str(written)
    except Exception as error:  # the library has no narrower class for what it can't read
        raise WeightsError(
            f"tokenizer.json can't be read: {error}", where=str(file), next="download it again"
        ) from error


def from_gguf(file: GGUFFile) -> Tokenizer:
    metadata = file.metadata
    backend, tokens = build_backend(metadata, str(file.path))

    def named(key: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{key}_token_id")
        return value if isinstance(value, int) else None

    kinds = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    ids = {name: found for name, key in kinds.items() if (found := named(key)) is not None}
    stops = (named("eos"), named("eot"), named("eom"))
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend=backend,
        bos_id=named("bos"),
        stop_ids=tuple(dict.fromkeys(stop for stop in stops if stop is not None)),
        chat_template=template if isinstance(template, str) else None,
        template_names={name: tokens[id] for name, id in ids.items() if id < len(tokens)},
        adds_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", _default_bos(metadata))),
    )


def _default_bos(metadata: Mapping[str, object]) -> bool:
    """SentencePiece vocabularies put their first token in front unless the file says no."""
    return metadata.get("tokenizer.ggml.model") == "llama"


def _read_json(file: Path) -> Fields:
    if not file.is_file():
        return Fields({}, str(file))
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{file.name} can't be read: {error}", where=str(file)) from error
    if not isinstance(values, dict):
        raise WeightsError(f"{file.name} holds no object", where=str(file))
    return Fields(values, str(file))


def _token_text(value: object) -> str | None:
    """A special token is written as its text or as an object around it."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _folder_template(folder: Path, settings: Fields) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.values.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, Mapping)]
        template = next(
            (one.get("template") for one in named if one.get("name") == "default"), None
        )
    return template if isinstance(template, str) else None


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> str:
    raise jinja2.TemplateError(message)
