"""Bias, mask, penalties and counts on a GPU, against the reference and the C++ kernel."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from fulgurite.kernels.sampling import ops, reference, triton_logits, triton_sampling
from fulgurite.kernels.sampling.table import HAS_PENALTIES, LogitsTable, pack_mask
from fulgurite.kernels.tuning.sm_90 import Sm90Heuristics
from tests.kernels.triton_support import DEVICE


def random_rows(rows: int, size: int, seed: int) -> tuple[Tensor, Tensor, LogitsTable]:
    """Logits, processing and a table on the CPU; every mix of flags."""
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    logits = 3 * torch.randn(rows, size, generator=generator)
    table = LogitsTable.allocate(rows + 1, size, torch.device("cpu"))
    shape = table.counts_WO.shape
    counts = torch.randint(0, 9, shape, generator=generator, dtype=torch.int32)
    table.counts_WO.copy_(counts * (torch.rand(shape, generator=generator) < 0.4))
    table.bias_WO.copy_(2 * torch.randn(shape, generator=generator))
    table.bias_WO[torch.rand(shape, generator=generator) < 0.1] = -torch.inf
    for words in table.allowed_WM:
        words.copy_(pack_mask(torch.rand(size, generator=generator) < 0.7))
    processing = [
        (rng.randrange(rows + 1), row % 8, rng.choice([1.0, 1.7, 0.3]), rng.uniform(-2, 2), 0.3)
        for row in range(rows)
    ]
    return logits, torch.tensor(processing, dtype=torch.float64), table


def to_device(table: LogitsTable) -> LogitsTable:
    return LogitsTable(
        table.counts_WO.to(DEVICE), table.bias_WO.to(DEVICE), table.allowed_WM.to(DEVICE)
    )


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sm90Heuristics, "sampling_chunk", 64)
    monkeypatch.setattr(Sm90Heuristics, "sampling_stretch", 16)


@pytest.mark.parametrize("size", [1, 31, 64, 133])
def test_processed_logits_have_the_bits_of_the_reference(size: int) -> None:
    logits, processing, table = random_rows(8, size, size)
    wanted = reference.process_logits_reference(logits, processing, table)
    found = triton_logits.process_logits(logits.to(DEVICE), processing.to(DEVICE), to_device(table))
    assert torch.equal(found.cpu(), wanted)
    strided = torch.stack([logits, logits], dim=1)[:, 0].to(DEVICE)
    found = triton_logits.process_logits(strided, processing.to(DEVICE), to_device(table))
    assert torch.equal(found.cpu(), wanted)


def test_special_logits() -> None:
    logits, processing, table = random_rows(8, 40, 0)
    logits[:, 3], logits[:, 4], logits[:, 5], logits[:, 6] = torch.nan, torch.inf, -torch.inf, -0.0
    wanted = reference.process_logits_reference(logits, processing, table)
    found = triton_logits.process_logits(logits.to(DEVICE), processing.to(DEVICE), to_device(table))
    torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=0, equal_nan=True)


def test_all_steps_give_the_tokens_of_the_cpu() -> None:
    logits, processing, table = random_rows(8, 133, 5)
    settings = [(0.0, 0, 0, 1, 0), (1, 0, 0, 1, 0.4), (0.7, 0.1, 5, 0.9, 0.6), (2, 0, 9, 1, 0.2)]
    settings_R5 = torch.tensor(settings * 2, dtype=torch.float64)
    wanted = ops.sample_tokens(logits, settings_R5, processing, table)
    processed = triton_logits.process_logits(
        logits.to(DEVICE), processing.to(DEVICE), to_device(table)
    )
    found = triton_sampling.sample_rows(processed, settings_R5.to(DEVICE), True)
    assert found.tolist() == wanted.tolist()
    greedy = triton_sampling.greedy_sample(processed)
    assert greedy.tolist() == ops.sample_tokens(logits, None, processing, table).tolist()


@pytest.mark.parametrize("rows", [1, 5, 300])
def test_tokens_are_stored_and_counted(rows: int) -> None:
    """Rows that are only padding share the last row of the table."""
    rng = random.Random(rows)
    places = rng.sample(range(rows), rows)
    padding = rows // 4
    places[rows - padding :] = [rows] * padding
    flags = [HAS_PENALTIES * rng.randrange(2) if place < rows else 0 for place in places]
    processing = torch.tensor([(*pair, 1, 0, 0) for pair in zip(places, flags, strict=True)])
    processing = processing.to(DEVICE, torch.float64)
    tokens = torch.tensor([rng.randrange(-2, 30) if place < rows else 7 for place in places])
    last, counts = torch.full((rows + 1,), 5), torch.ones(rows + 1, 30, dtype=torch.int32)
    found = last.to(DEVICE), counts.to(DEVICE)
    triton_logits.record_tokens(tokens.to(DEVICE), processing, *found)
    ops._record_tokens(tokens, processing.cpu(), last, counts)
    assert torch.equal(found[0].cpu(), last) and torch.equal(found[1].cpu(), counts)
    triton_logits.record_tokens(tokens.to(DEVICE) + 2, processing, found[0], None)
    assert found[0][places[0]].item() == max(int(tokens[0]) + 2, 0)


@pytest.mark.parametrize("count", [1, 7, 300])
def test_pending_tokens_come_from_the_step_before(count: int) -> None:
    rng = random.Random(count)
    ids = torch.tensor([rng.choice([-1, 4, 0]) for _ in range(count)])
    rows, last = torch.randint(0, 9, (count,)), torch.arange(100, 109)
    wanted = [int(last[row]) if id < 0 else int(id) for id, row in zip(ids, rows, strict=True)]
    found = ids.to(DEVICE)
    triton_logits.fill_pending_tokens(found, rows.to(DEVICE), last.to(DEVICE))
    assert found.tolist() == wanted
