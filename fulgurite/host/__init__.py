"""Host programs: final traces run by native code; see `program.py`."""

from fulgurite.host.program import HostProgram, build_host_program
from fulgurite.host_api import unavailable_reason

__all__ = ["HostProgram", "build_host_program", "unavailable_reason"]
