"""Segments move about as few bytes as the best cut of a graph, and are found fast."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import torch

from fulgurite.fuser.ir import split_axes
from fulgurite.fuser.ir.expression import Load, Operation
from fulgurite.fuser.ir.index import Axis, Index, of_atom
from fulgurite.fuser.ir.statement import Output, Reduction, Region, Tensor, check, statement
from fulgurite.fuser.segment import Segmentation, segment
from fulgurite.fuser.segment.loop_structure import Shape

ROWS, COLUMNS = Index(640), Index(384)
LIMIT = 1 << 20


class Graph:
    """Builds a region statement by statement; values are full (rows x columns), row or column."""

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
        return Load(name, tuple(of_atom(axis) for axis in at), torch.float32)

    def pointwise(self, name: str, kind: str, sources: list[str], op: str = "add") -> None:
        row, column = Axis("i0", ROWS), Axis("i1" if kind == "full" else "i0", COLUMNS)
        axes = {"full": (row, column), "row": (row,), "column": (column,)}[kind]
        expression = self.load(sources[0], row, column)
        for source in sources[1:]:
            expression = Operation(op, (expression, self.load(source, row, column)), torch.float32)
        if len(sources) == 1:
            expression = Operation("exp", (expression,), torch.float32)
        self.statements.append(statement(self.tensor(name, kind), axes, expression))

    def reduce(self, name: str, kind: str, source: str) -> None:
        over_columns = kind == "row"
        row = Axis("i0" if over_columns else "r0", ROWS)
        column = Axis("r1" if over_columns else "i1", COLUMNS)
        kept, over = (row, column) if over_columns else (column, row)
        expression = self.load(source, row, column)
        made = statement(self.tensor(name, kind), (kept,), expression, Reduction("sum", (over,)))
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
        check(region)
        return region


def random_region(seed: int, size: int = 6) -> Region:
    chance = random.Random(seed)
    graph = Graph()
    for k, kind in enumerate(["full", "full", "row", "column"]):
        graph.input(f"x{k}", kind)
    used: set[str] = set()
    for k in range(size):
        name = f"s{k}"
        known = list(graph.kinds)
        full = [n for n in known if graph.kinds[n] == "full"]
        recent = known[-4:]
        what = chance.random()
        if what < 0.25:
            source = chance.choice([n for n in full if n in recent] or full)
            graph.reduce(name, chance.choice(["row", "column"]), source)
            used.add(source)
        elif what < 0.85:
            sources = [chance.choice(full), *chance.sample(recent, chance.randint(0, 2))]
            graph.pointwise(name, "full", sources)
            used.update(sources)
        else:
            kind = chance.choice(["row", "column"])
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
    """The fewest bytes over every way to cut, and every choice of what to recompute."""

    def __init__(self, region: Region, limit: int) -> None:
        self.work = Segmentation(region, limit)
        self.facts = self.work.facts
        self.shapes: dict[frozenset[str], Shape | str] = {}

    def fold(self, names: frozenset[str]) -> Shape | str:
        if names not in self.shapes:
            self.shapes[names] = self.work.fold(names)
        return self.shapes[names]

    def best(self) -> int:
        names = list(self.facts)
        free = [n for n in names if not self.facts[n].reduced and n not in self.work.wanted]
        best = 1 << 60
        for mask in range(1 << len(free)):
            dissolved = {n for k, n in enumerate(free) if mask >> k & 1}
            kept = [n for n in names if n not in dissolved]
            for part in partitions(kept):
                best = min(best, self.bytes_of(part, dissolved))
        return best

    def bytes_of(self, part: list[list[str]], dissolved: set[str]) -> int:
        segments = [frozenset(self.with_dissolved(group, dissolved)) for group in part]
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
                for r in self.facts[n].readings
                if r.name not in other
            }
            stored = [n for n in group if n in outside or n in self.work.wanted]
            if not all(shape.storable(n) for n in stored):
                return 1 << 60
            total += self.work.moved(names, stored)
        return 1 << 60 if self.cyclic(segments, part) else total

    def with_dissolved(self, group: list[str], dissolved: set[str]) -> set[str]:
        found, stack = set(group), list(group)
        while stack:
            for reading in self.facts[stack.pop()].readings:
                if reading.name in dissolved and reading.name not in found:
                    found.add(reading.name)
                    stack.append(reading.name)
        return found

    def cyclic(self, segments: list[frozenset[str]], part: list[list[str]]) -> bool:
        home = {n: k for k, group in enumerate(part) for n in group}
        needs = [
            {
                home[r.name]
                for n in s
                for r in self.facts[n].readings
                if r.name in home and r.name not in s
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


def moved_by(region: Region, limit: int) -> int:
    work = Segmentation(region, limit)
    parts = segment(split_axes.refine(region), limit)
    return sum(work.moved(part.shape.facts, part.stored) for part in parts)


def test_within_five_percent_of_the_best_cut() -> None:
    """200 random graphs, against every possible cut; rows that fit the cache, or one way, or not."""
    ratios = []
    for seed in range(200):
        limit = (LIMIT, 2000, 1000)[seed % 3]
        region = random_region(seed, size=5 if seed % 4 else 6)
        ratios.append(moved_by(region, limit) / BruteForce(region, limit).best())
    assert min(ratios) >= 1.0, "better than the best: the yardstick is wrong"
    assert sum(ratios) / len(ratios) <= 1.05
    worse = [seed for seed, ratio in enumerate(ratios) if ratio > 1.3]
    assert len(worse) <= 6, f"far from the best at {worse}"


def test_three_thousand_statements_in_a_second() -> None:
    graph = Graph()
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
    segments = segment(split_axes.refine(region), LIMIT)
    taken = time.process_time() - start
    assert sum(len(part.names) for part in segments) >= 3000
    assert taken < 1.0 * SLOW_MACHINE, f"{taken:.2f} s"


SLOW_MACHINE = 2.5  # the target is a second on a quiet machine; CI machines share their cores


def test_every_cut_has_a_reason() -> None:
    graph = Graph()
    graph.input("x", "full")
    graph.reduce("columns", "column", "x")
    graph.pointwise("y", "full", ["x", "columns"])
    graph.reduce("rows", "row", "y")
    graph.pointwise("z", "full", ["y", "rows"])
    parts = segment(split_axes.refine(graph.region(["z"])), LIMIT)
    assert len(parts) == 2
    assert "needs all rows of rows first" in parts[0].reason
    assert parts[1].reason == "its results leave the region"


def test_a_cheap_producer_is_recomputed() -> None:
    """exp(x) read by a row sum and by a column sum that can't share a kernel is not stored."""
    graph = Graph()
    graph.input("x", "full")
    graph.pointwise("e", "full", ["x"])
    graph.reduce("c", "column", "e")
    graph.pointwise("y", "full", ["e", "c"])
    graph.reduce("r", "row", "y")
    graph.pointwise("z", "full", ["y", "r"])
    parts = segment(split_axes.refine(graph.region(["z"])), LIMIT)
    assert all("e" not in part.stored for part in parts)
