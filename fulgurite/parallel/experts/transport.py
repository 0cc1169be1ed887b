"""Transports of expert parallelism: options, an axis and a model's shapes in, a `TokenDispatcher` out.

    options    = ExpertOptions(transport="auto", wire="fp8")
    config     = options.dispatch_config(hidden_size, top_k, dtype, max_tokens, experts_per_rank)
    dispatcher = make_dispatcher(options, axis, config, device)     on all ranks of the axis
    parallelize(model, mesh, rules, dispatcher=dispatcher)          one dispatcher for all layers

The transports are the rows of `TRANSPORTS`:

    symmetric      kernels write into other ranks' memory; nothing waits for the host
    hierarchical   collectives, first between nodes, one row a node, then inside each
    all_to_all     collectives of torch.distributed, on every backend

`choose_transport` picks one for `auto` and says why. `dispatch_buffer_bytes` are what a transport holds
as long as it lives; `make_dispatcher` allocates them. What it allocates within a layer is measured on the
meta device (plan/meta_dispatch.py), for the engine and for `fulgurite plan`.

The engine calls two methods of a dispatcher once a step. `set_step_tokens(count)`: the most tokens that
a rank has in the next step. All ranks have agreed on it, so buffers and padding get this size, and the
host reads no counts. `check()` raises the errors that the device has recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fulgurite.errors import ArgumentError
from fulgurite.kernels.dispatch.buffers import DispatchConfig
from fulgurite.kernels.dispatch.wire_format import WireFormat
from fulgurite.option_values import AUTO, MICRO_BATCHES, WIRES
from fulgurite.parallel.dispatch.all_to_all import AllToAllDispatcher
from fulgurite.parallel.dispatch.dispatcher import WIRE_FORMAT_OF_DTYPE, TokenDispatcher
from fulgurite.parallel.dispatch.hierarchical import HierarchicalDispatcher
from fulgurite.parallel.dispatch.symmetric import SymmetricMemoryDispatcher
from fulgurite.parallel.mesh import Axis
from fulgurite.parallel.symmetric.memory import no_symmetric_memory_reason
from fulgurite.parallel.topology import unequal_nodes_reason


@dataclass(frozen=True)
class ExpertOptions:
    """How tokens go to experts on other ranks; equal on all ranks.

    transport       `auto` or a name of `TRANSPORTS`
    wire            wire format of tokens that are sent to experts; `auto`: the model's dtype
    capacity        most rows from one rank to another; None: all tokens of a step
    micro_batches   2: two halves of the tokens, so that one is sent while the other is computed
    """

    transport: str = AUTO
    wire: str = AUTO
    capacity: int | None = None
    micro_batches: int = 1

    def __post_init__(self) -> None:
        choices = (
            ("transport", self.transport, (AUTO, *TRANSPORTS)),
            ("wire", self.wire, WIRES),
            ("micro_batches", self.micro_batches, MICRO_BATCHES),
        )
        for name, value, allowed in choices:
            if value not in allowed:
                raise ArgumentError(
                    f"{name}={value!r}", next=f"one of {', '.join(map(str, allowed))}"
                )
        if self.capacity is not None and self.capacity < 1:
            raise ArgumentError(
                f"capacity={self.capacity}",
                next="the most rows from one rank to another: 1 or more",
            )

    def dispatch_config(
        self,
        hidden_size: int,
        top_k: int,
        dtype: torch.dtype,
        max_tokens: int,
        experts_per_rank: int,
    ) -> DispatchConfig:
        """What a dispatcher is built for, for a model of this dtype."""
        combine_format = WIRE_FORMAT_OF_DTYPE[dtype]
        dispatch_format = combine_format if self.wire == AUTO else self.wire
        WireFormat(dispatch_format, hidden_size)  # raises if the size has no whole blocks
        return DispatchConfig(
            max_tokens=max_tokens,
            top_k=top_k,
            hidden_size=hidden_size,
            experts_per_rank=experts_per_rank,
            dispatch_format=dispatch_format,
            combine_format=combine_format,
            capacity=self.capacity,
        )


class TransportChoice(NamedTuple):
    """A transport, and why it is used."""

    name: str
    reason: str


@dataclass(frozen=True)
class Transport:
    """One row of `TRANSPORTS`.

    create               makes the dispatcher; a collective call
    unavailable_reason   why this axis can't use it on this device; None: it can
    buffer_bytes         `dispatch_buffer_bytes` of a config and a number of ranks
    """

    create: Callable[[Axis, DispatchConfig, torch.device], TokenDispatcher]
    unavailable_reason: Callable[[Axis, torch.device], str | None]
    buffer_bytes: Callable[[DispatchConfig, int], int]


def make_dispatcher(
    options: ExpertOptions, axis: Axis, config: DispatchConfig, device: torch.device
) -> TokenDispatcher:
    """The dispatcher of these options; a collective call of all ranks of the axis."""
    return TRANSPORTS[choose_transport(options, axis, device).name].create(axis, config, device)


def choose_transport(options: ExpertOptions, axis: Axis, device: torch.device) -> TransportChoice:
    """The transport of an axis; ArgumentError if the one that was asked for can't run there."""
    if options.transport != AUTO:
        reason = TRANSPORTS[options.transport].unavailable_reason(axis, device)
        if reason is not None:
            raise ArgumentError(
                f"transport={options.transport!r} can't be used: {reason}",
                where=f"{axis}, {device.type}",
                next="leave out transport, or use transport='all_to_all', which works everywhere",
            )
        return TransportChoice(options.transport, "as asked")
    if device.type == "cpu" and not axis.spans_nodes:
        return TransportChoice("all_to_all", "on CPUs ranks exchange tokens by collectives")
    reasons: list[str] = []
    for name in AUTO_ORDER:
        if name not in TRANSPORTS:
            continue
        reason = TRANSPORTS[name].unavailable_reason(axis, device)
        if reason is None:
            why = f"{name}: {AUTO_REASONS[name]}"
            return TransportChoice(name, "; ".join([*reasons, why]))
        reasons.append(f"not {name}: {reason}")
    raise AssertionError(f"no transport for {axis}: {reasons}")


