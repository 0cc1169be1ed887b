"""The order of samples: a global sample number in, the index of a sample of the dataset out.

Sample numbers count on through all epochs. Each epoch is a permutation of the dataset of its own, computed
for one number at a time: a Feistel network on the smallest power of four that holds all indices, applied
again while its result is too large (cycle walking). So nothing is stored, and the order depends on
the seed and the number alone, not on ranks, workers or restarts.
"""

from __future__ import annotations

from fulgurite.errors import ArgumentError

ROUNDS = 6
MASK64 = (1 << 64) - 1


def sample_index(number: int, length: int, seed: int | None) -> int:
    """The index of the sample with this global number; `seed` None: in order."""
    if length < 1 or number < 0:
        raise ArgumentError(f"there is no sample {number} in a dataset of {length}")
    epoch, place = divmod(number, length)
    if seed is None or length == 1:
        return place
    return _permute(place, length, _mix(_mix(seed & MASK64) ^ epoch))


def _permute(place: int, length: int, key: int) -> int:
    half_bits = max(1, -(-(length - 1).bit_length() // 2))
    mask = (1 << half_bits) - 1
    while True:
        left, right = place >> half_bits, place & mask
        for round_number in range(ROUNDS):
            mixed = _mix(key ^ (right << 8 | round_number))
            left, right = right, left ^ (mixed & mask)
        place = left << half_bits | right
        if place < length:
            return place


def _mix(x: int) -> int:
    """A bijection of 64-bit numbers that flips half of the bits: splitmix64's finalizer."""
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)
