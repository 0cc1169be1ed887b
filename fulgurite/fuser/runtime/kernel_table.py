"""The table of compiled Triton kernels that host programs launch.

In: the launch handles of a region, by variant. Out: for each variant and kernel three integers: the function on the
device, threads of a block, bytes of shared memory. Variants that are compiled later are added as they come.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from fulgurite.fuser.runtime.compile_triton import CompiledVariants, LaunchHandle
from fulgurite.kernels.common.native_plan import WARP_SIZE, is_plain_launch

NUM_VARIANTS = 8
FIELDS = 3


class KernelTable:
    """Launch numbers of a region's kernels; a variant that is not compiled has zeros."""

    def __init__(self, variants: CompiledVariants, num_kernels: int) -> None:
        self.num_kernels = num_kernels
        self.words = (ctypes.c_int64 * (NUM_VARIANTS * num_kernels * FIELDS))()
        self.is_usable = all(
            map(_is_plain_launch, (h for handles in variants.values() for h in handles))
        )
        for variant, handles in variants.items():
            self.add(variant, handles)
        variants.when_compiled.append(self.add)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.words)

    def add(self, variant: int, handles: Sequence[LaunchHandle]) -> None:
        """Enter the kernels of a variant. The first one last: it says that the variant is there."""
        if not all(map(_is_plain_launch, handles)):
            return
        for number in reversed(range(len(handles))):
            _, function, metadata = handles[number]
            start = (variant * self.num_kernels + number) * FIELDS
            self.words[start + 1] = metadata[0] * WARP_SIZE
            self.words[start + 2] = metadata[2]
            self.words[start] = function


def _is_plain_launch(handle: LaunchHandle) -> bool:
    return is_plain_launch(*handle)
