"""One thread, no gradients."""

from __future__ import annotations

from tests.serve.conftest import no_gradients, one_thread

__all__ = ["no_gradients", "one_thread"]
