"""Expert placement: which expert each slot holds, and what follows from that.

    load [layers, experts] ─ rebalance.py ─▶ Placement ─┬─ simulate_rank_load ─▶ RankLoad
                                                        ├─ count_moves ─▶ experts to copy
                                                        └─ replica_table ─▶ ReplicaTable

A busy expert may have several replicas. Every rank has the same number of slots, so every rank needs
the same memory; only the load is balanced. A router selects logical experts. `ReplicaTable.remap` maps
them to slots right after it, and nothing behind it knows of replicas.

Shapes: L layers; E logical experts; S slots of all ranks; R ranks; P slots of a rank; M most replicas
of an expert; T tokens; k experts of a token.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fulgurite.errors import ArgumentError

NAME_MARK = "model: "  # of the model's name in the first line of a .csv file


@dataclass(frozen=True, eq=False)
class Placement:
    """`slots_LS[l, s]` is the expert in slot s; rank r has the slots from r S/R on.

    `model`: the name of the model that it was made for; empty: any of this shape.
    """

    slots_LS: Tensor
    num_experts: int
    num_ranks: int
    model: str = ""

    def __post_init__(self) -> None:
        slots = self.slots_LS
        if self.num_ranks < 1 or slots.ndim != 2 or slots.shape[1] % self.num_ranks:
            raise ArgumentError(
                f"slots of shape {list(slots.shape)} can't be divided evenly over {self.num_ranks} ranks",
                next="the number of slots must be a multiple of the number of ranks",
            )
        if slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < self.num_experts:
            raise ArgumentError(f"a slot has an expert outside 0 to {self.num_experts - 1}")
        for layer, counts in enumerate(self.replicas_LE.tolist()):
            if 0 in counts:
                raise ArgumentError(f"expert {counts.index(0)} of layer {layer} is in no slot")

    @property
    def num_layers(self) -> int:
        return self.slots_LS.shape[0]

    @property
    def slots_per_rank(self) -> int:
        return self.slots_LS.shape[1] // self.num_ranks

    @property
    def replicas_LE(self) -> Tensor:
        """The number of slots of each expert."""
        counts = torch.zeros(self.num_layers, self.num_experts, dtype=torch.int64)
        return counts.scatter_add(1, self.slots_LS, torch.ones_like(self.slots_LS))

    @property
    def experts_LRP(self) -> Tensor:
        return self.slots_LS.unflatten(1, (self.num_ranks, -1))

    def replica_table(self, device: torch.device | str = "cpu") -> ReplicaTable:
        """The slots of each expert and their number, for the router."""
        counts = self.replicas_LE
        order = self.slots_LS.argsort(dim=1, stable=True)  # slots by expert, lowest slot first
        first = counts.cumsum(1) - counts
        # The n-th replica of an expert; unused entries repeat the first.
        replica = torch.arange(int(counts.max()) if counts.numel() else 1)
        replica = replica.where(replica < counts[..., None], 0)
        slots = order.gather(1, (first[..., None] + replica).flatten(1))
        slots = slots.unflatten(1, replica.shape[1:])
        return ReplicaTable(slots.to(device), counts.to(device))


@dataclass(frozen=True, eq=False)
class ReplicaTable:
    """`slots_LEM[l, e, n]` is the slot of replica n of expert e, which has `replicas_LE[l, e]`."""

    slots_LEM: Tensor
    replicas_LE: Tensor

    def remap(self, layer: int, experts_Tk: Tensor, first_token: int = 0) -> Tensor:
        """Slots instead of experts: token t uses replica (first_token + t) mod replicas.

        The replicas of an expert then get equal loads, and equal inputs get equal slots. Ranks pass
        their index as `first_token`; otherwise ranks with few tokens would all use replica 0. An
        invalid expert gets slot -1, which a dispatcher rejects on every rank.
        """
        inside_Tk = (experts_Tk >= 0) & (experts_Tk < self.replicas_LE.shape[1])
        experts_Tk = experts_Tk.where(inside_Tk, 0)
        token_T1 = torch.arange(experts_Tk.shape[0], device=experts_Tk.device)[:, None]
        replica_Tk = (token_T1 + first_token) % self.replicas_LE[layer][experts_Tk]
        return self.slots_LEM[layer][experts_Tk, replica_Tk].where(inside_Tk, -1)


def contiguous_placement(layers: int, experts: int, ranks: int) -> Placement:
    """Every expert once, in order; spare slots at the end repeat the first experts."""
    slots = -(-experts // ranks) * ranks
    return Placement((torch.arange(slots) % experts).expand(layers, -1).clone(), experts, ranks)


@dataclass(frozen=True, eq=False)
class RankLoad:
    """The load of each rank in each layer: tokens assigned to its experts."""

    load_LR: Tensor

    @property
    def imbalance_L(self) -> Tensor:
        """The busiest rank relative to the mean, by layer; 1 if there was no load."""
        most, mean = self.load_LR.amax(1), self.load_LR.mean(1)
        return (most / mean).where(mean > 0, 1.0)

    @property
    def imbalance(self) -> float:
        """The same over all layers; each layer waits for its busiest rank."""
        mean = float(self.load_LR.mean(1).sum())
        return float(self.load_LR.amax(1).sum()) / mean if mean else 1.0


def simulate_rank_load(load_LE: Tensor, placement: Placement) -> RankLoad:
    """The load of each rank for a recorded expert load that replicas share evenly."""
    load = check_expert_load(load_LE)
    if tuple(load.shape) != (placement.num_layers, placement.num_experts):
        raise ArgumentError(
            f"an expert load of shape {list(load.shape)} does not match a placement of "
            f"{placement.num_layers} layers with {placement.num_experts} experts"
        )
    share_LE = load / placement.replicas_LE
    share_LS = share_LE.gather(1, placement.slots_LS)
    return RankLoad(share_LS.unflatten(1, (placement.num_ranks, -1)).sum(2))


def count_moves(old: Placement, new: Placement) -> int:
    """The number of experts, over ranks and layers, that a rank gets and did not have before."""
    if (old.num_layers, old.num_experts, old.num_ranks) != (
        new.num_layers,
        new.num_experts,
        new.num_ranks,
    ):
        raise ArgumentError("the placements belong to different models or numbers of ranks")
    had, has = _experts_on_ranks(old), _experts_on_ranks(new)
    return int((has & ~had).sum())


def _experts_on_ranks(placement: Placement) -> Tensor:
    """[L, R, E]: whether a rank has an expert."""
    shape = (placement.num_layers, placement.num_ranks, placement.num_experts)
    return torch.zeros(shape, dtype=torch.bool).scatter(2, placement.experts_LRP, True)


def count_expert_load(experts_Tk: Tensor, experts: int) -> Tensor:
    """[E]: the number of tokens assigned to each expert of one layer."""
    return torch.bincount(experts_Tk.flatten(), minlength=experts)


def read_expert_load(path: Path) -> Tensor:
    """The expert load [L, E] of a file: .json (a list of lists, or what an engine saves), .npy, or .csv
    (a line a layer)."""

    def read_json() -> np.ndarray:
        values = json.loads(path.read_text())
        return np.asarray(values.get("load") if isinstance(values, dict) else values)

    readers = {
        ".json": read_json,
        ".npy": lambda: np.load(path, allow_pickle=False),
        ".csv": lambda: np.loadtxt(path, delimiter=",", ndmin=2),
    }
    if path.suffix not in readers:
        raise ArgumentError(f"{path} is not an expert load", next=f"one of {', '.join(readers)}")
    try:
        if not path.stat().st_size:
            raise ValueError("it is empty")
        values = readers[path.suffix]()
        if values.dtype.kind not in "iuf":
            raise ValueError(f"its values are {values.dtype}")
        return check_expert_load(torch.from_numpy(np.ascontiguousarray(values, dtype=np.float64)))
    except OSError as problem:
        raise ArgumentError(f"{path} can't be read: {problem.strerror or problem}") from problem
    except (ValueError, TypeError) as problem:  # ArgumentError is a ValueError
        text = problem.what if isinstance(problem, ArgumentError) else problem
        raise ArgumentError(
            f"{path} is not an expert load: {text}", next="one row of numbers for each MoE layer"
        ) from problem


def read_model_name(path: Path) -> str:
    """The model of a file that `read_expert_load` accepts; empty: the file names none."""
    name: object = ""
    if path.suffix == ".json":
        values = json.loads(path.read_text())
        name = values.get("model", "") if isinstance(values, dict) else ""
    elif path.suffix == ".csv":
        line = path.read_text().partition("\n")[0].removeprefix("# ")
        name = line.removeprefix(NAME_MARK) if line.startswith(NAME_MARK) else ""
    return str(name).strip()


def check_model_name(what: str, recorded: str, name: str) -> None:
    """ArgumentError if something was recorded or made for a model of another name. Empty: any.

    The longer name may go on: `Qwen3-30B-A3B-FP8` is a Qwen3-30B-A3B.
    """
    short, long = sorted((recorded.lower(), name.lower()), key=len)
    if not long.startswith(short):
        raise ArgumentError(
            f"{what} is of {recorded}, and the model is {name}",
            next="record the load of this model; if it is the same one, change the name in the file",
        )


def save_placement(placement: Placement, path: Path) -> Path:
    """Write a placement as JSON, for `read_placement`."""
    values = {
        "model": placement.model,
        "experts": placement.num_experts,
        "ranks": placement.num_ranks,
        "slots": placement.slots_LS.tolist(),
    }
    try:
        path.write_text(json.dumps(values))
    except OSError as problem:
        raise ArgumentError(f"{path} can't be written: {problem.strerror}") from problem
    return path


def read_placement(path: Path) -> Placement:
    """Read a placement that `save_placement` wrote."""
    try:
        values = json.loads(path.read_text())
        slots = torch.tensor(values["slots"])
        if slots.dtype != torch.int64:  # 0.5 would become expert 0
            raise ValueError("its slots are not all numbers of experts")
        model = str(values.get("model", ""))
        return Placement(slots, int(values["experts"]), int(values["ranks"]), model)
    except OSError as problem:
        raise ArgumentError(f"{path} can't be read: {problem.strerror}") from problem
    except (
        ValueError,
        KeyError,
        TypeError,
        RuntimeError,
    ) as problem:  # all that json, torch and `Placement` raise
        text = problem.what if isinstance(problem, ArgumentError) else problem
        raise ArgumentError(
            f"{path} is not a placement: {text}",
            next="write one with fulgurite plan --expert-load … --placement FILE",
        ) from problem


def check_expert_load(load_LE: Tensor) -> Tensor:
    """The expert load in float64; ArgumentError if it is not one."""
    load = load_LE.to(torch.float64)
    if load.ndim != 2 or not load.shape[1]:
        raise ArgumentError(f"an expert load has shape [layers, experts], not {list(load.shape)}")
    if not bool(load.isfinite().all()) or bool((load < 0).any()):
        raise ArgumentError("an expert load has counts: numbers of 0 or more")
    return load
