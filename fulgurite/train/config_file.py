"""Config files and overrides: a TOML or Python file and `section.field=value` pairs in, a `TrainConfig` out.

    config = load_config("run.toml", [("optimizer.learning_rate", "3e-4"), ("steps", "100")])
    text = to_toml(config)                  # reads back as the same config

A Python file defines `config`: a `TrainConfig` or a function that returns one. A field that is None is
left out of a file. In `model.fields` the text `null` stands for null. Names that don't exist and values
of another type are errors that name the nearest field and the type.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import runpy
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from fulgurite.errors import ArgumentError
from fulgurite.train.config import TrainConfig
from fulgurite.train.user_code import user_code

NULL = "null"
# An empty one would be the working directory, as of a variable of a script that is not set.
PATHS_AND_NAMES = (
    *("output", "model.init_from", "model.architecture", "data.train", "data.validation"),
    *("data.text_field", "data.tokenizer", "log.profile", "tune.targets", "tune.rewards"),
)
CHOICES: dict[str, tuple[str, ...]] = {
    "device": ("cpu", "cuda"),
    "model.dtype": ("float32", "bfloat16"),
    "optimizer.name": ("adamw", "muon"),
    "optimizer.schedule": ("wsd", "cosine", "linear", "constant"),
    "optimizer.states": ("float32", "bfloat16", "int8"),
    "optimizer.rounding": ("master", "stochastic"),
    "loss.balance": ("auto", "bias", "aux", "none"),
    "precision.matmul": (
        "none",
        "fp8_tensorwise",
        "fp8_rowwise",
        "fp8_blockwise",
        "mxfp8",
        "nvfp4",
    ),
    "parallel.pipeline_schedule": ("1f1b", "interleaved", "zero_bubble"),
    "parallel.remat": ("none", "mincut", "selective", "full"),
    "tune.method": ("none", "lora", "qlora"),
    "tune.task": ("text", "chat", "dpo", "grpo"),
    "tune.reference": ("precomputed", "live"),
}
TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def load_config(
    path: str | Path | None = None, overrides: Sequence[tuple[str, str]] = ()
) -> TrainConfig:
    """The config of a file (None: the defaults) with fields overridden by dotted names."""
    config = TrainConfig() if path is None else read_config(Path(path))
    for name, text in overrides:
        config = override(config, name, text)
    return config


def read_config(path: Path) -> TrainConfig:
    """The config of a `.toml` or `.py` file."""
    if not path.is_file():
        raise ArgumentError(
            f"there is no config file {path}",
            next="give a .toml or .py file; fulgurite train --print-config > run.toml writes one",
        )
    if path.suffix == ".py":
        return _read_python(path)
    if path.suffix != ".toml":
        raise ArgumentError(f"{path} is no config file", next="its name ends in .toml or .py")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path} can't be parsed: {error}", where=str(path)) from error
    return from_mapping(values, str(path))


def _read_python(path: Path) -> TrainConfig:
    with user_code(str(path), next="repair the file, or give a .toml file"):
        found = runpy.run_path(str(path)).get("config")
        config = found() if callable(found) else found
    if not isinstance(config, TrainConfig):
        raise ArgumentError(
            f"{path} defines no config: `config` is {type(config).__name__}",
            next="from fulgurite.train.config import TrainConfig; config = TrainConfig(...)",
        )
    return from_mapping(dataclasses.asdict(config), str(path))  # checks types, which Python doesn't


def from_mapping(values: Mapping[str, Any], where: str = "the config") -> TrainConfig:
    """A config from nested dictionaries, as TOML and JSON give them."""
    config: TrainConfig = _fill(TrainConfig(), values, "", where)
    return config


def override(config: TrainConfig, name: str, text: str) -> TrainConfig:
    """The config with one field set from text, as on the command line."""
    path = name.split(".")
    section: Any = config
    sections: list[tuple[Any, str]] = []
    for index, part in enumerate(path[:-1]):
        _check_name(section, part, ".".join(path[:index]), f"--{name}")
        value = getattr(section, part)
        if isinstance(value, dict):  # model.fields.NAME, model.fields.rope_parameters.NAME
            changed = _set_nested(value, path[index + 1 :], parse_json(text))
            return _rebuild(sections, section, part, changed)
        if not is_dataclass(value):
            raise ArgumentError(f"{'.'.join(path[: index + 1])} has no fields", where=f"--{name}")
        sections.append((section, part))
        section = value
    _check_name(section, path[-1], ".".join(path[:-1]), f"--{name}")
    hint = _hints(type(section))[path[-1]]
    if is_dataclass(hint):
        inside = ", ".join(f"--{name}.{field.name}" for field in fields(hint))
        raise ArgumentError(f"--{name} is a section", next=f"set one of its fields: {inside}")
    return _rebuild(sections, section, path[-1], parse_text(hint, text, name))


def _set_nested(values: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """The dictionary with one value set at a path of names."""
    name, *rest = path
    inner = values.get(name)
    if rest:
        value = _set_nested(inner if isinstance(inner, Mapping) else {}, rest, value)
    return {**values, name: value}


def _rebuild(sections: list[tuple[Any, str]], section: Any, name: str, value: Any) -> TrainConfig:
    """The config with a field of one of its sections replaced."""
    changed = replace(section, **{name: value})
    for outer, part in reversed(sections):
        changed = replace(outer, **{part: changed})
    assert isinstance(changed, TrainConfig)
    return changed


def _fill(section: Any, values: Mapping[str, Any], prefix: str, where: str) -> Any:
    """A section with the values of one table."""
    changed = {}
    for name, value in values.items():
        _check_name(section, name, prefix, where)
        full = f"{prefix}.{name}" if prefix else name
        current = getattr(section, name)
        if is_dataclass(current):
            if not isinstance(value, Mapping):
                raise ArgumentError(
                    f"{full} is a section, not {value!r}", where=where, next=f"write [{full}]"
                )
            changed[name] = _fill(current, value, full, where)
        else:
            changed[name] = convert(_hints(type(section))[name], value, full, where)
    return replace(section, **changed)


def _hints(cls: Any) -> dict[str, Any]:
    """The type of every field of a section."""
    return typing.get_type_hints(cls)


@cache
def list_fields() -> tuple[str, ...]:
    """Every dotted name of the config."""

    def walk(cls: Any, prefix: str) -> list[str]:
        names = []
        for name, hint in _hints(cls).items():
            full = f"{prefix}{name}"
            names += walk(hint, f"{full}.") if is_dataclass(hint) else [full]
        return names

    return tuple(walk(TrainConfig, ""))


def is_boolean(name: str) -> bool:
    """Whether a dotted name is a field that is true or false."""
    return _split_union(_find_hint(name))[0] is bool


def is_list(name: str) -> bool:
    """Whether a dotted name is a field with any number of texts."""
    return Ellipsis in typing.get_args(_find_hint(name))


def _find_hint(name: str) -> Any:
    """The type of a dotted name; None: it is no field."""
    section: Any = TrainConfig
    for part in name.split("."):
        section = _hints(section).get(part) if is_dataclass(section) else None
    return section


def _check_name(section: Any, name: str, prefix: str, where: str) -> None:
    names = [field.name for field in fields(section)]
    if name in names:
        return
    full = f"{prefix}.{name}" if prefix else name
    asked = where.removeprefix("--") if where.startswith("--") else full
    near = [
        field
        for field in list_fields()
        if field.rpartition(".")[2] == name
        or (field.startswith(prefix) and _initials(field) == name)
    ]
    near = near or difflib.get_close_matches(asked, list_fields(), n=1, cutoff=0.8)
    place = f"[{prefix}]" if prefix else "the top level"
    raise ArgumentError(
        f"there is no option {full}",
        where=where,
        next=f"did you mean {' or '.join(near)}?" if near else f"{place} has {', '.join(names)}",
    )


def _initials(field: str) -> str:
    """`lr` for `optimizer.learning_rate`."""
    return "".join(word[0] for word in field.rpartition(".")[2].split("_"))


def check_choices(config: TrainConfig) -> None:
    """Raise for a field whose value is none of its choices, before any work is done."""
    for name in PATHS_AND_NAMES:
        value = _read_field(config, name)
        if "" in (value if isinstance(value, tuple) else (value,)):
            raise ArgumentError(f"{name} is an empty text", next=f"set {name}, or leave it out")
    for name, choices in CHOICES.items():
        value = _read_field(config, name)
        if value is not None and value not in choices:
            near = difflib.get_close_matches(str(value), choices, n=1)
            raise ArgumentError(
                f"{name} = {value!r} is not known",
                next=f"use one of {', '.join(choices)}"
                + (f"; did you mean {near[0]}?" if near else ""),
            )


def _read_field(config: TrainConfig, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


# ---- values ----------------------------------------------------------------------------------------


def describe_type(hint: Any) -> str:
    """A type in words: `an integer`, `a list of texts`."""
    kinds = _split_union(hint)
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}
    kind = kinds[0]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and arguments[-1] is Ellipsis:
        return "a list of texts"
    if origin is tuple:
        return f"a list of {len(arguments)} numbers"
    return words.get(kind, "a table")


def _split_union(hint: Any) -> list[Any]:
    """The types of a union, without None."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [kind for kind in typing.get_args(hint) if kind is not type(None)]
    return [hint]


