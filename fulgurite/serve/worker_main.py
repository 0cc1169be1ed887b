"""`python -m fulgurite.serve.worker_main`: a rank that an LLM started beside itself (parallel/others.py).

In: the arguments of that LLM, on stdin. Out: nothing; it computes its share until rank 0 is done.
"""

from __future__ import annotations

import os
import pickle
import sys

from fulgurite.errors import FulguriteError
from fulgurite.parallel.others import arguments_given
from fulgurite.serve.llm import LLM


def main() -> int:
    name, options = pickle.loads(arguments_given())
    try:
        LLM(name, **options).close()
    except FulguriteError as error:
        print(f"rank {os.environ['RANK']}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
