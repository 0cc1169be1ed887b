"""Regex classes that libraries read differently: a regex in, one that matches what all of them match out.

`\\d` and `\\w` are ASCII for JSON Schema (ECMAScript) and all of Unicode for Python. Their complements
differ as well: `\\W` matches `é` for one and not for the other. A reply must please both.

    \\w, \\d, \\s              ASCII (llguidance is asked for \\w and \\d)
    \\W, \\D, \\S              nothing that Unicode counts as a letter, digit or space
    the same in [^...]       the other way round
"""

from __future__ import annotations

WORD, DIGIT, SPACE = r"\p{L}\p{N}_", r"\p{Nd}", r"\s\x1c-\x1f\ufeff"
ASCII_SPACE = r"\t-\r "
OUTSIDE = {"s": f"[{ASCII_SPACE}]", "W": f"[^{WORD}]", "D": f"[^{DIGIT}]", "S": f"[^{SPACE}]"}
IN_NEGATED_CLASS = {"w": WORD, "d": DIGIT, "s": SPACE, "S": f"[^{ASCII_SPACE}]"}


def narrow_classes(regex: str) -> str:
    """The regex with classes that every library agrees about."""
    pieces: list[str] = []
    position, negated = 0, [False]  # of the classes around `position`, innermost last
    while position < len(regex):
        character = regex[position]
        if character == "\\":
            table = IN_NEGATED_CLASS if negated[-1] else OUTSIDE
            escape = regex[position : position + 2]
            pieces.append(table.get(escape[1:], escape))
            position += 2
            continue
        if character == "[":
            negated.append(negated[-1] != regex.startswith("[^", position))
        elif character == "]" and len(negated) > 1:
            negated.pop()
        pieces.append(character)
        position += 1
    return "".join(pieces)
