"""Chat templates of requests: a template that nobody vouches for in, the text of a prompt out.

Such a template may loop for ever or fill the memory, and no thread can be stopped. So each is rendered by
a process with limits (models/chat_template.py), a few at a time.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from typing import Any

from fulgurite.errors import ArgumentError
from fulgurite.models import chat_template

MAX_SECONDS = 2  # of CPU time, and about as much of real time
MAX_BYTES = 512 << 20  # of the process
MAX_CHARACTERS = 4 << 20  # of the text
MAX_PROCESSES = 2
GRACE_SECONDS = 8.0  # for a process that starts on a busy machine


class TemplateProcesses:
    """Renders templates in processes, `MAX_PROCESSES` at a time."""

    def __init__(self) -> None:
        self.slots = asyncio.Semaphore(MAX_PROCESSES)

    async def render(self, template: str, values: Mapping[str, Any]) -> str:
        """The text; ArgumentError if the template fails or does not keep the limits."""
        request = json.dumps({"template": template, "values": values}).encode()
        async with self.slots:
            output = await run_process(request)
        if not output:
            raise ArgumentError(
                f"the chat template of the request takes more than {MAX_SECONDS} s or "
                f"{MAX_BYTES >> 20} MiB",
                next="send a simpler one",
            )
        reply = json.loads(output)
        if "error" in reply:
            raise ArgumentError(f"the chat template of the request fails: {reply['error'][:500]}")
        text: str = reply["text"]
        return text


async def run_process(request: bytes) -> bytes:
    """What the process writes; nothing if it was ended for breaking a limit."""
    limits = (MAX_SECONDS, MAX_BYTES, MAX_CHARACTERS)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        chat_template.__file__,
        *map(str, limits),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={},
    )
    try:
        async with asyncio.timeout(MAX_SECONDS + GRACE_SECONDS):
            output, _ = await process.communicate(request)
    except TimeoutError:
        return b""
    finally:
        if process.returncode is None:  # also if the request was cancelled
            process.kill()
            await process.wait()
    return output if process.returncode == 0 else b""
