"""What a chat template does with tools: Jinja text in, a few facts out. Nothing is rendered."""

from __future__ import annotations

import re
from functools import lru_cache

import jinja2
import jinja2.nodes

# A template that tests `content is none` draws a difference that "" would hide.
TESTS_NONE = re.compile(r"""content['"]?\]?\s+is\s+(?:not\s+)?none""")
TOOLS_OF_MESSAGE = re.compile(r"""message(?:\[['"]tools['"]\]|\.tools\b)""")
MAX_TEMPLATES = 64  # remembered; a server has one, or one a request


@lru_cache(MAX_TEMPLATES)
def find_variables(template: str) -> frozenset[str]:
    """The variables that a template reads. Nothing of it is evaluated, constants neither."""
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        names = environment.parse(template).find_all(jinja2.nodes.Name)
        return frozenset(name.name for name in names if name.ctx == "load")
    except (jinja2.TemplateError, RecursionError, ValueError, MemoryError):
        # Rendering will say what is wrong. Until then, every word may be a variable.
        return frozenset(re.findall(r"[a-z_]+", template))


def uses_tools(template: str) -> bool:
    """Whether a template describes the tools of a request by itself."""
    return "tools" in find_variables(template) or takes_tools_in_system_message(template)


def takes_tools_in_system_message(template: str) -> bool:
    """Phi-4-mini's way: the JSON text of the tools is a field of the system message."""
    return "tools" not in find_variables(template) and bool(TOOLS_OF_MESSAGE.search(template))


def shows_tool_calls(template: str) -> bool:
    """Whether a template writes the calls of earlier messages."""
    return "tool_calls" in template


def knows_developer(template: str) -> bool:
    return "developer" in template


def knows_role(template: str, role: str) -> bool:
    """Whether a template has the name of a role in quotes."""
    return f"'{role}'" in template or f'"{role}"' in template


def rejects_system(template: str) -> bool:
    """Gemma's templates raise on system messages."""
    return "System role not supported" in template


def distinguishes_none(template: str) -> bool:
    return bool(TESTS_NONE.search(template))
