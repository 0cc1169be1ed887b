"""Expert load: how many tokens each expert receives; a running model in, counts [layers, experts]
out.

    with record_expert_load(model) as load_LE:
        model(token_ids, positions)
    rebalance_experts(load_LE, ranks=8)

An engine counts with an `ExpertLoadCounter` for as long as it runs, and saves the sum over all ranks,
which may be pipeline stages, as a file for `fulgurite plan --expert-load`:

    counter = ExpertLoadCounter(model)
    counter.begin_step(tokens, rows)       rows beyond the tokens are padding of a captured step
    file = ExpertLoadFile(counter, path, mesh)
    file.collect()                         all ranks
    file.write()                           one rank

Hooks on the routers count, on the device and without waiting for it. A CUDA graph captures them, so
replayed steps count, too. Recorded native calls of a CPU do not: run these steps eagerly.

Shapes: L MoE layers; E experts; T tokens; k experts per token.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fulgurite.errors import ArgumentError
from fulgurite.models.moe import Router
from fulgurite.models.pipeline_stage import OtherStageRouter
from fulgurite.parallel.collectives import all_reduce, shard_range
from fulgurite.parallel.experts.placement import NAME_MARK
from fulgurite.parallel.mesh import Axis, Mesh

SUFFIXES = (".json", ".npy", ".csv")  # that `parallel.placement.read_expert_load` reads


@contextmanager
def record_expert_load(model: nn.Module) -> Iterator[Tensor]:
    """A tensor [L, E] that counts tokens per expert while the model runs; rows in layer order."""
    counter = ExpertLoadCounter(model)
    try:
        yield counter.load_LE
    finally:
        counter.close()


class ExpertLoadCounter:
    """Counts the tokens of each expert in `load_LE` until it is closed; rows in layer order."""

    def __init__(self, model: nn.Module) -> None:
        routers = [m for m in model.modules() if isinstance(m, Router | OtherStageRouter)]
        if not routers:
            raise ArgumentError("this model has no experts, so there is no expert load to record")
        device, first = next(model.parameters()).device, routers[0]
        experts = len(first.weight) if isinstance(first, Router) else first.num_experts
        # One more column for indices that are no experts.
        self.counts_LE = torch.zeros(len(routers), experts + 1, dtype=torch.int64, device=device)
        self.num_tokens = torch.full((), torch.iinfo(torch.int64).max, device=device)
        # Each of these axes shards the rows that the one before it left to this rank.
        self.token_axes: tuple[Axis, ...] = ()
        self.handles = [
            router.register_forward_hook(self._make_hook(row_E))
            for router, row_E in zip(routers, self.counts_LE, strict=True)
            if isinstance(router, Router)
        ]

    @property
    def load_LE(self) -> Tensor:
        """The counts of this rank."""
        return self.counts_LE[:, :-1]

    def begin_step(self, num_tokens: int, num_rows: int) -> None:
        """Count only the first `num_tokens` of `num_rows` from now on; the others are padding.

        All rows are counted where there is no padding: a step may run as several micro-batches.
        """
        if num_tokens == num_rows:
            self.num_tokens.fill_(torch.iinfo(torch.int64).max)
            return
        for axis in self.token_axes:
            start, stop = shard_range(num_rows, axis.index, axis.size)
            num_tokens, num_rows = max(0, min(num_tokens, stop) - start), stop - start
        self.num_tokens.fill_(num_tokens)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing meanwhile: a step that is captured runs first to warm up."""
        num_tokens = self.num_tokens.clone()
        self.num_tokens.zero_()
        try:
            yield
        finally:
            self.num_tokens.copy_(num_tokens)

    def sum_over(self, axis: Axis) -> Tensor:
        """The counts of all ranks of an axis, on the CPU; a collective call."""
        return all_reduce(self.load_LE.cpu(), axis, "sum of expert loads")

    def close(self) -> None:
        """Stop to count."""
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def _make_hook(self, row_E: Tensor) -> Callable[[nn.Module, Any, Any], None]:
        def add(router: nn.Module, inputs: Any, routes: Any) -> None:
            experts_Tk, invalid = routes.experts_Tk, len(row_E) - 1
            row_T1 = torch.arange(len(experts_Tk), device=row_E.device)[:, None]
            is_counted_Tk = (experts_Tk >= 0) & (experts_Tk < invalid) & (row_T1 < self.num_tokens)
            index = experts_Tk.long().where(is_counted_Tk, invalid).flatten()
            row_E.scatter_add_(0, index, torch.ones_like(index))

        return add


class ExpertLoadFile:
    """The file with the counts of all ranks.

    `earlier`: what ranks have counted that are gone; this file goes on from there. `model`: its name.
    """

    def __init__(
        self,
        counter: ExpertLoadCounter,
        path: Path,
        mesh: Mesh | None = None,
        earlier: Tensor | None = None,
        model: str = "",
    ) -> None:
        self.counter, self.path, self.mesh, self.model = counter, path, mesh, model
        self.earlier = self.total = earlier

    def collect(self) -> None:
        """Sum the counts of all ranks; a collective call."""
        world = None if self.mesh is None else self.mesh.world
        load_LE = self.counter.load_LE.cpu() if world is None else self.counter.sum_over(world)
        self.total = load_LE if self.earlier is None else load_LE + self.earlier

    def write(self) -> None:
        """Write what was collected. Only rank 0 does; ArgumentError if it can't."""
        assert self.total is not None, "`collect` comes first"
        if self.mesh is None or self.mesh.rank == 0:
            save_expert_load(self.total, self.path, self.model)


def check_load_path(path: Path) -> Path:
    """A path that `save_expert_load` can write; ArgumentError otherwise."""
    if path.suffix not in SUFFIXES or not path.absolute().parent.is_dir():
        raise ArgumentError(
            f"the expert load can't be saved as {path}",
            next=f"a file in an existing folder whose name ends in {', '.join(SUFFIXES)}",
        )
    return path


def save_expert_load(load_LE: Tensor, path: Path, model: str = "") -> Path:
    """Write the counts for `fulgurite plan --expert-load`, in the format of the file's suffix, with the
    name of the model. A `.npy` file has no room for one.

    The file is replaced as a whole: others may read it while an engine saves it again.
    """
    check_load_path(path)
    values = load_LE.cpu().numpy()
    partial = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        if path.suffix == ".json":
            partial.write_text(json.dumps({"model": model, "load": values.tolist()}))
        elif path.suffix == ".npy":
            np.save(partial, values)
        else:
            np.savetxt(partial, values, "%d", ",", header=f"{NAME_MARK}{model}", comments="# ")
        partial.replace(path)
    except OSError as problem:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise ArgumentError(f"{path} can't be written: {problem.strerror}") from problem
    return path
