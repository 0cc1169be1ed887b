"""Rates, MFU and records; FLOPs against those that torch counts."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fulgurite.errors import ArgumentError
from fulgurite.train import flops, metrics
from fulgurite.train.config import LogSection
from fulgurite.train.flops import count_flops, find_peak, mean_context
from fulgurite.train.metrics import MetricsWriter, StepMeter, StepRecord, read_metrics
from tests.train.models import DENSE, MOE, build_small

T = 16


@dataclass(frozen=True)
class Result:
    loss: float = 2.0
    z_loss: float = 0.5
    tokens: int = 100
    gradient_norm: float = 1.5
    learning_rate: float = 1e-3
    is_skipped: bool = False
    load_LE: Tensor | None = None


# ---- FLOPs ---------------------------------------------------------------------------------------


def count_by_torch(run: Any) -> tuple[int, int]:
    """Operations of matmuls and of attention in forward and backward, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        run().sum().backward()
    counts = counter.get_flop_counts()["Global"]
    attention = sum(n for op, n in counts.items() if "attention" in str(op))
    return sum(counts.values()) - attention, attention


def dense_reference(tokens_BT: Tensor) -> Tensor:
    """The matmuls of a model with the sizes of DENSE, in plain torch."""
    size, heads, kv_heads, head = 32, 4, 2, 8
    make = lambda *shape: torch.zeros(*shape, requires_grad=True)  # noqa: E731
    x = make(320, size)[tokens_BT]
    for _ in range(2):
        q, k, v = (
            F.linear(x, make(n * head, size)).unflatten(-1, (n, head)).transpose(1, 2)
            for n in (heads, kv_heads, kv_heads)
        )
        k, v = (one.repeat_interleave(2, dim=1) for one in (k, v))
        scores = (q @ k.mT).softmax(-1)
        x = x + F.linear((scores @ v).transpose(1, 2).flatten(2), make(size, size))
        up = F.linear(x, make(80, size)) * F.linear(x, make(80, size))
        x = x + F.linear(up, make(size, 80))
    return F.linear(x, make(320, size))


def test_dense_flops_are_those_that_torch_counts():
    counted, _ = count_by_torch(lambda: dense_reference(torch.zeros(2, T, dtype=torch.int64)))
    found = count_flops(build_small(), T)
    square = found.attention * T / mean_context(T)  # torch computes the masked half, too
    assert counted == 2 * T * 3 * (found.matmul + square)


def expert_reference(x_TD: Tensor) -> Tensor:
    """Router, two experts of each token and the shared expert, in plain torch."""
    make = lambda *shape: torch.zeros(*shape, requires_grad=True)  # noqa: E731
    chosen_Tk = F.linear(x_TD, make(8, 32)).topk(2).indices
    total = F.linear(F.linear(x_TD, make(24, 32)) * F.linear(x_TD, make(24, 32)), make(32, 24))
    for place in range(2):
        for expert in chosen_Tk[:, place].unique():
            rows = x_TD[chosen_Tk[:, place] == expert]
            up = F.linear(rows, make(48, 32))
            total = total + F.linear(up[:, :24] * up[:, 24:], make(32, 24)).sum(0)
    return total


def test_moe_flops_are_those_of_the_chosen_experts():
    x_TD = torch.randn(T, 32, requires_grad=True)
    counted, _ = count_by_torch(lambda: expert_reference(x_TD))
    counted += 4 * T * 8 * 32  # topk has no gradient, so torch leaves out the router's backward
    with_experts = count_flops(build_small("Dots1ForCausalLM"), T)
    all_dense = count_flops(build_small("Dots1ForCausalLM", first_k_dense_replace=2), T)
    dense_mlp = 2 * 3 * 32 * 80
    moe_matmul = with_experts.matmul - all_dense.matmul + dense_mlp
    assert counted == T * 3 * moe_matmul


def test_experts_that_are_not_chosen_cost_nothing():
    few, many = (
        count_flops(build_small("Dots1ForCausalLM", n_routed_experts=n), T) for n in (8, 64)
    )
    router = 2 * 32 * (64 - 8)
    assert many.matmul - few.matmul == router
    assert many.parameters - few.parameters == (64 - 8) * (3 * 24 * 32 + 32 + 1)
    assert many.active_parameters - few.active_parameters == (64 - 8) * (32 + 1)
    assert MOE["num_experts_per_tok"] == 2 and DENSE["hidden_size"] == 32


