"""The dispatch layout: the expert slots of each token in, the ranks and rows it is sent to out.

A token is sent once to each rank that has experts of it, however many, and one result comes back from
each.

Shapes: T tokens; k experts of a token; W ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class DispatchLayout(NamedTuple):
    """Which rows are sent to which ranks. All shapes are static.

    rank_Tk               rank of each expert; W for an invalid slot
    is_token_in_rank_TW   whether a token is sent to a rank
    row_index_TW          row of the token among those sent to the rank
    """

    rank_Tk: Tensor
    is_token_in_rank_TW: Tensor
    row_index_TW: Tensor


def get_dispatch_layout(slots_Tk: Tensor, num_slots: int, num_ranks: int) -> DispatchLayout:
    """The layout of tokens by expert slot; rank r has the slots from r * num_slots / num_ranks on."""
    is_invalid_Tk = (slots_Tk < 0) | (slots_Tk >= num_slots)
    rank_Tk = (slots_Tk // (num_slots // num_ranks)).masked_fill(is_invalid_Tk, num_ranks).long()
    tokens, device = slots_Tk.shape[0], slots_Tk.device
    none = torch.zeros(tokens, num_ranks + 1, dtype=torch.bool, device=device)
    is_token_in_rank_TW = none.scatter(1, rank_Tk, True)[:, :num_ranks].contiguous()
    ones_TW = is_token_in_rank_TW.int()
    row_index_TW = ones_TW.cumsum(0, dtype=torch.int32) - ones_TW
    return DispatchLayout(rank_Tk, is_token_in_rank_TW, row_index_TW)
