"""Paged attention of deterministic mode: a query's bits don't depend on the step it is in.

On a GPU, or in Triton's interpreter.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.kernels.triton_support import DEVICE, INTERPRETED  # isort: skip

from fulgurite.determinism import deterministic
from fulgurite.kernels.attention import triton_attention
from fulgurite.kernels.attention.metadata import AttentionMetadata
from fulgurite.kernels.attention.triton_attention import count_parts, limit_splits
from fulgurite.kernels.tuning import deterministic as deterministic_tuning
from tests.kernels.attention.cases import Case, Inputs, build, exact

DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
NEW = 5  # the last tokens of each sequence are queries
PART_KEYS = 64
# within a part, at its end, in several, and where parts have twice as many keys
LENGTHS = (7, PART_KEYS, PART_KEYS + 1, 3 * PART_KEYS + 40, 18 * PART_KEYS + 70)
CASES = {
    "grouped": Case([(NEW, n) for n in LENGTHS]),
    "sinks": Case([(NEW, n) for n in LENGTHS], sinks=True),
    "window": Case([(NEW, n) for n in LENGTHS], options={"window": PART_KEYS + 33}),
    "chunk": Case([(NEW, n) for n in LENGTHS], options={"chunk": PART_KEYS + 64}),
    "softcap": Case([(NEW, n) for n in LENGTHS], options={"softcap": 2.0}),
}


@pytest.fixture(autouse=True)
def short_parts(monkeypatch):
    monkeypatch.setattr(deterministic_tuning, "PART_KEYS", PART_KEYS)


def run(inputs: Inputs, num_sms: int | None, monkeypatch) -> torch.Tensor:
    starts = inputs.metadata.query_start_loc.tolist()
    inputs = inputs.with_metadata(
        max_query_len=max(b - a for a, b in pairwise(starts)),
        max_seq_len=max(inputs.metadata.seq_lens_S.tolist()),
    )
    triton_attention.build_launch.cache_clear()
    with deterministic(), monkeypatch.context() as patch:
        if num_sms is not None:
            heuristics = triton_attention.heuristics_for(inputs.q.device)
            patch.setattr(heuristics, "num_sms", num_sms)
        out = triton_attention.paged_attention(*inputs)
    triton_attention.build_launch.cache_clear()
    return out


def take(inputs: Inputs, sequence: int, first: int, count: int) -> Inputs:
    """`count` query tokens of one sequence, from the `first` of its new ones on."""
    start = int(inputs.metadata.query_start_loc[sequence]) + first
    metadata = AttentionMetadata(
        inputs.metadata.block_table_SM[sequence : sequence + 1],
        torch.tensor([0, count], dtype=torch.int32, device=inputs.q.device),
        inputs.metadata.seq_lens_S[sequence : sequence + 1] - (NEW - first - count),
    )
    return inputs._replace(q=inputs.q[start : start + count], metadata=metadata)


@pytest.mark.parametrize("name", CASES)
def test_any_step_gives_the_same_bits(name: str, monkeypatch) -> None:
    torch.manual_seed(0)
    inputs = build(CASES[name], DTYPE, DTYPE, DEVICE)
    whole = run(inputs, 1, monkeypatch)  # one program a tile
    expected = exact(inputs)
    torch.testing.assert_close(whole.double(), expected, rtol=0.01, atol=0.01)
    assert torch.equal(run(inputs, None, monkeypatch), whole), "several programs share the keys"
    assert torch.equal(run(inputs, 9, monkeypatch), whole), "a program has some of the parts"
    for sequence, chunks in (
        (0, ((0, 1), (NEW - 1, 1))),
        (2, ((0, NEW), (NEW - 1, 1))),
        (4, ((1, 3), (NEW - 1, 1))),
    ):
        for first, count in chunks:
            start = int(inputs.metadata.query_start_loc[sequence]) + first
            part = run(take(inputs, sequence, first, count), None, monkeypatch)
            assert torch.equal(part, whole[start : start + count]), f"{count} of {sequence}"


def test_parts_of_a_context() -> None:
    """16 parts of a size, then 16 of twice that size."""
    ends = [count_parts(keys, 4) for keys in range(1, 500)]
    starts = [0] + [k for k in range(1, 499) if ends[k] != ends[k - 1]]
    sizes = [b - a for a, b in pairwise(starts)]
    assert sizes[:48] == [4] * 16 + [8] * 16 + [16] * 16
    assert ends == sorted(ends) and ends[0] == 1
    assert count_parts(0, 4) == 1


def test_partial_results_are_stored_if_they_are_small() -> None:
    elements = triton_attention.MAX_PARTIAL_BYTES // 4 // 5
    assert limit_splits(8, 5, elements) == 5 and limit_splits(3, 5, elements) == 3
    assert limit_splits(8, 5, elements + 1) == 1
