"""What each rank does in test_hierarchical.py. Ranks import this module, so nothing in it needs pytest."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fulgurite.cudagraph import capture_graph
from fulgurite.errors import FulguriteError
from fulgurite.kernels.dispatch.wire_format import WireFormat
from fulgurite.kernels.moe.router_config import Routes
from fulgurite.parallel import AllToAllDispatcher, Mesh, apply_expert_parallel
from fulgurite.parallel.dispatch.dispatcher import DispatchedTokens
from fulgurite.parallel.dispatch.hierarchical import HierarchicalDispatcher
from fulgurite.parallel.dispatch.node_axes import NodeAxes, split_by_node
from fulgurite.parallel.emulation import EmulatedNetwork, NetworkTraffic
from fulgurite.parallel.symmetric.collectives import SymmetricCollectives
from fulgurite.parallel.topology import divide_into_nodes
from tests.parallel.experts import expert_cases
from tests.parallel.model_cases import distance
from tests.ranks import open_once

Nodes = tuple[int, ...]
TOP_K = 3


def axes_of(nodes: Nodes) -> NodeAxes:
    """The axes of this process, with their groups, made once."""
    return open_once(("nodes", nodes), lambda: _open_axes(nodes)).axes


class _OpenAxes(NamedTuple):
    axes: NodeAxes
    mesh: Mesh

    def close(self) -> None:
        self.mesh.close()


def _open_axes(nodes: Nodes) -> _OpenAxes:
    mesh = Mesh(len(nodes), 1, len(nodes), timeout=60)
    return _OpenAxes(split_by_node(replace(mesh.expert, nodes=nodes)), mesh)


def compare(
    nodes: Nodes,
    tokens: tuple[int, ...],
    kind: str = "plain",
    dtype: torch.dtype = torch.float64,
    wire: str = "same",
    only: int | None = None,
    count: int = 8,
    top_k: int = TOP_K,
) -> dict[str, float]:
    """Distances to all experts on one rank: output, gradients of tokens, weights, experts."""
    axes = axes_of(nodes)
    axis = axes.axis
    whole = expert_cases.make_experts(kind, count, top_k, dtype)
    dispatcher = HierarchicalDispatcher(axes, dispatch_format=wire)
    ours = apply_expert_parallel(copy.deepcopy(whole), dispatcher)
    outs, group = [], []
    for rank in axis.ranks:
        x, routes = expert_cases.make_inputs(
            rank, tokens[rank % len(tokens)], count, top_k, dtype, only
        )
        x.requires_grad_(), routes.weights_Tk.requires_grad_()
        sent = x
        if wire != "same":
            sent = expert_cases.StraightThrough.apply(x, WireFormat(wire, x.shape[1]))
        group.append((x, routes))
        outs.append(whole(sent, routes))
    torch.cat(outs).square().sum().backward()
    x, routes = group[axis.index]
    mine = x.detach().clone().requires_grad_()
    weights = routes.weights_Tk.detach().clone().requires_grad_()
    out = ours(mine, Routes(weights, routes.experts_Tk))
    out.square().sum().backward()
    width = count // axis.size
    here = slice(axis.index * width, (axis.index + 1) * width)
    found = {
        "out": distance(out, outs[axis.index]),
        "x": distance(mine.grad, x.grad),
        "weights": distance(weights.grad, routes.weights_Tk.grad),
    }
    for name, parameter in ours.experts.named_parameters():
        found[name] = distance(parameter.grad, whole.get_parameter(name).grad[here])
    return found


def expert_stand_in(dispatched: DispatchedTokens) -> Tensor:
    """A row's result does not depend on other rows, so results can be compared to the bit."""
    factor_S = 1 + dispatched.experts_S.to(dispatched.x_SD.dtype) / 7
    y_SD = dispatched.x_SD * (factor_S * dispatched.weights_S.to(factor_S.dtype))[:, None]
    y_SD = torch.sin(3 * y_SD)
    y_SD[-1] = 0
    return y_SD


