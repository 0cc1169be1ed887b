"""Schedules of Triton kernels, one file a kernel shape: `choose.py` picks the shape."""
