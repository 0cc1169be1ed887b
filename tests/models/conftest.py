"""Fixtures: the pairs of models, one thread, no gradients."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is what these compare with")

from fulgurite.models import load_model
from tests.models.model_oracle import CASES, Pair, make_theirs

_PAIRS: dict[str, Pair] = {}


@pytest.fixture(scope="session")
def get_pair(tmp_path_factory: pytest.TempPathFactory):
    def get(name: str) -> Pair:
        if name not in _PAIRS:
            theirs = make_theirs(name)
            path = tmp_path_factory.mktemp(name)
            theirs.save_pretrained(path)
            _PAIRS[name] = Pair(name, theirs, load_model(path), path)
        return _PAIRS[name]

    return get


@pytest.fixture(params=list(CASES))
def pair(request: pytest.FixtureRequest, get_pair) -> Pair:
    return get_pair(request.param)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Models this small only lose by sharing work between threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield
