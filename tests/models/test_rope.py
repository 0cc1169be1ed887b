"""Rotary embeddings: what rotating means, and each scaling against transformers' frequencies."""

from __future__ import annotations

import pytest
import torch

from fulgurite.errors import WeightsError
from fulgurite.models.config import Fields, read_rope
from fulgurite.models.rope import Rotary, rotate
from tests.models.model_oracle import CASES, COMMON, Pair

LENGTH = {"max_position_embeddings": 64}


def make(kind: str, interleaved: bool = False, **values: object) -> Rotary:
    fields = {**LENGTH, "rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, **values}}
    return Rotary(read_rope(Fields(fields, "here"), 8, interleaved=interleaved))


def test_scores_depend_on_the_distance_only() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 1, 8, generator=generator), torch.randn(1, 1, 8, generator=generator)
    for interleaved in (False, True):
        rotary = make("default", interleaved)

        def score(i: int, j: int, rotary=rotary, interleaved=interleaved) -> float:
            turned = [
                rotate(x, rotary(torch.tensor([at]), None), interleaved)
                for x, at in ((q, i), (k, j))
            ]
            return (turned[0] * turned[1]).sum().item()

        assert score(7, 3) == pytest.approx(score(24, 20), abs=1e-4)
        assert score(0, 0) == pytest.approx((q * k).sum().item(), abs=1e-5)
        assert score(9, 2) != pytest.approx(score(7, 3), abs=1e-2)


def test_interleaved_is_half_with_dimensions_reordered() -> None:
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))
    rotation = make("default")(torch.arange(3), None)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    half = rotate(x[..., order], rotation, interleaved=False)
    assert torch.equal(rotate(x, rotation, interleaved=True)[..., order], half)


def test_dimensions_past_the_rotated_ones_pass_through() -> None:
    x = torch.randn(3, 2, 8)
    rotary = make("default", partial_rotary_factor=0.5)
    turned = rotate(x, rotary(torch.arange(3), None), interleaved=False)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert not torch.equal(turned[1:, :, :4], x[1:, :, :4])


def test_linear_is_slower_positions() -> None:
    slow = make("linear", factor=4.0)(torch.tensor([8]), None)
    plain = make("default")(torch.tensor([2]), None)
    torch.testing.assert_close(slow.cos, plain.cos)


def test_the_extent_of_each_token_decides_not_its_neighbours() -> None:
    rotary = make("longrope", short_factor=[1.0] * 4, long_factor=[1.0, 2.0, 3.0, 4.0])
    both = rotary(torch.tensor([5, 5]), torch.tensor([64, 65]))
    assert not torch.equal(both.cos[0], both.cos[1])
    alone = rotary(torch.tensor([5]), torch.tensor([64]))
    assert torch.equal(alone.cos[0], both.cos[0])


def test_frequencies_equal_transformers(pair: Pair) -> None:
    theirs = dict(pair.theirs.named_buffers())
    names = [name for name in theirs if name.endswith("inv_freq") and "original" not in name]
    wanted = [theirs[name] for name in names]
    ours = [rotary.short for rotary in pair.ours.rotaries]
    for frequency in ours:
        if pair.name == "llama_dynamic" or pair.name == "phi3":
            continue  # theirs change as they run
        assert any(
            frequency.shape == other.shape and torch.allclose(frequency, other, rtol=1e-6)
            for other in wanted
        )


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("llama_")] + ["llama3"])
def test_old_and_new_spellings_mean_the_same(name: str) -> None:
    new = {**COMMON, **CASES[name][1]}
    parameters = dict(new["rope_parameters"])  # type: ignore[call-overload]
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    old["rope_theta"] = parameters.pop("rope_theta")
    old["rope_scaling"] = {**parameters, "type": parameters["rope_type"]}
    del old["rope_scaling"]["rope_type"]
    assert read_rope(Fields(old, "old"), 16) == read_rope(Fields(new, "new"), 16)


def test_llama_4_scales_without_a_band_between() -> None:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 16.0}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 1.0}
    scaling |= {"original_max_position_embeddings": 8192}
    fields = {"max_position_embeddings": 10_485_760, "head_dim": 128, "rope_parameters": scaling}
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](transformers.Llama4TextConfig(**fields))
    ours = Rotary(read_rope(Fields(fields, "here"), 128)).short
    torch.testing.assert_close(ours, theirs)


def test_an_unknown_scaling_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(WeightsError, match=r"'mystery'.*known: default, linear"):
        make("mystery")


def test_factors_of_the_wrong_number_are_an_error() -> None:
    with pytest.raises(WeightsError, match="short_factor has 3 numbers, 4 are needed"):
        make("longrope", short_factor=[1.0] * 3, long_factor=[1.0] * 4)
