"""Gradients through the symmetric transport: each phase of a step has its mirror in the way back.

    forward     send ──▶ receive ──▶ experts ──▶ send_back ──▶ sum_up
    backward    sum_up ◀── send_back ◀── experts ◀── receive ◀── send

The gradient of a sum is a copy for everyone who was summed, and the other way round: so the gradient
of combine is a dispatch of the outputs' gradients along the same routes, and that of dispatch is a
combine. A second `Symmetric` with buffers of its own carries them, in full precision whatever the tokens
travel as; its rows are a little longer, for the gradients of a token's weights.

    plan = Plan(tokens, per_token, hidden, experts_per_rank, wire="fp8")
    back = gradient_plan(plan, torch.bfloat16)
    transport = Differentiable(Symmetric(axis, plan, symmetric_memory(axis, plan, device)),
                               Symmetric(axis, back, symmetric_memory(axis, back, device)))

Phases are autograd nodes that hand each other an empty tensor: it orders them, forwards and backwards.
As with every collective, all ranks must run the same backward, also those without tokens.

Shapes: T tokens; k experts of a token; S visits; D hidden size; G = D and room for k more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from fulgurite.errors import ArgumentError
from fulgurite.parallel.mesh import Axis
from fulgurite.parallel.transport import DTYPE_WIRES, Arrived
from fulgurite.parallel.transport_symmetric import Plan, Sent, Symmetric

STEP = 8  # values by which a row of gradients is longer: rows begin where 16 bytes do


def gradient_plan(plan: Plan, dtype: torch.dtype) -> Plan:
    """What the transport of gradients is for, where tokens have this dtype."""
    extra = -(-plan.per_token // STEP) * STEP
    return replace(plan, hidden=plan.hidden + extra, wire=DTYPE_WIRES[dtype], result="f32")


@dataclass(eq=False)
class Passage:
    """One step, there and back."""

    there: Symmetric
    back: Symmetric
    slots_Tk: Tensor
    slots: int
    sent: Sent | None = None
    arrived: Arrived | None = None
    sent_back: Sent | None = None  # of the gradients
    arrived_back: Arrived | None = None

    @property
    def hidden(self) -> int:
        return self.there.plan.hidden


class Differentiable:
    """The symmetric transport for training: `there` carries tokens, `back` their gradients."""

    def __init__(self, there: Symmetric, back: Symmetric) -> None:
        self.there, self.back = there, back
        wanted = gradient_plan(there.plan, torch.float32)
        if replace(back.plan, wire=wanted.wire) != wanted:
            raise ArgumentError(
                f"gradients of {there.plan} can't travel by {back.plan}",
                next="make the second transport for gradient_plan(plan, dtype)",
            )

    @property
    def axis(self) -> Axis:
        return self.there.axis

    def send(
        self, x_TD: Tensor, slots_Tk: Tensor, slots: int, weights_Tk: Tensor
    ) -> tuple[Passage, Tensor]:
        passage = Passage(self.there, self.back, slots_Tk, slots)
        # Wants a gradient whatever x does, so that each rank's way back is whole.
        anchor = torch.zeros(0, device=x_TD.device, requires_grad=True)
        return passage, _Send.apply(x_TD, weights_Tk, anchor, passage)

    def receive(self, sent: tuple[Passage, Tensor]) -> Arrived:
        passage, after = sent
        x_SD, weights_S = _Receive.apply(after, passage)
        assert passage.arrived is not None, "receive has just left it"
        return Arrived(x_SD, passage.arrived.experts_S, weights_S, passage)

    def combine(self, y_SD: Tensor, arrived: Arrived) -> Tensor:
        return self.sum_up(self.send_back(y_SD, arrived), arrived)

    def send_back(self, y_SD: Tensor, arrived: Arrived) -> Tensor:
        """Start the results on their way home; what `sum_up` wants to see."""
        after: Tensor = _SendBack.apply(y_SD, arrived.ticket)
        return after

    def sum_up(self, after: Tensor, arrived: Arrived) -> Tensor:
        out_TD: Tensor = _SumUp.apply(after, arrived.ticket)
        return out_TD

    def check(self) -> None:
        """Raise what the device has written down, if anything. Waits for the device."""
        self.there.check()
        self.back.check()


class _Send(Function):
    """Back: gradients of the tokens and of their weights come home, and are summed there."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weights_Tk: Tensor, anchor: Tensor, passage: Passage
    ) -> Tensor:
        ctx.passage, ctx.dtypes = passage, (x_TD.dtype, weights_Tk.dtype)
        passage.sent = passage.there.send(x_TD, passage.slots_Tk, passage.slots, weights_Tk)
        return anchor.new_zeros(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        passage: Passage = ctx.passage
        assert passage.arrived_back is not None, "gradients have come before they are sent on"
        home_TG = passage.back.sum_up(passage.arrived_back)
        hidden, per_token = passage.hidden, passage.slots_Tk.shape[1]
        x_TD, weights_Tk = home_TG[:, :hidden], home_TG[:, hidden : hidden + per_token]
        return x_TD.to(ctx.dtypes[0]), weights_Tk.to(ctx.dtypes[1]), None, None


class _Receive(Function):
    """Back: gradients of a row's visits are summed and sent home, each visit's weight in its place."""

    @staticmethod
    def forward(ctx: Any, after: Tensor, passage: Passage) -> tuple[Tensor, Tensor]:
        ctx.passage = passage
        assert passage.sent is not None, "send comes before receive"
        arrived = passage.arrived = passage.there.receive(passage.sent)
        return _of_nobody(arrived.x_SD, arrived, passage.there), arrived.weights_S

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        passage: Passage = ctx.passage
        x_SD, weights_S = gradients
        assert passage.arrived_back is not None, "gradients have come before they are sent on"
        # which of its token's weights a visit has: what travelled in the place of the weight
        turn_S = passage.arrived_back.weights_S.to(torch.int64)
        extra = passage.back.plan.hidden - passage.hidden
        room_SG = torch.zeros(len(turn_S), extra, dtype=torch.float32, device=x_SD.device)
        room_SG.scatter_(1, turn_S[:, None], weights_S[:, None].float())
        passage.back.send_back(torch.cat((x_SD.float(), room_SG), dim=1), passage.arrived_back)
        return gradients[0].new_zeros(0), None


class _SendBack(Function):
    """Back: the gradient of a token's output has come to each of its visits."""

    @staticmethod
    def forward(ctx: Any, y_SD: Tensor, passage: Passage) -> Tensor:
        ctx.passage, ctx.dtype = passage, y_SD.dtype
        assert passage.arrived is not None, "receive comes before combine"
        passage.there.send_back(y_SD, passage.arrived)
        return y_SD.new_zeros(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        passage: Passage = ctx.passage
        assert passage.sent_back is not None, "gradients are sent before they come"
        arrived = passage.arrived_back = passage.back.receive(passage.sent_back)
        y_SD = arrived.x_SD[:, : passage.hidden]
        return _of_nobody(y_SD, arrived, passage.back).to(ctx.dtype), None


class _SumUp(Function):
    """Back: the gradient of a token's output is sent wherever the token went."""

    @staticmethod
    def forward(ctx: Any, after: Tensor, passage: Passage) -> Tensor:
        ctx.passage = passage
        assert passage.arrived is not None, "receive comes before combine"
        return passage.there.sum_up(passage.arrived)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        passage: Passage = ctx.passage
        (out_TD,) = gradients
        out_TG = pad(out_TD, (0, passage.back.plan.hidden - passage.hidden))
        turn_Tk = torch.arange(passage.slots_Tk.shape[1], device=out_TD.device).float()
        turn_Tk = turn_Tk.expand(passage.slots_Tk.shape)
        passage.sent_back = passage.back.send(out_TG, passage.slots_Tk, passage.slots, turn_Tk)
        return out_TD.new_zeros(0), None


def _of_nobody(x_SD: Tensor, arrived: Arrived, transport: Symmetric) -> Tensor:
    """Zeros where no visit came: memory that was never written may hold anything, NaN too."""
    nobody_S = arrived.experts_S >= transport.plan.experts_per_rank
    return x_SD.masked_fill(nobody_S[:, None], 0)
