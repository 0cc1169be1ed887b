"""RoPE by layer type: one rotary embedding for full attention, one for sliding windows.

In: the fields of config.json. Out: layer type -> `RopeConfig`. Files of transformers 5 store
`rope_parameters` by layer type. Older files store one `rope_theta` and one `rope_scaling`; the
scaling belongs to layers with full attention only.
"""

from __future__ import annotations

from fulgurite.models.config import ConfigFields, RopeConfig
from fulgurite.models.config_readers import read_rope

FULL, SLIDING = "full_attention", "sliding_attention"


def read_ropes_by_layer_type(
    fields: ConfigFields, head_dim: int, full_theta: float, sliding_theta: float | None
) -> dict[str, RopeConfig]:
    """The rotary embeddings of both layer types.

    full_theta      the family's `rope_theta`
    sliding_theta   the `rope_theta` of layers with a sliding window; None: that of the others
    """
    by_type = fields.get_section("rope_parameters")
    if FULL in by_type or SLIDING in by_type:
        thetas = {FULL: full_theta, SLIDING: sliding_theta or full_theta}
        return {
            kind: read_rope(fields, head_dim, theta=theta, layer_type=kind)
            for kind, theta in thetas.items()
        }
    full = read_rope(fields, head_dim, theta=full_theta)
    scaled = ("rope_parameters", "rope_scaling", "rope_theta")
    unscaled = {name: value for name, value in fields.values.items() if name not in scaled}
    theta = sliding_theta or full.theta
    return {
        FULL: full,
        SLIDING: read_rope(ConfigFields(unscaled, fields.where), head_dim, theta=theta),
    }
