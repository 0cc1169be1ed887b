"""The dial: what is open is chosen, what is set stays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fulgurite.errors import ArgumentError
from fulgurite.models.loading.load_plan import build_model
from fulgurite.train.build import get_dtype, read_model_config
from fulgurite.train.config import DataSection, ModelSection, OptimizerSection, TrainConfig
from fulgurite.train.flops import count_flops
from fulgurite.train.sizes import SIZES, resolve_sizes


def resolve(**fields: object) -> TrainConfig:
    return resolve_sizes(replace(TrainConfig(device="cpu"), **fields))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("architecture", [None, "Qwen3ForCausalLM"])
def test_nothing_is_left_open(size, architecture):
    config = resolve(size=size, model=ModelSection(architecture=architecture))
    assert config.model.architecture and config.model.dtype == "float32"
    for section, name in (
        (config, "steps"),
        (config, "batch_size"),
        (config, "microbatch_size"),
        (config.data, "sequence_length"),
        (config.data, "vocab_size"),
        (config.optimizer, "learning_rate"),
        (config.optimizer, "adam_learning_rate"),
        (config.loss, "balance_rate"),
        (config.checkpoint, "every"),
        (config.evaluate, "every"),
    ):
        assert getattr(section, name), name
    assert resolve_sizes(config) == config


# size -> parameters of the dense model; active and all parameters of the mixture, in millions
PARAMETERS = {
    "nano": (1, 1, 2),
    "tiny": (7, 6, 13),
    "small": (34, 27, 62),
    "medium": (108, 104, 375),
    "large": (940, 1270, 6600),
}


@pytest.mark.parametrize("size", SIZES)
def test_parameters_of_a_size(size):
    dense, active, total = PARAMETERS[size]
    for architecture, expected in (
        ("Qwen3ForCausalLM", (dense, dense)),
        ("Dots1ForCausalLM", (active, total)),
    ):
        config = resolve(size=size, model=ModelSection(architecture=architecture))
        fields = {**config.model.fields, "vocab_size": config.data.vocab_size}
        family, model_config = read_model_config(fields, architecture)
        flops = count_flops(build_model(model_config, family, get_dtype("float32")), 64)
        found = (flops.active_parameters / 1e6, flops.parameters / 1e6)
        assert found == pytest.approx(expected, rel=0.15, abs=0.2)


def test_what_is_set_stays():
    config = resolve(
        steps=7,
        batch_size=12,
        microbatch_size=3,
        data=DataSection(sequence_length=100, vocab_size=999),
        optimizer=OptimizerSection(name="adamw", learning_rate=0.5),
        model=ModelSection(fields={"hidden_size": 96, "num_hidden_layers": 2}),
    )
    assert (config.steps, config.batch_size, config.microbatch_size) == (7, 12, 3)
    assert (config.data.sequence_length, config.data.vocab_size) == (100, 999)
    assert config.optimizer.learning_rate == config.optimizer.adam_learning_rate == 0.5
    assert config.model.fields["hidden_size"] == 96
    assert config.model.fields["num_attention_heads"] == 4


def test_new_weights_are_trained_with_muon():
    optimizer = resolve().optimizer
    assert optimizer.name == "muon" and optimizer.learning_rate > optimizer.adam_learning_rate
    assert resolve(model=ModelSection(init_from="smollm2")).optimizer.name == "adamw"


def test_a_checkpoint_brings_its_own_model():
    config = resolve(model=ModelSection(init_from="smollm2"))
    assert config.model.architecture is None and not config.model.fields
    assert config.optimizer.learning_rate < 1e-4 < resolve().optimizer.learning_rate
    with pytest.raises(ArgumentError, match="brings its own architecture"):
        resolve(model=ModelSection(init_from="smollm2", fields={"hidden_size": 64}))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_microbatches_of_a_deterministic_run_do_not_depend_on_ranks(ranks):
    config = resolve_sizes(TrainConfig(device="cpu", deterministic=True), data_ranks=ranks)
    assert config.microbatch_size == resolve(deterministic=True).microbatch_size
    assert config.batch_size % (config.microbatch_size * ranks) == 0


@pytest.mark.parametrize("batch_size", [1, 3, 7, 10, 96])
def test_microbatches_divide_any_batch(batch_size):
    for deterministic in (False, True):
        config = resolve(batch_size=batch_size, deterministic=deterministic)
        assert batch_size % config.microbatch_size == 0


def test_errors():
    with pytest.raises(ArgumentError, match="size='huge' is not known"):
        resolve(size="huge")
    for fields in ({"steps": 0}, {"batch_size": -2}):
        with pytest.raises(ArgumentError, match="must be at least 1|=0|=-2"):
            resolve(**fields)
    with pytest.raises(ArgumentError, match="can't be shared by 3 data ranks"):
        resolve_sizes(TrainConfig(device="cpu"), data_ranks=3)
