"""Suite `zoo`: its lists, its accuracy rule, and rows from worker processes, crashes and timeouts included."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import time
from dataclasses import replace

import pytest
import torch

from fulgurite.bench.readme import format_zoo_page
from fulgurite.bench.zoo import (
    candidates,
    catalog,
    inputs,
    pool,
    suite,
    tables,
    timm_models,
    torchvision_models,
)
from fulgurite.bench.zoo import transformers_models as hub
from fulgurite.bench.zoo.build import KEEP_ALL, disable_dropout, disable_sampling, run_training
from fulgurite.bench.zoo.catalog import MODELS, ZooModel, build_case, select
from fulgurite.bench.zoo.compare import find_differences, flatten, relative_error
from fulgurite.bench.zoo.sizes import SIZES, choose_sizes
from fulgurite.bench.zoo.worker import READY, Job, measure
from fulgurite.cli import main
from fulgurite.errors import ArgumentError

BERT = ZooModel("transformers", "masked", "DistilBertForMaskedLM")
VIT = ZooModel("transformers", "vision", "ViTForImageClassification")


def make_job(model: ZooModel, mode: str, log: str = os.devnull) -> Job:
    return Job(model, mode, "cpu", torch.float32, (), 0.01, 0, log)


# ---- lists ---------------------------------------------------------------------------------------


def test_models_are_distinct_and_families_are_named():
    assert len({str(model) for model in MODELS}) == len(MODELS)
    assert all(model.package in catalog.PACKAGES and model.family for model in MODELS)
    assert {str(model) for model in MODELS} >= set(catalog.QUICK)
    for package, least in {"transformers": 80, "timm": 60, "torchvision": 30}.items():
        assert sum(model.package == package for model in MODELS) >= least


def test_special_configurations_belong_to_listed_classes():
    listed = {name for names in hub.TASKS.values() for name in names}
    assert set(hub.SPECIAL) <= listed
    assert set(torchvision_models.MODELS) >= torchvision_models.WITH_BACKBONE


def test_every_family_of_timm_is_listed():
    if catalog.missing_packages([ZooModel("timm", "resnet", "test_resnet")]):
        pytest.skip("timm is not installed")
    timm = catalog.import_package("timm")
    assert set(timm_models.FAMILIES) >= set(timm.list_modules())
    assert set(timm_models.BY_NAME) <= set(timm.list_models())


def test_shards_and_patterns_select_models():
    shards = [select(None, f"{i}/3", quick=False) for i in (1, 2, 3)]
    assert sorted(map(str, itertools.chain(*shards))) == sorted(map(str, MODELS))
    assert {model.family for model in select("^speech$", None, quick=False)} == {"speech"}
    assert len(select(None, None, quick=True)) == len(catalog.QUICK)
    with pytest.raises(ArgumentError, match="4/3"):
        select(None, "4/3", quick=False)
    with pytest.raises(ArgumentError, match="no model matches"):
        select("no such model", None, quick=False)


# ---- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "main_input", "labels"),
    [
        ("LlamaForCausalLM", "input_ids", {"labels"}),
        ("BertForQuestionAnswering", "input_ids", {"start_positions", "end_positions"}),
        ("T5ForConditionalGeneration", "input_ids", {"labels"}),
        ("ViTForImageClassification", "pixel_values", {"labels"}),
        ("Wav2Vec2ForCTC", "input_values", {"labels"}),
        ("WhisperForConditionalGeneration", "input_features", {"labels"}),
    ],
)
def test_small_models_by_rule(name, main_input, labels):
    module = hub.build(name)
    given = inputs.make_inputs(module, SIZES["small"])
    assert set(given) - {"decoder_input_ids"} == {main_input}
    assert set(inputs.make_labels(module, SIZES["small"])) == labels
    assert sum(parameter.numel() for parameter in module.parameters()) < 5_000_000


@pytest.mark.parametrize(
    ("name", "millions", "input_shape"),
    [
        ("BertForMaskedLM", 110, (3, 384)),
        ("ViTForImageClassification", 86, (3, 3, 224, 224)),
        ("GPT2LMHeadModel", 124, (3, 1024)),
        ("LlamaForCausalLM", 1881, (3, 1024)),  # fewer layers
        ("OlmoeForCausalLM", 393, (3, 1024)),  # 6 layers of width 1024, 16 experts
    ],
)
def test_models_of_default_size(name, millions, input_shape):
    with torch.device("meta"):
        module = hub.build(name, SIZES["default"])
        (given,) = inputs.make_inputs(module, choose_sizes("default", 3)).values()
    parameters = sum(parameter.numel() for parameter in module.parameters())
    assert parameters / 1e6 == pytest.approx(millions, rel=0.01)
    assert tuple(given.shape) == input_shape


def test_fewer_layers_of_default_size():
    with torch.device("meta"):
        module = hub.build("BertForMaskedLM", choose_sizes("default", None, layers=3))
    assert len(module.bert.encoder.layer) == 3


def test_dropout_stays_in_the_graph_but_drops_nothing():
    module = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Dropout(0.0)).train()
    disable_dropout(module)
    assert module[0].p == KEEP_ALL and module[1].p == 0.0
    x = torch.randn(100)
    torch.testing.assert_close(module(x), x)


def test_routers_do_not_sample():
    router = type("PhimoeTopKRouter", (torch.nn.Linear,), {})(4, 2)
    module = torch.nn.Sequential(router, torch.nn.Dropout()).train()
    disable_sampling(module)
    assert not module[0].training and module[1].training


def test_cases_are_the_same_each_time_they_are_built():
    first, second = (run_training(build_case(BERT, "training", "cpu", torch.float32)) for _ in "12")
    assert "loss" in first and any(name.startswith("gradient of") for name in first)
    assert not find_differences(first, second, None, 0.0)


def test_non_maximum_suppression():
    boxes = torch.tensor([[0.0, 0, 10, 10], [1, 1, 11, 11], [20, 20, 30, 30], [0, 0, 10, 10]])
    scores = torch.tensor([0.5, 0.9, 0.1, 0.4])
    assert torchvision_models._non_maximum_suppression(boxes, scores, 0.5).tolist() == [1, 2]
    assert torchvision_models._non_maximum_suppression(boxes, scores, 0.99).tolist() == [1, 0, 2]


# ---- the rule ------------------------------------------------------------------------------------


def compare(eager, ours, exact=None, tolerance=1e-4):
    found = find_differences(
        {"x": eager}, {"x": ours}, None if exact is None else {"x": exact}, tolerance
    )
    return [difference.reason.split()[0] for difference in found]


def test_rule_takes_an_error_of_twice_that_of_eager():
    exact = torch.randn(2000, dtype=torch.float64)
    noise = torch.randn(2000, dtype=torch.float64)
    eager = (exact + 1e-2 * noise).float()
    assert not compare(eager, (exact + 1.9e-2 * noise.roll(1)).float(), exact)
    assert compare(eager, (exact + 2.2e-2 * noise.roll(1)).float(), exact) == ["inaccurate"]
    assert compare(eager, (exact + 1.9e-2 * noise.roll(1)).float()) == ["max"]  # no float64


def test_rule_wants_equal_shapes_dtypes_names_and_integers():
    ones = torch.ones(3)
    assert compare(ones, torch.ones(1)) == ["shape"]
    assert compare(ones, ones.double()) == ["dtype"]
    assert compare(ones.bool(), torch.tensor([True, True, False])) == ["max"]
    assert compare(ones.long(), 2 * ones.long()) == ["max"]
    assert find_differences({"x": ones}, {}, None, 1e-4)[0].reason == "missing"
    assert find_differences({}, {"x": ones}, None, 1e-4)[0].reason == "not in eager's result"


def test_rule_compares_nan_complex_and_empty_tensors():
    nan = torch.tensor([1.0, float("nan")])
    assert not compare(nan, nan.clone())
    assert compare(nan, torch.tensor([float("nan"), 1.0])) == ["max"]
    assert compare(torch.tensor([1.0, 2.0]), nan) == ["max"]
    assert not compare(torch.empty(0, 3), torch.empty(0, 3))
    wave = torch.randn(4, dtype=torch.complex64)
    assert not compare(wave, wave.conj().conj()) and compare(wave, wave + 1) == ["max"]


def test_relative_error_is_that_of_all_tensors_as_one_vector():
    exact = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0]), "n": torch.tensor([7])}
    result = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.5]), "n": torch.tensor([0])}
    assert relative_error(result, exact) == pytest.approx(0.1)
    assert relative_error({"a": torch.zeros(1)}, {"a": torch.zeros(1)}) == 0.0


def test_tensors_inside_containers_and_objects_are_compared():
    class Cache:
        def __init__(self):
            self.keys, self.size, self.itself = [torch.ones(2)], 3, self

    assert set(flatten({"a": (torch.ones(1), None), "cache": Cache()})) == {
        "out.a.0",
        "out.cache.keys.0",
    }


# ---- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "mode"), [(BERT, "training"), (VIT, "inference")], ids=str)
def test_a_model_passes(model, mode, monkeypatch):
    one_layer = {BERT.name: {"n_layers": 1}, VIT.name: {"num_hidden_layers": 1}}
    monkeypatch.setattr(hub, "SPECIAL", one_layer)
    turns = []
    row = measure(make_job(model, mode), lambda: turns.append(1))
    assert row["status"] == "pass", row
    assert row["kernels"] > 0 and row["fallbacks"] == []
    assert row["first_s"] > 0 and row["eager_ms"] > 0 and row["fulgurite_ms"] > 0
    assert turns == [1]


def test_other_compilers_are_timed_and_their_failures_are_facts_of_the_row(monkeypatch):
    def fail(module):
        raise RuntimeError("no such backend")

    compilers = {"torch_compile": lambda module: module, "reduce_overhead": lambda module: fail}
    monkeypatch.setattr(candidates, "COMPILERS", compilers)
    monkeypatch.setattr("fulgurite.compile", lambda module: module)
    monkeypatch.setattr("fulgurite.bench.zoo.worker._describe_compilation", lambda compiled: {})
    row = measure(replace(make_job(BERT, "inference"), compare=tuple(compilers)))
    assert row["status"] == "pass" and row["torch_compile_ms"] > 0
    assert row["torch_compile_first_s"] > 0 and "reduce_overhead_ms" not in row
    assert "TypeError" in row["reduce_overhead_error"]
    checked = measure(replace(make_job(BERT, "inference"), timing_budget=0.0))
    assert checked["status"] == "pass" and "eager_ms" not in checked


def test_a_wrong_result_is_a_row(monkeypatch):
    def compile_wrong(module):
        module.register_forward_hook(lambda module, args, out: {**out, "logits": out["logits"] + 1})
        return module

    monkeypatch.setattr("fulgurite.compile", compile_wrong)
    monkeypatch.setattr("fulgurite.bench.zoo.worker._describe_compilation", lambda compiled: {})
    row = measure(make_job(VIT, "inference"))
    assert row["status"] == "inaccurate" and "out.logits" in row["error"]


def test_a_model_that_is_not_installed_is_a_row():
    row = measure(make_job(replace(BERT, name="NoSuchModel"), "inference"))
    assert row["status"] == "unavailable" and "NoSuchModel" in row["error"]


def crash(job, connection):
    os.setsid()
    os.kill(os.getpid(), signal.SIGKILL)


def hang(job, connection):
    os.setsid()
    time.sleep(60)


def send_row(job, connection):
    os.setsid()
    connection.send({**job.describe(), "status": "pass"})
    connection.close()


def take_turns(job, connection):
    """Writes its start and end into the log, which all jobs share."""
    os.setsid()
    connection.send(READY)
    connection.recv()
    with open(job.log, "a") as log:
        log.write("start ")
        log.flush()
        time.sleep(0.05)
        log.write("end ")
    send_row(job, connection)


def run_jobs(monkeypatch, run, jobs, workers=2, time_limit=60.0, budget=60.0):
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(pool.Worker.__init__, "__defaults__", (run,))
    deadline = time.perf_counter() + budget
    return list(pool.measure_rows(jobs, workers, time_limit, deadline, context))


def test_a_crash_and_a_timeout_are_rows(monkeypatch):
    jobs = [replace(make_job(BERT, "training"), timing_budget=0.0)]
    (row,) = run_jobs(monkeypatch, crash, jobs)
    assert row["status"] == "crashed" and "SIGKILL" in row["error"]
    (row,) = run_jobs(monkeypatch, hang, jobs, time_limit=0.5)
    assert row["status"] == "timeout" and row["model"] == BERT.name and row["seconds"] < 30
    (row,) = run_jobs(monkeypatch, send_row, jobs)
    assert row["status"] == "pass"
    rows = run_jobs(monkeypatch, send_row, jobs * 5)
    assert [row["status"] for row in rows] == ["pass"] * 5


def test_no_rows_after_the_deadline(monkeypatch):
    jobs = [replace(make_job(BERT, "training"), timing_budget=0.0)] * 3
    start = time.perf_counter()
    assert run_jobs(monkeypatch, hang, jobs, budget=0.3) == []
    assert time.perf_counter() - start < 20


def test_workers_that_time_take_turns(monkeypatch, tmp_path):
    log = tmp_path / "turns"
    rows = run_jobs(monkeypatch, take_turns, [make_job(BERT, "training", str(log))] * 4, workers=3)
    assert len(rows) == 4
    assert log.read_text() == "start end " * 4


def make_row(job, status):
    row = {**job.describe(), "status": status, "error": "" if status == "pass" else "why"}
    if status == "pass":
        row |= {"graph_breaks": 1, "fallbacks": [], "first_s": 2.0, "eager_ms": 3.0}
        row |= {"fulgurite_ms": 1.5}
    return row


def test_resume_keeps_the_rows_that_passed(tmp_path, monkeypatch, capsys):
    calls = []

    def measure_rows(jobs, workers, time_limit, deadline, context):
        for job in jobs:
            calls.append((job.model.name, job.mode))
            yield make_row(job, "failed" if len(calls) == 1 else "pass")

    monkeypatch.setattr(suite, "measure_rows", measure_rows)
    output = tmp_path / "2026-01-02-zoo-cpu.json"
    command = ["bench", "zoo", "--device", "cpu", "--only", "DistilBert", "--output", str(output)]
    assert main(command) == 0
    assert len(calls) == 4
    capsys.readouterr()
    assert main([*command, "--resume", "--print-json"]) == 0
    assert calls[4:] == [calls[0]]
    rows = json.loads(output.read_text())["rows"]
    assert sorted({(row["model"], row["mode"]) for row in rows}) == sorted(set(calls))
    printed = capsys.readouterr().out
    assert "2.00" in printed
    page = format_zoo_page(tmp_path)
    assert (
        "| `DistilBertForMaskedLM` | pass | pass | 1 / 1 | 0 / 0 | 2.0 / 2.0 | 2.00 / 2.00 |"
        in page
    )

    saved = tmp_path / "printed.log"
    saved.write_text(f"other output\n{printed}")
    merged = tmp_path / "2026-01-03-zoo-cpu.json"
    merge = ["bench", "zoo", "--device", "cpu", "--output", str(merged), "--merge"]
    assert main([*merge, str(saved)]) == 0
    assert main([*merge, str(saved)]) == 0  # the same row again replaces itself
    assert [row["model"] for row in json.loads(merged.read_text())["rows"]] == [calls[0][0]]


def make_timed_row(model, mode, ours, compiled, eager=2.0):
    job = replace(make_job(model, mode), sizes=choose_sizes("default", 4))
    figures = {"fulgurite_ms": ours, "torch_compile_ms": compiled, "eager_ms": eager}
    figures |= {"fulgurite_peak_mb": 50.0, "torch_compile_peak_mb": 100.0}
    return {**job.describe(), "status": "pass", **figures}


def test_the_summary_of_times_counts_rows_that_are_behind():
    moe = ZooModel("transformers", "causal", "OlmoeForCausalLM")
    rows = [
        make_timed_row(BERT, "inference", ours=1.0, compiled=4.0),
        make_timed_row(VIT, "inference", ours=1.0, compiled=0.96),
        make_timed_row(moe, "inference", ours=4.0, compiled=1.0),
    ]
    _, inference, moes = tables.format_speed_summary(rows).splitlines()
    # rows, x eager, x compile, peak, slower than eager, behind torch.compile
    assert inference.split() == ["inference", "3", "1.26", "0.99", "0.50", "1", "1"]
    assert moes.split() == ["MoE", "inference", "1", "0.50", "0.25", "0.50", "1", "1"]
    assert "DistilBertForMaskedLM" in tables.format_summary(rows)
    assert len({tables.row_key(row) for row in rows}) == 3


def test_missing_packages_are_named(monkeypatch):
    def fail(package):
        raise ImportError(f"No module named {package!r}")

    monkeypatch.setattr(catalog, "import_package", fail)
    missing = catalog.missing_packages([ZooModel("timm", "resnet", "test_resnet")])
    assert "No module named 'timm'" in missing["timm"] and "fulgurite[zoo]" in missing["timm"]