def both(
    nodes: Nodes, dtype: torch.dtype, wire: str, on_one_node: bool, top_k: int
) -> tuple[Tensor, Tensor]:
    """The result of all-to-all and of the hierarchical dispatcher, for the same tokens."""
    axes = axes_of(nodes)
    axis, count = axes.axis, 4 * axes.axis.size
    x, routes = expert_cases.make_inputs(axis.index, 5 + axis.index, count, top_k, dtype, None)
    chosen = routes.experts_Tk
    if on_one_node:  # all experts of a token on one node, which differs between tokens
        num_nodes = axes.layout.num_nodes
        node_T1 = torch.arange(len(x))[:, None] % num_nodes
        chosen = chosen // num_nodes + node_T1 * (count // num_nodes)
    outs = []
    for dispatcher in (
        AllToAllDispatcher(axis, dispatch_format=wire),
        HierarchicalDispatcher(axes, dispatch_format=wire),
    ):
        with torch.no_grad():
            pending = dispatcher.start_dispatch(x, chosen, count, routes.weights_Tk)
            dispatched = dispatcher.finish_dispatch(pending)
            outs.append(dispatcher.combine(expert_stand_in(dispatched), dispatched))
    return outs[0], outs[1]


def pad(
    nodes: Nodes, tokens: tuple[int, ...], dtype: torch.dtype, wire: str, only: int | None
) -> tuple[Tensor, Tensor]:
    """The result with exact splits, and with equal ones, for which no counts are exchanged."""
    axes = axes_of(nodes)
    axis, count = axes.axis, 4 * axes.axis.size
    number = tokens[axis.index % len(tokens)]
    x, routes = expert_cases.make_inputs(axis.index, number, count, TOP_K, dtype, only)
    outs = []
    for step_tokens in (None, max(tokens) + 1):
        dispatcher = HierarchicalDispatcher(axes, dispatch_format=wire)
        dispatcher.set_step_tokens(step_tokens)
        if step_tokens is not None:
            dispatcher._exchange_counts = None  # type: ignore[assignment]
        with torch.no_grad():
            dispatched = dispatcher.start_dispatch(x, routes.experts_Tk, count, routes.weights_Tk)
            outs.append(dispatcher.combine(expert_stand_in(dispatched), dispatched))
        dispatcher.check()
    return outs[0], outs[1]


def check_invalid_slots(nodes: Nodes, bad: int) -> tuple[str, str, bool]:
    """Rank 1 routes a token to a slot that does not exist. The errors of `check`, twice, and whether the
    valid routes of that step still gave their results."""
    axes = axes_of(nodes)
    index = axes.axis.index
    x, routes = expert_cases.make_inputs(index, 3 * index, 8, 2, torch.float32, only=5)
    slots_Tk = torch.zeros_like(routes.experts_Tk)
    if index == 1:
        slots_Tk[0, 0] = bad
    dispatcher = HierarchicalDispatcher(axes)
    dispatcher.set_step_tokens(16)
    with torch.no_grad():
        dispatched = dispatcher.start_dispatch(x, slots_Tk, 8, routes.weights_Tk)
        out = dispatcher.combine(dispatched.x_SD * (dispatched.experts_S < 8)[:, None], dispatched)
    wanted = 2 * x
    wanted[:1] = x[:1] if index == 1 else wanted[:1]
    texts = []
    for _ in range(2):
        try:
            dispatcher.check()
            texts.append("")
        except FulguriteError as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts[0], texts[1], torch.equal(out, wanted)


