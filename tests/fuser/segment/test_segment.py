"""Segmentation moves about as few bytes as the best possible cut of a graph, and is fast."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from fulgurite.fuser.frontend.lower_graph import lower_graph
from fulgurite.fuser.ir.expression import Load, Operation
from fulgurite.fuser.ir.index import Axis, Index, from_atom
from fulgurite.fuser.ir.split_axes import split_axes
from fulgurite.fuser.ir.statement import (
    Output,
    Reduction,
    Region,
    Tensor,
    make_statement,
    verify_region,
)
from fulgurite.fuser.segment import Segmentation, segment_region
from fulgurite.fuser.segment.loop_structure import LoopStructure
from tests.fuser.support import trace

ROWS, COLUMNS = Index(640), Index(384)
LIMIT = 1 << 20


class RegionBuilder:
    """Builds a region statement by statement. Values are full (rows x columns), row or column."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []
        self.statements: list = []
        self.kinds: dict[str, str] = {}

    def sizes(self, kind: str) -> tuple[Index, ...]:
        return {"full": (ROWS, COLUMNS), "row": (ROWS,), "column": (COLUMNS,)}[kind]

    def tensor(self, name: str, kind: str) -> Tensor:
        sizes = self.sizes(kind)
        strides = (COLUMNS, Index(1)) if kind == "full" else (Index(1),)
        self.kinds[name] = kind
        return Tensor(name, torch.float32, sizes, strides)

    def input(self, name: str, kind: str) -> None:
        self.inputs.append(self.tensor(name, kind))

    def load(self, name: str, row: Axis, column: Axis) -> Load:
        at = {"full": (row, column), "row": (row,), "column": (column,)}[self.kinds[name]]
        return Load(name, tuple(from_atom(axis) for axis in at), torch.float32)

    def pointwise(self, name: str, kind: str, sources: list[str], op: str = "add") -> None:
        row, column = Axis("i0", ROWS), Axis("i1" if kind == "full" else "i0", COLUMNS)
        axes = {"full": (row, column), "row": (row,), "column": (column,)}[kind]
        expression = self.load(sources[0], row, column)
        for source in sources[1:]:
            expression = Operation(op, (expression, self.load(source, row, column)), torch.float32)
        if len(sources) == 1:
            expression = Operation("exp", (expression,), torch.float32)
        self.statements.append(make_statement(self.tensor(name, kind), axes, expression))

    def reduce(self, name: str, kind: str, source: str) -> None:
        over_columns = kind == "row"
        row = Axis("i0" if over_columns else "r0", ROWS)
        column = Axis("r1" if over_columns else "i1", COLUMNS)
        kept, over = (row, column) if over_columns else (column, row)
        expression = self.load(source, row, column)
        made = make_statement(
            self.tensor(name, kind), (kept,), expression, Reduction("sum", (over,))
        )
        self.statements.append(made)

    def region(self, outputs: list[str]) -> Region:
        kept = []
        wanted = set(outputs)
        for s in reversed(self.statements):
            if s.name in wanted:
                kept.append(s)
                wanted.update(load.name for load in s.loads)
        results = tuple(Output(name, self.sizes(self.kinds[name])) for name in outputs)
        region = Region(tuple(self.inputs), tuple(reversed(kept)), results)
        verify_region(region)
        return region


def random_region(seed: int, size: int = 6) -> Region:
    rng = random.Random(seed)
    graph = RegionBuilder()
    for k, kind in enumerate(["full", "full", "row", "column"]):
        graph.input(f"x{k}", kind)
    used: set[str] = set()
    for k in range(size):
        name = f"s{k}"
        known = list(graph.kinds)
        full = [n for n in known if graph.kinds[n] == "full"]
        recent = known[-4:]
        what = rng.random()
        if what < 0.25:
            source = rng.choice([n for n in full if n in recent] or full)
            graph.reduce(name, rng.choice(["row", "column"]), source)
            used.add(source)
        elif what < 0.85:
            sources = [rng.choice(full), *rng.sample(recent, rng.randint(0, 2))]
            graph.pointwise(name, "full", sources)
            used.update(sources)
        else:
            kind = rng.choice(["row", "column"])
            sources = [n for n in recent if graph.kinds[n] == kind]
            if not sources:
                graph.pointwise(name, "full", [full[-1]])
                used.add(full[-1])
            else:
                graph.pointwise(name, kind, sources)
                used.update(sources)
    made = [s.name for s in graph.statements]
    outputs = [n for n in made if n not in used] or [made[-1]]
    return graph.region(outputs)


