"""Values of options that need no torch are those of the modules that implement them."""

from __future__ import annotations

from fulgurite import option_values
from fulgurite.parallel.experts.transport import TRANSPORTS
from fulgurite.plan.kv_cache import KV_CACHE_DTYPES
from fulgurite.plan.limits import MAX_SEQUENCES


def test_names_are_those_of_the_registries():
    assert set(option_values.TRANSPORT_NAMES) == set(TRANSPORTS)
    assert set(option_values.KV_CACHE_DTYPE_NAMES) == set(KV_CACHE_DTYPES)
    assert set(option_values.SERVED_MIXED_TOKENS) == set(MAX_SEQUENCES)
