"""The mesh: every rank has a place on the axes data, tensor and expert.

In: how many ranks each axis has. Out: one `Axis` each, with the ranks that share it and the process
group they talk through.

    data x tensor = all ranks        rank = data_index * tensor + tensor_index
    expert divides data x tensor     `expert` ranks in a row share one set of experts

The data axis has its own tokens on each rank, the tensor axis one set of weights. The expert axis is no
third factor: it cuts the same ranks again, for the experts only. So 8 ranks are, for instance,

    Mesh(data=8, expert=8)              data-parallel attention, experts over all
    Mesh(data=2, tensor=4, expert=8)    tensor-parallel attention in fours, experts over all
    Mesh(tensor=8)                      everything tensor parallel

Ranks are started by torchrun, by any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or
by `parallel.launch` on one machine. One process without any of it is a mesh of one.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

from fulgurite.errors import ArgumentError
from fulgurite.parallel.health import Health

AXES = ("data", "tensor", "expert")
TIMEOUT = 300.0  # seconds that ranks wait for each other
START_RANKS = "start the ranks with torchrun, or with fulgurite.parallel.launch"
# All ranks make their meshes in one order, so the n-th at a store is the same one everywhere: what a closed
# mesh left there can't be taken for the next one's.
_meshes: Counter[tuple[str, int]] = Counter()


@dataclass(frozen=True)
class MeshShape:
    """How many ranks each axis has, and which rank is where. Needs no processes."""

    data: int = 1
    tensor: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for name in AXES:
            size = getattr(self, name)
            if size < 1:
                raise ArgumentError(f"{name}={size}", next="an axis has at least one rank")
        if self.ranks % self.expert:
            counts = [str(n) for n in range(1, self.ranks + 1) if self.ranks % n == 0]
            raise ArgumentError(
                f"expert {self.expert} must divide data {self.data} x tensor {self.tensor} = "
                f"{self.ranks} ranks",
                next=f"expert={_either(counts)}",
            )

    @property
    def ranks(self) -> int:
        return self.data * self.tensor

    @staticmethod
    def for_world(world: int, data: int | None, tensor: int, expert: int) -> MeshShape:
        """The shape for `world` started ranks; `data` None takes what tensor leaves."""
        if data is None:
            data = max(1, world // max(1, tensor))
        shape = MeshShape(data, tensor, expert)
        if shape.ranks != world:
            counts = [str(n) for n in range(1, world + 1) if world % n == 0]
            raise ArgumentError(
                f"data {data} x tensor {tensor} = {shape.ranks} ranks, but {world} "
                f"{'was' if world == 1 else 'were'} started",
                next=f"start {shape.ranks} ranks (torchrun --nproc-per-node {shape.ranks}), or choose "
                f"tensor={_either(counts)} and leave data to what remains",
            )
        return shape

    def groups(self, axis: str) -> list[list[int]]:
        """The ranks of every group along an axis, in order.

        `replica` is the rest of `expert`: ranks that hold the same experts for other tokens.
        """
        ranks = torch.arange(self.ranks)
        if axis == "world":
            return [ranks.tolist()]
        if axis == "tensor":
            return ranks.view(self.data, self.tensor).tolist()
        if axis == "data":
            return ranks.view(self.data, self.tensor).t().tolist()
        if axis == "expert":
            return ranks.view(-1, self.expert).tolist()
        assert axis == "replica", f"{axis} is no axis"
        return ranks.view(-1, self.expert).t().tolist()

    def __str__(self) -> str:
        text = f"data {self.data} x tensor {self.tensor} = {self.ranks} ranks"
        return text if self.expert == 1 else f"{text}, experts over {self.expert}"


@dataclass(frozen=True, eq=False)
class Axis:
    """The ranks this one shares an axis with. `group` is None where it is alone."""

    name: str
    ranks: tuple[int, ...]
    index: int
    group: dist.ProcessGroup | None = None
    health: Health | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    def __str__(self) -> str:
        return f"{self.name} axis, rank {self.index} of {self.size}"


class Mesh:
    """The axes of this rank. Use it as a context, or call `close` at the end."""

    def __init__(
        self,
        data: int | None = None,
        tensor: int = 1,
        expert: int = 1,
        *,
        timeout: float = TIMEOUT,
        backend: str | None = None,
    ) -> None:
        if not 0 < timeout < threading.TIMEOUT_MAX:
            raise ArgumentError(f"timeout={timeout}", next="seconds that ranks wait for each other")
        self.rank, world = _place()
        self.shape = MeshShape.for_world(world, data, tensor, expert)
        self.timeout = timeout
        self.device = _device()
        self.number = 0  # of the meshes that this process made
        self.health: Health | None = None
        self._started_here = False
        if world > 1:
            self._start(backend)
        self.world = self._axis("world")
        self.data = self._axis("data")
        self.tensor = self._axis("tensor")
        self.expert = self._axis("expert")
        self.replica = self._axis("replica")

    def _start(self, backend: str | None) -> None:
        host, port = os.environ["MASTER_ADDR"], _variable("MASTER_PORT")
        number = self.number = _meshes[host, port]
        _meshes[host, port] += 1
        wait = timedelta(seconds=self.timeout)
        if not dist.is_initialized():
            store, _, _ = next(iter(dist.rendezvous("env://", timeout=wait)))
            own = dist.PrefixStore(f"fulgurite-{number}", store)
            dist.init_process_group(
                backend or _backend(),
                store=own,
                rank=self.rank,
                world_size=self.shape.ranks,
                timeout=wait,
            )
            self._started_here = True
        self.health = Health(number, host, port, self.rank, self.shape.ranks, self.timeout)
        self.health.finish("start", lambda: dist.barrier(async_op=True), on_host=True)

    def _axis(self, name: str) -> Axis:
        """Every rank makes every group, in one order, as torch.distributed asks."""
        mine: Axis | None = None
        for ranks in self.shape.groups(name):
            group = None
            if len(ranks) > 1:
                group = dist.new_group(ranks, timeout=timedelta(seconds=self.timeout))
            if self.rank in ranks:
                mine = Axis(name, tuple(ranks), ranks.index(self.rank), group, self.health)
        assert mine is not None, f"rank {self.rank} has no place on {name} of {self.shape}"
        return mine

    @property
    def neighbours(self) -> int:
        """How many ranks of this machine share this rank's device, this one among them."""
        local = _local()[1] if self.shape.ranks > 1 else 1
        if self.device.type == "cpu":
            return local
        return -(-local // torch.cuda.device_count())

    def close(self) -> None:
        """Leave in good order: others that still wait here are told."""
        if self.health is not None:
            self.health.close()
            self.health = None
        if self._started_here:
            dist.destroy_process_group()
            self._started_here = False

    def __enter__(self) -> Mesh:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        places = ", ".join(f"{name} {getattr(self, name).index}" for name in AXES)
        return f"<Mesh {self.shape}; rank {self.rank}: {places}>"


def new_store(host: str, port: int) -> None:
    """A store was started here, perhaps where another one was before."""
    del _meshes[host, port]


def _place() -> tuple[int, int]:
    """This rank and the number of ranks, from whoever started them."""
    started = dist.is_available() and dist.is_initialized()
    if started:
        rank, world = dist.get_rank(), dist.get_world_size()
    else:
        rank, world = _variable("RANK", "0"), _variable("WORLD_SIZE", "1")
    wanted = ("MASTER_ADDR", "MASTER_PORT") if started else ("RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in wanted if name not in os.environ]
    if world > 1 and missing:
        raise ArgumentError(
            f"there are {world} ranks, but {', '.join(missing)} is not set", next=START_RANKS
        )
    if not 0 <= rank < world:
        raise ArgumentError(
            f"RANK {rank} is none of 0 to WORLD_SIZE {world} - 1 = {world - 1}", next=START_RANKS
        )
    return rank, world


def _variable(name: str, default: str | None = None) -> int:
    """A number that a launcher has set."""
    text = os.environ[name] if default is None else os.environ.get(name, default)
    try:
        return int(text)
    except ValueError as error:
        raise ArgumentError(f"{name} is {text!r} and no number", next=START_RANKS) from error


def _local() -> tuple[int, int]:
    """This rank among those of its machine, and how many they are."""
    rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    return _variable("LOCAL_RANK", rank), _variable("LOCAL_WORLD_SIZE", world)


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", _local()[0] % torch.cuda.device_count())


def _backend() -> str:
    """NCCL where each rank of this machine has a GPU of its own; gloo otherwise."""
    own = torch.cuda.is_available() and torch.cuda.device_count() >= _local()[1]
    return "cpu:gloo,cuda:nccl" if own else "gloo"


def _either(options: list[str]) -> str:
    return options[0] if len(options) == 1 else f"{', '.join(options[:-1])} or {options[-1]}"