def partitions(items: list[str]) -> Iterator[list[list[str]]]:
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for part in partitions(rest):
        yield [[first], *part]
        for k in range(len(part)):
            yield [*part[:k], [first, *part[k]], *part[k + 1 :]]


class BruteForce:
    """Finds the fewest bytes over every cut and every choice of recomputed values."""

    def __init__(self, region: Region, limit: int) -> None:
        self.state = Segmentation(region, limit)
        self.facts = self.state.statements
        self.shapes: dict[frozenset[str], LoopStructure | str] = {}

    def fold(self, names: frozenset[str]) -> LoopStructure | str:
        if names not in self.shapes:
            self.shapes[names] = self.state.build_structure(names)
        return self.shapes[names]

    def best(self) -> int:
        names = list(self.facts)
        free = [n for n in names if not self.facts[n].reduced_loops and n not in self.state.results]
        best = 1 << 60
        for mask in range(1 << len(free)):
            recomputed = {n for k, n in enumerate(free) if mask >> k & 1}
            kept = [n for n in names if n not in recomputed]
            for part in partitions(kept):
                best = min(best, self.bytes_of(part, recomputed))
        return best

    def bytes_of(self, part: list[list[str]], recomputed: set[str]) -> int:
        segments = [frozenset(self.with_recomputed(group, recomputed)) for group in part]
        total = 0
        for names, group in zip(segments, part, strict=True):
            shape = self.fold(names)
            if isinstance(shape, str):
                return 1 << 60
            outside = {
                r.name
                for other in segments
                if other is not names
                for n in other
                for r in self.facts[n].reads
                if r.name not in other
            }
            stored = [n for n in group if n in outside or n in self.state.results]
            if not all(shape.can_store(n) for n in stored):
                return 1 << 60
            total += self.state.count_bytes_moved(names, stored)
        return 1 << 60 if self.has_cycle(segments, part) else total

    def with_recomputed(self, group: list[str], recomputed: set[str]) -> set[str]:
        found, stack = set(group), list(group)
        while stack:
            for reading in self.facts[stack.pop()].reads:
                if reading.name in recomputed and reading.name not in found:
                    found.add(reading.name)
                    stack.append(reading.name)
        return found

    def has_cycle(self, segments: list[frozenset[str]], part: list[list[str]]) -> bool:
        owner = {n: k for k, group in enumerate(part) for n in group}
        needs = [
            {
                owner[r.name]
                for n in s
                for r in self.facts[n].reads
                if r.name in owner and r.name not in s
            }
            for s in segments
        ]
        done: set[int] = set()
        while len(done) < len(segments):
            ready = [k for k in range(len(segments)) if k not in done and needs[k] <= done]
            if not ready:
                return True
            done.update(ready)
        return False


def count_segmented_bytes(region: Region, limit: int) -> int:
    state = Segmentation(region, limit)
    parts = segment_region(split_axes(region), limit)
    return sum(state.count_bytes_moved(part.structure.statements, part.stored) for part in parts)


