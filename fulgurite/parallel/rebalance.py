"""Better places for experts: measured load in, a `Placement` with a low busiest rank out.

Layer by layer:

    replicas   extra slots go, one at a time, to the expert whose replicas are busiest
    pack       replicas go, busiest first, to the least busy rank that has room
    swap       while it helps, the busiest rank trades one of its experts for a lighter one
    align      ranks are renamed so that most experts stay where they lay before

With a budget of `moves` a layer starts from where its experts lie now instead: replicas of experts
that cooled down make room for those of hot ones, then ranks swap, until the budget is used up.

With several nodes, `groups` of experts (which a group-limited router visits together) are packed onto
nodes first and then each node is done for itself, so that a token's experts lie on few nodes.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.parallel.placement import Placement, check_load, simulate

Counts = np.ndarray
EPSILON = 1e-9  # of the load: a smaller gain is rounding
GOOD_ENOUGH = 1.02  # of the average: no other counts of replicas are tried
TRIES = 4


@dataclass(frozen=True)
class Places:
    """What there is to fill: `slots` in all, shared evenly by ranks, these evenly by nodes."""

    ranks: int
    slots: int
    nodes: int = 1
    groups: int = 1


def rebalance(
    load_LE: Tensor,
    ranks: int,
    *,
    slots: int | None = None,
    nodes: int = 1,
    groups: int = 1,
    old: Placement | None = None,
    moves: int | None = None,
) -> Placement:
    """Places for the experts of a recorded load; `slots` beyond the experts are for replicas.

    slots    in all; None: one an expert, and up to a multiple of the ranks
    nodes    how many the ranks are spread over; with `groups` of experts these stay together
    old      where experts lie now: a layer that would gain nothing stays as it is
    moves    how many experts of a layer may travel at most; None: as many as it takes
    """
    load = check_load(load_LE)
    experts = load.shape[1]
    if ranks < 1 or nodes < 1 or ranks % nodes:
        raise ArgumentError(f"{ranks} ranks can't be spread evenly over {nodes} nodes")
    slots = -(-experts // ranks) * ranks if slots is None else slots
    places = Places(ranks, slots, nodes, groups if nodes > 1 else 1)
    _check(places, experts)
    before = old if old is not None and old.slots_LS.shape[1] == slots else None
    if moves is not None and (before is None or places.groups > 1):
        raise ArgumentError(
            f"moves={moves} needs an old placement of {slots} slots, and no groups of experts"
        )
    rows = []
    for layer, load_E in enumerate(load.numpy()):
        if before is None:
            row = _layer(load_E, places)
        elif moves is None:
            row = align(_layer(load_E, places), before.slots_LS[layer].numpy(), places, experts)
        else:
            row = _improve(load_E, before.slots_LS[layer].numpy(), ranks, moves)
        rows.append(torch.from_numpy(row))
    made = Placement(torch.stack(rows) if rows else torch.zeros(0, slots).long(), experts, ranks)
    return made if before is None else _keep_good_layers(load, before, made)


def _check(places: Places, experts: int) -> None:
    ranks, nodes, slots = places.ranks, places.nodes, places.slots
    # one replica a rank; experts of a group that stays on its node have that node's ranks only
    most = experts * (ranks if places.groups == 1 else ranks // nodes)
    if slots % ranks or not experts <= slots <= most:
        least = -(-experts // ranks) * ranks
        raise ArgumentError(
            f"{slots} slots for {experts} experts on {ranks} ranks",
            where=f"{places.groups} groups of experts, {nodes} nodes"
            if places.groups > 1
            else None,
            next=f"a multiple of {ranks} from {least} to {most}",
        )
    if places.groups > 1 and (places.groups % nodes or experts % places.groups):
        raise ArgumentError(
            f"{places.groups} groups of {experts} experts can't be shared evenly by {nodes} nodes",
            next="groups=1 places experts one by one",
        )


def _keep_good_layers(load: Tensor, old: Placement, new: Placement) -> Placement:
    was, now = simulate(load, old).load_LR.amax(1), simulate(load, new).load_LR.amax(1)
    better = now < was * (1 - EPSILON)
    return Placement(new.slots_LS.where(better[:, None], old.slots_LS), new.experts, new.ranks)


def _layer(load_E: Counts, places: Places) -> Counts:
    """[S]: the expert of each slot, ranks one after the other."""
    if places.groups == 1:
        return _place(load_E, np.arange(len(load_E)), places.ranks, places.slots)
    nodes, each = places.nodes, places.groups // places.nodes
    members_GX = np.arange(len(load_E)).reshape(places.groups, -1)
    group_loads = load_E[members_GX].sum(1)
    node_of_group = pack(group_loads, np.arange(places.groups), nodes, each)
    rows = []
    for node in range(nodes):
        experts = members_GX[node_of_group == node].ravel()
        rows.append(_place(load_E[experts], experts, places.ranks // nodes, places.slots // nodes))
    return np.concatenate(rows)


def _place(load_X: Counts, experts_X: Counts, ranks: int, slots: int) -> Counts:
    """Slots of some ranks, filled with some experts."""
    counts_X = replicas(load_X, slots, ranks)
    index_S, rank_S, most = _packed(load_X, counts_X, ranks)
    for _ in range(TRIES):
        if most <= load_X.sum() / ranks * GOOD_ENOUGH:
            break
        found = _other_replicas(load_X, counts_X, index_S, rank_S, ranks, most)
        if found is None:
            break
        counts_X = found
        index_S, rank_S, most = _packed(load_X, counts_X, ranks)
    return experts_X[index_S[np.lexsort((index_S, rank_S))]]


def _packed(load_X: Counts, counts_X: Counts, ranks: int) -> tuple[Counts, Counts, float]:
    """The expert of each slot, its rank, and the busiest rank's load."""
    index_S = np.repeat(np.arange(len(load_X)), counts_X)
    share_S = (load_X / counts_X)[index_S]
    rank_S = pack(share_S, index_S, ranks, len(index_S) // ranks)
    return index_S, rank_S, float(np.bincount(rank_S, share_S, ranks).max())


def _other_replicas(
    load_X: Counts, counts_X: Counts, index_S: Counts, rank_S: Counts, ranks: int, most: float
) -> Counts | None:
    """Counts with one replica from elsewhere for an expert of the busiest rank, if that is better.

    The greedy counts make the busiest replica least, which is not always the busiest rank.
    """
    totals = np.bincount(rank_S, (load_X / counts_X)[index_S], ranks)
    busy = np.unique(index_S[rank_S == totals.argmax()])
    busy = busy[np.argsort(-(load_X / counts_X)[busy], kind="stable")]
    for hot in busy[counts_X[busy] < ranks][:TRIES]:
        left = np.where(counts_X > 1, load_X / np.maximum(counts_X - 1, 1), np.inf)
        left[hot] = np.inf
        for cold in np.argsort(left, kind="stable")[:TRIES]:
            counts = counts_X.copy()
            counts[hot] += 1
            counts[cold] -= 1
            if np.isfinite(left[cold]) and _packed(load_X, counts, ranks)[2] < most * (1 - EPSILON):
                return counts
    return None


def replicas(load_E: Counts, slots: int, most: int) -> Counts:
    """How many slots each expert gets, at most one a rank: what makes the busiest replica least."""
    counts = np.ones(len(load_E), dtype=np.int64)
    heap = [(-load, 1, expert) for expert, load in enumerate(load_E.tolist())]
    heapq.heapify(heap)
    for _ in range(slots - len(load_E)):
        _, count, expert = heapq.heappop(heap)
        counts[expert] = count + 1
        if count + 1 < most:
            heapq.heappush(heap, (-load_E[expert] / (count + 1), count + 1, expert))
    return counts


def pack(load_S: Counts, kind_S: Counts, bins: int, room: int) -> Counts:
    """[S]: a bin for each item, `room` items a bin, with a low heaviest bin.

    Items of one kind (replicas of an expert) go to different bins where that is possible.
    """
    bin_S = np.empty(len(load_S), dtype=np.int64)
    total, free = np.zeros(bins), np.full(bins, room)
    holds = np.zeros((bins, int(kind_S.max()) + 1), dtype=bool)
    for item in np.lexsort((kind_S, -load_S)):
        closed = (free == 0).astype(np.int64) * 2 + holds[:, kind_S[item]]
        chosen = int(np.lexsort((-free, total, closed))[0])
        bin_S[item] = chosen
        total[chosen] += load_S[item]
        free[chosen] -= 1
        holds[chosen, kind_S[item]] = True
    _swap(load_S, kind_S, bin_S, total, holds, most=8 * len(load_S))
    return bin_S


def _swap(
    load_S: Counts, kind_S: Counts, bin_S: Counts, total: Counts, holds: Counts, most: int
) -> None:
    """Trade between the heaviest bin and another while the heavier of the two gets lighter."""
    for _ in range(most):
        heaviest = int(total.argmax())
        mine = np.flatnonzero(bin_S == heaviest)
        shift = load_S[mine][:, None] - load_S[None, :]
        after = np.maximum(total[heaviest] - shift, total[bin_S][None, :] + shift)
        doubled = holds[bin_S][:, kind_S[mine]].T | holds[heaviest, kind_S][None, :]
        after[doubled | (bin_S == heaviest)[None, :]] = np.inf
        row, other = np.unravel_index(int(after.argmin()), after.shape)
        if after[row, other] >= total[heaviest] * (1 - EPSILON):
            return
        item, partner = mine[row], bin_S[other]
        for one, origin, target in ((item, heaviest, partner), (other, partner, heaviest)):
            total[origin] -= load_S[one]
            total[target] += load_S[one]
            holds[origin, kind_S[one]], holds[target, kind_S[one]] = False, True
            bin_S[one] = target


def _improve(load_E: Counts, old_S: Counts, ranks: int, moves: int) -> Counts:
    """The old slots, at most `moves` of them with an expert that is new to their rank."""
    kind_S, bin_S = old_S.copy(), np.repeat(np.arange(ranks), len(old_S) // ranks)
    holds = np.zeros((ranks, len(load_E)), dtype=bool)
    holds[bin_S, kind_S] = True
    counts_E = np.bincount(kind_S, minlength=len(load_E))
    wanted_E = replicas(load_E, len(old_S), ranks)
    while moves > 0 and (counts_E < wanted_E).any():
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
        moves -= 1
    load_S = (load_E / counts_E)[kind_S]
    total = np.bincount(bin_S, load_S, ranks)
    _swap(load_S, kind_S, bin_S, total, holds, most=moves // 2)
    new_RP = kind_S[np.argsort(bin_S, kind="stable")].reshape(ranks, -1)
    return np.concatenate([_in_old_order(*pair) for pair in zip(new_RP, old_S.reshape(ranks, -1))])


def align(row_S: Counts, old_S: Counts, places: Places, experts: int) -> Counts:
    """The same sets of experts on renamed nodes and ranks, in the old order where they stay."""
    nodes = places.nodes if places.groups > 1 else 1
    new_NRP = row_S.reshape(nodes, places.ranks // nodes, -1)
    old_NRP = old_S.reshape(new_NRP.shape)
    new_NRP = new_NRP[_match(_sets(new_NRP, nodes, experts), _sets(old_NRP, nodes, experts))]
    for new_RP, old_RP in zip(new_NRP, old_NRP, strict=True):
        ranks = len(new_RP)
        new_RP[:] = new_RP[_match(_sets(new_RP, ranks, experts), _sets(old_RP, ranks, experts))]
        for rank in range(ranks):
            new_RP[rank] = _in_old_order(new_RP[rank], old_RP[rank])
    return new_NRP.reshape(-1)


def _sets(slots: Counts, rows: int, experts: int) -> Counts:
    """[rows, E]: 1 where an expert is in that part of the slots."""
    held = np.zeros((rows, experts))
    held[np.arange(rows)[:, None], slots.reshape(rows, -1)] = 1
    return held


def _match(new: Counts, old: Counts) -> Counts:
    """For each old row the new one to put there: pairs with most in common first."""
    common = new @ old.T
    chosen = np.full(len(old), -1)
    taken = np.zeros(len(new), dtype=bool)
    for pair in np.argsort(-common, axis=None, kind="stable"):
        row, place = divmod(int(pair), len(old))
        if chosen[place] < 0 and not taken[row]:
            chosen[place], taken[row] = row, True
    return chosen


def _in_old_order(new_P: Counts, old_P: Counts) -> Counts:
    """The same experts, those that stay in their old slots."""
    coming = list(new_P)
    result = np.full(len(new_P), -1)
    for slot, expert in enumerate(old_P):
        if expert in coming:
            result[slot] = expert
            coming.remove(expert)
    result[result < 0] = coming
    return result
