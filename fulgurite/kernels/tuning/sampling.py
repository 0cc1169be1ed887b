"""Heuristics of sampling: how a row of logits is divided among programs."""

from __future__ import annotations


class SamplingHeuristics:
    """Sizes of `kernels/sampling`; the numbers are in the device family's table."""

    sampling_chunk: int  # tokens of a program
    sampling_pivot_chunk: int  # tokens of a program that compares them with pivots
    sampling_pivot_lanes: int  # tokens compared with all pivots at once
    sampling_pivots: int
    sampling_batched_pivots: (
        int  # of a large batch: shorter candidate lists would cost more than they save
    )
    sampling_large_batch: int  # rows
    sampling_stretch: int  # tokens whose maximum is stored, to bound the k-th largest logit
    sampling_capacity: int  # of a list of candidates
    sampling_list_tile: int  # candidates held in registers
    sampling_list_block: int  # candidates of a longer list read at once, times sixteen thresholds
    sampling_num_warps: int
    sampling_threshold_num_warps: int

    def sampling_num_pivots(self, rows: int) -> int:
        if rows >= self.sampling_large_batch:
            return self.sampling_batched_pivots
        return self.sampling_pivots
