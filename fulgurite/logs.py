"""Log messages: `FULGURITE_LOG=info` or `debug` prints them, with the rank in distributed runs.

In: the environment. Out: `LOG`, the Python logger "fulgurite". Without the variable nothing is printed, and a
program may attach handlers of its own. Warnings say what fell back to torch; info says what was compiled and
which implementation won a measurement; debug adds every step with its time, and hits of the kernel cache.
"""

from __future__ import annotations

import logging
import os

from fulgurite.config import read_env
from fulgurite.errors import ArgumentError

LOG = logging.getLogger("fulgurite")
LOG.addHandler(logging.NullHandler())  # else Python prints warnings of a logger without handlers
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
FORMAT = "%(asctime)s.%(msecs)03d fulgurite%(rank)s %(levelname)s %(message)s"


class _RankFilter(logging.Filter):
    """Adds the rank that a launcher such as torchrun gave this process."""

    def filter(self, record: logging.LogRecord) -> bool:
        rank = os.environ.get("RANK")
        record.rank = f"[rank {rank}]" if rank is not None else ""
        return True


def configure_logging() -> None:
    """Print messages to stderr, from the level of `FULGURITE_LOG` on."""
    level = read_env("FULGURITE_LOG")
    if level is None:
        return
    if level.lower() not in LEVELS:
        raise ArgumentError(
            f"FULGURITE_LOG={level} is not a level", next=f"one of {', '.join(LEVELS)}"
        )
    handler = logging.StreamHandler()
    handler.addFilter(_RankFilter())
    handler.setFormatter(logging.Formatter(FORMAT, "%H:%M:%S"))
    LOG.handlers = [handler]
    LOG.setLevel(LEVELS[level.lower()])
    LOG.propagate = False  # not twice, where the program has set up logging
