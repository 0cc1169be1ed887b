"""The symmetric transport: kernels write tokens straight into other ranks' memory.

In: memory that every rank of the axis can address. Out: a `Transport` that never waits for the host, so a
step with it can be recorded as a CUDA graph. For training `transport_gradients` puts two of them together.

    sent = transport.send(x, slots, P, w)
    arrived = transport.receive(sent)
    out = transport.combine(y, arrived)   =   transport.send_back(y, arrived); transport.sum_up(arrived)

Between `send` and `receive`, and between `send_back` and `sum_up`, work that needs no other rank (a shared expert, the next layer's norm) runs
while rows travel. Two steps may be under way at once, which is how many copies of the buffers there are.

What goes wrong on the device is written to `status` there: `check()` reads it, on the host, and raises.
Call it wherever the host waits anyway, once a step; nothing is overwritten and nothing hangs before that.

Memory comes from `symmetric_memory` (torch's symmetric memory, one process a rank), or from
`local_memory` (all ranks in one process: tests, and timing on one GPU).

Shapes: T tokens; k experts of a token; W ranks; C rows from a rank to a rank; V = min(k, experts of a
rank); S = W C V visits, most of them nobody's; D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed._symmetric_memory as symm_mem
import triton
from torch import Tensor

from fulgurite.errors import ArgumentError, CapacityError, RankError
from fulgurite.kernels.common.triton_counters import take_counters
from fulgurite.kernels.dispatch import triton_dispatch as kernels
from fulgurite.kernels.dispatch.wire_format import COPIES, Buffers, Wire, buffers
from fulgurite.kernels.tuning.gemm import processors
from fulgurite.parallel.mesh import Axis
from fulgurite.parallel.transport import Arrived

POLLS = 1 << 26  # of a flag before a rank is given up: about half a minute on an H200
RESULTS = ("bf16", "f16", "f32")
BLOCK = 8192  # values of a row that a program holds at once
SUM_BLOCK = 1024  # of results that are summed
BACK_PROGRAMS = 16  # a multiprocessor, that walk over the rows to send back
WAYS_BLOCK = 512  # tokens


@dataclass(frozen=True, eq=False)
class Memory:
    """One rank's buffer, and the addresses of all ranks' buffers, on the device."""

    buffer: Tensor
    peers_W: Tensor
    keep: object = None  # what must live as long as the addresses are used


@dataclass(frozen=True)
class Plan:
    """What a transport is for; all ranks have the same one."""

    tokens: int
    per_token: int
    hidden: int
    experts_per_rank: int
    wire: str = "bf16"
    result: str = "bf16"
    capacity: int | None = None

    def buffers(self, ranks: int) -> Buffers:
        return buffers(
            ranks,
            self.tokens,
            self.per_token,
            self.hidden,
            self.experts_per_rank,
            self.wire,
            self.result,
            self.capacity,
        )


@dataclass(frozen=True, eq=False)
class Sent:
    """A step under way. `step` is its number, on the device: a recorded graph counts on."""

    x_TD: Tensor
    place_TW: Tensor  # which of the rows to a rank a token is, -1 if it doesn't go there
    step: Tensor


@dataclass(frozen=True, eq=False)
class Received:
    sent: Sent
    counts_W: Tensor


class Symmetric:
    """Device-side dispatch and combine over the ranks of an axis."""

    def __init__(self, axis: Axis, plan: Plan, memory: Memory, polls: int = POLLS) -> None:
        if plan.result not in RESULTS:
            raise ArgumentError(
                f"results can't travel as {plan.result!r}", next=f"one of {', '.join(RESULTS)}"
            )
        self.axis, self.plan, self.memory, self.polls = axis, plan, memory, polls
        self.sizes = plan.buffers(axis.size)
        self.wire, self.back = Wire(plan.wire, plan.hidden), Wire(plan.result, plan.hidden)
        device = memory.buffer.device
        self.step = torch.zeros(1, dtype=torch.int32, device=device)
        self.status = torch.zeros(2, dtype=torch.int32, device=device)
        self.under_way = 0
        self.programs = BACK_PROGRAMS * processors(device)
        # One copy: headers, rows, returns, flags.
        self.rows_at = axis.size * self.sizes.rows * self.sizes.header
        self.returns_at = self.rows_at + axis.size * self.sizes.rows * self.wire.row_bytes
        self.flags_at = self.returns_at + self.sizes.returns // COPIES
        self.copy_bytes = self.sizes.total // COPIES
        if memory.buffer.numel() < self.sizes.total:
            raise ArgumentError(
                f"the buffer has {memory.buffer.numel()} bytes", next=str(self.sizes)
            )

    # ---- the transport -----------------------------------------------------------------------------

    def combine(self, y_SD: Tensor, arrived: Arrived) -> Tensor:
        self.send_back(y_SD, arrived)
        return self.sum_up(arrived)

    def send(self, x_TD: Tensor, slots_Tk: Tensor, slots: int, weights_Tk: Tensor) -> Sent:
        """Start the rows on their way."""
        self._check(x_TD, slots_Tk, slots)
        self.under_way += 1
        size, tokens, device = self.axis.size, x_TD.shape[0], x_TD.device
        place_TW = torch.empty(tokens, size, dtype=torch.int32, device=device)
        counts_W, step = torch.empty(size + 1, dtype=torch.int32, device=device).split([size, 1])
        slots_Tk = slots_Tk.contiguous()
        shared = {
            "K": self.plan.per_token, "KS": triton.next_power_of_2(self.plan.per_token),
            "V": self.sizes.visits, "W": size,
        }  # fmt: skip
        kernels.ways_kernel[(size,)](
            slots_Tk, place_TW, counts_W, self.step, step, self.status, tokens, self.axis.index,
            self.plan.experts_per_rank, BLOCK=WAYS_BLOCK, num_warps=8, **shared,
        )  # fmt: skip
        words = self.wire.row_bytes // 4
        kernels.send_kernel[(max(tokens, 1), size)](
            self.wire.pack(x_TD).view(torch.int32), slots_Tk, weights_Tk.contiguous(), place_TW,
            counts_W, self.memory.peers_W, step, self._counter(), self.status,
            tokens, self.axis.index, self.plan.experts_per_rank,
            self.sizes.rows, self.copy_bytes, self.rows_at, self.flags_at,
            LANES=self._lanes, HEAD=self.sizes.header, WORDS=words, BLOCK=_block(words),
            num_warps=_warps(words), **shared,
        )  # fmt: skip
        return Sent(x_TD, place_TW, step)

    def receive(self, sent: Sent) -> Arrived:
        """Wait for everybody's rows, and decode them."""
        device, dtype = sent.x_TD.device, sent.x_TD.dtype
        size, rows = self.axis.size, self.sizes.rows
        counts_W = torch.empty(size, dtype=torch.int32, device=device)
        self._wait(sent.step, counts_W, returns=False)
        places = size * rows * self.sizes.visits
        x_SD = torch.empty(places, self.plan.hidden, dtype=dtype, device=device)
        experts_S = torch.empty(places, dtype=torch.int32, device=device)
        weights_S = torch.empty(places, dtype=torch.float32, device=device)
        scales_at, factor_at = ([part.offset for part in self.wire.parts[1:]] + [0, 0])[:2]
        kernels.receive_kernel[(rows, size)](
            self.memory.peers_W, sent.step, counts_W, x_SD, experts_S, weights_S,
            self.axis.index, self.plan.experts_per_rank, rows, self.copy_bytes, self.rows_at,
            scales_at, factor_at,
            V=self.sizes.visits, VS=triton.next_power_of_2(self.sizes.visits),
            HEAD=self.sizes.header, ROW=self.wire.row_bytes, D=self.plan.hidden,
            BLOCK=_block(self.plan.hidden), KIND=self.plan.wire,
            num_warps=_warps(self.plan.hidden),
        )  # fmt: skip
        return Arrived(x_SD, experts_S, weights_S, Received(sent, counts_W))

    def send_back(self, y_SD: Tensor, arrived: Arrived) -> None:
        """Start the results on their way home."""
        _refuse_gradients(y_SD)
        ticket: Received = arrived.ticket
        block = min(_block(self.plan.hidden), SUM_BLOCK)
        most = max(1, self.sizes.rows * self.axis.size)
        kernels.send_back_kernel[(min(most, self.programs),)](
            y_SD.contiguous(), ticket.counts_W, self.memory.peers_W, ticket.sent.step,
            self._counter(), self.status,
            self.axis.index, self.plan.tokens, self.sizes.rows,
            self.copy_bytes, self.returns_at, self.flags_at,
            V=self.sizes.visits, M=self.sizes.homecomings, HEAD=self.sizes.header,
            ROW=self.back.row_bytes, D=self.plan.hidden, W=self.axis.size, LANES=self._lanes,
            BLOCK=block, KIND=self.plan.result, num_warps=_warps(block),
        )  # fmt: skip

    def sum_up(self, arrived: Arrived) -> Tensor:
        """Wait for everybody's results, and sum each token's."""
        sent: Sent = arrived.ticket.sent
        self._wait(sent.step, sent.step, returns=True)
        out_TD = torch.empty_like(sent.x_TD, memory_format=torch.contiguous_format)
        block = min(_block(self.plan.hidden), SUM_BLOCK)
        if out_TD.shape[0]:
            kernels.sum_up_kernel[(out_TD.shape[0], triton.cdiv(self.plan.hidden, block))](
                self.memory.peers_W, sent.step, sent.place_TW, out_TD, self.axis.index,
                self.copy_bytes, self.returns_at,
                M=self.sizes.homecomings, W=self.axis.size, LANES=self._lanes,
                ROW=self.back.row_bytes, D=self.plan.hidden, BLOCK=block, KIND=self.plan.result,
            )  # fmt: skip
        self.under_way -= 1
        return out_TD

    def check(self) -> None:
        """Raise what the device has written down, if anything. Waits for the device."""
        code, rank = self.status.tolist()
        if code == kernels.TIMED_OUT.value:
            raise RankError(
                f"rank {self.axis.ranks[rank]} did not answer: its flag never came",
                ranks=(self.axis.ranks[rank],),
                where=str(self.axis),
                next="look at the last lines of that process; start all ranks again",
            )
        if code == kernels.FULL.value:
            raise CapacityError(
                f"rank {self.axis.ranks[rank]} had more than {self.sizes.rows} rows for one rank",
                where=str(self.axis),
                next="a larger capacity, fewer tokens a step, or replicas of the busiest experts; "
                "rows past the capacity were not written",
            )
        if code == kernels.NOWHERE.value:
            raise ArgumentError(
                f"rank {self.axis.ranks[rank]} sent a token to an expert that doesn't exist",
                where=f"{self.axis.size * self.plan.experts_per_rank} slots",
                next="check the router and the placement table",
            )
        if code == kernels.TWICE.value:
            raise ArgumentError(
                f"rank {self.axis.ranks[rank]} sent a token to more experts of a rank than it has",
                where=f"{self.plan.experts_per_rank} experts a rank",
                next="the experts of a token must differ: check the router",
            )

    def __str__(self) -> str:
        return f"symmetric transport, {self.axis}\n{self.sizes}"

    @property
    def _lanes(self) -> int:
        return triton.next_power_of_2(self.axis.size)

    def _counter(self) -> Tensor:
        return take_counters(self.memory.buffer.device, 1)

    def _wait(self, step: Tensor, counts_W: Tensor, returns: bool) -> None:
        kernels.wait_kernel[(1,)](
            self.memory.peers_W, step, counts_W, self.status, self.axis.index, self.polls,
            self.copy_bytes, self.flags_at, W=self.axis.size, LANES=self._lanes, RETURNS=returns,
            num_warps=1,
        )  # fmt: skip

    def _check(self, x_TD: Tensor, slots_Tk: Tensor, slots: int) -> None:
        plan = self.plan
        tokens, per_token = slots_Tk.shape
        if tokens > plan.tokens or per_token != plan.per_token or x_TD.shape[1] != plan.hidden:
            raise ArgumentError(
                f"{tokens} tokens of {x_TD.shape[1]} values, {per_token} experts each",
                where=f"buffers for {plan.tokens} tokens of {plan.hidden}, {plan.per_token} each",
                next="make the transport for the largest step",
            )
        if slots != plan.experts_per_rank * self.axis.size:
            raise ArgumentError(
                f"{slots} slots, but {plan.experts_per_rank} x {self.axis.size} ranks were planned"
            )
        if self.under_way == COPIES:
            raise ArgumentError(
                f"{COPIES} steps are under way already, and there are {COPIES} copies of the buffers",
                next="combine the first one before a third is sent",
            )
        _refuse_gradients(x_TD)


