"""Log messages: `FULGURITE_LOG=info` or `debug` prints them, with the rank in distributed runs.

In: the environment. Out: `LOG`, the Python logger "fulgurite". Without the variable nothing is printed, and a
program may attach handlers of its own. Warnings say what fell back to torch; info says what was compiled and
which implementation won a measurement; debug adds every step with its time, and hits of the kernel cache. An
engine logs each request (info) and each step (debug). `FULGURITE_LOG_FORMAT=json` prints one JSON object a line.
"""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime

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


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, rank, message, and the fields of the record.

    Fields come from `LOG.info(..., extra={"fields": {...}})`.
    """

    def format(self, record: logging.LogRecord) -> str:
        rank = os.environ.get("RANK")
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            **({"rank": int(rank)} if rank is not None and rank.isdigit() else {}),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure_logging(default: str | None = None) -> None:
    """Print messages to stderr, from the level of `FULGURITE_LOG` on; without it, from `default` on."""
    level = read_env("FULGURITE_LOG") or default
    if level is None:
        return
    if level.lower() not in LEVELS:
        raise ArgumentError(
            f"FULGURITE_LOG={level} is not a level", next=f"one of {', '.join(LEVELS)}"
        )
    handler = logging.StreamHandler()
    handler.addFilter(_RankFilter())
    handler.setFormatter(_make_formatter(read_env("FULGURITE_LOG_FORMAT") or "text"))
    LOG.handlers = [handler]
    LOG.setLevel(LEVELS[level.lower()])
    LOG.propagate = False  # not twice, where the program has set up logging


def _make_formatter(name: str) -> logging.Formatter:
    if name == "json":
        return JsonFormatter()
    if name != "text":
        raise ArgumentError(f"FULGURITE_LOG_FORMAT={name} is not a format", next="text or json")
    return logging.Formatter(FORMAT, "%H:%M:%S")
