"""`bench generate --model`: random checkpoints of every format, and a whole run of a tiny one."""

from __future__ import annotations

import json

import pytest
import torch

from fulgurite import cli
from fulgurite.bench.generate.model import format_table, keep_first_layers, read_modes
from fulgurite.bench.generate.random_checkpoint import write_random_checkpoint
from fulgurite.errors import ArgumentError
from fulgurite.models.config import ConfigFields
from fulgurite.models.families.presets import MODEL_PRESETS, find_preset
from fulgurite.models.loading.loader import load_model
from fulgurite.quant import QuantTensor
from fulgurite.quant.files.compressed_tensors_writer import SCHEMES, get_scheme

SMALL = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 160,
}


@pytest.mark.parametrize("format", [None, *SCHEMES])
def test_random_checkpoints_load_packed(format, tmp_path):
    fields = find_preset("tiny-moe")
    assert fields is not None
    write_random_checkpoint(fields, tmp_path / "c", None if format is None else get_scheme(format))
    model = load_model(tmp_path / "c", keep_quantized=True)
    experts = model.get_submodule("layers.1.feed_forward.experts")
    for weight in (model.layers[0].feed_forward.experts.down_proj, experts.gate_up_proj):
        assert isinstance(weight, QuantTensor) == (format is not None)
        if format is not None:
            assert weight.format.name == SCHEMES[format].weights
        values = weight.dequantize(torch.float32) if format else weight.float()
        assert 0.015 < values.std() < 0.025


@pytest.mark.parametrize("name", ["llama-4-scout", "gpt-oss-20b", "phi-4", "gemma-3-1b"])
def test_families_with_layouts_of_their_own(name, tmp_path):
    """Stacked, transposed, interleaved and fused weights get the shapes that the loader expects."""
    fields = ConfigFields({**MODEL_PRESETS[name], **SMALL}, name)
    write_random_checkpoint(fields, tmp_path / "c", None)
    load_model(tmp_path / "c")


def test_first_layers_of_a_preset():
    """Lists with one entry a layer are cut; other lists are not."""
    values = {"num_hidden_layers": 4, "layer_types": ["a", "b", "a", "b"], "mlp_only_layers": [1]}
    cut = keep_first_layers(ConfigFields(values, "preset"), 3).values
    assert cut == {**values, "num_hidden_layers": 3, "layer_types": ["a", "b", "a"]}
    with pytest.raises(ArgumentError, match="1 to 4"):
        keep_first_layers(ConfigFields(values, "preset"), 5)


def test_a_whole_run(tmp_path, capsys):
    output = tmp_path / "rows.json"
    options = [
        "--device",
        "cpu",
        "--model",
        "tiny",
        "--format",
        "int4",
        "--first-layers",
        "1",
        "--mode",
        "eager,fulgurite",
    ]
    sizes = ["--prompt", "8", "--steps", "2", "--requests", "3", "--output", str(output)]
    assert not cli.main(["bench", "generate", *options, *sizes])
    rows = json.loads(output.read_text())["rows"]
    assert [row["mode"] for row in rows] == ["eager", "fulgurite", "fulgurite, penalties"]
    eager, ours, penalties = rows
    assert ours["layers"] == 1
    assert ours["format"] == "int4" and ours["load_s"] > 0 and ours["first_token_ms"] > 0
    for row in (eager, ours):
        assert row["decode_1"] > 0 and row["decode_3"] > 0
    assert ours["percent_3"] > 0 and penalties["decode_3"] > 0
    assert ours["plan_bytes"] > 100_000
    assert "of floor" in capsys.readouterr().out


@pytest.mark.slow
def test_two_ranks_and_torch_compile(tmp_path):
    options = ["--device", "cpu", "--model", "tiny-moe", "--format", "fp8"]
    sizes = ["--prompt", "8", "--steps", "2", "--requests", "2", "--tensor", "2", "--expert", "2"]
    assert not cli.main(["bench", "generate", *options, *sizes])


def test_refused_options(tmp_path, capsys):
    with pytest.raises(ArgumentError, match="'jit' is unknown"):
        read_modes("eager,jit")
    base = ["bench", "generate", "--device", "cpu"]
    assert cli.main([*base, "--model", "smollm2", "--format", "fp8"]) == 1
    assert "fulgurite quantize smollm2 --format fp8" in capsys.readouterr().err
    assert cli.main([*base, "--model", "tiny", "--steps", "0"]) == 1
    assert cli.main([*base, "--model", "tiny", "--format", "fp7"]) == 1
    assert "is unknown" in capsys.readouterr().err


def test_the_table_leaves_out_what_was_not_measured():
    rows = [{"mode": "eager", "decode_1": 10.0, "note": "no GPU"}, {"mode": "fulgurite"}]
    text = format_table(rows)
    assert "10.0/s" in text and "no GPU" in text


@pytest.mark.gpu
def test_a_whole_run_on_a_gpu(tmp_path):
    output = tmp_path / "rows.json"
    options = ["--device", "cuda", "--model", "tiny-moe", "--format", "nvfp4", "--prompt", "16"]
    assert not cli.main(
        ["bench", "generate", *options, "--steps", "4", "--requests", "8", "--output", str(output)]
    )
    modes = [row["mode"] for row in json.loads(output.read_text())["rows"]]
    assert modes[:2] == ["eager", "torch.compile"]
    assert modes[2:] == ["fulgurite", "fulgurite, penalties", "fulgurite, deterministic"]
