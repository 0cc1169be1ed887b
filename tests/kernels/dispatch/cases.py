"""Helpers of the dispatch tests."""

from __future__ import annotations

from torch import Tensor

from fulgurite.kernels.dispatch.wire_format import WireFormat


def round_trip(name: str, x_TD: Tensor) -> Tensor:
    """What the receiver of x reads in a wire format."""
    wire = WireFormat(name, x_TD.shape[1])
    return wire.unpack(wire.pack(x_TD), x_TD.dtype)
