"""The result file of the suite `train`: rows in, as they are measured; a JSON file out.

A run of everything starts an empty file. A run of `--only` adds to the file of the day: a row replaces
the one of the same case, all others stay. So an interrupted run keeps what it has, and `--only stall`
and `--only twin` don't replace each other. Rows of another machine are refused, not mixed in.
"""

from __future__ import annotations

import json
from typing import Any

from fulgurite.bench import results
from fulgurite.errors import ArgumentError

Row = dict[str, Any]
CASE_FIELDS = ("kind", "model", "candidate", "recipe", "save")
RUN_FIELDS = ("date", "command")  # facts of a run, not of its machine


class RowFile:
    """Rows of one run, saved with each `add`.

    Args:
        keeps_others: rows of an earlier run in the same file stay.
    """

    def __init__(self, device: str, output: str | None, *, keeps_others: bool) -> None:
        self.path = results.default_path("train", device, output)
        self.machine = results.describe_machine(device)
        self.rows: dict[tuple[Any, ...], Row] = {}
        if keeps_others and self.path.exists():
            self._read_others()

    def _read_others(self) -> None:
        content = json.loads(self.path.read_text(encoding="utf-8"))
        before, now = ({k: v for k, v in facts.items() if k not in RUN_FIELDS}
                       for facts in (content["machine"], self.machine))  # fmt: skip
        if before != now:
            names = sorted(key for key in before | now if before.get(key) != now.get(key))
            raise ArgumentError(
                f"{self.path} has rows of another machine or version ({', '.join(names)})",
                next="give --output FILE",
            )
        commands = [*content["machine"]["command"].split("; "), self.machine["command"]]
        self.machine["command"] = "; ".join(dict.fromkeys(commands))
        self.rows = {case_of(row): row for row in content["rows"]}

    def add(self, row: Row) -> None:
        self.rows[case_of(row)] = row
        results.write_content(self.path, {"machine": self.machine, "rows": self.list_rows()})

    def list_rows(self) -> list[Row]:
        return list(self.rows.values())


def case_of(row: Row) -> tuple[Any, ...]:
    """What a row measures: a later row of the same case replaces it."""
    return tuple(row.get(name) for name in CASE_FIELDS)
