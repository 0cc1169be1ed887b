"""Metrics: the figures of a step in, one record a step out, in `metrics.jsonl` and elsewhere.

    meter = StepMeter(...)
    record = meter.measure(step, result)         # rates, MFU, memory, expert load
    writer = MetricsWriter(folder, config.log)   # metrics.jsonl, TensorBoard, wandb
    writer.write(record)

A run that resumes at step `s` drops the records from `s` on: they are computed again. A line that a
killed process left half-written is dropped, too.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fulgurite.files import write_atomically
from fulgurite.logs import LOG
from fulgurite.quant.optional_package import import_optional
from fulgurite.train.config import LogSection

FILE = "metrics.jsonl"
WANDB_ID = "wandb-id.txt"
WINDOW = 20  # steps over which rates are averaged
MAX_LOAD = 1024  # numbers of expert load that every record has; larger ones are rarer
LOAD_EVERY = 50


class StepFigures(Protocol):
    """What a training step gives: `StepResult` of step.py."""

    @property
    def loss(self) -> float: ...
    @property
    def z_loss(self) -> float: ...
    @property
    def tokens(self) -> int: ...
    @property
    def gradient_norm(self) -> float: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def is_skipped(self) -> bool: ...
    @property
    def load_LE(self) -> Tensor | None: ...


@dataclass(frozen=True)
class StepRecord:
    """The metrics of one step.

    Attributes:
        step: from 0.
        time: seconds since the run (or its resumed part) began.
        loss: mean cross entropy of a token, in nats; `z_loss`: not weighted.
        bits_per_byte: the loss for a byte of text.
        learning_rate, gradient_norm: of this step, the norm before clipping.
        tokens: of all steps so far.
        tokens_per_second: over the last steps, all ranks.
        mfu: model FLOPs utilization, 0 to 1.
        memory_bytes: the most that this process had.
        is_skipped: a NaN or infinity; weights did not change.
        expert_min, expert_max: tokens of the least and the most loaded expert, to the mean of its layer.
        expert_load: of each expert of each layer, to the mean; None: no experts, or not in this record.
        evaluation: results on held-out text.
        task: figures of fine-tuning, such as the mean reward of GRPO.
    """

    step: int
    time: float
    loss: float
    z_loss: float = 0.0
    bits_per_byte: float | None = None
    learning_rate: float = 0.0
    gradient_norm: float = 0.0
    tokens: int = 0
    tokens_per_second: float | None = None
    mfu: float | None = None
    memory_bytes: int = 0
    is_skipped: bool = False
    expert_min: float | None = None
    expert_max: float | None = None
    expert_load: list[list[float]] | None = None
    evaluation: dict[str, float] = field(default_factory=dict)
    task: dict[str, float] = field(default_factory=dict)


class StepMeter:
    """Turns the figures of steps into records.

    Args:
        tokens_per_step: inputs of a step, over all ranks.
        flops_per_token: of training; see flops.py. None: no MFU.
        peak_flops: of one device.
        world_size: devices.
        bytes_per_token: of text, for bits per byte.
        device: whose memory is measured.
        clock: in seconds.
    """

    def __init__(
        self,
        *,
        tokens_per_step: int,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        world_size: int = 1,
        bytes_per_token: float | None = None,
        device: torch.device | str = "cpu",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.tokens_per_step = tokens_per_step
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops
        self.world_size = world_size
        self.bytes_per_token = bytes_per_token
        self.device = torch.device(device)
        self._clock = clock
        self._begin = clock()
        self._last = self._begin
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._is_first = True

    def skip_time(self) -> None:
        """Leave out the time since the last step: an evaluation or a checkpoint took it."""
        self._last = self._clock()

    def measure(self, step: int, result: StepFigures) -> StepRecord:
        """The record of a step that has just ended. The first one compiles, so its time doesn't count."""
        now = self._clock()
        if not self._is_first:
            self._seconds.append(now - self._last)
        self._last, self._is_first = now, False
        rate = self._tokens_per_second()
        load = relative_load(result.load_LE)
        flat = [value for row in load or () for value in row]
        is_kept = len(flat) <= MAX_LOAD or step % LOAD_EVERY == 0
        return StepRecord(
            step=step,
            time=now - self._begin,
            loss=result.loss,
            z_loss=result.z_loss,
            bits_per_byte=self.bits_per_byte(result.loss),
            learning_rate=result.learning_rate,
            gradient_norm=result.gradient_norm,
            tokens=(step + 1) * self.tokens_per_step,
            tokens_per_second=rate,
            mfu=self._mfu(rate),
            memory_bytes=peak_memory(self.device),
            is_skipped=result.is_skipped,
            expert_min=min(flat, default=None),
            expert_max=max(flat, default=None),
            expert_load=load if is_kept else None,
        )

    def bits_per_byte(self, loss: float) -> float | None:
        return loss / math.log(2) / self.bytes_per_token if self.bytes_per_token else None

    def seconds_left(self, step: int, steps: int) -> float | None:
        """Until step `steps` ends, if all go on like the last ones."""
        if not self._seconds:
            return None
        return max(0, steps - step - 1) * sum(self._seconds) / len(self._seconds)

    def _tokens_per_second(self) -> float | None:
        seconds = sum(self._seconds)
        return len(self._seconds) * self.tokens_per_step / seconds if seconds > 0 else None

    def _mfu(self, rate: float | None) -> float | None:
        if rate is None or not self.flops_per_token or not self.peak_flops:
            return None
        return rate * self.flops_per_token / (self.world_size * self.peak_flops)


