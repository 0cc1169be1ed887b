"""The scales of a quantized KV cache: tensor names in, the names of both scales of each attention out.

self_attn.k_proj.k_scale  self_attn.v_proj.v_scale     ModelOpt
self_attn.k_scale         self_attn.v_scale            compressed-tensors, FP8
self_attn.attn.k_scale    self_attn.attn.v_scale       vLLM's own names
self_attn.kv_scale                                     one scale for both
self_attn.k_proj.output_scale  self_attn.v_proj.output_scale   older compressed-tensors
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

# The name of a scale: the attention module, then one of these. The first that matches counts.
PATTERNS = {
    part: tuple(
        re.compile(pattern.replace("X", part))
        for pattern in (
            r"(.+)\.X_proj\.X_scale",
            r"(.+\.(?:self_attn|attention))\.attn\.X_scale",
            r"(.+)\.X_scale",
            r"(.+)\.kv_scale",
            r"(.+)\.X_proj\.output_scale",
        )
    )
    for part in ("k", "v")
}
# Scales that only a quantized attention kernel needs, and offsets of other cache formats.
UNUSED = re.compile(r".*\.(q_scale|prob_scale|q_proj\.q_scale|k_proj\.k_bias|v_proj\.v_bias)")


class KVScales(NamedTuple):
    """The names of the scales of keys and values; one name for both in some checkpoints."""

    k: str
    v: str


def find_kv_scales(names: Iterable[str]) -> dict[str, KVScales]:
    """The KV scales of a checkpoint, by the name of their attention module."""
    found: dict[str, dict[str, str]] = {"k": {}, "v": {}}
    for name in names:
        for part, patterns in PATTERNS.items():
            match = next((m for p in patterns if (m := p.fullmatch(name)) is not None), None)
            if match is not None:
                found[part].setdefault(match[1], name)
    modules = sorted(found["k"].keys() & found["v"].keys())
    return {module: KVScales(found["k"][module], found["v"][module]) for module in modules}


def is_unused_attention_scale(name: str) -> bool:
    """Whether a tensor is a scale of attention that a KV cache does not need."""
    return UNUSED.fullmatch(name) is not None
