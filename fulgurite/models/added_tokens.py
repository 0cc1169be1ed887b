"""Tokens that a checkpoint declares beside tokenizer.json: settings in, tokens added to a backend out.

    tokenizer_config.json     added_tokens_decoder: id -> token; additional_special_tokens,
                              extra_special_tokens, bos_token, …: texts
    special_tokens_map.json   additional_special_tokens
    added_tokens.json         text -> id (older)

Fine-tuned checkpoints may have tokens there that their tokenizer.json lacks. Without them a chat
template's markers would be read letter by letter. A token whose id is not the next one, or for which
the model has no embedding, is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from fulgurite.models.config_fields import ConfigFields

FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")
LISTS = ("additional_special_tokens", "extra_special_tokens")


class DeclaredToken(NamedTuple):
    """A token of a checkpoint's settings. `id`: None: the next one."""

    token: AddedToken
    id: int | None


def read_declared_tokens(
    settings: ConfigFields, special_map: ConfigFields, older: ConfigFields
) -> list[DeclaredToken]:
    """Those with an id first, in the order of their ids."""
    by_id: dict[int, AddedToken] = {}
    for text, id in older.values.items():
        if isinstance(id, int):
            by_id[id] = AddedToken(text, normalized=False)
    for key, value in settings.get_section("added_tokens_decoder").values.items():
        token = _read_token(value)
        if token is not None and key.isascii() and key.isdigit():
            by_id[int(key)] = token
    declared = [DeclaredToken(by_id[id], id) for id in sorted(by_id)]
    for values in (settings.values, special_map.values):
        named = [values[name] for name in NAMED if values.get(name)]
        declared += [DeclaredToken(token, None) for token in _list(named)]
        declared += [
            DeclaredToken(token, None) for name in LISTS for token in _list(values.get(name))
        ]
    return declared


def _list(values: object) -> Iterator[AddedToken]:
    """The special tokens of a list, or of an object by their names."""
    entries = list(values.values()) if isinstance(values, Mapping) else values
    for value in entries if isinstance(entries, list) else ():
        token = _read_token({"content": value} if isinstance(value, str) else value)
        if token is not None:
            token.special = True
            yield token


def _read_token(value: object) -> AddedToken | None:
    if not isinstance(value, Mapping) or not isinstance(value.get("content"), str):
        return None
    flags = {name: value[name] for name in FLAGS if isinstance(value.get(name), bool)}
    return AddedToken(value["content"], **{"normalized": False, **flags})


def add_missing_tokens(
    backend: Backend, declared: list[DeclaredToken], model_vocab_size: int | None
) -> None:
    """Add the tokens that the backend lacks."""
    missing = [one for one in declared if one.token.content and not _has(backend, one.token)]
    if not missing:
        return
    next_id = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    for token, id in missing:
        has_embedding = model_vocab_size is None or next_id < model_vocab_size
        if _has(backend, token) or id not in (None, next_id) or not has_embedding:
            continue
        add = backend.add_special_tokens if token.special else backend.add_tokens
        next_id += add([token])


def _has(backend: Backend, token: AddedToken) -> bool:
    return backend.token_to_id(token.content) is not None
