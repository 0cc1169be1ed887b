"""Imported by the server that forks the workers of the suite `zoo`: packages are imported once, not per model."""

from __future__ import annotations

from fulgurite.bench.zoo import worker
from fulgurite.bench.zoo.catalog import MODELS, missing_packages

__all__ = ["MISSING", "worker"]
MISSING = missing_packages(list(MODELS))
