"""Processes of ranks: how they start, and how rank 0 talks to the others.

launch.py       N processes on this machine that run a function
launch_ray.py   the same on a Ray cluster
workers.py      worker processes of a single process, which becomes rank 0
channel.py      broadcast of messages from rank 0
"""
