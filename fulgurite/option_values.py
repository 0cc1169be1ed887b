"""Values and defaults of options that command lines list: names in, nothing else.

It imports nothing, so that `fulgurite serve` can read its options without torch. The modules that
implement an option import its values from here.
"""

from __future__ import annotations

AUTO = "auto"

# Ranks.
DEFAULT_TIMEOUT = 300.0  # seconds that ranks wait for each other
FAILURE_MODES = ("fail", "retry")  # what happens to running requests when a rank is lost

# Experts on other ranks.
TRANSPORT_NAMES = ("symmetric", "hierarchical", "all_to_all")
WIRES = (AUTO, "bf16", "f16", "f32", "fp8", "nvfp4")
MICRO_BATCHES = (1, 2)

# Engines.
HEARTBEAT_SECONDS = 0.5  # between reports of an idle engine
KV_CACHE_DTYPE_NAMES = ("float32", "bfloat16", "float16", "fp8")
# Tokens of a step beside next tokens of replies, by device type: readers of a server wait for each
# token. None: `max_batched_tokens`.
SERVED_MIXED_TOKENS: dict[str, int | None] = {"cpu": 24, "cuda": None}
