"""Captures for tests without a GPU: they run the function again on the memory it was captured with.

Like a CUDA graph, a fake capture knows addresses only and holds no input. A capture computes nothing: its
outputs are NaN until the first replay, and mutated inputs stay. A replay overwrites the outputs of later
captures of its pool, which may lie in its intermediate memory.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from fulgurite.cudagraph import CaptureBackend
from fulgurite.cudagraph.seeds import capture_seeds, captured_seeds


class FakePool:
    reserved_bytes = 0  # of all pools; tests set it

    def __init__(self, device: torch.device) -> None:
        self.captures = 0
        self.outputs: dict[int, list[Tensor]] = {}  # of the captures that exist, by their order

    @property
    def kept_bytes(self) -> int:
        """Bytes of the outputs of the captures that exist: each has memory of its own."""
        found = [t for outputs in self.outputs.values() for t in outputs]
        return sum({storage_address(t): t.untyped_storage().nbytes() for t in found}.values())


class FakeCapturedCall:
    def __init__(self, run: Callable[..., Any], inputs: list[Any], pool: FakePool) -> None:
        self.run, self.seeds = run, captured_seeds()
        self.memory = [at_same_address(x) if isinstance(x, Tensor) else x for x in inputs]
        before = [x.clone() if isinstance(x, Tensor) else x for x in inputs]
        with torch.random.fork_rng([]):
            self.outputs: list[Any] = list(run(list(inputs)))
        for value, old in zip(inputs, before, strict=True):
            if isinstance(value, Tensor) and not torch.equal(value, old):
                value.copy_(old)
        own = {storage_address(x) for x in inputs if isinstance(x, Tensor)}
        self.targets = [
            at_same_address(t) if isinstance(t, Tensor) and storage_address(t) not in own else None
            for t in self.outputs
        ]
        pool.captures += 1
        self.pool, self.order = pool, pool.captures
        pool.outputs[self.order] = [t for t in self.targets if t is not None]
        weakref.finalize(self, pool.outputs.pop, self.order)
        poison(pool.outputs[self.order])

    def replay(self) -> None:
        with capture_seeds(ReplayedSeeds(self.seeds)):
            new = list(self.run(list(self.memory)))
        for target, value in zip(self.targets, new, strict=True):
            if target is not None:
                target.copy_(value)
        for order, later in self.pool.outputs.items():
            if order > self.order:
                poison(later)


class ReplayedSeeds:
    """Gives kernels the addresses of their seeds again, in the captured order."""

    def __init__(self, seeds: Any) -> None:
        self.seeds, self.count = seeds, 0

    def add(self, draw: Callable[[], int]) -> None:
        self.count += 1

    @property
    def last_address(self) -> int:
        return self.seeds.memory.data_ptr() + 8 * (self.count - 1)


def at_same_address(tensor: Tensor) -> Tensor:
    """A tensor of the same memory that does not keep it alive."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return tensor.clone()
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    typed = flat[: storage.nbytes() // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
    return typed.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def storage_address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def poison(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(float("nan") if tensor.is_floating_point() else 77)


class FakeStopwatch:
    """Runs calls and reports these seconds, one after the other; the last ones repeat.

    walls   default: a kernel starts when the host is done
    """

    def __init__(
        self,
        hosts: Iterable[float] = (),
        devices: Iterable[float] = (),
        walls: Iterable[float] | None = None,
    ) -> None:
        self.hosts, self.devices = list(hosts), list(devices)
        self.walls = None if walls is None else list(walls)

    def time_call(self, call: Callable[[], Any]) -> tuple[Any, float, float]:
        host = take(self.hosts)
        wall = host + self.devices[0] if self.walls is None else take(self.walls)
        return call(), host, wall

    def time_device(self, call: Callable[[], Any], host: float) -> tuple[Any, float]:
        return call(), take(self.devices)


def take(values: list[float]) -> float:
    return values.pop(0) if len(values) > 1 else values[0]


def make_fake_backend(
    stopwatch: FakeStopwatch | None = None, total_memory: int = 1 << 40
) -> CaptureBackend:
    slow, fast = [100e-6] * 3, [10e-6]
    times = stopwatch or FakeStopwatch([*slow, *fast], [5e-6])
    return CaptureBackend(
        "cpu",
        FakeCapturedCall,
        FakePool,
        times,
        lambda device: total_memory,
        lambda device: FakePool.reserved_bytes,
        is_on_fake_device,
    )


def is_on_fake_device(tensor: Tensor) -> bool:
    """Whether it is on what stands for the device: not a tensor of `put_on_fake_host`."""
    return tensor.dim() > 0 or tensor.storage_offset() == 0


def put_on_fake_host(value: int) -> Tensor:
    """A number that stands for one in host memory."""
    return torch.tensor([0, value])[1]


@contextmanager
def use_fake_captures(stopwatch: FakeStopwatch | None = None) -> Iterator[None]:
    """Capture the graphs of `fulgurite.compile` on the CPU, by fake captures."""
    with pytest.MonkeyPatch.context() as patch:
        backend = make_fake_backend(stopwatch)
        patch.setattr("fulgurite.executors.cudagraph.BACKEND", backend)
        yield
