"""The GPU suite `fusions` with fake measurements: phases, printed lines, saved rows."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fulgurite.bench.fusions import baselines, gemm_epilogues, gpu
from fulgurite.bench.fusions.baselines import AUTOTUNE, Job
from fulgurite.bench.fusions.gpu_cases import Case, size_cases
from fulgurite.bench.fusions.report import find_size_cliffs, format_report


def row(case: str, pace: float = 1.0, size: int = 128 << 20) -> dict[str, Any]:
    """A row whose time per byte is `pace`."""
    figures = {"fulgurite_ms": pace * size, "fulgurite_percent": 90 / pace, "compile_s": 0.5}
    return {"case": case, "bytes": size, **figures}


def product(case: gemm_epilogues.GemmCase) -> dict[str, Any]:
    return {"group": "matmul", "case": case.name, "fused kernel_us": 10.0, "speedup": 1.1,
            "difference": 0.0}  # fmt: skip


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Run without a GPU: records which candidate was measured on which case."""
    asked: list[Any] = []

    def measure_case(case: Case, copy: float) -> dict[str, Any]:
        asked.append(("fulgurite", case.name))
        eager = {"eager_percent": 20.0, "difference": 0.0} if case.compared else {}
        return {**row(case.name), **eager}

    def measure_compiled(case: Case, moved: int, copy: float, mode: Any = None, cold: bool = False):
        name = "torch_compile" if mode is None else "max_autotune"
        asked.append((name, case.name, "cold" if cold else "warm"))
        return {f"{name}_percent": 50.0}

    def measure_liger(group: str, case: Case, *_: Any) -> dict[str, float] | None:
        asked.append(("liger", case.name))
        return {"liger_percent": 70.0} if case.name == "softmax" else None

    def matmul(case: gemm_epilogues.GemmCase) -> dict[str, Any]:
        asked.append(("product", case.name))
        return product(case)

    def autotuned(case: gemm_epilogues.GemmCase, mode: str) -> dict[str, float]:
        asked.append(("tuned product", case.name))
        return {"max-autotune_us": 12.0}

    for function in (measure_case, measure_compiled, measure_liger):
        monkeypatch.setattr(gpu, function.__name__, function)
    few = [case for case in size_cases() if " 2048x" in case.name]
    monkeypatch.setattr(gpu, "size_cases", lambda: few)
    monkeypatch.setattr(gpu.results, "fresh_cache_environment", dict)
    monkeypatch.setattr(gpu, "measure_copy_bandwidth", lambda: 1e12)
    monkeypatch.setattr(gemm_epilogues, "measure_case", matmul)
    monkeypatch.setattr(gemm_epilogues, "measure_autotuned", autotuned)
    monkeypatch.setattr(baselines, "precompile", lambda jobs: asked.append(("ahead", jobs)))
    monkeypatch.setattr(baselines, "import_liger", lambda: object())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return asked


def run(path: Path, quick: bool = False) -> list[dict[str, Any]]:
    gpu.run_fusions_gpu(argparse.Namespace(device="cuda", quick=quick, output=str(path)))
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def test_the_most_important_phase_runs_first(log: list[Any], tmp_path: Path) -> None:
    run(tmp_path / "out.json")
    kinds = [(entry[0], *entry[2:]) if entry[0] != "ahead" else ("ahead",) for entry in log]
    assert list(dict.fromkeys(kinds)) == [
        ("fulgurite",),
        ("product",),
        ("torch_compile", "cold"),
        ("ahead",),
        ("torch_compile", "warm"),
        ("max_autotune", "warm"),
        ("tuned product",),
        ("liger",),
    ]
    assert kinds == sorted(kinds, key=list(dict.fromkeys(kinds)).index), "a part at a time"


def test_warm_baselines_are_precompiled(log: list[Any], tmp_path: Path) -> None:
    run(tmp_path / "out.json")
    jobs = next(entry[1] for entry in log if entry[0] == "ahead")
    assert set(jobs) <= {Job(*name, mode) for name in known() for mode in (None, AUTOTUNE)}
    warm = [entry[1] for entry in log if entry[-1] == "warm" or entry[0] == "tuned product"]
    assert sorted(job.case for job in jobs) == sorted(warm)


def known() -> set[tuple[str, str]]:
    return set(baselines.find_functions())


def test_norms_of_2048_rows_have_baselines() -> None:
    compared = [case.name for case in size_cases() if case.compared]
    assert len(compared) == 22 and all(" 2048x" in name for name in compared)
    assert {name.split()[1] for name in compared} == {"float32", "bfloat16"}


def test_the_file_the_image_and_the_tables(
    log: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run(tmp_path / "out.json")
    softmax = [r for r in rows if r["case"] == "softmax"]
    assert all({"max_autotune_percent", "liger_percent"} <= r.keys() for r in softmax)
    assert sum("torch_compile_percent" in r for r in rows if r["group"] == "sizes") == 22
    assert sum("max-autotune_us" in r for r in rows if r["group"] == "matmul") == 8
    image = (tmp_path / "out.svg").read_text()
    assert all(f">{name}</text>" in image for name in ("max-autotune", "liger", "torch.compile"))
    output = capsys.readouterr().out
    assert "size cliffs\n  none" in output and "forward softmax: liger 70" in output


def test_a_quick_run_has_no_sizes(
    log: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {r["group"] for r in run(tmp_path / "out.json", quick=True)} == {
        "forward", "backward", "matmul"}  # fmt: skip
    assert "size cliffs" not in capsys.readouterr().out


def test_the_geomean_needs_all_cases() -> None:
    rows = [
        {**row("a 1x1"), "group": "forward", "eager_percent": 20.0, "liger_percent": 60.0},
        {**row("b 1x1"), "group": "forward", "eager_percent": 5.0},
    ]
    head, first, second, mean = format_report(rows).strip().splitlines()[1:]
    assert head.split() == ["case", "eager", "liger", "fulgurite", "ms", "compile"]
    assert first.split()[2:5] == ["20", "60", "90"] and second.split()[2:4] == ["5", "90"]
    assert mean.split() == ["geomean", "10.0", "90.0"]


def test_gemms_without_autotuning_leave_a_gap() -> None:
    small, large = (product(gemm_epilogues.gemm_cases((depth,))[0]) for depth in (512, 1024))
    lines = gemm_epilogues.format_table([small, large | {"max-autotune_us": 12.0}]).splitlines()
    assert "max-autotune" in lines[0]
    assert lines[1].split()[-2:] == ["10", "1.10×"] and lines[2].split()[-3:] == [
        "10",
        "12",
        "1.10×",
    ]


def test_size_cliffs_are_named() -> None:
    found = list(
        find_size_cliffs(
            [
                row("rms_norm float32 2048x4096", 1.0),
                row("rms_norm float32 2048x4098", 1.25),
                row("rms_norm float32 2048x4100", 1.09),
                row("rms_norm float32 2048x5120", 9.0),  # not of these widths
                row("rms_norm float32 8192x4098", 9.0),  # no neighbouring size
                row("rms_norm bfloat16 2048x4104", 9.0),
                row("relu_bias float32 2048x4104", 9.0),
                row("rms_norm float32 2048x4104", 9.0, size=(64 << 20) - 1),  # too small to count
            ]
        )
    )
    assert found == [
        "rms_norm float32 2048x4098 takes 25% longer per byte than rms_norm float32 2048x4096"
    ]
