"""Which Python functions of the package a call runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def find_python_frames(call: Callable[[], Any]) -> set[str]:
    """Names of Fulgurite's Python functions that run during the call."""
    seen: set[str] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("fulgurite"):
            seen.add(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen
