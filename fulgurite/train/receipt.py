"""The receipt of a run: what it was made of, and what every step gave.

In: configuration, hashes of the data, losses, checkpoints. Out: `receipt.jsonl`, one line an event,
appended while the run goes on; and `receipt.json`, the whole of it, written at the end.

    {"kind": "start", "step": 0, "config": {…}, "data": {…}, "code": {…}, …, "chain": "…"}
    {"kind": "step", "step": 1, "loss": "0x1.5c0a3ep+2", "chain": "…"}
    {"kind": "checkpoint", "step": 100, "name": "step-000100", "sha256": "…", "chain": "…"}
    {"kind": "end", "step": 200, "chain": "…"}

Losses are hexadecimal floats: all their bits. `chain` is a hash of the line and of the chain before it, so
a line that is changed, removed or added later is found. A killed process leaves at most half a line,
which the next start removes. Steps that are repeated after a restart are recorded again; in a
deterministic run they must give the same bits, and a warning says if they don't.

The chain is no signature: who recomputes it all can write any receipt. `fulgurite verify` therefore
replays steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import threading
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fulgurite import version
from fulgurite.logs import LOG
from fulgurite.train.checkpoint import hash_checkpoint
from fulgurite.train.config import TrainConfig

LINES = "receipt.jsonl"
SUMMARY = "receipt.json"
FORMAT = 1
# Fields of the config that decide about losses; others say what is written, and on how many ranks.
COMPUTED = ("model.", "data.", "optimizer.", "loss.", "precision.", "tune.", "seed", "batch_size")


class ReceiptWarning(UserWarning):
    """A repeated step of a deterministic run gave another loss, or a receipt was changed."""


class Receipt:
    """The receipt of a run that goes on. Only rank 0 has one. Its methods may be called by any thread."""

    def __init__(self, folder: Path, is_deterministic: bool) -> None:
        self.folder, self.is_deterministic = folder, is_deterministic
        self._lock = threading.Lock()
        lines = _remove_torn_line(folder / LINES)
        events = parse_lines(lines)
        self._chain = events[-1].get("chain", "") if events else ""
        starts = [event for event in events if event.get("kind") == "start"]
        self._before = starts[-1] if starts else None  # how this run was started last
        self._losses = {e["step"]: e["loss"] for e in events if e.get("kind") == "step"}
        self._file: FileIO | None = (folder / LINES).open("ab", buffering=0)
        self._unwritten = b""  # a full disk must not end a run: these lines wait for room
        self._is_refused = False
        self._last_step = 0

    @classmethod
    def open(
        cls,
        folder: Path | str,
        *,
        config: TrainConfig | None = None,
        data: Mapping[str, str] | None = None,
        device: str = "cpu",
        ranks: int = 1,
        step: int = 0,
        resumed_from: Path | None = None,
    ) -> Receipt:
        """Begin a receipt, or go on with one after a restart at `step`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        receipt = cls(folder, config is not None and config.deterministic)
        start: dict[str, Any] = {"kind": "start", "format": FORMAT, "step": step, "ranks": ranks}
        start["config"] = None if config is None else asdict(config)
        start["data"] = dict(sorted((data or {}).items()))
        start["code"] = {"version": version.VERSION, "sha256": hash_sources()}
        start["environment"] = describe_environment(device)
        if resumed_from is not None:
            start["resumed_from"] = {
                "name": resumed_from.name,
                "sha256": hash_checkpoint(resumed_from),
            }
            if receipt._before is not None:
                report_changes(receipt._before, start)
        receipt._append(start, sync=True)
        return receipt

    def record(self, step: int, loss: float | Tensor) -> None:
        """Record the loss of a step; steps count from 1."""
        text = float(loss).hex()
        before = self._losses.get(step)
        if self.is_deterministic and before is not None and before != text:
            warnings.warn(
                f"step {step} gave the loss {before} before a restart and {text} now, though the run is "
                "deterministic",
                ReceiptWarning,
                stacklevel=2,
            )
        self._losses[step] = text
        self._last_step = step
        self._append({"kind": "step", "step": step, "loss": text})

    def record_checkpoint(self, step: int, path: Path) -> None:
        """Record a checkpoint that is whole: the `on_saved` of a `CheckpointManager`."""
        event = {"kind": "checkpoint", "step": step, "name": path.name}
        self._append({**event, "sha256": hash_checkpoint(path)}, sync=True)

    def close(self) -> None:
        """End the receipt and write `receipt.json`."""
        if self._file is None:
            return
        self._append({"kind": "end", "step": self._last_step}, sync=True)
        self._file.close()
        self._file = None
        try:
            write_summary(self.folder)
        except OSError as error:
            LOG.warning("%s can't be written: %s", self.folder / SUMMARY, error.strerror)

    def _append(self, event: dict[str, Any], sync: bool = False) -> None:
        with self._lock:
            if self._file is None:
                return  # a checkpoint that ends after the run
            self._chain = extend_chain(self._chain, event)
            line = json.dumps({**event, "chain": self._chain}, ensure_ascii=False)
            self._unwritten += line.encode() + b"\n"
            try:
                while self._unwritten:
                    self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
                if sync:
                    os.fsync(self._file.fileno())
                self._is_refused = False
            except OSError as error:
                if not self._is_refused:
                    path = self.folder / LINES
                    LOG.warning("%s can't be written, the run goes on: %s", path, error.strerror)
                self._is_refused = True


