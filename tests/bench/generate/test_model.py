"""`bench generate --model`: random checkpoints of every format, and a whole run of a tiny one."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from fulgurite import cli
from fulgurite.bench.generate.model import format_table, keep_first_layers, read_modes
from fulgurite.bench.generate.random_checkpoint import write_random_checkpoint
from fulgurite.bench.generate.workload import Workload, compile_kernels
from fulgurite.errors import ArgumentError, WeightsError
from fulgurite.models.config import ConfigFields
from fulgurite.models.families.presets import MODEL_PRESETS, find_preset
from fulgurite.models.loading.loader import load_model
from fulgurite.models.loading.safetensors_checkpoint import SafetensorsCheckpoint
from fulgurite.quant import QuantTensor
from fulgurite.quant.files.compressed_tensors_writer import SCHEMES, get_scheme
from fulgurite.quant.files.safetensors_writer import ALIASES_KEY
from fulgurite.serve.llm import LLM, SamplingParams

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


@pytest.mark.parametrize("format", [None, "nvfp4", "int4_asym", "fp8_static"])
def test_shared_layers_load_as_stored_ones(format, tmp_path):
    """Layers and experts are stored once; the loaded model is the same."""
    fields = find_preset("tiny-moe")
    scheme = None if format is None else get_scheme(format)
    models, sizes = [], []
    for name, share in (("all", False), ("shared", True)):
        write_random_checkpoint(fields, tmp_path / name, scheme, share_layers=share)
        models.append(load_model(tmp_path / name, keep_quantized=True))
        sizes.append((tmp_path / name / "model.safetensors").stat().st_size)
    expected, actual = (dict(model.named_parameters()) for model in models)
    assert expected.keys() == actual.keys()
    for name, parameter in expected.items():
        assert type(parameter) is type(actual[name]), name
        pair = [
            weight.dequantize(torch.float32) if isinstance(weight, QuantTensor) else weight
            for weight in (parameter, actual[name])
        ]
        torch.testing.assert_close(pair[1], pair[0], rtol=0, atol=0)
    assert sizes[1] < 0.6 * sizes[0]


@pytest.mark.parametrize(
    "aliases, message",
    [('{"b": "missing"}', "the alias b of missing"), ('{"a": "a"}', "the alias a of a"),
     ("[", "cannot parse"), ('["a"]', "no object of names")],
)  # fmt: skip
def test_damaged_aliases(aliases, message, tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors", {ALIASES_KEY: aliases})
    with pytest.raises(WeightsError, match=message):
        SafetensorsCheckpoint(tmp_path)


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
    printed = capsys.readouterr()
    assert "of floor" in printed.out
    parts = ["random weights", "eager: decode of 3", "fulgurite: loading", "fulgurite: warm-up"]
    assert [part for part in parts if f" s] {part}" not in printed.err] == []


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


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tiny-moe", "qwen3-next-80b-a3b"])
def test_kernels_compiled_ahead_do_not_change_tokens(name, tmp_path):
    fields = find_preset(name)
    if name != "tiny-moe":
        small = {"vocab_size": 512, "num_experts": 16, "num_hidden_layers": 4}
        fields = ConfigFields({**fields.values, **small}, name)
    write_random_checkpoint(fields, tmp_path / "c", None, share_layers=True)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
    tokens = []
    for is_ahead in (True, False):
        with LLM(tmp_path / "c", device="cuda", context=128, max_sequences=4) as llm:
            if is_ahead:
                compile_kernels(llm.engine, Workload(80, 2, (1, 4)), threads=8)
                assert not any(llm.engine.audit().values())
            tokens.append([one.token_ids for one in llm.engine.generate(prompts, params)])
    assert tokens[0] == tokens[1]
