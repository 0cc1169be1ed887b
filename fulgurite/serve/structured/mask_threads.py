"""Threads that compute masks while the model runs: jobs in, run soon by one of a few threads.

A burst of jobs starts each thread once. llguidance releases the GIL, so these threads use cores that
the step leaves.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

Job = Callable[[], None]


class MaskThreads:
    """Runs jobs that never raise, in the order in which they come."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self.pool = ThreadPoolExecutor(num_threads, thread_name_prefix="fulgurite-masks")
        self.jobs: deque[Job] = deque()
        self.num_running = 0
        self.lock = threading.Lock()

    def submit(self, job: Job) -> None:
        with self.lock:
            self.jobs.append(job)
            if self.num_running == self.num_threads:
                return  # a thread leaves only when no job is left
            self.num_running += 1
        self.pool.submit(self._run)

    def _run(self) -> None:
        while True:
            with self.lock:
                if not self.jobs:
                    self.num_running -= 1
                    return
                job = self.jobs.popleft()
            job()

    def close(self) -> None:
        self.pool.shutdown(wait=True)
