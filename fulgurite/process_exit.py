"""The end of a program: what `sys.exit` does, without freeing every object.

    run_program(main)          `main` returns the exit status

A Python process that has imported torch takes about a second of CPU time to free its modules. So
the ranks of an engine ended 12 to 18 s after their last step on a busy machine. The operating
system frees the memory at once: after the threads and the `atexit` functions, and once all output
is flushed, the process ends.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn


def run_program(main: Callable[[], int]) -> NoReturn:
    """Run the `main` of a process and end the process. An exception ends it as it would anyway."""
    end_process(main())


def end_process(status: int) -> NoReturn:
    """End this process; the order is that of the interpreter: threads, `atexit`, output."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if not _flush_output():
        status = status or 1
    os._exit(status)


def _flush_output() -> bool:
    """Whether all that was printed has been written."""
    try:
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()
        if sys.stderr is not None and not sys.stderr.closed:
            sys.stderr.flush()
    except BrokenPipeError:  # the reader closed the pipe (`| head`)
        return False
    except OSError as problem:
        os.write(2, f"the output can't be written: {problem.strerror}\n".encode())
        return False
    finally:
        ctypes.CDLL(None).fflush(None)  # what libraries have printed: NCCL, for example
    return True
