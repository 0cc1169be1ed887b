"""`Loader`: a dataset in, this rank's microbatches of each step out.

Step `s` has the samples `s·batch_size` to `(s + 1)·batch_size`, by their global numbers. A data rank has
a contiguous share of them. The only state is the step: a loader that starts at step 700 gives what one
that started at 0 gives there. Threads prepare the next steps ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.train.batch import Batch, find_offsets
from fulgurite.train.data.order import sample_index
from fulgurite.train.data.packing import Dataset, Ints, Sample


class Loader:
    """Microbatches of one data rank.

    Args:
        dataset: samples by number.
        batch_size: samples of a step, over all ranks.
        microbatch_size: samples of one forward and backward.
        data_rank, data_ranks: which share of a step is this rank's.
        start_step: where prefetching begins.
        shuffle_seed: of the order; None: the order of the files.
        workers: threads, and how many steps are prepared ahead; 0: none.
        pin: page-locked memory, for copies that don't wait. None: if there is a GPU.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        microbatch_size: int,
        data_rank: int = 0,
        data_ranks: int = 1,
        start_step: int = 0,
        shuffle_seed: int | None = None,
        workers: int = 2,
        pin: bool | None = None,
    ) -> None:
        _check_sizes(batch_size, microbatch_size, data_rank, data_ranks)
        if workers < 0:
            raise ArgumentError(f"data.workers={workers} is negative", next="use 0 or more")
        if not len(dataset):
            raise ArgumentError("the dataset has no samples", next="add text to data.train")
        self.dataset = dataset
        self.batch_size = batch_size
        self.microbatch_size = microbatch_size
        self.data_rank = data_rank
        self.data_ranks = data_ranks
        self.shuffle_seed = shuffle_seed
        self.workers = workers
        self.pin = torch.cuda.is_available() if pin is None else pin
        self._pool = ThreadPoolExecutor(workers, "loader") if workers else None
        self._ahead: dict[int, Future[list[Batch]]] = {}
        self._prefetch(start_step)

    def step(self, step: int) -> list[Batch]:
        """The microbatches of a step; any step, but the next one is ready first."""
        if step < 0:
            raise ArgumentError(f"there is no step {step}")
        future = self._ahead.pop(step, None)
        self._prefetch(step + 1)
        return self._load(step) if future is None else future.result()

    def can_resume(self, step: int) -> bool:
        """Whether a loader that starts at `step` gives the same samples as this one: always."""
        return True

    def close(self) -> None:
        """End the threads."""
        self._ahead.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def sample_numbers(self, step: int) -> range:
        """The global numbers of this rank's samples of a step."""
        share = self.batch_size // self.data_ranks
        first = step * self.batch_size + self.data_rank * share
        return range(first, first + share)

    def _prefetch(self, step: int) -> None:
        """Start on the steps from `step` on, and forget all others."""
        if self._pool is None:
            return
        wanted = range(step, step + self.workers)
        for old in [key for key in self._ahead if key not in wanted]:
            self._ahead.pop(old).cancel()
        for one in wanted:
            if one not in self._ahead:
                self._ahead[one] = self._pool.submit(self._load, one)

    def _load(self, step: int) -> list[Batch]:
        numbers = self.sample_numbers(step)
        size = self.microbatch_size
        return [self._load_batch(numbers[at : at + size]) for at in range(0, len(numbers), size)]

    def _load_batch(self, numbers: range) -> Batch:
        length = len(self.dataset)
        samples = [
            self.dataset.sample(sample_index(number, length, self.shuffle_seed))
            for number in numbers
        ]
        return collate(samples, numbers[0], self.pin)


def collate(samples: Sequence[Sample], first_sample: int = 0, pin: bool = False) -> Batch:
    """Rows of one length as a batch; `pin`: for a GPU."""
    documents = [sample.documents for sample in samples if sample.documents is not None]
    assert len(documents) in (0, len(samples)), "some rows have documents and some have none"
    documents_BT = _stack(documents, pin) if documents else None
    return Batch(
        _stack([sample.tokens for sample in samples], pin),
        _stack([sample.labels for sample in samples], pin),
        _stack([sample.positions for sample in samples], pin),
        documents_BT,
        first_sample,
        find_offsets(documents_BT).pin_memory() if pin and documents_BT is not None else None,
    )


def _stack(rows: Sequence[Ints], pin: bool) -> Tensor:
    tensor = torch.from_numpy(np.stack(rows))
    return tensor.pin_memory() if pin else tensor


def _check_sizes(batch_size: int, microbatch_size: int, data_rank: int, data_ranks: int) -> None:
    if min(batch_size, microbatch_size, data_ranks) < 1 or not 0 <= data_rank < data_ranks:
        raise ArgumentError(
            f"batch_size={batch_size}, microbatch_size={microbatch_size} and data rank {data_rank} "
            f"of {data_ranks} must be positive, the rank below the number of ranks"
        )
    if batch_size % (microbatch_size * data_ranks):
        share = microbatch_size * data_ranks
        fitting = max(share, batch_size // share * share)
        raise ArgumentError(
            f"batch_size={batch_size} is not a multiple of microbatch_size={microbatch_size} × "
            f"{data_ranks} data ranks",
            next=f"try batch_size={fitting}, or another microbatch_size",
        )
