"""The global sequence of samples depends on no ranks, no workers and no restarts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fulgurite.errors import ArgumentError
from fulgurite.train.batch import IGNORED, Batch
from fulgurite.train.data.loader import Loader, collate
from fulgurite.train.data.packing import Sample


class Numbered:
    """Sample `n` has the token `n`."""

    num_tokens = 0

    def __init__(self, length: int, documents: bool = True) -> None:
        self.length = length
        self.documents = documents

    def __len__(self) -> int:
        return self.length

    def hashes(self) -> dict[str, str]:
        return {}

    def sample(self, number: int) -> Sample:
        row = np.full(3, number)
        return Sample(row, row + 1, np.arange(3), np.zeros(3, np.int64) if self.documents else None)


def global_sequence(ranks: int, workers: int, start: int, steps: int, micro: int = 1) -> list[int]:
    """The tokens of steps `start` to `steps`, all ranks' shares in order."""
    loaders = [
        Loader(
            Numbered(37),
            batch_size=24,
            microbatch_size=micro,
            data_rank=rank,
            data_ranks=ranks,
            start_step=start,
            shuffle_seed=5,
            workers=workers,
        )
        for rank in range(ranks)
    ]
    found = []
    for step in range(start, steps):
        for loader in loaders:
            for batch in loader.step(step):
                assert len(batch.tokens_BT) == micro
                found += batch.tokens_BT[:, 0].tolist()
    for loader in loaders:
        loader.close()
    return found


@pytest.fixture(scope="module")
def reference() -> list[int]:
    return global_sequence(1, 0, 0, 8)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_ranks_and_workers_give_the_same_sequence(reference: list[int], ranks: int, workers: int):
    assert global_sequence(ranks, workers, 0, 8, micro=3 if ranks != 3 else 2) == reference


@pytest.mark.parametrize("start", range(8))
def test_a_restart_at_any_step_goes_on(reference: list[int], start: int):
    """Also on another number of ranks."""
    assert global_sequence([1, 2, 3, 4, 8][start % 5], 2, start, 8) == reference[24 * start :]


def test_each_sample_once_an_epoch(reference: list[int]):
    for epoch in range(len(reference) // 37):
        assert sorted(reference[37 * epoch : 37 * epoch + 37]) == list(range(37))


def test_any_step_may_be_asked_for_in_any_order(reference: list[int]):
    loader = Loader(Numbered(37), batch_size=24, microbatch_size=24, shuffle_seed=5, workers=2)
    for step in [3, 3, 0, 7, 1, 2]:
        [batch] = loader.step(step)
        assert batch.tokens_BT[:, 0].tolist() == reference[24 * step : 24 * step + 24]
        assert batch.first_sample == 24 * step
    loader.close()


def test_a_batch_has_what_the_samples_have():
    loader = Loader(Numbered(10), batch_size=4, microbatch_size=2, workers=0)
    first, second = loader.step(1)
    assert isinstance(first, Batch)
    assert first.tokens_BT.tolist() == [[4] * 3, [5] * 3] and first.tokens_BT.dtype == torch.int64
    assert first.labels_BT.tolist() == [[5] * 3, [6] * 3]
    assert first.positions_BT.tolist() == [[0, 1, 2]] * 2
    assert first.documents_BT is not None and not first.documents_BT.any()
    assert (first.first_sample, second.first_sample) == (4, 6)
    assert int(first.num_tokens) == 6 and IGNORED not in first.labels_BT


def test_batches_for_a_gpu_bring_where_documents_begin(monkeypatch: pytest.MonkeyPatch):
    """The threads of the loader find them: that takes the training thread milliseconds."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # needs a GPU
    with_documents = [
        Sample(*(np.arange(8),) * 3, np.array([0, 0, 1, 1, 1, 2, -1, -1])) for _ in range(2)
    ]
    batch = collate(with_documents, pin=True)
    assert batch.offsets_S is not None
    assert batch.offsets_S.tolist()[:8] == [0, 2, 5, 6, 8, 10, 13, 14]
    assert batch.to("cpu").offsets_S is None, "only flash attention on a GPU reads it"
    assert collate(with_documents).offsets_S is None


def test_rows_of_one_document_have_no_documents():
    [batch] = Loader(Numbered(4, documents=False), batch_size=2, microbatch_size=2).step(0)
    assert batch.documents_BT is None


def test_a_batch_larger_than_the_dataset_goes_into_the_next_epoch():
    loader = Loader(Numbered(3), batch_size=8, microbatch_size=8, shuffle_seed=0, workers=0)
    [batch] = loader.step(0)
    tokens = batch.tokens_BT[:, 0].tolist()
    assert sorted(tokens[:3]) == sorted(tokens[3:6]) == [0, 1, 2]


def test_an_error_of_a_worker_reaches_the_caller():
    class Broken(Numbered):
        def sample(self, number: int) -> Sample:
            raise OSError("the disk is gone")

    loader = Loader(Broken(5), batch_size=1, microbatch_size=1, workers=2)
    with pytest.raises(OSError, match="the disk is gone"):
        loader.step(0)
    loader.close()
    loader.close()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(batch_size=10, microbatch_size=4), "not a multiple"),
        (dict(batch_size=8, microbatch_size=4, data_ranks=3), "3 data ranks"),
        (dict(batch_size=0, microbatch_size=1), "must be positive"),
        (dict(batch_size=4, microbatch_size=1, data_rank=2, data_ranks=2), "below the number"),
        (dict(batch_size=4, microbatch_size=1, workers=-1), "negative"),
    ],
)
def test_sizes_that_do_not_fit(sizes: dict[str, int], message: str):
    with pytest.raises(ArgumentError, match=message):
        Loader(Numbered(5), **sizes)


def test_an_empty_dataset():
    with pytest.raises(ArgumentError, match="no samples"):
        Loader(Numbered(0), batch_size=1, microbatch_size=1)
