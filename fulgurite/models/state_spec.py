"""`StateSpec`: the state that one layer without attention keeps for a sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StateSpec:
    """What a cache keeps for one layer with a state of fixed size: one slot a sequence.

    conv_shape        the last inputs of a causal convolution, [taps - 1, channels], model dtype
    recurrent_shape   the matrices of linear attention, [heads, key size, value size], float32; None:
                      the layer has a convolution only
    is_local          False: another pipeline stage has the layer, and its states
    """

    layer_index: int
    conv_shape: tuple[int, int]
    recurrent_shape: tuple[int, int, int] | None = None
    is_local: bool = True

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one slot in a model of this dtype."""
        if not self.is_local:
            return 0
        recurrent = 0 if self.recurrent_shape is None else math.prod(self.recurrent_shape)
        return math.prod(self.conv_shape) * dtype.itemsize + recurrent * torch.float32.itemsize
