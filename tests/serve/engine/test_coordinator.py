"""Messages between ranks are JSON, and come out as they went in."""

from __future__ import annotations

import json
import math

import numpy as np

from fulgurite.serve.engine.coordinator import (
    PrefixCacheReset,
    RequestAdded,
    RequestEnded,
    StepMessage,
    TokenSampled,
    decode_step,
    encode_step,
)
from fulgurite.serve.engine.request import RequestOptions, SamplingParams


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
    ]
    message = StepMessage(events, 2, 30, is_last=True)
    data = encode_step(message)
    json.loads(data)
    assert decode_step(data) == message


def test_token_ids_of_numpy_are_numbers():
    event = TokenSampled("r", np.int64(5))  # type: ignore[arg-type]
    assert decode_step(encode_step(StepMessage([event], 0, 0))).events == [TokenSampled("r", 5)]
