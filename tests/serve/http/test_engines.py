"""Engines that are launched before the server: what they load, where, and that they end."""

from __future__ import annotations

import os

import pytest
import torch

from fulgurite.models.loading import hub
from fulgurite.serve.http import engines, placement
from fulgurite.serve.http.config import ServerConfig
from fulgurite.serve.http.engines import choose_environments, launch_engines, make_load


def test_what_replicas_load() -> None:
    config = ServerConfig(replicas=2, engine={"context": 64}, faults=True)
    load = make_load(config)
    assert load.name == str(hub.resolve_model_path("smollm2"))
    assert load.options == {"context": 64} and load.mock is None and load.faults
    assert load.threads == max(1, (os.cpu_count() or 1) // 2)
    assert make_load(ServerConfig()).threads is None
    assert make_load(ServerConfig(threads=3, replicas=2)).threads == 3
    mock = make_load(ServerConfig(mock=True, mock_options={"context": 9}))
    assert mock.mock == {"context": 9} and mock.name == load.name


def test_gpus_are_counted_only_if_replicas_share_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    monkeypatch.setattr(engines, "count_gpus", lambda: counted.append(1) or 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for fields in ({}, {"mock": True, "replicas": 2}, {"replicas": 2, "engine": {"device": "cpu"}}):
        config = ServerConfig(**fields)  # type: ignore[arg-type]
        assert choose_environments(config) == [{}] * config.replicas and not counted
    found = choose_environments(ServerConfig(replicas=2))
    assert [env["CUDA_VISIBLE_DEVICES"] for env in found] == ["0", "1"] and len(counted) == 1


def test_the_count_of_gpus_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert placement.has_cuda_build() == torch.backends.cuda.is_built()
    assert placement.count_gpus() == torch.cuda.device_count()
    monkeypatch.setattr(placement, "has_cuda_build", lambda: True)  # ask the driver in any case
    if not torch.cuda.is_available():
        assert placement.count_gpus() == 0


@pytest.mark.gpu
def test_the_count_of_gpus_knows_the_visible_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert placement.count_gpus() == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert placement.count_gpus() == 1


def test_launched_engines_end_with_the_block() -> None:
    with launch_engines(ServerConfig(mock=True, replicas=2)) as launched:
        assert len(launched) == 2
        assert all(one.process.poll() is None for one in launched)
    assert all(one.process.returncode is not None for one in launched)
    with launch_engines(ServerConfig(mock=True, engine_in="thread")) as launched:
        assert launched == []