def _allows_none(hint: Any) -> bool:
    return type(None) in typing.get_args(hint)


def convert(hint: Any, value: Any, name: str, where: str) -> Any:
    """A value of a file as its field's type."""
    kind = _split_union(hint)[0]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if value is None and _allows_none(hint):
        return None
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if kind in (int, bool, str) and type(value) is kind:
        return value
    if origin is dict and isinstance(value, Mapping):
        return {str(key): _restore_null(one) for key, one in value.items()}
    if origin is tuple and isinstance(value, (list, tuple)):
        is_open = arguments[-1] is Ellipsis
        if is_open or len(value) == len(arguments):
            return tuple(convert(arguments[0], one, name, where) for one in value)
    if origin is tuple and arguments[-1] is Ellipsis and isinstance(value, str):
        return (value,)
    raise ArgumentError(f"{name} = {value!r} is not {describe_type(hint)}", where=where)


def parse_text(hint: Any, text: str, name: str) -> Any:
    """A value of the command line as its field's type."""
    kind = _split_union(hint)[0]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if text.lower() == "none" and _allows_none(hint):
        return None
    try:
        if kind is bool:
            return _parse_bool(text)
        if kind in (int, float):
            return kind(text)
        if kind is str:
            text.encode()  # raises for bytes that are not UTF-8: a file could not hold them
            return text
        if origin is tuple:
            parts = split_list(text)
            if arguments[-1] is not Ellipsis and len(parts) != len(arguments):
                raise ValueError
            return tuple(parse_text(arguments[0], part, name) for part in parts)
        value = parse_json(text)
        if not isinstance(value, dict):
            raise ValueError
        return value
    except UnicodeEncodeError as error:
        raise ArgumentError(f"--{name} {text!r} is not UTF-8", next="rename it") from error
    except ValueError as error:
        raise ArgumentError(
            f"--{name} {text} is not {describe_type(hint)}", next=_example(kind, name)
        ) from error


