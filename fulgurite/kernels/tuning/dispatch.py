"""Expert-parallel dispatch over symmetric memory: launch configs.

In: the number of items (values or words) of a row. Out: a `LaunchConfig`: `block_n` items of a
program.
"""

from __future__ import annotations

from fulgurite.kernels.integer_math import next_power_of_2
from fulgurite.kernels.tuning.config import LaunchConfig


class DispatchHeuristics:
    """Decisions of `kernels/dispatch`; the numbers are in the device family's table."""

    num_sms: int
    dispatch_max_row_items: int  # that a program holds at once
    dispatch_max_combine_items: int  # the same for sums of results
    dispatch_layout: LaunchConfig  # `block_m` tokens counted at once
    dispatch_warp_items: int  # longer blocks take eight warps
    dispatch_combine_programs_per_sm: int  # in flight, so that stores to peers overlap

    @property
    def dispatch_combine_programs(self) -> int:
        return self.dispatch_combine_programs_per_sm * self.num_sms

    def dispatch_row(self, items: int) -> LaunchConfig:
        """Copies of rows: the warps follow from the whole row."""
        block = min(next_power_of_2(items), self.dispatch_max_row_items)
        return LaunchConfig(block_n=block, num_warps=self._dispatch_num_warps(items))

    def dispatch_combine(self, items: int) -> LaunchConfig:
        """Sums of results."""
        block = min(next_power_of_2(items), self.dispatch_max_combine_items)
        return LaunchConfig(block_n=block, num_warps=self._dispatch_num_warps(block))

    def _dispatch_num_warps(self, items: int) -> int:
        return 8 if items > self.dispatch_warp_items else 4
