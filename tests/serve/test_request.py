"""Sampling params are checked where they are made."""

from __future__ import annotations

import pytest

from fulgurite.errors import ArgumentError
from fulgurite.serve.request import SamplingParams


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_p": 0}, "top_p=0 must be more than 0"),
        ({"top_p": 2}, "top_p=2"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_k": 2.5}, "whole number"),
        ({"min_p": 1.1}, "min_p=1.1"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": True}, "max_tokens=True"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**64}, "seed="),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"frequency_penalty": 3}, "frequency_penalty=3"),
        ({"presence_penalty": -2.5}, "presence_penalty"),
        ({"logprobs": -1}, "logprobs=-1"),
        ({"stop": ""}, "not empty"),
        ({"stop": ["a", ""]}, "not empty"),
        ({"logit_bias": {3: float("nan")}}, "token 3"),
    ],
)
def test_wrong_values_are_named(values: dict, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        SamplingParams(**values)


def test_edges_are_allowed() -> None:
    SamplingParams(top_p=1, min_p=1, top_k=0, temperature=0, seed=2**64 - 1, logprobs=0)
    assert SamplingParams(stop="x").stop == ("x",)


def test_token_ids_are_checked_against_the_model() -> None:
    for params in (
        SamplingParams(banned=(10,)),
        SamplingParams(logit_bias={-1: 0.5}),
        SamplingParams(stop_token_ids=[10]),
    ):
        with pytest.raises(ArgumentError, match="not in the vocabulary"):
            params.check_tokens(10)
    with pytest.raises(ArgumentError, match="every token is banned"):
        SamplingParams(banned=range(3)).check_tokens(3)
