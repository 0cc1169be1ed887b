"""Expert load balancing: recorded expert load in, a `Placement` with a low maximum load out.

Layer by layer, as in DeepSeek's EPLB:

    replicate   extra slots go, one at a time, to the expert with the busiest replicas
    pack        replicas go, busiest first, to the least busy rank with a free slot
    swap        while it helps, the busiest rank swaps an expert for one with less load
    align       ranks are permuted so that most experts stay on their rank

With a budget of `max_moves`, a layer starts from its previous placement instead. Replicas of experts
that are no longer busy are replaced by those of busy ones, then ranks swap, until the budget is used.

With several nodes, `groups` of experts (which a group-limited router selects together) are packed onto
nodes first, then each node is balanced by itself. A token's experts are then on few nodes.

Shapes: L layers; E experts; S slots; R ranks; P slots of a rank; X some experts; G groups.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.parallel.experts.placement import Placement, check_expert_load, simulate_rank_load

Array = np.ndarray
MIN_GAIN = 1e-9  # relative; a smaller gain is rounding
GOOD_ENOUGH = 1.02  # maximum over mean load, at which no other replica counts are tried
MAX_TRIES = 4


@dataclass(frozen=True)
class SlotLayout:
    """The slots to fill, divided evenly over ranks, and these over nodes."""

    num_ranks: int
    num_slots: int
    num_nodes: int = 1
    num_groups: int = 1


def rebalance_experts(
    load_LE: Tensor,
    ranks: int,
    *,
    slots: int | None = None,
    nodes: int = 1,
    groups: int = 1,
    previous: Placement | None = None,
    max_moves: int | None = None,
) -> Placement:
    """A balanced placement for a recorded expert load.

    slots       of all ranks; more than experts: for replicas; None: the experts, rounded up to a
                multiple of the ranks
    nodes       number of nodes of the ranks; `groups` of experts stay together on a node
    previous    the current placement; a layer that would not gain stays as it is
    max_moves   most experts of a layer that change their rank; None: no limit
    """
    load = check_expert_load(load_LE)
    experts = load.shape[1]
    if ranks < 1 or nodes < 1 or ranks % nodes:
        raise ArgumentError(f"{ranks} ranks can't be divided evenly over {nodes} nodes")
    slots = -(-experts // ranks) * ranks if slots is None else slots
    layout = SlotLayout(ranks, slots, nodes, groups if nodes > 1 else 1)
    _check_layout(layout, experts)
    if previous is not None and previous.slots_LS.shape[1] != slots:
        previous = None
    if max_moves is not None and (previous is None or layout.num_groups > 1):
        raise ArgumentError(
            f"max_moves={max_moves} needs a previous placement of {slots} slots, and groups=1"
        )
    rows = []
    for layer, load_E in enumerate(load.numpy()):
        if previous is None:
            row = _place_layer(load_E, layout)
        else:
            previous_S = previous.slots_LS[layer].numpy()
            if max_moves is None:
                row = _place_layer(load_E, layout)
                row = align_with_previous(row, previous_S, layout, experts)
            else:
                row = _improve_placement(load_E, previous_S, ranks, max_moves)
        rows.append(torch.from_numpy(row))
    slots_LS = torch.stack(rows) if rows else torch.zeros(0, slots).long()
    placement = Placement(slots_LS, experts, ranks)
    return placement if previous is None else _keep_better_layers(load, previous, placement)


def _check_layout(layout: SlotLayout, experts: int) -> None:
    ranks, nodes, slots = layout.num_ranks, layout.num_nodes, layout.num_slots
    # At most one replica a rank; experts of a group have the ranks of one node only.
    max_slots = experts * (ranks if layout.num_groups == 1 else ranks // nodes)
    if slots % ranks or not experts <= slots <= max_slots:
        min_slots = -(-experts // ranks) * ranks
        raise ArgumentError(
            f"{slots} slots for {experts} experts on {ranks} ranks",
            where=f"{layout.num_groups} groups of experts, {nodes} nodes"
            if layout.num_groups > 1
            else None,
            next=f"a multiple of {ranks} from {min_slots} to {max_slots}",
        )
    if layout.num_groups > 1 and (layout.num_groups % nodes or experts % layout.num_groups):
        raise ArgumentError(
            f"{layout.num_groups} groups of {experts} experts can't be divided evenly over {nodes} nodes",
            next="use groups=1, which ignores groups",
        )


def _keep_better_layers(load: Tensor, old: Placement, new: Placement) -> Placement:
    """The new slots of layers whose maximum load decreases, the old slots of all others."""
    old_max_L = simulate_rank_load(load, old).load_LR.amax(1)
    new_max_L = simulate_rank_load(load, new).load_LR.amax(1)
    is_better_L = new_max_L < old_max_L * (1 - MIN_GAIN)
    slots_LS = new.slots_LS.where(is_better_L[:, None], old.slots_LS)
    return Placement(slots_LS, new.num_experts, new.num_ranks)


def _place_layer(load_E: Array, layout: SlotLayout) -> Array:
    """[S]: the expert of each slot, rank by rank."""
    if layout.num_groups == 1:
        return _place_experts(load_E, np.arange(len(load_E)), layout.num_ranks, layout.num_slots)
    nodes, groups_per_node = layout.num_nodes, layout.num_groups // layout.num_nodes
    members_GX = np.arange(len(load_E)).reshape(layout.num_groups, -1)
    group_loads = load_E[members_GX].sum(1)
    node_of_group = balanced_packing(
        group_loads, np.arange(layout.num_groups), nodes, groups_per_node
    )
    rows = []
    for node in range(nodes):
        experts = members_GX[node_of_group == node].ravel()
        node_ranks, node_slots = layout.num_ranks // nodes, layout.num_slots // nodes
        rows.append(_place_experts(load_E[experts], experts, node_ranks, node_slots))
    return np.concatenate(rows)


def _place_experts(load_X: Array, experts_X: Array, ranks: int, slots: int) -> Array:
    """Fill the slots of some ranks with some experts."""
    counts_X = replicate_experts(load_X, slots, ranks)
    index_S, rank_S, most = _pack_replicas(load_X, counts_X, ranks)
    for _ in range(MAX_TRIES):
        if most <= load_X.sum() / ranks * GOOD_ENOUGH:
            break
        found = _try_moving_a_replica(load_X, counts_X, index_S, rank_S, ranks, most)
        if found is None:
            break
        counts_X = found
        index_S, rank_S, most = _pack_replicas(load_X, counts_X, ranks)
    return experts_X[index_S[np.lexsort((index_S, rank_S))]]


def _pack_replicas(load_X: Array, counts_X: Array, ranks: int) -> tuple[Array, Array, float]:
    """The expert of each slot, its rank, and the maximum load of a rank."""
    index_S = np.repeat(np.arange(len(load_X)), counts_X)
    share_S = (load_X / counts_X)[index_S]
    rank_S = balanced_packing(share_S, index_S, ranks, len(index_S) // ranks)
    return index_S, rank_S, float(np.bincount(rank_S, share_S, ranks).max())


def _try_moving_a_replica(
    load_X: Array, counts_X: Array, index_S: Array, rank_S: Array, ranks: int, most: float
) -> Array | None:
    """Replica counts with one replica moved to an expert of the busiest rank, if that is better.

    The greedy counts minimize the load of the busiest replica, which is not always the busiest rank.
    """
    totals = np.bincount(rank_S, (load_X / counts_X)[index_S], ranks)
    busy = np.unique(index_S[rank_S == totals.argmax()])
    busy = busy[np.argsort(-(load_X / counts_X)[busy], kind="stable")]
    for hot in busy[counts_X[busy] < ranks][:MAX_TRIES]:
        left = np.where(counts_X > 1, load_X / np.maximum(counts_X - 1, 1), np.inf)
        left[hot] = np.inf
        for cold in np.argsort(left, kind="stable")[:MAX_TRIES]:
            counts = counts_X.copy()
            counts[hot] += 1
            counts[cold] -= 1
            if np.isfinite(left[cold]) and _pack_replicas(load_X, counts, ranks)[2] < most * (
                1 - MIN_GAIN
            ):
                return counts
    return None


def replicate_experts(load_E: Array, slots: int, max_count: int) -> Array:
    """The number of slots of each expert, at most `max_count`; minimizes the busiest replica."""
    counts = np.ones(len(load_E), dtype=np.int64)
    heap = [(-load, 1, expert) for expert, load in enumerate(load_E.tolist())]
    heapq.heapify(heap)
    for _ in range(slots - len(load_E)):
        _, count, expert = heapq.heappop(heap)
        counts[expert] = count + 1
        if count + 1 < max_count:
            heapq.heappush(heap, (-load_E[expert] / (count + 1), count + 1, expert))
    return counts


def balanced_packing(load_S: Array, kind_S: Array, bins: int, bin_size: int) -> Array:
    """[S]: a bin for each item, `bin_size` items a bin, with a low maximum load of a bin.

    Items of one kind (replicas of an expert) go to different bins if possible.
    """
    bin_S = np.empty(len(load_S), dtype=np.int64)
    total, free = np.zeros(bins), np.full(bins, bin_size)
    holds = np.zeros((bins, int(kind_S.max()) + 1), dtype=bool)
    for item in np.lexsort((kind_S, -load_S)):
        closed = (free == 0).astype(np.int64) * 2 + holds[:, kind_S[item]]
        chosen = int(np.lexsort((-free, total, closed))[0])
        bin_S[item] = chosen
        total[chosen] += load_S[item]
        free[chosen] -= 1
        holds[chosen, kind_S[item]] = True
    _swap_items(load_S, kind_S, bin_S, total, holds, max_swaps=8 * len(load_S))
    return bin_S


def _swap_items(
    load_S: Array, kind_S: Array, bin_S: Array, total: Array, holds: Array, max_swaps: int
) -> None:
    """Swap items of the heaviest bin with those of others while the heavier of the two gets lighter."""
    for _ in range(max_swaps):
        heaviest = int(total.argmax())
        mine = np.flatnonzero(bin_S == heaviest)
        shift = load_S[mine][:, None] - load_S[None, :]
        after = np.maximum(total[heaviest] - shift, total[bin_S][None, :] + shift)
        doubled = holds[bin_S][:, kind_S[mine]].T | holds[heaviest, kind_S][None, :]
        after[doubled | (bin_S == heaviest)[None, :]] = np.inf
        row, other = np.unravel_index(int(after.argmin()), after.shape)
        if after[row, other] >= total[heaviest] * (1 - MIN_GAIN):
            return
        item, partner = mine[row], bin_S[other]
        for one, origin, target in ((item, heaviest, partner), (other, partner, heaviest)):
            total[origin] -= load_S[one]
            total[target] += load_S[one]
            holds[origin, kind_S[one]], holds[target, kind_S[one]] = False, True
            bin_S[one] = target


def _improve_placement(load_E: Array, old_S: Array, ranks: int, max_moves: int) -> Array:
    """The old slots; at most `max_moves` of them get an expert that is new to their rank."""
    kind_S, bin_S = old_S.copy(), np.repeat(np.arange(ranks), len(old_S) // ranks)
    holds = np.zeros((ranks, len(load_E)), dtype=bool)
    holds[bin_S, kind_S] = True
    counts_E = np.bincount(kind_S, minlength=len(load_E))
    wanted_E = replicate_experts(load_E, len(old_S), ranks)
    while max_moves > 0 and (counts_E < wanted_E).any():
        hot = int(np.where(counts_E < wanted_E, load_E / counts_E, -1).argmax())
        spare = (counts_E > wanted_E)[kind_S] & ~holds[bin_S, hot]
        if not spare.any():
            break
        totals = np.bincount(bin_S, (load_E / counts_E)[kind_S], ranks)
        slot = int(np.where(spare, totals[bin_S], np.inf).argmin())
        counts_E[kind_S[slot]] -= 1
        counts_E[hot] += 1
        kind_S[slot] = hot
        holds = np.zeros_like(holds)
        holds[bin_S, kind_S] = True
        max_moves -= 1
    load_S = (load_E / counts_E)[kind_S]
    total = np.bincount(bin_S, load_S, ranks)
    _swap_items(load_S, kind_S, bin_S, total, holds, max_swaps=max_moves // 2)
    new_RP = kind_S[np.argsort(bin_S, kind="stable")].reshape(ranks, -1)
    return np.concatenate(
        [_keep_previous_slots(*pair) for pair in zip(new_RP, old_S.reshape(ranks, -1))]
    )


def align_with_previous(row_S: Array, old_S: Array, layout: SlotLayout, experts: int) -> Array:
    """The same experts on permuted nodes and ranks; experts that stay keep their slots."""
    nodes = layout.num_nodes if layout.num_groups > 1 else 1
    new_NRP = row_S.reshape(nodes, layout.num_ranks // nodes, -1)
    old_NRP = old_S.reshape(new_NRP.shape)
    new_NRP = new_NRP[
        _match_rows(_membership(new_NRP, nodes, experts), _membership(old_NRP, nodes, experts))
    ]
    for new_RP, old_RP in zip(new_NRP, old_NRP, strict=True):
        ranks = len(new_RP)
        new_RP[:] = new_RP[
            _match_rows(_membership(new_RP, ranks, experts), _membership(old_RP, ranks, experts))
        ]
        for rank in range(ranks):
            new_RP[rank] = _keep_previous_slots(new_RP[rank], old_RP[rank])
    return new_NRP.reshape(-1)


def _membership(slots: Array, rows: int, experts: int) -> Array:
    """[rows, E]: 1 if an expert is in that row of slots."""
    held = np.zeros((rows, experts))
    held[np.arange(rows)[:, None], slots.reshape(rows, -1)] = 1
    return held


def _match_rows(new: Array, old: Array) -> Array:
    """For each old row the new row to put there; pairs with most experts in common first."""
    common = new @ old.T
    chosen = np.full(len(old), -1)
    taken = np.zeros(len(new), dtype=bool)
    for pair in np.argsort(-common, axis=None, kind="stable"):
        row, place = divmod(int(pair), len(old))
        if chosen[place] < 0 and not taken[row]:
            chosen[place], taken[row] = row, True
    return chosen


def _keep_previous_slots(new_P: Array, old_P: Array) -> Array:
    """The same experts; those that stay keep their slots."""
    coming = list(new_P)
    result = np.full(len(new_P), -1)
    for slot, expert in enumerate(old_P):
        if expert in coming:
            result[slot] = expert
            coming.remove(expert)
    result[result < 0] = coming
    return result
