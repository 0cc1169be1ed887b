"""Rotary embeddings: properties of the rotation, and each scaling against transformers."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fulgurite.errors import WeightsError
from fulgurite.models.config import ConfigFields
from fulgurite.models.config_readers import read_rope
from fulgurite.models.rope import RotaryEmbedding, apply_rope
from tests.models.reference_models import CASES, COMMON, ModelPair

LENGTH = {"max_position_embeddings": 64}


def build_rotary(rope_type: str, interleaved: bool = False, **values: object) -> RotaryEmbedding:
    fields = {**LENGTH, "rope_parameters": {"rope_type": rope_type, "rope_theta": 1000.0, **values}}
    return RotaryEmbedding(read_rope(ConfigFields(fields, "here"), 8, interleaved=interleaved))


def test_scores_depend_only_on_the_distance() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 1, 8, generator=generator), torch.randn(1, 1, 8, generator=generator)
    for interleaved in (False, True):
        rotary = build_rotary("default", interleaved)

        def score(i: int, j: int, rotary=rotary, interleaved=interleaved) -> float:
            rotated = [
                apply_rope(x, rotary(torch.tensor([position]), None), interleaved)
                for x, position in ((q, i), (k, j))
            ]
            return (rotated[0] * rotated[1]).sum().item()

        assert score(7, 3) == pytest.approx(score(24, 20), abs=1e-4)
        assert score(0, 0) == pytest.approx((q * k).sum().item(), abs=1e-5)
        assert score(9, 2) != pytest.approx(score(7, 3), abs=1e-2)


def test_interleaved_layout_is_the_half_layout_reordered() -> None:
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))
    cos_sin = build_rotary("default")(torch.arange(3), None)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    half = apply_rope(x[..., order], cos_sin, interleaved=False)
    assert torch.equal(apply_rope(x, cos_sin, interleaved=True)[..., order], half)


def test_partial_rotary_leaves_other_dimensions_unchanged() -> None:
    x = torch.randn(3, 2, 8)
    rotary = build_rotary("default", partial_rotary_factor=0.5)
    rotated = apply_rope(x, rotary(torch.arange(3), None), interleaved=False)
    assert torch.equal(rotated[..., 4:], x[..., 4:])
    assert not torch.equal(rotated[1:, :, :4], x[1:, :, :4])


def test_linear_scaling_divides_positions() -> None:
    slow = build_rotary("linear", factor=4.0)(torch.tensor([8]), None)
    unscaled = build_rotary("default")(torch.tensor([2]), None)
    torch.testing.assert_close(slow.cos, unscaled.cos)


def test_longrope_factors_depend_on_the_own_sequence_length() -> None:
    rotary = build_rotary("longrope", short_factor=[1.0] * 4, long_factor=[1.0, 2.0, 3.0, 4.0])
    batch = rotary(torch.tensor([5, 5]), torch.tensor([64, 65]))
    assert not torch.equal(batch.cos[0], batch.cos[1])
    single = rotary(torch.tensor([5]), torch.tensor([64]))
    assert torch.equal(single.cos[0], batch.cos[0])


def test_frequencies_match_transformers(pair: ModelPair) -> None:
    expected = dict(pair.reference.named_buffers())
    names = [name for name in expected if name.endswith("inv_freq") and "original" not in name]
    reference_inv_freq = [expected[name] for name in names]
    actual = [rotary.short_inv_freq for rotary in pair.model.rotary_embeddings]
    for inv_freq in actual:
        if pair.name == "llama_dynamic" or pair.name == "phi3":
            continue  # the reference changes them while it runs
        assert any(
            inv_freq.shape == other.shape and torch.allclose(inv_freq, other, rtol=1e-6)
            for other in reference_inv_freq
        )


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("llama_")] + ["llama3"])
def test_old_and_new_config_fields_agree(name: str) -> None:
    new = {**COMMON, **CASES[name][1]}
    parameters = dict(new["rope_parameters"])  # type: ignore[call-overload]
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    old["rope_theta"] = parameters.pop("rope_theta")
    old["rope_scaling"] = {**parameters, "type": parameters["rope_type"]}
    del old["rope_scaling"]["rope_type"]
    assert read_rope(ConfigFields(old, "old"), 16) == read_rope(ConfigFields(new, "new"), 16)


def test_llama4_scaling_with_equal_freq_factors() -> None:
    scaling = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 16.0}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 1.0}
    scaling |= {"original_max_position_embeddings": 8192}
    fields = {"max_position_embeddings": 10_485_760, "head_dim": 128, "rope_parameters": scaling}
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](transformers.Llama4TextConfig(**fields))
    actual = RotaryEmbedding(read_rope(ConfigFields(fields, "here"), 128)).short_inv_freq
    torch.testing.assert_close(actual, expected)


def test_unsupported_rope_type_lists_the_supported_ones() -> None:
    with pytest.raises(WeightsError, match=r"'mystery'.*supported: default, linear"):
        build_rotary("mystery")


def test_wrong_number_of_factors_is_an_error() -> None:
    with pytest.raises(
        WeightsError, match="short_factor has 3 numbers; it needs rotary_dim / 2 = 4"
    ):
        build_rotary("longrope", short_factor=[1.0] * 3, long_factor=[1.0] * 4)
