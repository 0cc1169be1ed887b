"""The device mesh: numbers of ranks in, one `Axis` for each kind of parallelism out.

An `Axis` has the ranks that share it and their process group.

    pipeline x data x context x tensor = all ranks
    rank = ((pipeline_index * data + data_index) * context + context_index) * tensor + tensor_index
    expert divides data x context x tensor     `expert` consecutive ranks share one set of experts

A pipeline axis shares out the layers: each of its ranks is a stage. Each data rank has sequences of its
own. A context axis shares out the tokens of a sequence and their KV cache. A tensor axis shares one set
of weights. The expert axis is not another factor: it regroups the ranks of a stage, for the experts
only. Meshes of 8 ranks are, for example,

    Mesh(data=8, expert=8)              data-parallel attention, experts over all ranks
    Mesh(data=2, tensor=4, expert=8)    tensor-parallel attention over 4, experts over all ranks
    Mesh(tensor=8)                      everything tensor-parallel
    Mesh(pipeline=2, tensor=4)          two stages, each tensor-parallel
    Mesh(context=4, tensor=2)           long prompts: a quarter of the KV cache on a rank

Ranks are started by torchrun, by any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT,
or by `parallel.launch` on one machine. A single process is a mesh of one rank.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import TracebackType

import torch
import torch.distributed as dist

from fulgurite.errors import ArgumentError
from fulgurite.kernels.integer_math import cdiv
from fulgurite.option_values import DEFAULT_TIMEOUT
from fulgurite.parallel.device_collectives import DeviceCollectives
from fulgurite.parallel.emulation import EmulatedNetwork, network_from_environment
from fulgurite.parallel.health import HealthMonitor
from fulgurite.parallel.topology import find_emulated_nodes, publish_node, read_nodes

AXES = ("pipeline", "data", "context", "tensor", "expert")
MESHES_PER_RESTART = 1_000_000  # numbers for the meshes between two restarts by torchrun
HOW_TO_START_RANKS = "start the ranks with torchrun, or with fulgurite.parallel.processes.launch"
# All ranks create their meshes in the same order, so the n-th mesh at a store is the same one on all
# ranks. Keys that a closed mesh left at the store are not mistaken for those of the next one.
_mesh_counts: Counter[tuple[str, int]] = Counter()


@dataclass(frozen=True)
class MeshShape:
    """The number of ranks of each axis, and their positions. Needs no processes."""

    data: int = 1
    tensor: int = 1
    expert: int = 1
    pipeline: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        for name in AXES:
            size = getattr(self, name)
            if size < 1:
                raise ArgumentError(f"{name}={size}", next="an axis has at least one rank")
        if self.stage_size % self.expert:
            counts = [str(n) for n in range(1, self.stage_size + 1) if self.stage_size % n == 0]
            stage = " of a pipeline stage" if self.pipeline > 1 else ""
            raise ArgumentError(
                f"expert {self.expert} must divide {self._format_stage()} = {self.stage_size} "
                f"ranks{stage}",
                next=f"expert={_format_choices(counts)}",
            )

    @property
    def stage_size(self) -> int:
        """The ranks of one pipeline stage."""
        return self.data * self.context * self.tensor

    @property
    def world_size(self) -> int:
        return self.pipeline * self.stage_size

    @staticmethod
    def for_world(
        world: int,
        data: int | None,
        tensor: int,
        expert: int,
        pipeline: int = 1,
        context: int = 1,
    ) -> MeshShape:
        """The shape for `world` ranks; `data` None: what the other axes leave."""
        if data is None:
            data = max(1, world // max(1, pipeline * context * tensor))
        shape = MeshShape(data, tensor, expert, pipeline, context)
        if shape.world_size != world:
            counts = [str(n) for n in range(1, world + 1) if world % n == 0]
            raise ArgumentError(
                f"{shape._format_factors()} = {shape.world_size} ranks, but {world} "
                f"{'was' if world == 1 else 'were'} started",
                next=f"start {shape.world_size} ranks (torchrun --nproc-per-node {shape.world_size}), or choose "
                f"tensor={_format_choices(counts)} and leave data to what remains",
            )
        return shape

    def count_rank_tokens(self, tokens: int, micro_batches: int = 1) -> int:
        """The most tokens that a rank has of a step of a replica, or of one of its micro-batches.

        The context axis shards them, and so does the tensor axis with sequence parallelism.
        """
        tokens = cdiv(cdiv(tokens, micro_batches), self.context)
        return cdiv(tokens, self.tensor) if self.tensor > 1 and self.expert > 1 else tokens

    def groups(self, axis: str) -> list[list[int]]:
        """The ranks of every group along an axis, in order.

        The groups of `expert_data` are the ranks with the same experts and other tokens.
        """
        ranks = torch.arange(self.world_size)
        if axis == "world":
            return [ranks.tolist()]
        if axis == "expert":
            return ranks.view(-1, self.expert).tolist()
        if axis == "expert_data":
            groups = ranks.view(self.pipeline, -1, self.expert).transpose(1, 2)
            return groups.flatten(0, 1).tolist()
        dims = ("pipeline", "data", "context", "tensor")
        assert axis in dims, f"{axis} is not an axis"
        grid = ranks.view(*(getattr(self, name) for name in dims))
        return grid.movedim(dims.index(axis), -1).flatten(0, -2).tolist()

    def _format_stage(self) -> str:
        context = f" x context {self.context}" if self.context > 1 else ""
        return f"data {self.data}{context} x tensor {self.tensor}"

    def _format_factors(self) -> str:
        pipeline = f"pipeline {self.pipeline} x " if self.pipeline > 1 else ""
        return pipeline + self._format_stage()

    def __str__(self) -> str:
        text = f"{self._format_factors()} = {self.world_size} ranks"
        return text if self.expert == 1 else f"{text}, experts over {self.expert}"


@dataclass(frozen=True, eq=False)
class Axis:
    """The ranks that share an axis with this one. `group` is None for a single rank.

    `nodes` has the node of each rank; empty: all are on one node.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    group: dist.ProcessGroup | None = None
    health: HealthMonitor | None = None
    nodes: tuple[int, ...] = ()
    network: EmulatedNetwork | None = None
    device_collectives: DeviceCollectives | None = None  # for the messages that it accepts

    def __post_init__(self) -> None:
        if not self.nodes:
            object.__setattr__(self, "nodes", (0,) * len(self.ranks))
        assert len(self.nodes) == len(self.ranks), f"{self.nodes} for ranks {self.ranks}"

    @property
    def spans_nodes(self) -> bool:
        return len(set(self.nodes)) > 1

    @property
    def has_nccl(self) -> bool:
        return self.group is not None and "nccl" in dist.get_backend_config(self.group)

    @property
    def can_capture(self) -> bool:
        """Whether collectives run on the device alone, so that a CUDA graph may hold them."""
        return self.group is None or self.device_collectives is not None or self.has_nccl

    @property
    def size(self) -> int:
        return len(self.ranks)

    def __str__(self) -> str:
        return f"{self.name} axis, rank {self.index} of {self.size}"


