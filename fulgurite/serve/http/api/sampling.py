"""Fields that the OpenAI endpoints share: a body's sampling fields in, `SamplingParams` out.

Fields of OpenAI come first, then those of vLLM and others that clients send as extras. Fields of OpenAI
without a meaning here are accepted if ignoring them changes no answer.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from fulgurite.errors import ArgumentError
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.http.config import Limits
from fulgurite.serve.http.errors import ApiError, invalid

MIN_PRIORITY, MAX_PRIORITY = -(1 << 31), (1 << 31) - 1
# JSON numbers may be any; SamplingParams says which are allowed, in its own words.
MAX_TOP_K = (1 << 31) - 1
MIN_TOP_P = 1e-6  # for 0, which OpenAI allows: the most likely token
REQUEST_ID_PATTERN = r"^[A-Za-z0-9_.:-]{1,128}$"
Bias = Annotated[float, Meta(ge=-100, le=100)]


class StructuredOutputs(Struct, forbid_unknown_fields=True, kw_only=True):
    """vLLM's way to constrain a reply: exactly one of these."""

    json: dict[str, Any] | str | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None


class JsonSchemaFormat(Struct, kw_only=True):
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    """`text`, `json_object`, or `json_schema` with a schema; `grammar` with a Lark grammar.

    `structural_tag` with `structures` and `triggers`, or with `format` (structured/structural_tag.py).
    """

    type: Literal["text", "json_object", "json_schema", "structural_tag", "grammar", "regex"]
    json_schema: JsonSchemaFormat | None = None
    grammar: str | None = None
    regex: str | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class ExtraFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of vLLM and others that every endpoint that generates takes."""

    seed: int | None = None
    logit_bias: dict[str, Bias] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: str | list[str] | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Meta(ge=MIN_PRIORITY, le=MAX_PRIORITY)] | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    deadline: Annotated[float, Meta(gt=0)] | None = None  # seconds from the arrival of the request
    structured_outputs: StructuredOutputs | None = None

    def copy_extras(self) -> dict[str, Any]:
        """These fields with their values, for the `SamplingFields` of another body."""
        return {name: getattr(self, name) for name in ExtraFields.__struct_fields__}


class SamplingFields(ExtraFields, kw_only=True, forbid_unknown_fields=True):
    """Sampling, limits and scheduling of a request."""

    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    # extras
    return_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    request_id: Annotated[str, Meta(pattern=REQUEST_ID_PATTERN)] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def check_stream(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise invalid("'stream_options' needs 'stream': true", "stream_options")

    def count(self, limits: Limits) -> int:
        """`n`, checked."""
        n = 1 if self.n is None else self.n
        if not 1 <= n <= limits.choices:
            raise invalid(f"'n' must be 1 to {limits.choices}, not {n}", "n")
        return n

    def check_stops(self, limits: Limits) -> list[str]:
        stops = [self.stop] if isinstance(self.stop, str) else (self.stop or [])
        if len(stops) > limits.stops:
            raise invalid(f"'stop' has {len(stops)} strings; the limit is {limits.stops}", "stop")
        if any(not 0 < len(one) <= limits.stop_characters for one in stops):
            raise invalid(f"stop strings have 1 to {limits.stop_characters} characters", "stop")
        return stops

    def count_prompt_logprobs(self, limits: Limits) -> int | None:
        """Alternatives a token of the prompt; None: it has no log-probabilities."""
        count = self.prompt_logprobs
        if count is not None and not 0 <= count <= limits.logprobs:
            raise invalid(f"'prompt_logprobs' must be 0 to {limits.logprobs}", "prompt_logprobs")
        if count is not None and self.stream:
            raise invalid("'prompt_logprobs' is not supported with 'stream'", "prompt_logprobs")
        return count

    def read_bias(self) -> dict[int, float]:
        bias = self.logit_bias or {}
        bad = next((key for key in bias if not (key.isascii() and key.isdigit())), None)
        if bad is not None:
            raise invalid(f"'logit_bias' has the key {bad!r}; keys are token ids", "logit_bias")
        return {int(key): value for key, value in bias.items()}

    def grammar_fields(self, response_format: ResponseFormat | None) -> dict[str, Any]:
        """The fields of `SamplingParams` that constrain the reply; at most one."""
        found = [
            *read_response_format(response_format),
            *read_structured_outputs(self.structured_outputs),
            *(
                (name, value)
                for name, value in (
                    ("json_schema", self.guided_json),
                    ("regex", self.guided_regex),
                    ("choices", self.guided_choice),
                    ("grammar", self.guided_grammar),
                )
                if value is not None
            ),
        ]
        return choose_constraint(found)

    def build_params(
        self,
        limits: Limits,
        max_tokens: int,
        logprobs: int | None,
        constraint: dict[str, Any],
        defaults: Mapping[str, float],
    ) -> SamplingParams:
        """The sampling params; ApiError 400 for values that are not allowed.

        `defaults`: of the model, for fields that the request does not have.
        """
        values: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": MIN_TOP_P if self.top_p == 0 else self.top_p,
            "top_k": read_top_k(self.top_k),
            "min_p": self.min_p,
            "seed": None if self.seed is None else self.seed & ((1 << 64) - 1),
            "stop": self.check_stops(limits),
            "logit_bias": self.read_bias(),
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids,
            "bad_words": self.bad_words,
            "max_tokens": max_tokens,
            "logprobs": logprobs,
            "prompt_logprobs": self.count_prompt_logprobs(limits),
            **constraint,
        }
        given = {name: value for name, value in values.items() if value is not None}
        try:
            return SamplingParams(**{"temperature": 1.0, **defaults, **given})
        except ArgumentError as error:
            text = error.one_line()
            raise invalid(text, find_param(text)) from None


def find_param(text: str) -> str | None:
    """The field that an error of `SamplingParams` begins with."""
    names = (one.name for one in dataclasses.fields(SamplingParams))
    return next((name for name in names if re.match(rf"{name}\b", text)), None)


def read_top_k(top_k: int | None) -> int | None:
    """-1 is vLLM's "all"; what is more than any vocabulary means the same, and fits into a message."""
    return 0 if top_k is not None and (top_k == -1 or top_k > MAX_TOP_K) else top_k


