"""`python -m fulgurite.serve.worker_main`: a worker process of an LLM (parallel/processes/workers.py).

In: the arguments of that LLM, on stdin. Out: nothing; it runs its shard until rank 0 is done.
"""

from __future__ import annotations

import os
import pickle
import sys

from fulgurite.errors import FulguriteError
from fulgurite.parallel.processes.workers import read_arguments, report_error
from fulgurite.process_exit import run_program
from fulgurite.serve.llm import LLM


def main() -> int:
    name, config = pickle.loads(read_arguments())
    try:
        LLM(name, config).close()
    except FulguriteError as error:
        report_error(error)
        print(f"rank {os.environ['RANK']}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except BaseException as error:
        report_error(error)
        raise
    return 0


if __name__ == "__main__":
    run_program(main)
