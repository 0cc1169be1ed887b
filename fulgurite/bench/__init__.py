"""Benchmarks that anyone can repeat: `fulgurite bench SUITE`.

In: a suite and a device. Out: a table on the screen and a dated JSON file with the hardware and the command that
made it. All candidates of a table are measured in the same run. `readme.py` renders the saved files as Markdown.
"""