def split_list(text: str) -> list[str]:
    """The parts of `A,B`, `[A, B]`, `(A, B)` or a JSON list, whose texts may have commas.

    Brackets inside a part belong to it: `notes[0-9].txt`, `docs (copy)`.
    """
    value = parse_json(text)
    if isinstance(value, list):
        return [str(part) for part in value]
    inner = text.strip()
    if inner[:1] + inner[-1:] in ("[]", "()") and not set("[]()") & set(inner[1:-1]):
        inner = inner[1:-1]
    parts = [part.strip().strip("'\"") for part in inner.split(",")]
    return [part for part in parts if part]


def _example(kind: Any, name: str) -> str:
    if typing.get_origin(kind) is dict:
        return f"set its parts: --{name}.NAME VALUE"
    if typing.get_origin(kind) is tuple:
        return f"write --{name} A,B"
    samples = {int: "100", float: "3e-4", bool: "true"}
    return f"write --{name} {samples.get(kind, 'TEXT')}"


def _parse_bool(text: str) -> bool:
    if text.lower() not in TRUE + FALSE:
        raise ValueError(text)
    return text.lower() in TRUE


def parse_json(text: str) -> Any:
    """A JSON value; text that is none is a string."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _restore_null(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _restore_null(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_restore_null(one) for one in value]
    return None if value == NULL else value


# ---- writing ---------------------------------------------------------------------------------------


def to_toml(config: TrainConfig) -> str:
    """The config as TOML, every field that is not None."""
    lines = _write_table(config, "")
    return "\n".join(lines).strip() + "\n"


def _write_table(section: Any, prefix: str) -> list[str]:
    lines: list[str] = []
    later: list[str] = []
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        full = f"{prefix}.{field.name}" if prefix else field.name
        if is_dataclass(value):
            later += ["", f"[{full}]", *_write_table(value, full)]
        elif isinstance(value, dict):
            if value:
                later += ["", f"[{full}]"]
                later += [f"{_key(name)} = {format_value(one)}" for name, one in value.items()]
        elif value is not None:
            lines.append(f"{field.name} = {format_value(value)}")
    return lines + later


def _key(name: str) -> str:
    is_bare = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if is_bare else format_value(name)


def format_value(value: Any) -> str:
    """A value as TOML text."""
    if value is None:
        return json.dumps(NULL)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # characters beyond 16 bits as they are: JSON escapes them by surrogates, TOML has none
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, Mapping):
        inside = ", ".join(
            f"{_key(str(name))} = {format_value(one)}" for name, one in value.items()
        )
        return f"{{{inside}}}"
    return repr(value)
