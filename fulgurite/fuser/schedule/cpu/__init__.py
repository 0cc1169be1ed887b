"""CPU schedules: which loops are parallel, which are SIMD. One file a kernel shape."""
