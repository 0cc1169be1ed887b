"""Where experts lie: a `Placement` says which expert each slot holds, and what follows from that.

    load [layers, experts] ─ rebalance.py ─▶ Placement ─┬─ simulate ─▶ Balance: load by rank
                                                        ├─ moved ─▶ copies that must travel
                                                        └─ table ─▶ ReplicaTable, for the router

An expert that many tokens visit may have several replicas. Every rank has equally many slots, so
every rank keeps equally many bytes; the load is what is balanced. A router chooses logical experts;
`ReplicaTable.remap` turns them into slots right after it, and nothing behind it knows of replicas.

Shapes: L layers; E logical experts; S slots of all ranks; R ranks; M most replicas of an expert;
T tokens; k experts of a token.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fulgurite.errors import ArgumentError


@dataclass(frozen=True, eq=False)
class Placement:
    """`slots_LS[l, s]` is the expert in slot s; rank r has the slots from r S/R on, in order."""

    slots_LS: Tensor
    experts: int
    ranks: int

    def __post_init__(self) -> None:
        slots = self.slots_LS
        if self.ranks < 1 or slots.ndim != 2 or slots.shape[1] % self.ranks:
            raise ArgumentError(
                f"slots of shape {list(slots.shape)} can't be shared evenly by {self.ranks} ranks",
                next="give [layers, slots] with a multiple of the ranks as slots",
            )
        if slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < self.experts:
            raise ArgumentError(f"a slot names an expert outside 0 to {self.experts - 1}")
        for layer, counts in enumerate(self.replicas_LE.tolist()):
            if 0 in counts:
                raise ArgumentError(f"expert {counts.index(0)} of layer {layer} lies nowhere")

    @property
    def layers(self) -> int:
        return self.slots_LS.shape[0]

    @property
    def slots_per_rank(self) -> int:
        return self.slots_LS.shape[1] // self.ranks

    @property
    def replicas_LE(self) -> Tensor:
        """How many slots hold each expert."""
        counts = torch.zeros(self.layers, self.experts, dtype=torch.int64)
        return counts.scatter_add(1, self.slots_LS, torch.ones_like(self.slots_LS))

    @property
    def by_rank_LRP(self) -> Tensor:
        return self.slots_LS.unflatten(1, (self.ranks, -1))

    def table(self, device: torch.device | str = "cpu") -> ReplicaTable:
        """What a router needs: for each expert its slots, and how many they are."""
        counts = self.replicas_LE
        order = self.slots_LS.argsort(dim=1, stable=True)  # slots by expert, lowest slot first
        first = counts.cumsum(1) - counts
        # The n-th replica of an expert; past the last one the first again, which remap never asks.
        turn = torch.arange(int(counts.max()) if counts.numel() else 1)
        turn = turn.where(turn < counts[..., None], 0)
        slots = order.gather(1, (first[..., None] + turn).flatten(1)).unflatten(1, turn.shape[1:])
        return ReplicaTable(slots.to(device), counts.to(device))


@dataclass(frozen=True, eq=False)
class ReplicaTable:
    """`slots_LEM[l, e, n]` is the slot of replica n of expert e, which has `replicas_LE[l, e]`."""

    slots_LEM: Tensor
    replicas_LE: Tensor

    def remap(self, layer: int, experts_Tk: Tensor, first_token: int = 0) -> Tensor:
        """Slots in place of experts: token t visits replica (first_token + t) mod replicas.

        So the replicas of an expert get equal shares, and equal inputs equal slots. Ranks with few
        tokens each pass a `first_token` of their own, their rank, or all would visit replica 0. An
        expert that doesn't exist has slot -1, which a transport refuses on every rank.
        """
        inside_Tk = (experts_Tk >= 0) & (experts_Tk < self.replicas_LE.shape[1])
        experts_Tk = experts_Tk.where(inside_Tk, 0)
        token_T1 = torch.arange(experts_Tk.shape[0], device=experts_Tk.device)[:, None]
        turn_Tk = (token_T1 + first_token) % self.replicas_LE[layer][experts_Tk]
        return self.slots_LEM[layer][experts_Tk, turn_Tk].where(inside_Tk, -1)


def contiguous(layers: int, experts: int, ranks: int) -> Placement:
    """Every expert once, in order, as models are loaded; the last slots may repeat the first ones."""
    slots = -(-experts // ranks) * ranks
    return Placement((torch.arange(slots) % experts).expand(layers, -1).clone(), experts, ranks)


@dataclass(frozen=True, eq=False)
class Balance:
    """What each rank has to do in each layer, in visits of tokens."""

    load_LR: Tensor

    @property
    def ratio_L(self) -> Tensor:
        """The busiest rank over the average, layer by layer; 1 where there was nothing to do."""
        most, mean = self.load_LR.amax(1), self.load_LR.mean(1)
        return (most / mean).where(mean > 0, 1.0)

    @property
    def ratio(self) -> float:
        """The same over all layers, which wait for their busiest rank one after the other."""
        mean = float(self.load_LR.mean(1).sum())
        return float(self.load_LR.amax(1).sum()) / mean if mean else 1.0


def simulate(load_LE: Tensor, placement: Placement) -> Balance:
    """The load of each rank when tokens come as recorded and replicas share them evenly."""
    load = check_load(load_LE)
    if tuple(load.shape) != (placement.layers, placement.experts):
        raise ArgumentError(
            f"a load of {list(load.shape)} does not belong to a placement of "
            f"{placement.layers} layers with {placement.experts} experts"
        )
    share_LE = load / placement.replicas_LE
    share_LS = share_LE.gather(1, placement.slots_LS)
    return Balance(share_LS.unflatten(1, (placement.ranks, -1)).sum(2))


def moved(old: Placement, new: Placement) -> int:
    """How many experts some rank gets that it did not hold before, over all layers."""
    if (old.layers, old.experts, old.ranks) != (new.layers, new.experts, new.ranks):
        raise ArgumentError("the two placements are of different models or numbers of ranks")
    had, has = _held(old), _held(new)
    return int((has & ~had).sum())


def _held(placement: Placement) -> Tensor:
    """[L, R, E]: whether a rank holds an expert."""
    shape = (placement.layers, placement.ranks, placement.experts)
    return torch.zeros(shape, dtype=torch.bool).scatter(2, placement.by_rank_LRP, True)


def count_load(experts_Tk: Tensor, experts: int) -> Tensor:
    """[E]: how many tokens visit each expert of one layer; sums of these are a load's rows."""
    return torch.bincount(experts_Tk.flatten(), minlength=experts)