def _refuse_gradients(x: Tensor) -> None:
    if torch.is_grad_enabled() and x.requires_grad:
        raise ArgumentError(
            "this transport alone has no gradients",
            next="run under torch.no_grad(), or train with transport_gradients.Differentiable or "
            "parallel.Collective",
        )


def local_memory(ranks: int, plan: Plan, device: torch.device | str) -> list[Memory]:
    """The buffers of all ranks in one process."""
    size = plan.buffers(ranks).total
    made = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(ranks)]
    peers = torch.tensor([buffer.data_ptr() for buffer in made], device=device)
    return [Memory(buffer, peers, made) for buffer in made]


def symmetric_memory(axis: Axis, plan: Plan, device: torch.device) -> Memory:
    """One buffer a process, which all ranks of the axis map; they must all call this."""
    if axis.group is None:
        return local_memory(1, plan, device)[0]
    buffer = symm_mem.empty(plan.buffers(axis.size).total, dtype=torch.uint8, device=device)
    buffer.zero_()
    handle = symm_mem.rendezvous(buffer, axis.group)
    torch.cuda.synchronize(device)
    handle.barrier()  # nobody's flags are read before they are zero
    views = [handle.get_buffer(rank, buffer.shape, buffer.dtype) for rank in range(axis.size)]
    peers = torch.tensor([view.data_ptr() for view in views], device=device)
    return Memory(buffer, peers, (handle, views))


def _block(items: int) -> int:
    return min(triton.next_power_of_2(items), BLOCK)


def _warps(items: int) -> int:
    return 8 if items > 2048 else 4
