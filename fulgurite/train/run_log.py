"""`RunLog`: log records in; warnings at the terminal and in `log.txt` out.

    with RunLog(is_first) as log:              records wait
        parts = build_parts(config)
        log.open(folder / "log.txt")           they are written, and all later ones with them

The folder of a run is not made before its data and its model are read, and what is skipped there must be
seen. The file has all warnings, and information about training (which layers are compiled, which
samples are skipped). The terminal has the warnings about training, each text once. Ranks after the first one
show and write nothing: they would repeat it.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import TracebackType

from fulgurite.logs import LOG

PACKAGE = str(Path(__file__).parent)
LOG_FILE = "log.txt"
FORMAT = "%(asctime)s %(levelname)s %(message)s"


class RunLog(logging.Handler):
    """A handler of `LOG` for one run."""

    def __init__(self, is_first: bool) -> None:
        super().__init__(logging.INFO)
        self.is_first = is_first
        self.setFormatter(logging.Formatter(FORMAT))
        self._file: logging.FileHandler | None = None
        self._waiting: list[logging.LogRecord] = []
        self._shown: set[str] = set()
        self._levels: dict[logging.Logger | logging.Handler, int] = {}

    def emit(self, record: logging.LogRecord) -> None:
        is_own = record.pathname.startswith(PACKAGE)
        if record.levelno < logging.WARNING and not is_own:
            return
        if self._file is None:
            self._waiting.append(record)
        else:
            self._file.handle(record)
        if is_own and record.levelno >= logging.WARNING:
            self._show(record.getMessage())

    def _show(self, text: str) -> None:
        """Print a warning, unless `FULGURITE_LOG` prints all of them."""
        prints_all = any(type(handler) is logging.StreamHandler for handler in LOG.handlers)
        if prints_all or text in self._shown:
            return
        self._shown.add(text)
        print(f"warning: {text}", file=sys.stderr, flush=True)  # a live view draws below it

    def open(self, path: Path) -> None:
        """Write to a file from now on, and first what was logged before."""
        if not self.is_first:
            return
        self._file = logging.FileHandler(path, encoding="utf-8")
        self._file.setFormatter(self.formatter)
        waiting, self._waiting = self._waiting, []
        for record in waiting:
            self._file.handle(record)

    def __enter__(self) -> RunLog:
        if self.is_first:
            level = LOG.getEffectiveLevel()
            if level > logging.INFO:  # for the file; other handlers go on as they were
                self._levels = {LOG: LOG.level, **{one: one.level for one in LOG.handlers}}
                for handler in LOG.handlers:
                    handler.setLevel(max(handler.level, level))
                LOG.setLevel(logging.INFO)
            LOG.addHandler(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        LOG.removeHandler(self)
        for one, level in self._levels.items():
            one.setLevel(level)
        if self._file is not None:
            self._file.close()
