"""Formats of strings in JSON schemas: a format's name in, a pattern or another format out.

llguidance knows some formats of JSON Schema. Others are written as patterns, which may be narrower than
the format: `idn-email` becomes `email`. Names that neither JSON Schema nor pydantic or OpenAPI give a
syntax (`password`, `path`, `int32`) constrain nothing, as JSON Schema says.
"""

from __future__ import annotations

from typing import Any

# Those of llguidance that are exact.
EXACT = ("duration", "email", "hostname", "ipv4", "ipv6", "uri")
NARROWER = {
    "idn-email": "email",
    "idn-hostname": "hostname",
    "iri": "uri",
    "iri-reference": "uri",
    "uri-reference": "uri",
    "ipvanyaddress": "ipv4",
    "name-email": "email",
}

YEAR = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
MONTH_AND_DAY = (
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
FOURS = "(0[48]|[2468][048]|[13579][26])"  # two digits that 4 divides, without 00
LEAP_DAY = f"([0-9]{{2}}{FOURS}|{FOURS}00)-02-29"
DATE = f"({YEAR}-{MONTH_AND_DAY}|{LEAP_DAY})"  # no year 0
HOUR_AND_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"
TIME = rf"{HOUR_AND_MINUTE}:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+-]{HOUR_AND_MINUTE})"  # no second 60

POINTER = "(/([^/~]|~[01])*)*"
UUID = "[0-9a-f]{{8}}-[0-9a-f]{{4}}-{version}[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}-[0-9a-f]{{12}}"
BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
BASE64 = "([{0}]{{4}})*([{0}][AQgw]==|[{0}]{{2}}[AEIMQUYcgkosw048]=)?"
REGEX_ATOM = r"([A-Za-z0-9_ @:,-]|\\[dws.]|\[(a-z|A-Z|0-9|[a-z0-9])+\]|\([a-z0-9]+(\|[a-z0-9]+)*\))"
PATTERNS = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "json-pointer": POINTER,
    "relative-json-pointer": f"(0|[1-9][0-9]*)(#|{POINTER})",
    "regex": rf"\^?({REGEX_ATOM}[*+?]?)+\$?",
    "uri-template": r"([A-Za-z0-9/:?=&._-]|\{[A-Za-z_]+\})*",
    "base64": BASE64.format("A-Za-z0-9+/"),
    "byte": BASE64.format("A-Za-z0-9+/"),
    "base64url": BASE64.format("A-Za-z0-9_-"),
    "ipv4network": rf"({BYTE}\.){{3}}{BYTE}/32",
    "ipv4interface": rf"({BYTE}\.){{3}}{BYTE}/([12]?[0-9]|3[0-2])",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    **{f"uuid{version}": UUID.format(version=version) for version in (1, 3, 4, 5, 6, 7, 8)},
}


def rewrite_format(schema: dict[str, Any]) -> None:
    """Write the format of a schema in words that llguidance reads exactly."""
    format = schema.get("format")
    if not isinstance(format, str) or format in EXACT:
        return  # llguidance says what is wrong with others
    if format in NARROWER:
        schema["format"] = NARROWER[format]
        return
    del schema["format"]
    pattern = PATTERNS.get(format)
    if pattern is not None:
        add_pattern(schema, f"^({pattern})$")


def add_pattern(schema: dict[str, Any], pattern: str) -> None:
    """Let strings match this pattern as well."""
    if "pattern" not in schema:
        schema["pattern"] = pattern
        return
    others = schema.get("allOf")
    schema["allOf"] = [*(others if isinstance(others, list) else []), {"pattern": pattern}]