def read_load(path: Path) -> Tensor:
    """[L, E] from a file: .json (a list of lists), .npy, or .csv (a line a layer)."""
    readers = {
        ".json": lambda: np.asarray(json.loads(path.read_text()), dtype=np.float64),
        ".npy": lambda: np.load(path, allow_pickle=False).astype(np.float64),
        ".csv": lambda: np.loadtxt(path, delimiter=",", ndmin=2),
    }
    if path.suffix not in readers:
        raise ArgumentError(
            f"{path} is no load that can be read", next=f"one of {', '.join(readers)}"
        )
    try:
        values = readers[path.suffix]()
    except OSError as problem:
        raise ArgumentError(f"{path} can't be read: {problem.strerror or problem}") from problem
    except (ValueError, TypeError) as problem:
        raise ArgumentError(
            f"{path} holds no load: {problem}", next="rows of numbers, a row a layer of experts"
        ) from problem
    return check_load(torch.from_numpy(np.ascontiguousarray(values)))


def save_placement(placement: Placement, path: Path) -> Path:
    """As JSON, for `read_placement`."""
    values = {
        "experts": placement.experts,
        "ranks": placement.ranks,
        "slots": placement.slots_LS.tolist(),
    }
    try:
        path.write_text(json.dumps(values))
    except OSError as problem:
        raise ArgumentError(f"{path} can't be written: {problem.strerror}") from problem
    return path


def read_placement(path: Path) -> Placement:
    """What `save_placement` wrote, checked."""
    try:
        values = json.loads(path.read_text())
        slots = torch.tensor(values["slots"], dtype=torch.int64)
        experts, ranks = int(values["experts"]), int(values["ranks"])
    except OSError as problem:
        raise ArgumentError(f"{path} can't be read: {problem.strerror}") from problem
    except (
        ValueError,
        KeyError,
        TypeError,
        RuntimeError,
    ) as problem:  # as json and torch have them
        raise ArgumentError(
            f"{path} holds no placement: {problem}", next="fulgurite plan --load … --placement FILE"
        ) from problem
    return Placement(slots, experts, ranks)


def check_load(load_LE: Tensor) -> Tensor:
    """The load in float64, if it is one."""
    load = load_LE.to(torch.float64)
    if load.ndim != 2 or not load.shape[1]:
        raise ArgumentError(f"a load is [layers, experts], not {list(load.shape)}")
    if not bool(load.isfinite().all()) or bool((load < 0).any()):
        raise ArgumentError("a load counts visits: numbers of 0 or more")
    return load