def test_tied_weights_still_compute_the_head():
    tied, own = (count_flops(build_small(tie_word_embeddings=t), T) for t in (True, False))
    assert tied.matmul == own.matmul and own.parameters - tied.parameters == 320 * 32


@pytest.mark.parametrize(
    ("length", "window", "chunk"),
    [(1, None, None), (16, None, None), (16, 4, None), (16, 99, None), (17, None, 5), (7, 7, None)],
)
def test_the_mean_context_is_that_of_the_mask(length: int, window: int | None, chunk: int | None):
    query, key = torch.arange(length)[:, None], torch.arange(length)
    mask = key <= query
    if window is not None:
        mask &= query - key < window
    if chunk is not None:
        mask &= query // chunk == key // chunk
    assert mean_context(length, window, chunk) == pytest.approx(mask.sum().item() / length)


def test_peaks_of_known_and_unknown_devices(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200 NVL")
    assert find_peak("cuda") == flops.Peak(989e12, is_measured=False)
    assert find_peak("cuda", "fp8_rowwise").flops == 1979e12
    measured = find_peak("cpu")
    assert measured.is_measured and measured.flops > 1e8
    assert find_peak("cpu") == measured


# ---- records -------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_rates_and_mfu():
    clock = Clock()
    meter = StepMeter(
        tokens_per_step=1000,
        flops_per_token=3e6,
        peak_flops=1e10,
        world_size=2,
        bytes_per_token=4.0,
        clock=clock,
    )
    clock.now = 60.0  # the first step compiles
    first = meter.measure(0, Result())
    assert first.tokens_per_second is None and first.mfu is None and first.time == 60
    assert meter.seconds_left(0, 10) is None
    for step in (1, 2):
        clock.now += 0.5
        record = meter.measure(step, Result())
    assert record.tokens_per_second == 2000 and record.tokens == 3000
    assert record.mfu == pytest.approx(2000 * 3e6 / 2e10)
    assert record.bits_per_byte == pytest.approx(2.0 / math.log(2) / 4)
    assert meter.seconds_left(2, 10) == pytest.approx(3.5)
    assert record.memory_bytes > 2**20


def test_time_of_evaluations_does_not_count():
    clock = Clock()
    meter = StepMeter(tokens_per_step=10, clock=clock)
    for step in range(4):
        clock.now += 1
        record = meter.measure(step, Result())
        clock.now += 100
        meter.skip_time()
    assert record.tokens_per_second == 10 and record.mfu is None and record.bits_per_byte is None


def test_expert_load_is_to_the_mean_of_the_layer():
    meter = StepMeter(tokens_per_step=1)
    load = torch.tensor([[10, 30, 20, 20], [0, 0, 0, 8]])
    record = meter.measure(0, Result(load_LE=load))
    assert record.expert_load == [[0.5, 1.5, 1, 1], [0, 0, 0, 4]]
    assert (record.expert_min, record.expert_max) == (0, 4)
    nothing = meter.measure(1, Result(load_LE=torch.zeros(2, 3)))
    assert nothing.expert_max == 0
    large = torch.ones(metrics.MAX_LOAD + 1, 1)
    assert meter.measure(1, Result(load_LE=large)).expert_load is None
    assert meter.measure(metrics.LOAD_EVERY, Result(load_LE=large)).expert_load is not None


def record_of(step: int, **values: Any) -> StepRecord:
    return StepRecord(step=step, time=1.5 * step, loss=3.0 - step, **values)


def test_records_come_back(tmp_path: Path):
    writer = MetricsWriter(tmp_path, LogSection())
    records = [
        record_of(0, expert_load=[[0.5, 1.5]], evaluation={"loss": 1.0, "perplexity": math.inf}),
        replace(record_of(1), loss=math.nan, is_skipped=True, gradient_norm=math.inf),
        record_of(2, mfu=0.4),
    ]
    for record in records:
        writer.write(record)
    writer.close()
    writer.close()
    found = read_metrics(tmp_path)
    assert math.isnan(found[1].loss) and found[1].gradient_norm == math.inf
    assert [found[0], found[2]] == [records[0], records[2]]
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_resumed_run_drops_what_it_computes_again(tmp_path: Path):
    writer = MetricsWriter(tmp_path, LogSection())
    for step in range(5):
        writer.write(record_of(step))
    writer.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "time": 1')  # killed here
    writer = MetricsWriter(tmp_path, LogSection(), start_step=3)
    assert [record.step for record in read_metrics(tmp_path)] == [0, 1, 2]
    writer.write(record_of(3, mfu=0.1))
    writer.close()
    assert [record.mfu for record in read_metrics(tmp_path)] == [None, None, None, 0.1]


def test_lines_of_other_versions_and_garbage(tmp_path: Path):
    lines = ['{"step": 0, "time": 1, "loss": 2, "new": 5}', "[]", "5", '{"step": 1}', "\x00", ""]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert read_metrics(tmp_path) == [StepRecord(0, 1, 2)]
    assert read_metrics(tmp_path / "nothing") == []


def test_only_some_steps_are_written(tmp_path: Path):
    writer = MetricsWriter(tmp_path, LogSection(every=10))
    for step in range(25):
        writer.write(
            record_of(step, is_skipped=step == 13, evaluation={"x": 1.0} if step == 7 else {})
        )
    writer.close()
    assert [record.step for record in read_metrics(tmp_path)] == [0, 7, 10, 13, 20]


def test_a_full_disk_does_not_end_the_run(tmp_path: Path, caplog, monkeypatch):
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    writer = MetricsWriter(tmp_path, LogSection())
    file = writer._file
    monkeypatch.setattr(writer, "_file", Full())
    writer.write(record_of(0))
    assert "metrics of step 0 can't be written: No space left" in caplog.text
    monkeypatch.setattr(writer, "_file", file)
    writer.write(record_of(1))
    writer.close()
    assert [record.step for record in read_metrics(tmp_path)] == [1]


def test_a_full_disk_at_the_end_does_not_end_the_run(tmp_path: Path, caplog):
    writer = MetricsWriter(tmp_path, LogSection())
    writer._file.close()
    writer._file = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115
    writer.write(record_of(0))
    writer.close()
    assert "metrics can't be written: No space left" in caplog.text


def test_tensorboard_gets_every_number(tmp_path: Path):
    name = "tensorboard.backend.event_processing.event_accumulator"
    EventAccumulator = pytest.importorskip(name, exc_type=ImportError).EventAccumulator
    writer = MetricsWriter(tmp_path, LogSection(tensorboard=True))
    writer.write(record_of(0, evaluation={"loss": 2.5}))
    writer.write(record_of(1))
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("loss")] == [3.0, 2.0]
    assert [event.value for event in events.Scalars("validation/loss")] == [2.5]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_wandb_that_is_not_installed(tmp_path: Path):
    with pytest.raises(ArgumentError, match=r"log.wandb needs the wandb package"):
        MetricsWriter(tmp_path, LogSection(wandb=True))


def test_wandb_gets_the_config_and_a_resumed_run_goes_on(tmp_path: Path, monkeypatch):
    started: list[dict[str, Any]] = []
    run = SimpleNamespace(log=lambda values, step: None, finish=lambda: None)
    stub = SimpleNamespace(init=lambda **options: started.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", stub)
    for start in (0, 5):
        MetricsWriter(tmp_path, LogSection(wandb=True), start, {"seed": 3}).close()
    assert started[0]["config"] == {"seed": 3}
    assert started[0]["id"] == started[1]["id"] and started[1]["resume"] == "allow"


def test_the_measured_peak_is_the_best_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that was busy when the first process measured heals."""
    stored: dict[str, str] = {}
    monkeypatch.setattr(flops, "read_text", lambda kind, key: stored.get(key))
    monkeypatch.setattr(flops, "write_text", lambda kind, key, text: stored.update({key: text}))
    for measured, expected in ((1e9, 1e9), (5e9, 5e9), (2e9, 5e9)):
        monkeypatch.setattr(flops, "_measure_gemm", lambda *_, value=measured: value)
        flops._measured_peak.cache_clear()
        assert flops.find_peak("cpu").flops == expected
    flops._measured_peak.cache_clear()
