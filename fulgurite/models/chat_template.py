"""Chat templates: Jinja text and its variables in, the text of a prompt out.

Templates run in Jinja's immutable sandbox, which has no access to Python. The sandbox limits neither
time nor memory: `python chat_template.py LIMITS` renders a template that nobody vouches for in a
process of its own. In: JSON on stdin. Out: JSON on stdout. It imports nothing of this package, so that
it starts quickly.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache

import jinja2
import jinja2.sandbox

MAX_TEMPLATES = 16  # compiled ones that are kept

# Exceptions that template expressions may raise: 1 + 'a', messages[9]['role'], 1 / 0, range(10**9),
# a macro that calls itself, 'a' * 10**12.
TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    LookupError,
    ArithmeticError,
    ValueError,
    RecursionError,
    MemoryError,
)


def render_template(template: str, values: Mapping[str, object]) -> str:
    """The text of a template; raises one of `TEMPLATE_ERRORS` if it refuses the values."""
    return compile_template(template).render(values)


@lru_cache(MAX_TEMPLATES)
def compile_template(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_template_error
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment.from_string(template)


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_template_error(message: str) -> str:
    raise jinja2.TemplateError(message)


def main() -> None:
    """Render {"template": …, "values": …} within the limits: seconds, bytes, characters of the text."""
    seconds, num_bytes, max_characters = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    request = json.load(sys.stdin)
    try:
        text = render_template(request["template"], request["values"])
        if len(text) > max_characters:
            raise ValueError(f"the text has more than {max_characters} characters")
        reply = {"text": text}
    except TEMPLATE_ERRORS as error:
        reply = {"error": f"{error}" or type(error).__name__}
    json.dump(reply, sys.stdout)


if __name__ == "__main__":
    main()
