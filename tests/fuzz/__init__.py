"""The fuzzer: random programs, compiled against eager and float64. `scripts/fuzz` is its command.

templates → generate: a `Program` (text) → oracle: what it must give → check: what it gives
  → shrink → findings: a script; command and worker run many seeds in several processes.
"""
