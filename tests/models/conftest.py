"""Fixtures: pairs of a reference model and our model, one thread, no gradients."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is the reference")

from fulgurite.models import load_model
from tests.models.reference_models import CASES, ModelPair, build_reference

_PAIRS: dict[str, ModelPair] = {}


@pytest.fixture(scope="session")
def get_pair(tmp_path_factory: pytest.TempPathFactory):
    def get(name: str) -> ModelPair:
        if name not in _PAIRS:
            reference = build_reference(name)
            path = tmp_path_factory.mktemp(name)
            reference.save_pretrained(path)
            _PAIRS[name] = ModelPair(name, reference, load_model(path), path)
        return _PAIRS[name]

    return get


@pytest.fixture(params=list(CASES))
def pair(request: pytest.FixtureRequest, get_pair) -> ModelPair:
    return get_pair(request.param)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Models this small are slower with several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield
