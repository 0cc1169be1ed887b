"""How tokens get to the ranks of their experts and back: the interface, and the collective transport.

    sent    = transport.send(x_TD, slots_Tk, P, weights_Tk)    tokens are on their way
    arrived = transport.receive(sent)                          rows for the experts of this rank
    y_SD    = experts(arrived.x_SD, ...)                       each row by one expert, weighted
    out_TD  = transport.combine(y_SD, arrived)

A slot is a place for an expert: rank r has the slots from r P/W on. A token travels once to each rank that
has experts of it, packed once by the sender (`kernels.dispatch.Wire`); there it is handed to each of them,
and the sum of their results is the one row that comes back. Gradients travel in full precision, the same ways
backwards; rounding is passed straight through. All sums are taken in a fixed order.

`Collective` uses all-to-all and works on every backend. It first gathers everybody's counts, so each rank
knows what all others are about to do: a rank whose capacity would be passed, or that sends to a slot
which doesn't exist, is an error on all of them, before any row has moved. It reads those counts on the
host, once a layer.

Shapes: T tokens of this rank; k experts of a token; P slots of all ranks; W ranks; R rows that arrive;
S visits of them to experts; H rows that go out, and come home.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from fulgurite.errors import ArgumentError, CapacityError
from fulgurite.kernels.dispatch.wire_format import WIRES, Visits, Wire, visits
from fulgurite.kernels.moe.ops import combine_parts
from fulgurite.parallel.collectives import exchange, exchange_rows, gather
from fulgurite.parallel.mesh import Axis

SAME = "same"  # on the wire: the dtype that tokens have anyway
Counts = tuple[tuple[int, ...], tuple[int, ...]]  # to each rank, and from each
DTYPE_WIRES = {dtype: name for name, dtype in WIRES.items() if isinstance(dtype, torch.dtype)}


@dataclass(frozen=True, eq=False)
class Arrived:
    """Visits to this rank's experts. Numbers past the last expert mark visits of nobody."""

    x_SD: Tensor
    experts_S: Tensor
    weights_S: Tensor
    ticket: Any  # what the transport needs to find the way back


class Transport(Protocol):
    """Tokens to their experts and back; every rank of the axis makes the same calls in one order."""

    axis: Axis

    def send(self, x_TD: Tensor, slots_Tk: Tensor, slots: int, weights_Tk: Tensor) -> Any:
        """Send each token, and the weights of its visits, to its slots (of `slots` in all)."""
        ...

    def receive(self, sent: Any) -> Arrived:
        """What has come for this rank's experts. Work between `send` and this one may overlap."""
        ...

    def combine(self, y_SD: Tensor, arrived: Arrived) -> Tensor:
        """Sum the results of each row, send them home, and sum them there: [T, D]."""
        ...


class Places(NamedTuple):
    """Which rows belong to one sum: `places` has their numbers; where there are fewer, that of the last
    row, which is zeros. `of_row` says of each row, the last one too, to which sum it belongs."""

    places: Tensor
    of_row: Tensor


@dataclass(frozen=True, eq=False)
class Ticket:
    """The way of the rows: how many went to each rank, how many came from each, and what is summed."""

    send: tuple[int, ...]
    receive: tuple[int, ...]
    visits: Places  # of a row that arrived
    homecomings: Places  # of a token of ours


class Collective:
    """All-to-all on any backend. `capacity`: the most rows a rank takes in one call; None: any."""

    def __init__(
        self, axis: Axis, wire: str = SAME, result: str = SAME, capacity: int | None = None
    ) -> None:
        for name in (wire, result):
            if name != SAME and name not in WIRES:
                raise ArgumentError(
                    f"tokens can't travel as {name!r}", next=f"one of {SAME}, {', '.join(WIRES)}"
                )
        self.axis, self.wire, self.result, self.capacity = axis, wire, result, capacity

    def receive(self, sent: Arrived) -> Arrived:
        return sent  # nothing is under way: `send` has waited for all

    def send(self, x_TD: Tensor, slots_Tk: Tensor, slots: int, weights_Tk: Tensor) -> Arrived:
        ways = visits(slots_Tk, slots, self.axis.size)
        rows_WW, pairs_WW = self._counts(ways)
        here = self.axis.index
        send, receive = tuple(rows_WW[here].tolist()), tuple(rows_WW[:, here].tolist())
        pairs = tuple(pairs_WW[here].tolist()), tuple(pairs_WW[:, here].tolist())
        token_H = ways.visited_TW.t().nonzero()[:, 1]
        homecomings = _homecomings(ways, token_H, slots_Tk.shape[1])
        wire = Wire(_named(self.wire, x_TD.dtype), x_TD.shape[1])
        x_RD = _Dispatch.apply(x_TD, token_H, homecomings, wire, self.axis, send, receive)
        row_S, experts_S, weights_S = self._send_visits(ways, slots_Tk, slots, weights_Tk, pairs)
        row_S = row_S + _starts(receive, pairs[1]).to(x_TD.device)
        ticket = Ticket(send, receive, _segments(row_S, x_RD.shape[0]), homecomings)
        # One more visit, of nobody: what experts make of it is the row of zeros that sums need.
        experts_S = torch.cat((experts_S, experts_S.new_full((1,), slots)))
        weights_S = torch.cat((weights_S, weights_S.new_zeros(1)))
        return Arrived(_Copy.apply(x_RD, ticket.visits), experts_S, weights_S, ticket)

    def _send_visits(
        self, ways: Visits, slots_Tk: Tensor, slots: int, weights_Tk: Tensor, pairs: Counts
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of each visit that arrives: which of its sender's rows it is, its expert, and its weight."""
        pair_S = ways.rank_Tk.flatten().argsort(stable=True)  # by rank, then token
        row_S = ways.row_TW.gather(1, ways.rank_Tk).flatten()[pair_S]
        expert_S = slots_Tk.flatten()[pair_S] % (slots // self.axis.size)
        sent_S2 = torch.stack((row_S, expert_S.int()), dim=1)
        visits_S2 = exchange_rows(sent_S2, self.axis, *pairs, "dispatch of visits")
        sent_S = weights_Tk.flatten()[pair_S]
        weights_S = exchange(sent_S, self.axis, *pairs, "dispatch of weights")
        return visits_S2[:, 0], visits_S2[:, 1], weights_S

    def combine(self, y_SD: Tensor, arrived: Arrived) -> Tensor:
        ticket: Ticket = arrived.ticket
        y_RD = _sum(y_SD, ticket.visits)
        wire = Wire(_named(self.result, y_RD.dtype), y_RD.shape[1])
        home_HD = _Return.apply(y_RD, wire, self.axis, ticket.receive, ticket.send)
        return _sum(home_HD, ticket.homecomings)

    def _counts(self, ways: Visits) -> tuple[Tensor, Tensor]:
        """How many rows and visits each rank sends to each, [W, W] on the host, and all of it allowed."""
        size = self.axis.size
        rank_S = ways.rank_Tk.flatten()
        pairs_W = rank_S.new_zeros(size + 1).scatter_add(0, rank_S, torch.ones_like(rank_S))
        mine = torch.cat((ways.visited_TW.sum(0), pairs_W))
        everyone = gather(mine[None], self.axis, "counts").cpu()
        rows_WW, pairs_WW, lost_W = everyone.split((size, size, 1), dim=1)
        if lost_W.any():
            rank = int(lost_W.argmax())
            raise ArgumentError(
                f"rank {rank} of the expert axis sent {int(lost_W[rank])} tokens to experts that "
                f"don't exist",
                next="check the router and the placement table: NaN logits choose anything",
            )
        arriving_W = rows_WW.sum(0)
        if self.capacity is not None and int(arriving_W.max()) > self.capacity:
            raise _full(arriving_W, self.capacity)
        return rows_WW, pairs_WW


class _Dispatch(Function):
    """Tokens, packed once, to the ranks they visit."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        token_H: Tensor,
        homecomings: Places,
        wire: Wire,
        axis: Axis,
        send: tuple[int, ...],
        receive: tuple[int, ...],
    ) -> Tensor:
        ctx.homecomings, ctx.axis, ctx.ways = homecomings, axis, (receive, send)
        rows_HB = wire.pack(x_TD)[token_H]
        return wire.unpack(exchange_rows(rows_HB, axis, send, receive, "dispatch"), x_TD.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        send, receive = ctx.ways
        what = "dispatch of gradients"
        back_HD = exchange_rows(gradients[0], ctx.axis, send, receive, what, spare=1)
        return _sum(back_HD, ctx.homecomings), None, None, None, None, None, None


class _Return(Function):
    """Results to the ranks that sent the tokens, and a row of zeros."""

    @staticmethod
    def forward(
        ctx: Any,
        y_RD: Tensor,
        wire: Wire,
        axis: Axis,
        send: tuple[int, ...],
        receive: tuple[int, ...],
    ) -> Tensor:
        ctx.axis, ctx.ways = axis, (receive, send)
        rows_HB = exchange_rows(wire.pack(y_RD), axis, send, receive, "combine", spare=1)
        return wire.unpack(rows_HB, y_RD.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        send, receive = ctx.ways
        back_RD = exchange_rows(gradients[0][:-1], ctx.axis, send, receive, "combine of gradients")
        return back_RD, None, None, None, None


class _Copy(Function):
    """A row for each of its visits, and one of nobody; the gradient sums them in order."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, visits: Places) -> Tensor:
        ctx.visits = visits
        return x_RD[visits.of_row] if x_RD.shape[0] else x_RD.new_zeros(1, x_RD.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        rows = gradients[0].clone()
        rows[-1] = 0
        return _sum(rows, ctx.visits), None


def _sum(rows: Tensor, sums: Places) -> Tensor:
    """Each place's rows, summed in order; the last row is zeros."""
    if sums.places.shape[0] == 0:
        return rows[:0]
    out: Tensor = combine_parts(rows, sums.places, sums.of_row, sums.of_row, None)
    return out


def _homecomings(ways: Visits, token_H: Tensor, per_token: int) -> Places:
    """The rows of each token, by rank; rows lie by rank, and within one by token."""
    size = ways.visited_TW.shape[1]
    ends_W = ways.visited_TW.sum(0).cumsum(0)
    row_TW = ways.row_TW + (ends_W - ways.visited_TW.sum(0))
    nowhere = token_H.shape[0]
    row_TW = row_TW.masked_fill(~ways.visited_TW, nowhere)
    first = ways.visited_TW.int().argsort(dim=1, descending=True, stable=True)
    places = row_TW.gather(1, first[:, : min(per_token, size)])
    return Places(places.int(), _and_zeros(token_H))


def _segments(row_S: Tensor, rows: int) -> Places:
    """The visits of each row, which lie side by side."""
    counts_R = torch.zeros(rows, dtype=torch.long, device=row_S.device)
    counts_R = counts_R.scatter_add(0, row_S.long(), torch.ones_like(row_S, dtype=torch.long))
    most = int(counts_R.max()) if rows else 0
    turn = torch.arange(most, device=row_S.device)
    places = (counts_R.cumsum(0) - counts_R)[:, None] + turn
    places = places.masked_fill(turn >= counts_R[:, None], row_S.shape[0])
    return Places(places.int(), _and_zeros(row_S))


def _and_zeros(of_row: Tensor) -> Tensor:
    """With the row of zeros at the end: it may belong to any sum, for it changes none."""
    return torch.cat((of_row.int(), of_row.new_zeros(1, dtype=torch.int32)))


def _starts(rows: tuple[int, ...], pairs: tuple[int, ...]) -> Tensor:
    """Of each visit that arrived, where the rows of its sender begin."""
    rows_W = torch.tensor(rows)
    return (rows_W.cumsum(0) - rows_W).repeat_interleave(torch.tensor(pairs)).int()


def _named(wire: str, dtype: torch.dtype) -> str:
    return DTYPE_WIRES[dtype] if wire == SAME else wire


def _full(arriving_W: Tensor, capacity: int) -> CapacityError:
    rank = int(arriving_W.argmax())
    rows, mean = int(arriving_W[rank]), float(arriving_W.float().mean())
    return CapacityError(
        f"{rows} rows would go to rank {rank} of the expert axis, which takes {capacity}",
        where=f"rows by rank: {', '.join(map(str, arriving_W.tolist()))}; mean {mean:.0f}",
        next=f"capacity={rows} or more, fewer tokens a step, or replicas of the busiest experts "
        "(fulgurite plan --load); nothing was sent",
    )
