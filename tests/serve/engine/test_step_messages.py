"""Messages between ranks are JSON, and come out as they went in."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from fulgurite.serve.engine.request import RequestOptions, SamplingParams, TokenLogprob
from fulgurite.serve.engine.sampler import SamplingVariant
from fulgurite.serve.engine.step_messages import (
    NO_LOGPROBS,
    GrammarStarted,
    PrefixCacheReset,
    RemoteToken,
    RequestAdded,
    RequestEnded,
    StepMessage,
    StepsDropped,
    TokenSampled,
    count_words,
    decode_step,
    decode_token,
    encode_step,
    encode_token,
)


def test_messages_round_trip():
    params = SamplingParams(
        temperature=0.5, logit_bias={7: 2.5, 9: -math.inf}, stop_token_ids=[3], seed=2**64 - 1
    )
    options = RequestOptions(priority=-3, cache_salt='a "salt"', detokenize=False)
    stops = frozenset({5, 3})
    events = [
        RequestAdded("r", 4, 1, [1, 2], params, 2**63, stops, options),
        TokenSampled("r", 17),
        RequestEnded("r", True),
        PrefixCacheReset(),
        StepsDropped(),
    ]
    events.append(GrammarStarted("regex", '[a-z]"+'))
    variant = SamplingVariant(True, False, True)
    message = StepMessage(
        events, 2, 30, variant, can_replay=True, can_launch=False, num_logprobs=4, is_last=True
    )
    data = encode_step(message)
    json.loads(data)
    assert decode_step(data) == message


def test_token_ids_of_numpy_are_numbers():
    event = TokenSampled("r", np.int64(5))  # type: ignore[arg-type]
    assert decode_step(encode_step(StepMessage([event], 0, 0))).events == [TokenSampled("r", 5)]


@pytest.mark.parametrize(
    ("logprob", "num_logprobs"),
    [
        (None, NO_LOGPROBS),
        (TokenLogprob(5, -0.1), 0),
        (TokenLogprob(5, -math.inf, ((5, -0.1), (0, -2.0))), 2),
        (TokenLogprob(5, -1e-30, ((5, -1e-30),)), 3),
    ],
    ids=str,
)
def test_tokens_round_trip_as_integers(logprob, num_logprobs):
    words = encode_token(5, logprob, num_logprobs)
    assert len(words) == count_words(num_logprobs)
    assert decode_token("r", words) == RemoteToken("r", 5, logprob)


def test_token_without_logprobs_in_a_step_with_them():
    words = encode_token(5, None, 2)
    assert len(words) == count_words(2)
    found = decode_token("r", words)
    assert found.token == 5 and found.logprob is not None and math.isnan(found.logprob.logprob)
