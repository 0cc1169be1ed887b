"""The size of a regex or of a Lark terminal once its repetitions are written out.

`(a{1000}){1000}` has 15 characters and matches a million. llguidance has no limit on such a run, so it
is computed before: characters and classes count 1, `{m,n}` multiplies by its larger number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

REPETITION = re.compile(r"\{(\d*)(?:,(\d*))?\}|[*+?]")
LARK_DEFINITION = re.compile(
    r"^[ \t]*([?!]?)([A-Za-z_]\w*)(?:\.-?\d+)?(?:\[[^\]]*\])?[ \t]*:", re.M
)
LARK_NAME = re.compile(r"[A-Za-z_]\w*")
LARK_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
LARK_REGEX = re.compile(r"/(?!/)((?:[^/\\\n]|\\.)+)/")
LARK_COMMENT = re.compile(r"(?://|#)[^\n]*")
HUGE = 10**18  # sizes are cut off here, so that numbers stay small

AtomSize = Callable[[str, int], tuple[int, int]]  # text, position -> size, position after the atom


def expanded_size(pattern: str, read_atom: AtomSize | None = None) -> int:
    """The number of characters and classes that the pattern has without repetitions.

    Parentheses that don't match are ignored: the regex parser reports them.
    """
    read_atom = read_regex_atom if read_atom is None else read_atom
    sizes = [0]  # of the open groups
    position = last = 0
    while position < len(pattern):
        repetition = REPETITION.match(pattern, position)
        if pattern[position] == "(":
            sizes.append(0)
            position, last = position + 1, 0
        elif pattern[position] == ")":
            last = sizes.pop() if len(sizes) > 1 else 0
            sizes[-1] += last
            position += 1
        elif repetition is not None:
            count = read_count(repetition)
            sizes[-1] = min(sizes[-1] + last * (count - 1), HUGE)
            last = min(last * count, HUGE)
            position = repetition.end()
        else:
            last, position = read_atom(pattern, position)
            sizes[-1] += last
    return min(sum(sizes), HUGE)


def read_count(repetition: re.Match[str]) -> int:
    """How often a repetition repeats, at most; an open one at least."""
    numbers = [int(text[:18]) for text in repetition.groups() if text]
    return max(1, *numbers, 1)


def read_regex_atom(pattern: str, position: int) -> tuple[int, int]:
    """A character, an escape, or a class in brackets."""
    if pattern[position] == "\\":
        return 1, position + 2
    if pattern[position] != "[":
        return 1, position + 1
    end = position + 1
    while end < len(pattern) and pattern[end] != "]":
        end += 2 if pattern[end] == "\\" else 1
    return 1, end + 1


# ---- Lark ----------------------------------------------------------------------------------------


def lark_terminal_sizes(text: str) -> dict[str, int]:
    """The sizes of all terminals (upper-case names) of a Lark grammar, and of its regexes in rules."""
    bodies = read_lark_definitions(text)
    sizes: dict[str, int] = {}
    for name in bodies:
        measure_lark_name(name, bodies, sizes, frozenset())
    return sizes


def read_lark_definitions(text: str) -> Mapping[str, str]:
    """Name -> body of every rule and terminal."""
    found = list(LARK_DEFINITION.finditer(text))
    starts = [match.start() for match in found[1:]]
    ends = [*starts, len(text)][: len(found)]
    bodies: dict[str, str] = {}
    for match, end in zip(found, ends, strict=True):
        bodies[match.group(2)] = bodies.get(match.group(2), "") + text[match.end() : end]
    return bodies


def measure_lark_name(
    name: str, bodies: Mapping[str, str], sizes: dict[str, int], above: frozenset[str]
) -> int:
    """The size of one definition. Recursive ones end there: llguidance refuses such terminals."""
    if name in sizes:
        return sizes[name]
    if name in above or name not in bodies:
        return 1
    inside = above | {name}

    def read_atom(body: str, position: int) -> tuple[int, int]:
        for pattern, measure in (
            (LARK_COMMENT, lambda match: 0),
            (LARK_STRING, lambda match: len(match.group())),
            (LARK_REGEX, lambda match: expanded_size(match.group(1))),
            (LARK_NAME, lambda match: measure_reference(name, match.group())),
        ):
            match = pattern.match(body, position)
            if match is not None:
                return measure(match), match.end()
        return 0, position + 1

    def measure_reference(name: str, other: str) -> int:
        """Of a rule only its own regexes count: the parser has limits for what rules repeat."""
        if not is_terminal(name):
            return 0
        return measure_lark_name(other, bodies, sizes, inside)

    if is_terminal(name):
        sizes[name] = expanded_size(bodies[name], read_atom)
    else:
        body = LARK_STRING.sub("", bodies[name])
        regexes = [expanded_size(match.group(1)) for match in LARK_REGEX.finditer(body)]
        sizes[name] = max(regexes, default=0)
    return sizes[name]


def is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def longest_lark_string(text: str) -> int:
    return max((len(match.group()) for match in LARK_STRING.finditer(text)), default=0)
