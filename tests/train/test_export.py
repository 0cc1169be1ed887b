"""Export: every family in its published layout, read back by us and by transformers."""

from __future__ import annotations

import json

import pytest
import safetensors
import safetensors.torch
import torch

pytest.importorskip("transformers", reason="transformers is the reference")

import transformers

import fulgurite
from fulgurite.errors import ArgumentError
from fulgurite.models import ARCHITECTURES, build_random_model, load_model
from fulgurite.models.config import ConfigFields
from fulgurite.models.loading.checkpoint import get_language_model_fields
from fulgurite.train.export import (
    ExportOptions,
    complete_fields,
    find_architecture,
    save_pretrained,
)
from fulgurite.train.published_layout import INVERSES, JOINS, MODEL_TYPES
from tests.models.families import test_qwen_vl as vision_models
from tests.models.more_cases import MORE_CASES
from tests.models.reference_models import CASES, build_reference, make_prompt

NAMES = [*CASES, *MORE_CASES]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def save_reference(reference, folder):
    """What transformers writes, and the fields of its config.json."""
    reference.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def assert_equal_parameters(found, expected):
    ours, theirs = dict(found.named_parameters()), dict(expected.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in theirs.items():
        assert ours[name].dtype == parameter.dtype, name
        assert torch.equal(ours[name], parameter), name


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_every_family_reads_back_to_the_bit(name, tmp_path):
    reference = build_reference(name, num_hidden_layers=4)
    fields = save_reference(reference, tmp_path / "theirs")
    model = load_model(tmp_path / "theirs")
    family = ARCHITECTURES[fields["architectures"][0]]
    output = save_pretrained(model, family, fields, tmp_path / "ours")
    assert_equal_parameters(load_model(output), model)
    loaded = type(reference).from_pretrained(output, attn_implementation="eager")
    state, expected = loaded.state_dict(), reference.state_dict()
    assert state.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(state[key], tensor), key
    ids = make_prompt(12)[None]
    torch.testing.assert_close(loaded(ids).logits, reference(ids).logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", vision_models.CASES)
@pytest.mark.parametrize("has_base", [True, False])
def test_language_models_of_vision_models(name, has_base, tmp_path):
    """With the checkpoint that training started from the image encoder is there, too."""
    reference = vision_models.build(name)
    fields = save_reference(reference, tmp_path / "theirs")
    model = load_model(tmp_path / "theirs")
    model.norm.weight.add_(0.25)  # what training changed
    reference.model.language_model.norm.weight.add_(0.25)
    options = ExportOptions(base=tmp_path / "theirs" if has_base else None)
    family = ARCHITECTURES[fields["architectures"][0]]
    output = save_pretrained(model, family, fields, tmp_path / "ours", options)
    assert_equal_parameters(load_model(output), model)
    loaded = type(reference).from_pretrained(output, attn_implementation="eager").state_dict()
    for key, tensor in reference.state_dict().items():
        assert torch.equal(loaded[key], tensor) or (not has_base and "visual" in key), key


def make_small(architecture="Dots1ForCausalLM", dtype=torch.float32):
    name = {"Dots1ForCausalLM": "dots1", "LlamaForCausalLM": "llama3"}[architecture]
    config = build_reference(name).config
    fields = {**config.to_dict(), "architectures": [architecture]}
    family = ARCHITECTURES[architecture]
    read = family.read_config(get_language_model_fields(ConfigFields(fields, "config.json")))
    return build_random_model(read, family, dtype=dtype, seed=3), family, fields


def test_big_models_have_shards_and_an_index(tmp_path):
    model, family, fields = make_small()
    output = save_pretrained(
        model, family, fields, tmp_path / "out", ExportOptions(max_shard_bytes=50_000)
    )
    index = json.loads((output / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert files == sorted(file.name for file in output.glob("*.safetensors"))
    total = 0
    for file in files:
        tensors = safetensors.torch.load_file(output / file)
        assert {index["weight_map"][name] for name in tensors} == {file}
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= 50_000 or len(tensors) == 1
        total += size
    assert index["metadata"]["total_size"] == total
    assert_equal_parameters(load_model(output), model)


def test_dtype_and_what_stays_float32(tmp_path):
    model, family, fields = make_small()
    output = save_pretrained(
        model, family, fields, tmp_path / "out", ExportOptions(dtype=torch.bfloat16)
    )
    written = json.loads((output / "config.json").read_text())
    assert written["torch_dtype"] == written["dtype"] == "bfloat16"
    assert written["architectures"] == ["Dots1ForCausalLM"]
    assert written["model_type"] == "dots1"
    tensors = safetensors.torch.load_file(output / "model.safetensors")
    kinds = {tensor.dtype for name, tensor in tensors.items() if "correction_bias" not in name}
    assert kinds == {torch.bfloat16}
    biases = [tensor for name, tensor in tensors.items() if "correction_bias" in name]
    assert biases and all(bias.dtype == torch.float32 for bias in biases)
    loaded = load_model(output)
    assert torch.equal(loaded.norm.weight, model.norm.weight.bfloat16())
    with pytest.raises(ArgumentError, match="int8"):
        save_pretrained(model, family, fields, tmp_path / "x", ExportOptions(dtype=torch.int8))


def test_tokenizer_files_are_copied_and_token_ids_written(tmp_path):
    model, family, fields = make_small("LlamaForCausalLM")
    source = tmp_path / "tokenizer"
    source.mkdir()
    for name in ("tokenizer.json", "generation_config.json", "weights.bin"):
        (source / name).write_text("{}")
    output = save_pretrained(
        model, family, fields, tmp_path / "out", ExportOptions(tokenizer=source)
    )
    names = {file.name for file in output.iterdir()}
    assert names == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "generation_config.json",
    }
    fields = {**fields, "eos_token_id": [2, 3], "bos_token_id": None}
    output = save_pretrained(model, family, fields, tmp_path / "other")
    generation = json.loads((output / "generation_config.json").read_text())
    assert generation == {"_from_model_config": True, "eos_token_id": [2, 3]}


def test_tied_embeddings_are_written_once(tmp_path):
    model, family, fields = make_small("LlamaForCausalLM")
    output = save_pretrained(model, family, fields, tmp_path / "out")
    names = safetensors.torch.load_file(output / "model.safetensors")
    assert fields["tie_word_embeddings"] and "lm_head.weight" not in names


def test_only_an_empty_folder_may_exist(tmp_path):
    model, family, fields = make_small("LlamaForCausalLM")
    folder = tmp_path / "out"
    folder.mkdir()
    save_pretrained(model, family, fields, folder)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(ArgumentError, match="already exists"):
        save_pretrained(model, family, fields, folder)
    assert before == {file.name: file.read_bytes() for file in folder.iterdir()}
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="already exists"):
        save_pretrained(model, family, fields, tmp_path / "file")


def test_a_failure_leaves_nothing_behind(tmp_path):
    model, family, fields = make_small("LlamaForCausalLM")

    def fail(name, parameter):
        if name == "norm.weight":
            raise OSError("no space left on device")
        return parameter

    with pytest.raises(OSError, match="no space"):
        save_pretrained(model, family, fields, tmp_path / "out", ExportOptions(gather=fail))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    model, family, fields = make_small("LlamaForCausalLM")

    def fail(*arguments, **options):
        raise safetensors.SafetensorError("I/O error: no space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", fail)
    with pytest.raises(OSError, match="no space left"):
        save_pretrained(model, family, fields, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_fields_of_another_model_and_quantized_weights_are_refused(tmp_path):
    model, family, fields = make_small("LlamaForCausalLM")
    with pytest.raises(ArgumentError, match="embed_tokens.weight is"):
        save_pretrained(model, family, {**fields, "vocab_size": 7}, tmp_path / "out")
    fulgurite.quantize(model, "int8")
    with pytest.raises(ArgumentError, match="is quantized"):
        save_pretrained(model, family, fields, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_names_of_wrappers_are_left_out(tmp_path):
    model, family, fields = make_small("LlamaForCausalLM")
    model.layers[0] = torch.compile(model.layers[0], backend="eager")
    output = save_pretrained(model, family, fields, tmp_path / "out")
    names = safetensors.torch.load_file(output / "model.safetensors")
    assert not any("_orig_mod" in name for name in names)


def test_tables_are_complete():
    assert MODEL_TYPES.keys() == ARCHITECTURES.keys()
    for name, model_type in MODEL_TYPES.items():
        configuration = transformers.AutoConfig.for_model(model_type)
        assert configuration.model_type == model_type, name
    joined = {convert for converts in JOINS for convert in converts}
    for family in ARCHITECTURES.values():
        for mapping in family.weights:
            assert mapping.convert in INVERSES or mapping.convert in joined, mapping.source


def test_architecture_of_a_family():
    family = ARCHITECTURES["PhimoeForCausalLM"]
    assert (
        find_architecture(family, {"architectures": ["PhiMoEForCausalLM"]}) == "PhiMoEForCausalLM"
    )
    assert find_architecture(family, {}) == "PhimoeForCausalLM"
    fields = complete_fields({"text_config": {"a": 1}, "quantization_config": {}},
                             "Gemma3ForConditionalGeneration", torch.float16)  # fmt: skip
    assert fields["text_config"] == {"a": 1, "torch_dtype": "float16", "dtype": "float16"}
    assert "quantization_config" not in fields and fields["model_type"] == "gemma3"
