"""Rows of an all-to-all with their routes: tokens, slots and weights in, one row of bytes each out.

    header   int32 number of invalid slots of the sender, int32 expert of each of the k routes on the
             receiving rank (-1: elsewhere), router weight of each
    row      the token in a `WireFormat`

Everything that a rank needs to compute a token's experts is in one row, so a layer has one all-to-all in
each direction. Shapes depend on row counts only, and nothing waits for the device.

Shapes: T tokens; k experts of a token; W ranks; H rows to send; R received rows; S assignments of rows
to experts; B bytes of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fulgurite.kernels.dispatch.layout import DispatchLayout
from fulgurite.kernels.dispatch.wire_format import WireFormat, align
from fulgurite.quant import QuantTensor

ELSEWHERE = -1  # an expert of another rank, and all experts of a padding row
INT_BYTES = 4


def _header_bytes(top_k: int, weight_bytes: int) -> int:
    return align(INT_BYTES * (1 + top_k) + weight_bytes * top_k)


@dataclass(frozen=True, eq=False)
class SendOrder:
    """Where each token goes among the rows to send, which are ordered by rank.

    row_TW     row of a token for a rank; the last one, which is not sent, if it isn't sent there
    token_H    token of a row; 0 for a padding row
    rank_H     rank of a row; -1 for a padding row
    """

    row_TW: Tensor
    token_H: Tensor
    rank_H: Tensor


def order_rows(layout: DispatchLayout, offsets_W: Tensor, num_rows: int) -> SendOrder:
    """The order of rows of which those for rank w begin at `offsets_W[w]`."""
    tokens, ranks = layout.is_token_in_rank_TW.shape
    device = offsets_W.device
    row_TW = layout.row_index_TW + offsets_W
    row_TW = row_TW.masked_fill(~layout.is_token_in_rank_TW, num_rows).long()
    pair_TW = torch.arange(tokens * ranks, device=device).view(tokens, ranks)
    pair_H = torch.full((num_rows + 1,), -1, device=device).scatter(
        0, row_TW.flatten(), pair_TW.flatten()
    )[:num_rows]
    is_padding_H = pair_H < 0
    token_H = (pair_H // ranks).masked_fill(is_padding_H, 0)
    return SendOrder(row_TW, token_H, (pair_H % ranks).masked_fill(is_padding_H, -1))


def pack_payload(
    x_TD: Tensor,
    slots_Tk: Tensor,
    weights_Tk: Tensor,
    order: SendOrder,
    wire: WireFormat,
    experts_per_rank: int,
    num_invalid: Tensor,
) -> Tensor:
    """The rows to send, [H, B] in uint8."""
    (tokens, top_k), rows = slots_Tk.shape, order.token_H.shape[0]
    header_bytes = _header_bytes(top_k, weights_Tk.itemsize)
    out_HB = x_TD.new_zeros(rows, header_bytes + wire.row_bytes, dtype=torch.uint8)
    header_H = torch.full((rows, 1 + top_k), ELSEWHERE, dtype=torch.int32, device=x_TD.device)
    header_H[:, 0] = num_invalid
    if tokens:
        expert_Hk = slots_Tk[order.token_H] - (order.rank_H * experts_per_rank)[:, None]
        is_local_Hk = (expert_Hk >= 0) & (expert_Hk < experts_per_rank)
        is_local_Hk &= (order.rank_H >= 0)[:, None]
        header_H[:, 1:] = expert_Hk.int().masked_fill(~is_local_Hk, ELSEWHERE)
        end = INT_BYTES * (1 + top_k) + weights_Tk.itemsize * top_k
        weights_Hk = weights_Tk[order.token_H].contiguous()
        out_HB[:, INT_BYTES * (1 + top_k) : end] = weights_Hk.view(torch.uint8)
        out_HB[:, header_bytes:] = wire.pack(x_TD)[order.token_H]
    out_HB[:, : INT_BYTES * (1 + top_k)] = header_H.view(torch.uint8)
    return out_HB


def gather_rows(x_RD: Tensor, row_S: Tensor) -> Tensor:
    """x[row], dense or quantized; a row of zeros if x has no rows."""
    if isinstance(x_RD, QuantTensor):
        # Bytes: few operators know 8-bit floats.
        data = gather_rows(x_RD.packed.view(torch.uint8), row_S).view(x_RD.packed.dtype)
        scales = {name: gather_rows(scale, row_S) for name, scale in x_RD.scales.items()}
        return QuantTensor(x_RD.format, data, scales, x_RD.dtype)
    return x_RD[row_S] if x_RD.shape[0] else x_RD.new_zeros(1, x_RD.shape[1])


@dataclass(frozen=True, eq=False)
class ReceivedRows:
    """Rows of tokens of all ranks. `experts_Rk` is `ELSEWHERE` for routes to other ranks."""

    x_RD: Tensor
    experts_Rk: Tensor
    weights_Rk: Tensor
    num_invalid_R: Tensor


def unpack_payload(
    rows_RB: Tensor,
    top_k: int,
    wire: WireFormat,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    keep_quantized: bool = False,
) -> ReceivedRows:
    """What `pack_payload` of the senders has packed; `keep_quantized`: without dequantizing it."""
    experts_end = INT_BYTES * (1 + top_k)
    weights_end = experts_end + weight_dtype.itemsize * top_k
    header_R = rows_RB[:, :experts_end].contiguous().view(torch.int32)
    weights_Rk = rows_RB[:, experts_end:weights_end].contiguous().view(weight_dtype)
    row_RB = rows_RB[:, _header_bytes(top_k, weight_dtype.itemsize) :]
    x_RD = wire.read_quantized(row_RB, dtype) if keep_quantized else wire.unpack(row_RB, dtype)
    return ReceivedRows(x_RD, header_R[:, 1:], weights_Rk, header_R[:, 0])