def test_bytes_are_within_five_percent_of_the_optimum() -> None:
    """200 random graphs against every possible cut, with three row limits."""
    ratios = []
    for seed in range(200):
        limit = (LIMIT, 2000, 1000)[seed % 3]
        region = random_region(seed, size=5 if seed % 4 else 6)
        ratios.append(count_segmented_bytes(region, limit) / BruteForce(region, limit).best())
    assert min(ratios) >= 1.0, "better than the optimum: brute force is wrong"
    assert sum(ratios) / len(ratios) <= 1.05
    worse = [seed for seed, ratio in enumerate(ratios) if ratio > 1.3]
    assert len(worse) <= 6, f"far from the optimum at seeds {worse}"


def test_three_thousand_statements_in_a_second() -> None:
    graph = RegionBuilder()
    graph.input("x", "full")
    last = "x"
    for k in range(600):
        graph.pointwise(f"a{k}", "full", [last])
        graph.reduce(f"m{k}", "row" if k % 7 else "column", f"a{k}")
        graph.pointwise(f"b{k}", "full", [f"a{k}", f"m{k}"], "sub")
        graph.pointwise(f"c{k}", "full", [f"b{k}", last], "mul")
        graph.pointwise(f"d{k}", "full", [f"c{k}"])
        last = f"d{k}"
    region = graph.region([last])
    assert len(region.statements) == 3000
    start = time.process_time()
    segments = segment_region(split_axes(region), LIMIT)
    taken = time.process_time() - start
    assert sum(len(part.names) for part in segments) >= 3000
    assert taken < 1.0 * TIME_SLACK, f"{taken:.2f} s"


TIME_SLACK = 2.5  # the target is one second on an idle machine; CI machines share their cores


def test_every_segment_has_a_reason() -> None:
    graph = RegionBuilder()
    graph.input("x", "full")
    graph.reduce("columns", "column", "x")
    graph.pointwise("y", "full", ["x", "columns"])
    graph.reduce("rows", "row", "y")
    graph.pointwise("z", "full", ["y", "rows"])
    parts = segment_region(split_axes(graph.region(["z"])), LIMIT)
    assert len(parts) == 2
    assert "needs all rows of rows first" in parts[0].reason
    assert parts[1].reason == "its outputs leave the region"


def test_cheap_producer_is_recomputed() -> None:
    """exp(x) is not stored if a row sum and a column sum in different kernels read it."""
    graph = RegionBuilder()
    graph.input("x", "full")
    graph.pointwise("e", "full", ["x"])
    graph.reduce("c", "column", "e")
    graph.pointwise("y", "full", ["e", "c"])
    graph.reduce("r", "row", "y")
    graph.pointwise("z", "full", ["y", "r"])
    parts = segment_region(split_axes(graph.region(["z"])), LIMIT)
    assert all("e" not in part.stored for part in parts)


@pytest.mark.parametrize(("window", "segments"), [(2, 1), (8, 2)])
def test_windows_of_expensive_values_are_read_from_memory(window: int, segments: int) -> None:
    """Every point of a window would be text of the kernel: 64 bicubic interpolations of 16 loads."""

    def pool(x: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(F.interpolate(x, scale_factor=2, mode="bicubic"), window)

    module = trace(pool, (torch.randn(1, 2, 8, 8),))
    region = split_axes(lower_graph(module))
    assert len(segment_region(region, LIMIT)) == segments


def test_kernels_of_a_loop_of_writes_have_a_bounded_number_of_loads() -> None:
    """Each write reads what the writes before it left; the 30th kernel must not load 30 buffers."""

    def solve(x: torch.Tensor) -> torch.Tensor:
        for n in range(1, 32):
            row = x[n, :n] + (x[n, :n, None] * x[:n, :n]).sum(0)
            x = torch.select_scatter(x, torch.slice_scatter(x[n], row, 0, 0, n), 0, n)
        return x

    region = split_axes(lower_graph(trace(solve, (torch.randn(32, 32),))))
    statements = {statement.name: statement for statement in region.statements}
    for segment in segment_region(region, LIMIT):
        inside = {*segment.structure.statements}
        loaded = {load.name for name in inside for load in statements[name].loads} - inside
        assert len(loaded) <= 12, f"{segment} loads {sorted(loaded)}"
