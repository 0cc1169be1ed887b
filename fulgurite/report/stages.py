"""Every stage's text, and which lines of different stages belong together.

In: the traces of an explanation. Out: plain data for the page's script. Each distinct line is stored once. Each
line of a stage carries the number of its *thread*: a line that continues a line of the stage before has the same
number. Threads of a program keep their order in every stage, so any two stages are compared by walking both
once; nothing has to be searched when the page is read.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fulgurite.trace import Trace

TITLE_ID = 0  # id of the first line of a text: it names the stage, so it always differs
PROGRAM_KINDS = ("inference", "forward", "backward")

_ASSIGNED = re.compile(r"([\w, ]+?),? = ")
_PARAMETER = re.compile(r"(\w+)(?::|,$)")


@dataclass(frozen=True)
class Stage:
    """One stage of a graph: its lines, and the diff to the previous stage."""

    trace: Trace
    lines: list[str]
    threads: list[int]
    added: int
    removed: int
    changed: int


@dataclass(frozen=True)
class StageHistory:
    """All stages of one kind (forward, backward, inference) of one graph, captured first."""

    graph: int
    kind: str
    stages: list[Stage]

    @property
    def final(self) -> Trace:
        return self.stages[-1].trace


def group_stages(traces: Sequence[Trace]) -> list[StageHistory]:
    """Group traces by graph and kind, in order."""
    result = []
    for graph in dict.fromkeys(trace.index for trace in traces):
        own = [trace for trace in traces if trace.index == graph]
        captured = [trace for trace in own if trace.kind == "captured"]
        for kind in PROGRAM_KINDS:
            built = [trace for trace in own if trace.kind == kind]
            if built:
                result.append(StageHistory(graph, kind, match_stages([*captured, *built])))
    return result


def match_stages(traces: Sequence[Trace]) -> list[Stage]:
    """Match lines across the stages: equal lines get the same id."""
    stages: list[Stage] = []
    before: list[str] = []
    threads: list[int] = []
    following = TITLE_ID + 1
    for trace in traces:
        lines = trace.text.split("\n")
        pairs = match_lines(line_keys(before), line_keys(lines))
        old = threads
        threads = [-1] * len(lines)
        for here, there in pairs:
            threads[there] = old[here]
        threads[0] = TITLE_ID
        for position, number in enumerate(threads):
            if number < 0:
                threads[position] = following
                following += 1
        kept = [(a, b) for a, b in pairs if b and a]
        stages.append(
            Stage(
                trace=trace,
                lines=lines,
                threads=threads,
                added=len(lines) - 1 - len(kept) if stages else 0,
                removed=max(len(before) - 1, 0) - len(kept),
                changed=sum(before[a] != lines[b] for a, b in kept),
            )
        )
        before = lines
    return stages


def build_payload(programs: Sequence[StageHistory]) -> dict[str, Any]:
    """JSON data for the page's script."""
    numbers: dict[str, int] = {}
    described = [
        {
            "graph": program.graph,
            "kind": program.kind,
            "stages": [
                {
                    "name": stage.trace.stage,
                    "title": stage.trace.name,
                    "lines": [numbers.setdefault(line, len(numbers)) for line in stage.lines],
                    "threads": stage.threads,
                }
                for stage in program.stages
            ],
        }
        for program in programs
    ]
    return {"lines": list(numbers), "programs": described}


# ---- which line is which -------------------------------------------------------------------------


def line_keys(lines: Sequence[str]) -> list[str]:
    """A key per line: the name it assigns, or what it declares, or its text."""
    keys = []
    scope = ""
    for position, line in enumerate(lines):
        stripped = line.strip()
        if position == 0:
            key = "title"
        elif stripped.startswith("def "):
            scope = stripped[4:].partition("(")[0]
            key = f"def {scope}"
        elif stripped.startswith("#"):
            key = stripped
        elif stripped.startswith("return"):
            key = f"{scope} return"
        elif found := _ASSIGNED.match(stripped):
            key = f"{found[1]} ="
        elif found := _PARAMETER.match(stripped):
            key = f"{scope}({found[1]})"
        else:
            key = stripped
        keys.append(key)
    return keys


def match_lines(old: Sequence[str], new: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs of line positions with equal keys: a patience diff."""
    pairs: list[tuple[int, int]] = []
    work = [(0, len(old), 0, len(new))]
    while work:
        old_start, old_end, new_start, new_end = work.pop()
        while old_start < old_end and new_start < new_end and old[old_start] == new[new_start]:
            pairs.append((old_start, new_start))
            old_start, new_start = old_start + 1, new_start + 1
        while old_start < old_end and new_start < new_end and old[old_end - 1] == new[new_end - 1]:
            old_end, new_end = old_end - 1, new_end - 1
            pairs.append((old_end, new_end))
        anchors = _find_anchors(old, new, (old_start, old_end), (new_start, new_end))
        if not anchors:
            continue
        for here, there in [*anchors, (old_end, new_end)]:
            work.append((old_start, here, new_start, there))
            old_start, new_start = here + 1, there + 1
        pairs += anchors
    return sorted(pairs)


def _find_anchors(
    old: Sequence[str], new: Sequence[str], within: tuple[int, int], among: tuple[int, int]
) -> list[tuple[int, int]]:
    """The longest ordered sequence of keys that are unique on both sides."""
    old_counts = Counter(old[slice(*within)])
    new_counts = Counter(new[slice(*among)])
    place = {new[i]: i for i in range(*among) if new_counts[new[i]] == 1}
    candidates = [
        (i, place[old[i]]) for i in range(*within) if old_counts[old[i]] == 1 and old[i] in place
    ]
    return _longest_increasing_pairs(candidates)


def _longest_increasing_pairs(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest subsequence of pairs (sorted by the first) whose second increases."""
    ends: list[int] = []  # smallest last value of an increasing run, by length
    holders: list[int] = []  # the pair that has it
    previous: list[int] = []
    for position, (_, value) in enumerate(pairs):
        length = bisect_left(ends, value)
        previous.append(holders[length - 1] if length else -1)
        if length == len(ends):
            ends.append(value)
            holders.append(position)
        else:
            ends[length] = value
            holders[length] = position
    chain = []
    position = holders[-1] if holders else -1
    while position >= 0:
        chain.append(pairs[position])
        position = previous[position]
    return chain[::-1]