def check_expert_axis(is_given: bool, has_expert_axis: bool) -> None:
    """ArgumentError for options about experts on several ranks, without such ranks."""
    if is_given and not has_expert_axis:
        raise ArgumentError(
            "transport, wire, expert_capacity, micro_batches and placement are for experts on "
            "several ranks, and expert=1",
            next="add expert=N, or leave them out",
        )


def dispatch_buffer_bytes(transport: str, config: DispatchConfig, num_ranks: int) -> int:
    """Bytes of one rank that a dispatcher holds as long as it lives."""
    return TRANSPORTS[transport].buffer_bytes(config, num_ranks)


# ---- all-to-all ------------------------------------------------------------------------------------


def _no_all_to_all_reason(axis: Axis, device: torch.device) -> str | None:
    return None


def _create_all_to_all(
    axis: Axis, config: DispatchConfig, device: torch.device
) -> AllToAllDispatcher:
    return AllToAllDispatcher(
        axis,
        dispatch_format=config.dispatch_format,
        combine_format=config.combine_format,
        capacity=None if config.capacity is None else axis.size * config.capacity,
    )


# ---- hierarchical ----------------------------------------------------------------------------------


def _no_hierarchical_reason(axis: Axis, device: torch.device) -> str | None:
    if not axis.spans_nodes:
        return "all ranks of the axis are on one node (nodes=2 emulates two)"
    return unequal_nodes_reason(axis.nodes)


def _create_hierarchical(
    axis: Axis, config: DispatchConfig, device: torch.device
) -> HierarchicalDispatcher:
    return HierarchicalDispatcher.create(
        axis,
        dispatch_format=config.dispatch_format,
        combine_format=config.combine_format,
        capacity=None if config.capacity is None else axis.size * config.capacity,
    )


def _no_buffers(config: DispatchConfig, num_ranks: int) -> int:
    return 0  # collectives allocate as they go


TRANSPORTS: dict[str, Transport] = {
    "symmetric": Transport(
        SymmetricMemoryDispatcher.create, no_symmetric_memory_reason, DispatchConfig.num_bytes
    ),
    "hierarchical": Transport(_create_hierarchical, _no_hierarchical_reason, _no_buffers),
    "all_to_all": Transport(_create_all_to_all, _no_all_to_all_reason, _no_buffers),
}
# What `auto` tries on a GPU, or if the axis spans nodes, in this order.
AUTO_ORDER = ("symmetric", "hierarchical", "all_to_all")
AUTO_REASONS = {
    "symmetric": "all ranks of the axis can address each other's memory",
    "hierarchical": "the axis spans several nodes",
    "all_to_all": "it works on every backend",
}
