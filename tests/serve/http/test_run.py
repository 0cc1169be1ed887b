"""What the terminal of a server shows while requests run."""

from __future__ import annotations

from fulgurite.serve.http.run import format_cache, format_first_tokens
from fulgurite.serve.remote.messages import Progress


def test_cache_of_all_replicas() -> None:
    progress = [
        Progress(used_blocks=10, total_blocks=40, prefix_hits=30, prefix_queries=100),
        Progress(used_blocks=30, total_blocks=40),
    ]
    assert format_cache(progress) == "cache 50% (prefix hits 30%)"
    assert format_cache([Progress()]) == "cache 0% (prefix hits 0%)"


def test_first_tokens() -> None:
    assert format_first_tokens([]) == ""
    assert format_first_tokens([0.25]) == "ttft p50 250 ms p99 250 ms"
    seconds = [one / 1000 for one in range(201)]
    assert format_first_tokens(seconds) == "ttft p50 100 ms p99 198 ms"