class Mesh:
    """The axes of this rank. Use it as a context manager, or call `close` at the end."""

    def __init__(
        self,
        data: int | None = None,
        tensor: int = 1,
        expert: int = 1,
        *,
        pipeline: int = 1,
        context: int = 1,
        timeout: float = DEFAULT_TIMEOUT,
        backend: str | None = None,
        nodes: int | None = None,
        network: EmulatedNetwork | None = None,
    ) -> None:
        check_timeout(timeout)
        self.rank, world = _rank_and_world_size()
        self.shape = MeshShape.for_world(world, data, tensor, expert, pipeline, context)
        self.timeout = timeout
        self.device = _default_device()
        self.mesh_number = 0  # among the meshes at the same store
        self.health: HealthMonitor | None = None
        self._owns_process_group = False
        self.network = network_from_environment() if network is None else network
        self.nodes = find_emulated_nodes(world, nodes)  # the node of each rank
        with ExitStack() as on_error:
            on_error.callback(self.close)
            if world > 1:
                self._start(backend)
            self.world = self._axis("world")
            self.pipeline = self._axis("pipeline")
            self.data = self._axis("data")
            self.context = self._axis("context")
            self.tensor = self._axis("tensor")
            self.expert = self._axis("expert")
            self.expert_data = self._axis("expert_data")
            on_error.pop_all()

    def _start(self, backend: str | None) -> None:
        host, port = os.environ["MASTER_ADDR"], _read_int_env("MASTER_PORT")
        number = self.mesh_number = _first_mesh_number() + _mesh_counts[host, port]
        _mesh_counts[host, port] += 1
        wait = timedelta(seconds=self.timeout)
        is_initialized = dist.is_initialized()
        if not is_initialized:  # rank 0 may host the store, so this comes before its first client
            store, _, _ = next(iter(dist.rendezvous("env://", timeout=wait)))
        self.health = HealthMonitor(
            number, host, port, self.rank, self.shape.world_size, self.timeout
        )
        publish_node(self.health.store, self.rank)
        self.health.wait_for_ranks("start")
        if not is_initialized:
            own = dist.PrefixStore(f"fulgurite-{number}", store)
            self._owns_process_group = True
            start = partial(
                dist.init_process_group,
                backend or _default_backend(),
                store=own,
                rank=self.rank,
                world_size=self.shape.world_size,
                timeout=wait,
            )
            self.health.run_blocking("start of the process group", start)
        self.nodes = self.nodes or read_nodes(self.health.store, self.shape.world_size)

    def _axis(self, name: str) -> Axis:
        """Create all groups of an axis; torch.distributed requires it of every rank, in one order."""
        own: Axis | None = None
        for ranks in self.shape.groups(name):
            group = None
            if len(ranks) > 1:
                assert self.health is not None, "several ranks have a health monitor"
                group = make_group(ranks, self.health, f"{name} axis")
            if self.rank in ranks:
                nodes = tuple(self.nodes[rank] for rank in ranks) if self.nodes else ()
                own = Axis(
                    name,
                    tuple(ranks),
                    ranks.index(self.rank),
                    group,
                    self.health,
                    nodes,
                    self.network,
                )
        assert own is not None, f"rank {self.rank} is in no group of {name} in {self.shape}"
        return own

    @property
    def samples(self) -> bool:
        """Whether this rank samples the tokens of its replica: the first rank of it."""
        return self.pipeline.index == self.context.index == self.tensor.index == 0

    @property
    def ranks_per_device(self) -> int:
        """The number of ranks of this machine that use this rank's device."""
        local = _local_rank_and_world_size()[1] if self.shape.world_size > 1 else 1
        if self.device.type == "cpu":
            return local
        return -(-local // torch.cuda.device_count())

    def close(self) -> None:
        """Leave the mesh; ranks that still wait for this one get an error."""
        if self.health is not None:
            self.health.close()
            self.health = None
        if self._owns_process_group:
            self._owns_process_group = False
            if dist.is_initialized():  # not if it could not be started
                dist.destroy_process_group()

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
        indices = ", ".join(f"{name} {getattr(self, name).index}" for name in AXES)
        return f"<Mesh {self.shape}; rank {self.rank}: {indices}>"


def make_group(
    ranks: Sequence[int], health: HealthMonitor, name: str, *, only_members: bool = False
) -> dist.ProcessGroup:
    """A process group; a call of all ranks, or of its members only. RankError if one of them is lost."""
    timeout = timedelta(seconds=health.timeout)
    make = partial(
        dist.new_group, list(ranks), timeout=timeout, use_local_synchronization=only_members
    )
    return health.run_blocking(f"start of the {name}", make)


def reset_mesh_count(host: str, port: int) -> None:
    """Start to count the meshes of a new store, whose address another store may have had."""
    del _mesh_counts[host, port]


def _first_mesh_number() -> int:
    """The number of the first mesh of this process: torchrun's store outlives a restart of its ranks."""
    return _read_int_env("TORCHELASTIC_RESTART_COUNT", "0") * MESHES_PER_RESTART


def _rank_and_world_size() -> tuple[int, int]:
    """RANK and WORLD_SIZE, from the process group or the environment."""
    started = dist.is_available() and dist.is_initialized()
    if started:
        rank, world = dist.get_rank(), dist.get_world_size()
    else:
        rank, world = _read_int_env("RANK", "0"), _read_int_env("WORLD_SIZE", "1")
    wanted = ("MASTER_ADDR", "MASTER_PORT") if started else ("RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in wanted if name not in os.environ]
    if world > 1 and missing:
        raise ArgumentError(
            f"there are {world} ranks, but {', '.join(missing)} is not set", next=HOW_TO_START_RANKS
        )
    if not 0 <= rank < world:
        raise ArgumentError(
            f"RANK {rank} is not in 0 to WORLD_SIZE {world} - 1 = {world - 1}",
            next=HOW_TO_START_RANKS,
        )
    return rank, world


def check_timeout(timeout: float) -> None:
    """ArgumentError for what is not a number of seconds."""
    if not 0 < timeout < threading.TIMEOUT_MAX:
        raise ArgumentError(
            f"timeout={timeout}", next="seconds that ranks wait for each other; must be above 0"
        )


def _read_int_env(name: str, default: str | None = None) -> int:
    """An integer environment variable of a launcher."""
    text = os.environ[name] if default is None else os.environ.get(name, default)
    try:
        return int(text)
    except ValueError as error:
        raise ArgumentError(
            f"{name} is {text!r} and not a number", next=HOW_TO_START_RANKS
        ) from error


def _local_rank_and_world_size() -> tuple[int, int]:
    """LOCAL_RANK and LOCAL_WORLD_SIZE."""
    rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    return _read_int_env("LOCAL_RANK", rank), _read_int_env("LOCAL_WORLD_SIZE", world)


def _default_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", _local_rank_and_world_size()[0] % torch.cuda.device_count())


def _default_backend() -> str:
    """NCCL if each rank of this machine has a GPU of its own; otherwise gloo."""
    own = torch.cuda.is_available() and torch.cuda.device_count() >= _local_rank_and_world_size()[1]
    return "cpu:gloo,cuda:nccl" if own else "gloo"


def _format_choices(options: list[str]) -> str:
    return options[0] if len(options) == 1 else f"{', '.join(options[:-1])} or {options[-1]}"
