"""Measurements that anyone can repeat.

In: a suite's name and a device. Out: a table on the screen and a dated JSON file with the machine and the command
that made it. Everything compared is measured in the same run.
"""
