"""Loading a model where memory runs out."""

from __future__ import annotations

import pytest

from fulgurite.errors import CapacityError
from fulgurite.serve.remote import served_engine
from fulgurite.serve.remote.messages import LoadModel


def load_with(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(served_engine, "LLM", fail)
    served_engine.load_engine(LoadModel("any", {"device": "cpu"}))


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 48.0 MiB"),
        RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes\nx"
        ),
    ],
)
def test_no_memory_says_what_to_change(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CapacityError, match="not enough memory") as caught:
        load_with(error, monkeypatch)
    assert "--cache-tokens" in str(caught.value) and "\nx" not in str(caught.value)


@pytest.mark.parametrize(
    "error", [RuntimeError("a bug"), CapacityError("the plan is too large", next="a smaller one")]
)
def test_other_errors_stay_as_they_are(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(type(error)) as caught:
        load_with(error, monkeypatch)
    assert caught.value is error