def relative_load(load_LE: Tensor | None) -> list[list[float]] | None:
    """Tokens of each expert, to the mean of its layer."""
    if load_LE is None or load_LE.numel() == 0:
        return None
    load = load_LE.detach().double().cpu()
    mean_L1 = load.mean(-1, keepdim=True).clamp(min=1e-9)
    return [[round(value, 3) for value in row] for row in (load / mean_L1).tolist()]


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process had on the device so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# ---- writing -------------------------------------------------------------------------------------


class MetricsWriter:
    """Writes records to `folder/metrics.jsonl`, and to TensorBoard and wandb if the config says so."""

    def __init__(
        self,
        folder: Path,
        section: LogSection,
        start_step: int = 0,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE
        self.every = max(1, section.every)
        _drop_records(self.path, start_step)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115
        self._tensorboard = _open_tensorboard(folder, start_step) if section.tensorboard else None
        self._wandb = _open_wandb(folder, config) if section.wandb else None

    def write(self, record: StepRecord) -> None:
        """Write a record; of records without news, only every `log.every`-th."""
        has_news = record.is_skipped or bool(record.evaluation)
        if record.step % self.every and not has_news:
            return
        try:
            self._file.write(json.dumps(_to_json(record), allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:  # a full disk must not end a run
            LOG.warning("metrics of step %d can't be written: %s", record.step, error.strerror)
        values = scalar_values(record)
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, record.step)
        if self._wandb is not None:
            self._wandb.log(values, step=record.step)

    def close(self) -> None:
        """Flush to disk; closing again does nothing."""
        if not self._file.closed:
            try:
                with self._file:
                    self._file.flush()
                    os.fsync(self._file.fileno())
            except OSError as error:  # the run is done: the last lines are not worth its end
                LOG.warning("metrics can't be written: %s", error.strerror)
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()
        self._tensorboard = self._wandb = None


def scalar_values(record: StepRecord) -> dict[str, float]:
    """The numbers of a record by name, evaluations as `validation/...`."""
    values = {
        name: float(value)
        for name, value in asdict(record).items()
        if name not in ("step", "evaluation", "task", "expert_load") and value is not None
    }
    values |= {f"task/{name}": value for name, value in record.task.items()}
    return values | {f"validation/{name}": value for name, value in record.evaluation.items()}


def _open_tensorboard(folder: Path, start_step: int) -> Any:
    module: Any = import_optional("torch.utils.tensorboard", "log.tensorboard", "tensorboard")
    return module.SummaryWriter(str(folder / "tensorboard"), purge_step=start_step or None)


def _open_wandb(folder: Path, config: Mapping[str, Any] | None) -> Any:
    """The run there; a run that resumes goes on with it, by the id in its folder."""
    module: Any = import_optional("wandb", "log.wandb", "wandb")
    file = folder / WANDB_ID
    if not file.is_file():
        write_atomically(file, uuid.uuid4().hex)
    return module.init(
        project="fulgurite",
        id=file.read_text(encoding="utf-8"),
        name=folder.name,
        dir=str(folder),
        config=dict(config or {}),
        resume="allow",
    )


# ---- reading -------------------------------------------------------------------------------------


def _to_json(record: StepRecord) -> dict[str, Any]:
    """Fields that are set. JSON has no NaN: such numbers are strings."""

    def encode(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if isinstance(value, dict):
            return {name: encode(one) for name, one in value.items()}
        return value

    values = asdict(record)
    return {name: encode(value) for name, value in values.items() if value not in (None, {})}


def read_metrics(folder: Path) -> list[StepRecord]:
    """The records of a run, in order; of a step that ran twice, the last one."""
    path = folder / FILE
    if not path.is_file():
        return []
    found = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        record = _parse(line)
        if record is not None:
            found[record.step] = record
    return [found[step] for step in sorted(found)]


def _parse(line: str) -> StepRecord | None:
    """A record; None for a line that is not whole. Fields of later versions are left out."""
    try:
        values = json.loads(line)
        known = {one.name for one in fields(StepRecord)}
        kept = {name: _decode(value) for name, value in values.items() if name in known}
        return StepRecord(**kept)
    except (ValueError, TypeError, AttributeError):
        return None


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _decode(one) for name, one in value.items()}
    return float(value) if isinstance(value, str) else value


def _drop_records(path: Path, start_step: int) -> None:
    """Keep the whole lines of earlier steps."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        record = _parse(line)
        if record is not None and record.step < start_step:
            kept.append(line + "\n")
    write_atomically(path, "".join(kept))
