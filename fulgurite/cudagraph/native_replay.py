"""The words of `include/graph_replay.h`: replays without Python.

In: a function that is captured, and its captures. Out: a callable of a list of inputs, and a plan of each
capture; None where the library for it can't be used.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import guards

from fulgurite.host_api import load_library

Plan = tuple[bytes, tuple[Any, ...]]  # words, and the objects that they refer to
MAX_SINGLE_COPIES = 2  # so many inputs are copied one by one; more of them in one launch


class ResultKind(IntEnum):
    """`ResultKind` of graph_replay.h."""

    MEMORY = 0
    COPY = 1
    INPUT = 2
    VIEW = 3
    CONSTANT = 4


@dataclass(frozen=True)
class Result:
    """How a result is made.

    value    a tensor in the graph's memory, or a constant
    source   position of the input that it is, or of which it is a view
    layout   sizes and strides of a view
    offset   of a view, to the input's
    """

    kind: ResultKind
    value: Any = None
    source: int = 0
    layout: Any = None
    offset: int = 0

    def words(self) -> tuple[list[Any], list[int]]:
        """`GraphResult` of graph_replay.h: the objects that it refers to, and numbers."""
        layout, number = self.layout, self.source
        if self.kind == ResultKind.COPY:
            layout, number = _copy_layout(self.value), self.value.nbytes
        return [self.value, layout], [self.kind, id(self.value), id(layout), number, self.offset]


class Words:
    """Integers that Python and native code share."""

    def __init__(self, *values: int) -> None:
        self._array = (ctypes.c_int64 * len(values))(*values)
        self.address = ctypes.addressof(self._array)

    def __getitem__(self, position: int) -> int:
        return self._array[position]

    def __setitem__(self, position: int, value: int) -> None:
        self._array[position] = value


@dataclass(frozen=True)
class GraphedState:
    """What a `GraphedFunction` shares with native code."""

    expected: list[Any]  # of one: a weak reference to the capture that comes next, or None
    lock: Any
    replays: Words
    stream: Words
    device: torch.device

    def make_callable(self, slow: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any] | None:
        """A function of a list of inputs that replays what is expected, and calls `slow` for the rest."""
        library = load_library()
        if library is None:
            return None
        objects = (self.expected, self.lock.acquire, self.lock.release, slow)
        device = self.device.index if self.device.type == "cuda" else -1
        addresses = (self.replays.address, self.stream.address)
        words = struct.pack("7q", *map(id, objects), *addresses, device)
        made: Callable[[list[Any]], Any] = library.make_callable(
            "run_graphed", (words, (objects, self))
        )
        return made


@dataclass(frozen=True)
class ReplayPlan:
    """A capture as native code replays it: `Replay` of graph_replay.h.

    replay        launches the graph
    copy_inputs   copies inputs into static buffers, given all of them
    finish        completes a list of results, given the inputs; None: nothing is left to do
    static        position and address of the inputs that are read in place
    copied        position and static buffer of the others
    dynamic       position and value of the inputs whose sizes, or values if they are numbers, may change
    """

    replay: Callable[[], Any]
    copy_inputs: Callable[[list[Any]], None]
    draw_seeds: Callable[[], None] | None
    finish: Callable[[list[Any], list[Any]], None] | None
    shared: list[Any]
    own_outputs: Any
    state: Words
    order: int
    num_inputs: int
    static: Sequence[tuple[int, int]]
    copied: Sequence[tuple[int, Tensor]]
    results: Sequence[Result]
    dynamic: Sequence[tuple[int, Any]]

    def pack(self) -> Plan | None:
        """The words, and what they refer to; None where only Python can compare the inputs."""
        sizes = [_dynamic_words(position, value) for position, value in self.dynamic]
        if any(words is None for words in sizes):
            return None
        copies_many = len(self.copied) > MAX_SINGLE_COPIES
        objects: list[Any] = [
            self.replay,
            self.copy_inputs if copies_many else None,
            *(self.draw_seeds, self.finish, self.shared, self.own_outputs),
        ]
        words = [0 if value is None else id(value) for value in objects]
        words += [self.state.address, self.order, self.num_inputs]
        words += [len(self.static), len(self.copied), len(self.results), len(sizes)]
        words += [word for pair in self.static for word in pair]
        for position, buffer in self.copied:
            objects.append(buffer)
            words += [position, id(buffer)]
        for result in self.results:
            referred, numbers = result.words()
            objects += referred
            words += numbers
        words += [word for part in sizes for word in part or ()]
        return struct.pack(f"{len(words)}q", *words), (*objects, self.state)


def _dynamic_words(position: int, value: Any) -> list[int] | None:
    """What a later input must have; None if it is neither a tensor nor an integer of 64 bits."""
    if isinstance(value, Tensor):
        return [position, value.dim(), *value.shape, *value.stride()]
    if type(value) is int and abs(value) < 1 << 63:
        return [position, -1, value]
    return None


def _copy_layout(tensor: Tensor) -> tuple[Any, ...]:
    """The function that allocates a copy, and its arguments."""
    allocate = getattr(guards, f"_empty_strided_{tensor.device.type}")
    return allocate, tuple(tensor.shape), tensor.stride(), tensor.dtype