def capture_on_gpu(tokens: int, wire: str) -> list[tuple[Tensor, Tensor]]:
    """Two nodes of one rank that share a GPU: the network is symmetric memory, and a CUDA graph holds
    dispatch, experts and combine. Results of replays, and those of exact splits on a CPU."""
    axes, device = axes_of((0, 1)), torch.device("cuda")
    collectives = SymmetricCollectives.create(replace(axes.network, nodes=()), device)
    network = replace(axes.network, device_collectives=collectives)
    dispatcher = HierarchicalDispatcher(replace(axes, network=network), dispatch_format=wire)
    assert dispatcher.can_capture
    dispatcher.set_step_tokens(tokens)
    inputs: list[Tensor] = []

    def run() -> Tensor:
        x, slots, weights = inputs
        dispatched = dispatcher.start_dispatch(x, slots, 8, weights)
        return dispatcher.combine(expert_stand_in(dispatched), dispatched)

    found, graph = [], None
    with torch.no_grad():
        for seed in range(3):
            number = 10 * seed + axes.axis.index
            x, routes = expert_cases.make_inputs(number, tokens, 8, TOP_K, torch.float32, None)
            values = (x, routes.experts_Tk, routes.weights_Tk)
            exact = HierarchicalDispatcher(axes, dispatch_format=wire)
            dispatched = exact.start_dispatch(values[0], values[1], 8, values[2])
            wanted = exact.combine(expert_stand_in(dispatched), dispatched)
            if not inputs:
                inputs += [value.to(device) for value in values]
                graph = capture_graph(run, warmups=2)
            for static, value in zip(inputs, values, strict=True):
                static.copy_(value)
            assert graph is not None
            found.append((graph.replay().cpu(), wanted))
            dispatcher.check()
            collectives.check()
    return found


def raise_on_all(
    nodes: Nodes, tokens: tuple[int, ...], capacity: int | None, bad: int | None
) -> tuple[str, bool]:
    """The error of a dispatch on this rank; then the same ranks still work together."""
    axes = axes_of(nodes)
    index = axes.axis.index
    x, routes = expert_cases.make_inputs(index, tokens[index], 8, 2, torch.float32, only=5)
    if bad is not None and index == 1:
        routes.experts_Tk[0, 0] = bad
    dispatcher = HierarchicalDispatcher(axes, capacity=capacity)
    text = ""
    try:
        dispatcher.start_dispatch(x, routes.experts_Tk, 8, routes.weights_Tk)
    except FulguriteError as error:
        text = f"{type(error).__name__}: {error}"
    dispatcher = HierarchicalDispatcher(axes)
    dispatched = dispatcher.start_dispatch(
        x, torch.zeros_like(routes.experts_Tk), 8, routes.weights_Tk
    )
    out = dispatcher.combine(dispatched.x_SD, dispatched)
    return text, torch.equal(out, 2 * x)


def count_traffic(
    num_ranks: int, num_nodes: int, tokens: int, hidden: int, top_k: int, links: tuple[float, float]
) -> dict[str, tuple[float, NetworkTraffic]]:
    """Seconds and bytes of dispatch and combine by transport, on an emulated network."""
    import time

    nodes = divide_into_nodes(num_ranks, num_nodes)
    latency, bandwidth = links
    count = 4 * num_ranks
    found = {}
    for transport in ("all_to_all", "hierarchical"):
        network = EmulatedNetwork(latency, bandwidth)
        axes = axes_of(nodes)
        axis = replace(axes.axis, network=network)
        axes = replace(axes, axis=axis, network=replace(axes.network, network=network))
        dispatcher = (
            AllToAllDispatcher(axis) if transport == "all_to_all" else HierarchicalDispatcher(axes)
        )
        generator = torch.Generator().manual_seed(axis.index)
        x = torch.randn(tokens, hidden, generator=generator)
        chosen = torch.rand(tokens, count, generator=generator).topk(top_k).indices
        weights = torch.rand(tokens, top_k, generator=generator)
        seconds = []
        for _ in range(3):
            network.collect_traffic()
            torch.distributed.barrier(axis.group)
            start = time.perf_counter()
            dispatched = dispatcher.finish_dispatch(
                dispatcher.start_dispatch(x, chosen, count, weights)
            )
            dispatcher.combine(dispatched.x_SD, dispatched)
            seconds.append(time.perf_counter() - start)
        found[transport] = (min(seconds), network.collect_traffic())
    return found
