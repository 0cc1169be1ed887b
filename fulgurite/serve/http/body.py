"""Request bodies: bytes in, a validated msgspec Struct out, or an `ApiError` that names the field.

A body is refused before it is parsed if it is too large, and before it is used if it is nested too
deeply. Unknown fields are refused, as OpenAI does. A number such as 16.0 is an integer, as JSON Schema
says: clients of languages without integers send it.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, TypeVar

import msgspec
import msgspec.inspect
from starlette.requests import ClientDisconnect, Request

from fulgurite.serve.http.config import Limits
from fulgurite.serve.http.errors import ApiError, invalid

T = TypeVar("T")
PATH = re.compile(r" - at `(?P<path>\$[^`]*)`$")
GOT_FLOAT = re.compile(r"^Expected `[^`]*\bint\b[^`]*`, got `float`")
MAX_EXACT = 1 << 53  # whole floats beyond have no one integer
UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
MISSING_FIELD = re.compile(r"Object missing required field `(?P<name>.*)`")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
ENUM_VALUE = re.compile(r"Invalid enum value (?P<value>.*)", re.DOTALL)
PATH_STEP = re.compile(r"\[[^\]]*\]|[^.\[\]]+")
NO_NUMBER = re.compile(
    rb"\b(NaN|Infinity)\b"
)  # Python's json writes them; JSON has no such numbers
MAX_QUOTED = 200  # characters of a request that an error repeats
# An escaped surrogate without its other half: a string that was cut inside of a character.
HIGH, LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
HALF_PAIR = re.compile(HIGH + rb"(?!" + LOW + rb")|(?<!" + HIGH + rb")" + LOW)
# Possessive: the regex engine keeps nothing for each character, and never goes back.
STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


async def read_body(request: Request, limits: Limits) -> bytes:
    """The body, up to the limit; ApiError 413 beyond it, without reading the rest."""
    check_content_type(request)
    declared = request.headers.get("content-length", "")
    if len(declared) < 20 and declared.isdigit() and int(declared) > limits.body_bytes:
        raise too_large(limits)
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limits.body_bytes:
                raise too_large(limits)
            chunks.append(chunk)
    except ClientDisconnect:
        raise ApiError(400, "the client disconnected before the body was complete") from None
    return b"".join(chunks)


def check_content_type(request: Request) -> None:
    """ApiError 415 unless the body is declared as JSON that is not compressed.

    A web page of another origin can send other types without asking the server first (CORS).
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise ApiError(
            415,
            f"content-encoding {encoding[:100]!r} is not supported; send the body as it is",
            code="unsupported_media_type",
        )
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(
            415,
            f"content-type {media_type[:100]!r} is not supported; send application/json",
            code="unsupported_media_type",
        )


def too_large(limits: Limits) -> ApiError:
    return ApiError(
        413, f"the body is larger than {limits.body_bytes} bytes", code="body_too_large"
    )


def check_depth(body: bytes, limit: int) -> None:
    """ApiError if JSON is nested deeper than the limit. Reads bytes only: it can't recurse."""
    if body.count(b"[") + body.count(b"{") <= limit:
        return
    brackets = STRING.sub(b"", body).translate(None, NO_BRACKETS)
    for _ in range(limit):  # take the innermost pairs away, a level at a time
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if not brackets:
            return
    raise invalid(f"the body is nested deeper than {limit} levels, or its brackets don't match")


@cache
def decoder_of(kind: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def parse_body(body: bytes, kind: type[T], limits: Limits) -> T:
    """The body as a Struct; ApiError 400 that names the field."""
    body = body.removeprefix(BYTE_ORDER_MARK)  # some clients of Windows send it
    if not body:
        raise invalid("the body is empty; send a JSON object", code="invalid_json")
    check_depth(body, limits.json_depth)
    try:
        decoded: T = decoder_of(kind).decode(body)  # type: ignore[arg-type]
        return decoded
    except msgspec.ValidationError as error:
        if GOT_FLOAT.match(str(error)):
            return parse_whole_floats(body, kind)
        raise describe_invalid(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        half, number = HALF_PAIR.search(body), NO_NUMBER.search(STRING.sub(b"", body))
        text = str(error)
        if half is not None:
            text = f"it has {half[0].decode()}, which is half of a character"
        elif number is not None:
            text = f"it has {number[0].decode()}, which is no number of JSON"
        raise invalid(f"the body is not valid JSON: {text}", code="invalid_json") from None


def parse_whole_floats(body: bytes, kind: type[T]) -> T:
    """`parse_body`, with whole floats as integers."""
    try:
        return msgspec.convert(to_integers(msgspec.json.decode(body)), kind)
    except msgspec.ValidationError as error:
        raise describe_invalid(str(error), kind) from None


def to_integers(value: Any) -> Any:
    """A JSON value with its whole floats as integers. Its nesting was checked."""
    if isinstance(value, float) and value.is_integer() and abs(value) < MAX_EXACT:
        return int(value)
    if isinstance(value, list):
        return [to_integers(one) for one in value]
    if isinstance(value, dict):
        return {key: to_integers(one) for key, one in value.items()}
    return value


def describe_invalid(text: str, kind: Any) -> ApiError:
    """OpenAI's words for a message of msgspec: `Expected `int`, got `str` - at `$.seed``.

    `kind`: the type of the body, whose fields know their values.
    """
    found = PATH.search(text)
    path = "" if found is None else found["path"].removeprefix("$").removeprefix(".")
    what = text if found is None else text[: found.start()]
    unknown, missing = UNKNOWN_FIELD.fullmatch(what), MISSING_FIELD.fullmatch(what)
    wrong = ENUM_VALUE.fullmatch(what)
    what = what.replace("`", "'")[:MAX_QUOTED]
    if wrong is not None and (choices := find_choices(kind, path)):
        given = wrong["value"][:MAX_QUOTED]
        names = ", ".join(map(repr, choices))
        what = f"{given} is not one of {names}" if len(choices) > 1 else f"{given} is not {names}"
    if unknown is not None:
        name = join_path(path, unknown["name"][:MAX_QUOTED])
        return invalid(f"Unrecognized request argument supplied: {name}", name, "unknown_parameter")
    if missing is not None:
        name = join_path(path, missing["name"])
        return invalid(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")
    where = f" for '{path}'" if path else ""
    return invalid(f"Invalid value{where}: {what}.", path or None, "invalid_type")


def find_choices(kind: Any, path: str) -> list[str]:
    """The values that the field at this path may have; empty if they are not named."""
    types: list[Any] = [msgspec.inspect.type_info(kind)]
    for step in PATH_STEP.findall(path):
        found = []
        for one in expand_unions(types):
            match one:
                case msgspec.inspect.StructType(fields=fields):
                    found += [field.type for field in fields if field.encode_name == step]
                case msgspec.inspect.ListType(item_type=inner):
                    found.append(inner)
                case msgspec.inspect.DictType(value_type=inner):
                    found.append(inner)
        types = found
    literals = [one for one in expand_unions(types) if isinstance(one, msgspec.inspect.LiteralType)]
    return [value for one in literals for value in one.values if isinstance(value, str)]


def expand_unions(types: list[Any]) -> list[Any]:
    return [
        inner
        for one in types
        for inner in (one.types if isinstance(one, msgspec.inspect.UnionType) else (one,))
    ]


def join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def encode_json(value: Any) -> bytes:
    return msgspec.json.encode(value)
