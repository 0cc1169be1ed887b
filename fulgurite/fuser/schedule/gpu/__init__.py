"""GPU schedules: blocks, programs and passes. One file a kernel shape."""