def report_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Warn of a run that goes on with other data, or with a config that changes what it computes."""
    after = json.loads(json.dumps(now))  # tuples become lists, as in the file
    old, new = (_flatten(start.get("config") or {}) for start in (before, after))
    changed = [
        f"{name} {old.get(name)} → {new.get(name)}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and name.startswith(COMPUTED)
    ]
    if changed:
        LOG.warning("the run goes on with another config: %s", "; ".join(changed))
    data = [
        name for name, value in after["data"].items() if before.get("data", {}).get(name) != value
    ]
    if data:
        LOG.warning("the run goes on with other data than before: %s changed", ", ".join(data))


def _flatten(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """All fields by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in section.items():
        if isinstance(value, Mapping):
            found |= _flatten(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def extend_chain(chain: str, event: Mapping[str, Any]) -> str:
    text = json.dumps(event, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(f"{chain}\n{text}".encode()).hexdigest()[:32]


def _remove_torn_line(path: Path) -> list[str]:
    """Cut off a last line without an end; returns the whole lines."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    return whole.decode(errors="replace").splitlines()


def parse_lines(lines: list[str]) -> list[dict[str, Any]]:
    """The events of a receipt; a line that is none becomes an event without fields."""
    events: list[dict[str, Any]] = []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            event = {}
        events.append(event if isinstance(event, dict) else {})
    return events


def read_lines(folder: Path) -> list[str]:
    """The lines of a receipt, without half a line of a killed process."""
    data = (folder / LINES).read_bytes()
    return data[: data.rfind(b"\n") + 1].decode(errors="replace").splitlines()


def find_broken_line(events: list[dict[str, Any]]) -> int | None:
    """The number, from 1, of the first line whose chain does not follow from the lines before."""
    chain = ""
    for number, event in enumerate(events, start=1):
        fields = {key: value for key, value in event.items() if key != "chain"}
        chain = extend_chain(chain, fields)
        if event.get("chain") != chain:
            return number
    return None


def write_summary(folder: Path) -> None:
    """Write `receipt.json` from `receipt.jsonl`, whole or not at all."""
    text = json.dumps(summarize(parse_lines(read_lines(folder))), indent=1, ensure_ascii=False)
    unfinished = folder / f"{SUMMARY}.tmp"
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(folder / SUMMARY)


def summarize(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything of a receipt by its kind; of steps that were repeated, the last record."""
    starts = [event for event in events if event.get("kind") == "start"]
    last = starts[-1] if starts else {}
    names = ("format", "config", "data", "code", "environment", "ranks")
    losses = {e["step"]: e["loss"] for e in events if e.get("kind") == "step"}
    checkpoints = {e["name"]: e["sha256"] for e in events if e.get("kind") == "checkpoint"}
    resumed = [e["resumed_from"] for e in starts if "resumed_from" in e]
    return {
        **{name: last.get(name) for name in names},
        "starts": [event["step"] for event in starts],
        "is_finished": bool(events) and events[-1].get("kind") == "end",
        "losses": {str(step): losses[step] for step in sorted(losses)},
        "checkpoints": {r["name"]: r["sha256"] for r in resumed} | checkpoints,
        "chain": events[-1].get("chain") if events else None,
    }


@cache
def hash_sources() -> str:
    """SHA-256 of all Python and header files of the package, with their names."""
    root = Path(version.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".h", ".json")):
        digest.update(f"{path.relative_to(root)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def describe_environment(device: str) -> dict[str, str]:
    """What, besides the code, decides about bits: versions, processor, GPU."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "device": device,
    }
    if device.startswith("cuda") and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = str(torch.version.cuda)
    return found