def read_response_format(format: ResponseFormat | None) -> list[tuple[str, Any]]:
    if format is None or format.type == "text":
        return []
    if format.type == "json_object":
        return [("json_object", True)]
    if format.type == "json_schema":
        if format.json_schema is None or format.json_schema.schema is None:
            raise invalid("response_format needs 'json_schema.schema'", "response_format")
        return [("json_schema", format.json_schema.schema)]
    if format.type == "structural_tag":
        return [("structural_tag", read_structural_tag(format))]
    value = format.grammar if format.type == "grammar" else format.regex
    if value is None:
        raise invalid(f"response_format needs '{format.type}'", "response_format")
    return [(format.type, value)]


def read_structural_tag(format: ResponseFormat) -> dict[str, Any]:
    """The structural tag of a response format; what it has is checked when it is compiled."""
    parts = {name: getattr(format, name) for name in ("structures", "triggers", "format")}
    return {name: value for name, value in parts.items() if value is not None}


def choose_constraint(found: list[tuple[str, Any]]) -> dict[str, Any]:
    """The one constraint of a reply; ApiError 400 for several."""
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise invalid(f"a reply can have one constraint, not {names}", "response_format")
    return dict(found)


def read_structured_outputs(given: StructuredOutputs | None) -> list[tuple[str, Any]]:
    if given is None:
        return []
    fields = (
        ("json_schema", given.json),
        ("json_object", given.json_object or None),
        ("regex", given.regex),
        ("choices", given.choice),
        ("grammar", given.grammar),
        ("structural_tag", given.structural_tag),
    )
    found = [(name, value) for name, value in fields if value is not None]
    if not found:
        raise invalid(
            "'structured_outputs' has no constraint; give it json, json_object, regex, choice, "
            "grammar or structural_tag",
            "structured_outputs",
        )
    return found


def refuse_unsupported(body: Struct, names: dict[str, tuple[Any, ...]]) -> None:
    """ApiError for fields whose values would change the answer in a way that is not supported."""
    for name, accepted in names.items():
        value = getattr(body, name)
        if value is not None and value not in accepted:
            raise ApiError(
                400, f"'{name}' is not supported", param=name, code="unsupported_parameter"
            )
