"""Native hardware support of number formats.

In: a format and a device, or its feature names. Out: yes or no, or a `FormatError` that names the
fallback. Feature names are those of `Format.native_archs`: `sm_90`, `gfx950`, `avx512_vnni`.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from fulgurite.errors import FormatError
from fulgurite.quant.format import FORMATS, Format, resolve_format


def get_device_features(device: torch.device | str) -> tuple[str, ...]:
    """The feature names of a device: its GPU architecture, or its CPU instruction sets."""
    device = torch.device(device)
    if device.type == "cuda" and torch.version.hip:
        return (torch.cuda.get_device_properties(device).gcnArchName.split(":")[0],)
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return (f"sm_{major}{minor}",)
    if device.type != "cpu":
        return ()
    supported = {
        "avx512_vnni": torch.cpu._is_vnni_supported(),
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
    }
    if torch.cpu._is_amx_tile_supported():
        supported |= {"amx_int8": True, "amx_bf16": True}
    return tuple(name for name, present in supported.items() if present)


def is_native(format: str | Format, features: Collection[str]) -> bool:
    """Whether a device with these features has matmul instructions for the format."""
    return any(feature in resolve_format(format).native_archs for feature in features)


def require_native(format: str | Format, features: Collection[str]) -> None:
    """Raise unless a device with these features has matmul instructions for the format."""
    entry = resolve_format(format)
    if is_native(entry, features):
        return
    device = ", ".join(features) or "this device"
    native = [name for name in FORMATS if is_native(name, features)]
    raise FormatError(
        f"{device} has no native matmul for {entry.name}",
        where=f"native on {', '.join(entry.native_archs) or 'no device'}",
        next=f"fallback: {entry.fallback}; native formats here: {', '.join(native) or 'none'}",
    )
