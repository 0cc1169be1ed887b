"""The command: options that are refused, interrupted writes, GGUF sources."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import safetensors.torch
import torch

from fulgurite.compress import pipeline
from fulgurite.models.loading.loader import load_model
from fulgurite.quant.files import safetensors_writer
from fulgurite.quant.files.safetensors_writer import ShardWriter, TensorSpec, split_into_shards
from tests.compress.checkpoints import TEXT, build_model, run_quantize, save_checkpoint
from tests.models.loading.gguf_export import write_gguf


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--format", "fp9"), "'fp9' is unknown"),
        (("--format", "fp8_static"), "add --calibrate TEXT"),
        (("--format", "fp8", "--kv", "fp8"), "needs a calibration text"),
        (("--format", "fp8", "--group-size", "64"), "does not apply to fp8"),
        (("--format", "int4", "--group-size", "48"), "must be one of (32, 64, 128)"),
        (("--format", "fp8", "--calibrate", "/no/such/file"), "no such file"),
        (("--format", "fp8", "--ignore", "nothing.*"), "matches no linear"),
        (("--format", "fp8", "--ignore", "*.q_proj"), "ignore all of them, or none"),
        (("--format", "fp8", "--ignore", "model.layers.*"), "no weight of this checkpoint"),
        (("--format", "fp8", "--max-shard-size", "many"), "is not a size"),
        (("--format", "fp8", "--eval", "-", "--no-eval"), "exclude each other"),
        (("--format", "fp8", "--sequence", "1"), "must be at least"),
    ],
)
def test_refused_options(options, message, source, tmp_path, capsys):
    assert run_quantize(source, tmp_path / "out", *options) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_ignored_linears_stay_dense(source, tmp_path):
    options = ("--format", "int8", "--no-eval", "--ignore", "re:.*down_proj")
    assert not run_quantize(source, tmp_path / "out", *options, "--ignore", "model.layers.0.*")
    tensors = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    quantized = {name for name, tensor in tensors.items() if tensor.dtype == torch.int8}
    assert quantized and all("layers.1." in n and "down_proj" not in n for n in quantized)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    ignore = config["quantization_config"]["ignore"]
    assert "model.layers.1.mlp.down_proj" in ignore and "model.layers.0.mlp.up_proj" in ignore


def test_the_output_must_be_new(source, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("data")
    assert run_quantize(source, tmp_path / "out", "--format", "fp8") == 1
    assert "is not empty" in capsys.readouterr().err
    assert (tmp_path / "out" / "precious").read_text() == "data"
    (tmp_path / "empty").mkdir()
    assert not run_quantize(source, tmp_path / "empty", "--format", "fp8", "--no-eval")
    assert (tmp_path / "empty" / "config.json").is_file()


def test_a_full_disk_is_noticed_before_anything_is_written(source, tmp_path, capsys, monkeypatch):
    usage = namedtuple("usage", "total used free")(10, 9, 1)
    monkeypatch.setattr(safetensors_writer.shutil, "disk_usage", lambda path: usage)
    assert run_quantize(source, tmp_path / "out", "--format", "fp8") == 1
    assert "GB are free" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_write_leaves_nothing(error, source, tmp_path, monkeypatch):
    write, count = ShardWriter.write, 0

    def fail(self: ShardWriter, name: str, tensor: torch.Tensor) -> None:
        nonlocal count
        count += 1
        if count > 5:
            raise error
        write(self, name, tensor)

    monkeypatch.setattr(ShardWriter, "write", fail)
    assert run_quantize(source, tmp_path / "out", "--format", "fp8", "--no-eval") in (1, 130)
    assert not list(tmp_path.iterdir())


def test_a_weight_with_nan_is_refused(source, tmp_path, capsys):
    broken = tmp_path / "broken"
    shutil.copytree(source, broken)
    tensors = safetensors.torch.load_file(broken / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    safetensors.torch.save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    assert run_quantize(broken, tmp_path / "out", "--format", "nvfp4", "--no-eval") == 1
    assert "model.layers.1.mlp.up_proj.weight" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("model", "architecture"), [("llama", "llama"), ("mixtral", "llama"), ("qwen3_moe", "qwen3moe")]
)
def test_a_gguf_file_becomes_the_same_checkpoint(model, architecture, tmp_path):
    """Names, layouts and config.json are mapped back: the values are those of the model."""
    reference = build_model(model)
    for folder in ("gguf", "hf"):
        (tmp_path / folder).mkdir()
    file = write_gguf(reference, architecture, tmp_path / "gguf")
    reference.save_pretrained(tmp_path / "hf")
    options = ("--format", "int8_w8a16", "--no-eval")
    assert not run_quantize(file, tmp_path / "from_gguf", *options)
    assert not run_quantize(tmp_path / "hf", tmp_path / "from_hf", *options)
    first, second = (
        safetensors.torch.load_file(tmp_path / name / "model.safetensors")
        for name in ("from_gguf", "from_hf")
    )
    assert first.keys() == second.keys()
    for name in first:
        if name.endswith("_scale") or first[name].dtype == torch.bfloat16:
            torch.testing.assert_close(
                first[name].float(), second[name].float(), rtol=2.0**-7, atol=1e-6
            )
    mine, theirs = (load_config(tmp_path / name) for name in ("from_gguf", "from_hf"))
    for field in ("architectures", "model_type", "hidden_size", "num_key_value_heads"):
        assert mine[field] == theirs[field], field


def load_config(folder: Path) -> dict[str, object]:
    values: dict[str, object] = json.loads((folder / "config.json").read_text())
    return values


def test_fused_projections_of_phi3(tmp_path):
    source = save_checkpoint(tmp_path / "source", "phi3")
    (tmp_path / "text").write_text(TEXT)
    options = ("--calibrate", str(tmp_path / "text"), "--calibration-tokens", "128", "--no-eval")
    assert not run_quantize(
        source, tmp_path / "out", "--format", "nvfp4", *options, "--sequence", "64"
    )
    tensors = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["model.layers.0.self_attn.qkv_proj.weight_packed"].shape == (256, 64)


# ---- the writer --------------------------------------------------------------------------------


def test_tensors_of_any_dtype_and_size_are_aligned(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "odd": torch.randint(0, 255, (3, 5), dtype=torch.uint8, generator=generator),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 7, dtype=torch.bfloat16),
        "wide": torch.randn(2, 3, dtype=torch.float64, generator=generator),
        "fp8": torch.randn(3, generator=generator).to(torch.float8_e4m3fn),
        "rows": torch.randn(6, 4, generator=generator)[::2].t(),
        "é": torch.tensor([True, False]),
    }
    specs = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
    writer = ShardWriter(tmp_path, specs, max_shard_bytes=10**6)
    for name in reversed(tensors):
        writer.write(name, tensors[name])
    writer.close()
    loaded = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert torch.equal(loaded[name].float(), tensor.float()), name


def test_shards_have_at_most_the_size():
    specs = {str(i): TensorSpec(torch.uint8, (size,)) for i, size in enumerate((4, 4, 9, 1, 7))}
    assert split_into_shards(specs, 8) == [["0", "1"], ["2"], ["3", "4"]]


def test_a_missing_tensor_is_noticed(tmp_path):
    writer = ShardWriter(tmp_path, {"x": TensorSpec(torch.float32, (2,))}, 10**6)
    with pytest.raises(AssertionError, match="1 tensors missing"):
        writer.close()
    writer.abort()


def test_memory_is_bounded_by_one_tensor(source, tmp_path, monkeypatch):
    """Without texts, no weight is read before the one before it was written."""
    events: list[str] = []
    write, read = ShardWriter.write, pipeline.CheckpointQuantizer._read

    def record_write(self: ShardWriter, name: str, tensor: torch.Tensor) -> None:
        events.append("write")
        write(self, name, tensor)

    def record_read(self, weight):
        events.append("read")
        return read(self, weight)

    monkeypatch.setattr(ShardWriter, "write", record_write)
    monkeypatch.setattr(pipeline.CheckpointQuantizer, "_read", record_read)
    assert not run_quantize(source, tmp_path / "out", "--format", "fp8", "--no-eval")
    weights = "".join(event[0] for event in events).rstrip("w")
    assert weights.count("rr") == 0 and events.count("read") == 14


def test_load_model_reads_a_folder_made_from_gguf(tmp_path):
    file = write_gguf(build_model("llama"), "llama", tmp_path)
    assert not run_quantize(file, tmp_path / "out", "--format", "int8_w8a16", "--no-eval")
    ids, positions = torch.arange(20), torch.arange(20)
    with torch.no_grad():
        ours = load_model(tmp_path / "out", dtype=torch.float32)(ids, positions)
        expected = load_model(file, dtype=torch.float32)(ids, positions)
    assert (ours - expected).norm() < 0.1 * expected.norm()


def test_a_folder_without_a_tokenizer(source, tmp_path, capsys):
    bare = tmp_path / "bare"
    shutil.copytree(source, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    assert not run_quantize(bare, tmp_path / "out", "--format", "int8")
    assert "perplexity is not measured" in capsys.readouterr().err
    assert run_quantize(bare, tmp_path / "two", "--format", "int8", "--eval", __file__) == 1
    assert "no tokenizer.json" in capsys.readouterr().err


def test_a_quantized_checkpoint_is_quantized_again(source, tmp_path):
    """It is dequantized first. The scales of its KV cache are dropped."""
    (tmp_path / "text").write_text(TEXT)
    calibrate = (
        "--calibrate",
        str(tmp_path / "text"),
        "--calibration-tokens",
        "128",
        "--kv",
        "fp8",
    )
    first, second = tmp_path / "first", tmp_path / "second"
    assert not run_quantize(source, first, "--format", "fp8", "--no-eval", *calibrate)
    assert not run_quantize(first, second, "--format", "int8_w8a16", "--no-eval")
    tensors = safetensors.torch.load_file(second / "model.safetensors")
    assert not any(name.endswith("k_scale") for name in tensors)
    assert load_config(second)["quantization_config"]["format"] == "pack-quantized"
    before, after = (load_model(path, dtype=torch.float32) for path in (first, second))
    for name, weight in before.named_parameters():
        error = (after.get_parameter(name) - weight).norm() / weight.norm()
        assert error < 0.01, name


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_on_a_gpu(model, tmp_path):
    source = save_checkpoint(tmp_path / "source", model, torch.bfloat16)
    (tmp_path / "text").write_text(TEXT)
    options = ("--calibrate", str(tmp_path / "text"), "--eval", str(tmp_path / "text"))
    sizes = ("--calibration-tokens", "256", "--eval-tokens", "256", "--sequence", "64")
    found = {}
    for device in ("cpu", "cuda"):
        file = tmp_path / f"{device}.json"
        arguments = (*options, *sizes, "--json", str(file), "--device", device)
        assert not run_quantize(source, tmp_path / device, "--format", "nvfp4_w4a4", *arguments)
        found[device] = json.loads(file.read_text())
    for key in ("perplexity_before", "perplexity_after"):
        assert found["cuda"][key] == pytest.approx(found["cpu"][key], rel=0.2)
    weights = zip(found["cpu"]["weights"], found["cuda"]["weights"], strict=True)
    assert all(abs(a["output_db"] - b["output_db"]) < 2 for a, b in weights)
