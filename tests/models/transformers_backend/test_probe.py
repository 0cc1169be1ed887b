"""Attention specs that are read from transformers' modules, and masks that can't be expressed."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="its modules are tested")

from fulgurite.models.transformers_backend.probe import Reach, UnsupportedAttention, read_reach


def causal(batch, head, query, key):
    return key <= query


def within(size):
    return lambda batch, head, query, key: (key <= query) & (query - key < size)


def chunked(size):
    return lambda batch, head, query, key: (key <= query) & (query // size == key // size)


@pytest.mark.parametrize("size", [1, 2, 7, 63])
def test_reach_of_windows_and_chunks(size):
    assert read_reach(within(size), 64) == Reach(sliding_window=size)
    if size > 1:  # chunks of 1 are a window of 1
        assert read_reach(chunked(size), 64) == Reach(chunk_size=size)


def test_a_window_of_all_positions_is_none():
    assert read_reach(causal, 64) == Reach()
    assert read_reach(within(64), 64) == Reach()


@pytest.mark.parametrize(
    "mask",
    [
        lambda batch, head, query, key: key >= 0 * query,  # bidirectional
        lambda batch, head, query, key: (key <= query) & (key % 2 == 0),  # strided
        lambda batch, head, query, key: (key <= query) & ((query - key < 8) | (key < 2)),  # sinks
        lambda batch, head, query, key: key < query,  # a query does not see its own key
    ],
)
def test_other_masks_are_refused(mask):
    with pytest.raises(UnsupportedAttention, match="neither causal"):
        read_reach(mask, 64)


def test_a_mask_that_depends_on_data_is_refused():
    padding = torch.zeros((), dtype=torch.long, device="meta")
    with pytest.raises(UnsupportedAttention, match="can't be evaluated"):
        read_reach(lambda batch, head, query, key: key + padding <= query, 64)
