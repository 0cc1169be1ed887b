"""Numbers out of range are errors before a run begins."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from fulgurite.errors import ArgumentError
from fulgurite.train.config import TrainConfig
from fulgurite.train.config_file import list_fields
from fulgurite.train.config_limits import LIMITS, check_limits
from fulgurite.train.sizes import resolve_sizes

CHECKED_LATER = ("parallel.",)  # degrees, by the number of ranks


def set_field(name: str, value: Any) -> TrainConfig:
    config, (section, _, field) = TrainConfig(), name.rpartition(".")
    if not section:
        return replace(config, **{field: value})
    return replace(config, **{section: replace(getattr(config, section), **{field: value})})


def get_field(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


def test_defaults_are_within_their_limits() -> None:
    check_limits(TrainConfig())
    check_limits(resolve_sizes(TrainConfig(device="cpu")))


def test_every_number_has_limits() -> None:
    resolved = resolve_sizes(TrainConfig(device="cpu"))
    numbers = [
        name
        for name in list_fields()
        if isinstance(get_field(resolved, name), int | float)
        and not isinstance(get_field(resolved, name), bool)
    ]
    assert [n for n in numbers if n not in LIMITS and not n.startswith(CHECKED_LATER)] == []


@pytest.mark.parametrize("name", LIMITS)
def test_numbers_beyond_a_limit_are_errors(name: str) -> None:
    limit = LIMITS[name]
    wrong = [limit.least - 1, math.nan, math.inf]
    wrong += [] if limit.has_least else [limit.least]
    wrong += [] if limit.has_most or limit.most == math.inf else [limit.most]
    for value in wrong:
        given = (0.5, value) if name == "optimizer.betas" else value
        with pytest.raises(ArgumentError, match=f"{re.escape(name)}="):
            resolve_sizes(set_field(name, given))
