"""Models of a run: initialization, loading, every architecture."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers

from fulgurite.errors import ArgumentError
from fulgurite.models.families.registry import ARCHITECTURES
from fulgurite.train.build import build_from_scratch, build_training_model, initial_values
from fulgurite.train.config import ModelSection, TrainConfig
from fulgurite.train.export import save_pretrained
from fulgurite.train.family_fields import Size, build_fields
from fulgurite.train.loss import LossModule
from fulgurite.train.sizes import resolve_sizes
from tests.models.families.test_multimodal import build as build_multimodal
from tests.train.test_loss import TINY, build_tiny, make_batch


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_every_architecture_trains_from_scratch(architecture):
    model = build_tiny(architecture)
    sums = LossModule(model)(*make_batch([9, 15]))
    sums.total.backward()
    assert abs((sums.loss / sums.tokens).item() - 4.57) < 0.5, "about ln(vocabulary)"
    for name, parameter in model.named_parameters():
        if "correction_bias" not in name:
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name


# odd head sizes; windows of no family end within a row
SMALL = Size(64, 4, 4, 2, 24, 96, 8, 2, 32, 320, 32, 2, 3, 1e-3)
PUBLISHED = [
    name
    for name in sorted(ARCHITECTURES)
    if name.endswith("ForCausalLM") and hasattr(transformers, name)
]


@pytest.mark.parametrize("architecture", PUBLISHED)
def test_every_architecture_from_scratch_is_the_same_in_transformers(architecture, tmp_path):
    """The fields of a size say all that readers of config.json disagree on."""
    size = replace(SMALL, head_dim=16) if architecture == "OlmoeForCausalLM" else SMALL
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    fields = {**build_fields(architecture, size, 32), "vocab_size": 320, **ids}
    built = build_from_scratch(fields, architecture, dtype=torch.float32, device="cpu", seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in built.model.parameters():  # norms and biases matter, too
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    save_pretrained(built.model.eval(), built.family, built.fields, tmp_path / "export")
    load = transformers.AutoModelForCausalLM.from_pretrained
    reference = load(tmp_path / "export", dtype=torch.float32, attn_implementation="eager").eval()
    tokens = torch.randint(0, 320, (1, 24), generator=generator)
    with torch.no_grad():
        expected = reference(tokens, use_cache=False).logits
        logits = built.model(tokens, torch.arange(24).expand(1, 24))
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=3e-4)


def test_values_depend_on_name_and_seed_alone():
    model, same, other = (build_tiny("Dots1ForCausalLM", seed=seed) for seed in (0, 0, 1))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, same.get_parameter(name)), name
        if parameter.dim() > 1:
            assert not torch.equal(parameter, other.get_parameter(name)), name
    linear = model.layers[0].attention.q_proj
    values = initial_values(
        linear, "layers.0.attention.q_proj.weight", tuple(linear.weight.shape), 2, 0
    )
    assert torch.equal(values, linear.weight)


def test_scales_of_the_first_weights():
    model = build_tiny("Dots1ForCausalLM", hidden_size=256, num_hidden_layers=8)
    block = model.layers[1].feed_forward
    assert block.experts.gate_up_proj.std().item() == pytest.approx(256**-0.5, rel=0.1)
    assert block.experts.down_proj.std().item() == pytest.approx((24 * 16) ** -0.5, rel=0.1)
    assert model.embed_tokens.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert block.router.correction_bias.eq(0).all() and block.router.weight.std() < 0.03
    assert model.norm.weight.eq(1).all()
    gemma = build_tiny("Gemma3ForCausalLM")
    assert gemma.norm.weight.eq(0).all(), "Gemma's norms add 1 to their weights"


def test_selection_biases_have_no_gradient():
    config = resolve_sizes(TrainConfig(device="cpu"))
    built = build_training_model(config, 512, "cpu")
    router = built.model.layers[1].feed_forward.router
    assert not router.correction_bias.requires_grad and router.weight.requires_grad
    assert built.model.training
    assert built.fields["architectures"] == ["Dots1ForCausalLM"]
    assert built.fields["vocab_size"] == 512


def test_loads_what_was_exported(tmp_path):
    fields = {**build_fields("Qwen3MoeForCausalLM", TINY, 32), "vocab_size": 97}
    built = build_from_scratch(
        fields, "Qwen3MoeForCausalLM", dtype=torch.float32, device="cpu", seed=3
    )
    save_pretrained(built.model, built.family, built.fields, tmp_path / "export")
    section = ModelSection(init_from=str(tmp_path / "export"))
    config = resolve_sizes(replace(TrainConfig(device="cpu"), model=section))
    loaded = build_training_model(config, 97, "cpu")
    for name, parameter in built.model.named_parameters():
        assert torch.equal(parameter, loaded.model.get_parameter(name)), name
    assert loaded.fields["architectures"] == ["Qwen3MoeForCausalLM"]
    with pytest.raises(ArgumentError, match="the tokenizer has 98 tokens, the model only 97"):
        build_training_model(config, 98, "cpu")


def test_errors_name_what_is_wrong():
    section = ModelSection(architecture="Gpt5ForCausalLM")
    config = resolve_sizes(replace(TrainConfig(device="cpu"), model=section))
    with pytest.raises(ArgumentError, match="Gpt5ForCausalLM.*is not known"):
        build_training_model(config, 97, "cpu")
    section = ModelSection(architecture="LlamaForCausalLM", fields={"num_key_value_heads": 3})
    config = resolve_sizes(replace(TrainConfig(device="cpu"), model=section))
    with pytest.raises(ArgumentError, match="LlamaForCausalLM can't be built: num_attention_heads"):
        build_training_model(config, 97, "cpu")
    config = resolve_sizes(replace(TrainConfig(device="cpu"), model=ModelSection(dtype="float16")))
    with pytest.raises(ArgumentError, match="float16.*can't be trained"):
        build_training_model(config, 97, "cpu")


@pytest.mark.parametrize(
    "architecture", ["LlavaForConditionalGeneration", "Mistral3ForConditionalGeneration"]
)
def test_a_multimodal_checkpoint_is_trained_and_exported_as_its_text_decoder(
    architecture, tmp_path
):
    reference = build_multimodal(architecture)
    reference.save_pretrained(tmp_path / "whole")
    section = ModelSection(init_from=str(tmp_path / "whole"), dtype="float32")
    config = resolve_sizes(replace(TrainConfig(device="cpu"), model=section))
    built = build_training_model(config, 8, "cpu")
    save_pretrained(built.model, built.family, built.fields, tmp_path / "export")
    decoder = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(decoder(ids).logits, reference(input_ids=ids).logits)
