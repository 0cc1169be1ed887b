"""Schedules of C++ kernels, one file a kernel shape: `choose.py` picks the shape."""
