"""Which machines run a format natively, asked before a kernel is chosen.

In: a format and a device (or the features of one, by name). Out: yes or no, or a `FormatError` that
says what runs there instead. The names are those of `Format.native`: `sm_90`, `gfx950`,
`avx512_vnni`.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from fulgurite.errors import FormatError
from fulgurite.quant.format import FORMATS, Format, resolve


def features_of(device: torch.device | str) -> tuple[str, ...]:
    """The native-format features of a device: its architecture, or a CPU's instruction sets."""
    device = torch.device(device)
    if device.type == "cuda" and torch.version.hip:
        return (torch.cuda.get_device_properties(device).gcnArchName.split(":")[0],)
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return (f"sm_{major}{minor}",)
    if device.type != "cpu":
        return ()
    found = {
        "avx512_vnni": torch.cpu._is_vnni_supported(),
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
    }
    if torch.cpu._is_amx_tile_supported():
        found |= {"amx_int8": True, "amx_bf16": True}
    return tuple(name for name, present in found.items() if present)


def is_native(format: str | Format, features: Collection[str]) -> bool:
    """Whether a machine with these features multiplies in the format itself."""
    return any(feature in resolve(format).native for feature in features)


def require_native(format: str | Format, features: Collection[str]) -> None:
    """Raises unless a machine with these features multiplies in the format itself."""
    entry = resolve(format)
    if is_native(entry, features):
        return
    machine = ", ".join(features) or "a machine without known features"
    here = [name for name in FORMATS if is_native(name, features)]
    raise FormatError(
        f"{machine} can't multiply in {entry.name}",
        where=f"native on {', '.join(entry.native) or 'nothing'}",
        next=f"here it runs {entry.elsewhere}; formats native here: {', '.join(here) or 'none'}",
    )
