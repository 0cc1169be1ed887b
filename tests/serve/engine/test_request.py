"""Sampling params are checked where they are made."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fulgurite.errors import ArgumentError
from fulgurite.serve.engine.request import SamplingParams


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_p": 0}, "top_p=0 must be more than 0"),
        ({"top_p": 2}, "top_p=2"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_k": 2.5}, "must be an integer"),
        ({"min_p": 1.1}, "min_p=1.1"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": True}, "max_tokens=True"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**64}, "seed="),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"frequency_penalty": 3}, "frequency_penalty=3"),
        ({"presence_penalty": -2.5}, "presence_penalty"),
        ({"logprobs": -1}, "logprobs=-1"),
        ({"stop": ""}, "non-empty strings"),
        ({"stop": ["a", ""]}, "non-empty strings"),
        ({"logit_bias": {3: float("nan")}}, "token 3"),
        ({"logit_bias": {3: float("inf")}}, "token 3"),
        ({"logit_bias": {3: "much"}}, "token 3"),
        ({"logit_bias": {"3": 1.0}}, "logit_bias contains '3'"),
        ({"logit_bias": [3]}, "must be a dict"),
        ({"temperature": None}, "temperature=None"),
        ({"temperature": "1"}, "temperature='1'"),
        ({"temperature": True}, "temperature=True"),
        ({"temperature": 1e31}, "temperature=1e[+]31"),
        ({"top_p": [0.5]}, "top_p=.0.5."),
        ({"stop": None}, "stop=None must be a list of strings"),
        ({"stop": b"x"}, "stop=b'x'"),
        ({"stop": [1]}, "must contain non-empty strings"),
        ({"stop_token_ids": 5}, "stop_token_ids=5 must be a list"),
        ({"stop_token_ids": "12"}, "stop_token_ids='12'"),
        ({"banned_token_ids": [2.0]}, "banned_token_ids contains 2.0"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids contains 'a'"),
        ({"min_tokens": -1}, "min_tokens=-1"),
        ({"min_tokens": 9, "max_tokens": 8}, "from 0 to max_tokens=8"),
    ],
)
def test_invalid_values_raise(values: dict, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        SamplingParams(**values)


def test_edges_are_allowed() -> None:
    SamplingParams(top_p=1, min_p=1, top_k=0, temperature=0, seed=2**64 - 1, logprobs=0)
    assert SamplingParams(stop="x").stop == ("x",)
    assert SamplingParams(stop_token_ids={np.int64(3)}).stop_token_ids == (3,)
    SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), max_tokens=10**30)


def test_settings_are_values() -> None:
    bias = {3: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[3] = 2.0
    assert params.logit_bias == {3: 1.0}


def test_token_ids_are_checked_against_the_model() -> None:
    for params in (
        SamplingParams(banned_token_ids=(10,)),
        SamplingParams(logit_bias={-1: 0.5}),
        SamplingParams(stop_token_ids=[10]),
        SamplingParams(allowed_token_ids=[3, 11]),
    ):
        with pytest.raises(ArgumentError, match="not in the vocabulary"):
            params.check_token_ids(10)
    with pytest.raises(ArgumentError, match="every token is banned"):
        SamplingParams(banned_token_ids=range(3)).check_token_ids(3)
    with pytest.raises(ArgumentError, match="every token is banned"):
        SamplingParams(banned_token_ids=[0, 1], logit_bias={2: -math.inf}).check_token_ids(3)
    with pytest.raises(ArgumentError, match="every token is banned"):
        SamplingParams(banned_token_ids=[0, 1], allowed_token_ids=[1]).check_token_ids(3)
