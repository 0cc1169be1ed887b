"""A rank loads its share of a checkpoint: the numbers of the divided whole, and nothing else is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fulgurite.errors import RankError
from fulgurite.parallel import Placement, launch
from tests.parallel import sharding_cases as cases
from tests.parallel.checkpoints import save
from tests.parallel.test_tensor import ALL, COMMON, DENSE, MIXTURES

TENSOR, SPREAD, MIXED, DATA = (1, 4, 1), (1, 4, 4), (2, 2, 4), (4, 1, 4)
# Sizes at which blocks of 128 can be cut in two.
BLOCKS = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 128}


def fields_of(name: str, **changed: object) -> dict[str, object]:
    architecture, fields = ALL[name]
    return COMMON | fields | {"architectures": [f"{architecture}ForCausalLM"]} | changed


def check(pool, folder: Path, shape, keep_quantized=False, placement=None) -> list[cases.Compared]:
    found = pool.run(cases.compare, folder, shape, keep_quantized, placement)
    for one in found:
        assert not one.wrong, one.wrong
    return found


def check_read(
    pool, folder: Path, shape, keep_quantized=False, placement=None
) -> list[cases.Compared]:
    """A rank reads the bytes it holds and no more; an expert in several slots is read once."""
    found = check(pool, folder, shape, keep_quantized, placement)
    for one in found:
        assert one.read == pytest.approx(one.held, abs=1e-3), one
    return found


LOADED = [n for n in DENSE | MIXTURES if not n.startswith("gemma")]
# Norms over all heads, fused experts, biases of the head, a gated shared expert, a flattened bias.
LOADED += ["olmoe", "granite_moe_shared", "phi_moe", "qwen2_moe", "ernie_moe"]


@pytest.mark.parametrize("name", LOADED)
def test_tensor_parallel(ranks, tmp_path, name):
    found = check_read(ranks(4), save(tmp_path, fields_of(name), shards=2), TENSOR)
    assert max(one.read for one in found) < 0.55  # norms, routers and shared key heads are whole


@pytest.mark.covering
@pytest.mark.parametrize("shape", [SPREAD, MIXED, DATA], ids=str)
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_experts_over_ranks(ranks, tmp_path, name, shape):
    fields = fields_of(name, **({"num_local_experts": 8} if name == "gpt_oss" else {}))
    check_read(ranks(4), save(tmp_path, fields), shape)


@pytest.mark.parametrize("shape", [(1, 2, 1), (1, 2, 2), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("name", ["mixtral", "llama4"])
def test_two_ranks(ranks, tmp_path, name, shape):
    check_read(ranks(2), save(tmp_path, fields_of(name)), shape)


def test_experts_in_several_slots(ranks, tmp_path):
    slots = torch.tensor([[3, 0, 2, 1, 4, 5, 1, 3], [5, 0, 4, 1, 2, 3, 5, 0]])
    folder = save(tmp_path, fields_of("mixtral", num_hidden_layers=2))
    check(ranks(2), folder, (2, 1, 2), placement=Placement(slots, 6, 2))


@pytest.mark.parametrize("layers", [1, 3])
def test_placement_of_another_model_raises(tmp_path, layers):
    folder = save(tmp_path, fields_of("mixtral", num_hidden_layers=2))
    slots = torch.arange(6).expand(layers, -1).clone()
    with pytest.raises(RankError, match=f"the placement has {layers} layers"):
        launch(cases.compare, 2, folder, (2, 1, 2), False, Placement(slots, 6, 2))


PACKED = {
    "fp8": fields_of("qwen3_moe", moe_intermediate_size=256, **BLOCKS),
    "mxfp4": fields_of("gpt_oss", intermediate_size=128),
}


@pytest.mark.covering
@pytest.mark.parametrize("shape", [(1, 2, 1), (1, 2, 2)], ids=str)
@pytest.mark.parametrize("format", PACKED)
def test_quantized_checkpoints(ranks, tmp_path, format, shape):
    """Unpacked on the way in or not, the same blocks are read."""
    folder = save(tmp_path, PACKED[format], packed=format)
    packed = check_read(ranks(2), folder, shape, True)
    unpacked = check(ranks(2), folder, shape, False)
    for one, other in zip(packed, unpacked, strict=True):
        assert one.packed and not other.packed
        assert other.read == pytest.approx(one.read, abs=1e-3)


def test_expert_axis_without_experts_raises(tmp_path):
    folder = save(tmp_path, fields_of("llama"))
    with pytest.raises(RankError, match="expert=2 needs a model with experts"):
        launch(cases.compare, 2, folder, (2, 1, 2), "dense")
