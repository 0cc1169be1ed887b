"""Transports: every one gives the tokens of one rank, whatever the path of a step; host syncs; errors."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from fulgurite.errors import ArgumentError
from fulgurite.kernels.dispatch.buffers import DispatchConfig
from fulgurite.kernels.moe.router_config import Routes
from fulgurite.models.moe import Experts
from fulgurite.parallel import AllToAllDispatcher, Axis, Mesh, Placement
from fulgurite.parallel.dispatch import all_to_all
from fulgurite.parallel.experts.expert_parallel import ExpertParallel
from fulgurite.parallel.experts.placement import (
    contiguous_placement,
    read_expert_load,
    read_model_name,
    save_placement,
)
from fulgurite.parallel.experts.rebalance import rebalance_experts
from fulgurite.parallel.experts.transport import (
    TRANSPORTS,
    ExpertOptions,
    choose_transport,
    dispatch_buffer_bytes,
)
from fulgurite.serve.llm import LLM
from tests.kernels.dispatch.cases import round_trip
from tests.parallel import engine_cases
from tests.parallel.experts import transport_cases as cases
from tests.parallel.experts.expert_cases import HIDDEN, make_experts
from tests.parallel.test_engine import alone, folder, greedy, prompts

__all__ = ["folder"]  # a fixture
TWO, FOUR = (2, 1, 2), (4, 1, 4)
UNEVEN = (5, 0, 3, 17)
CPU = torch.device("cpu")
REPLICAS = Placement(
    torch.tensor([[7, 0, 3, 3, 1, 3, 2, 4, 5, 0, 6, 7]]), num_experts=8, num_ranks=4
)
STEPS = {
    "with gradients": {"grad": True},
    "exact": {},
    "padded": {"step_tokens": 17},
    "more padding": {"step_tokens": 23},
    "chunks": {"chunk_rows": 7},
    "padded chunks": {"step_tokens": 17, "chunk_rows": 7},
    "micro-batches": {"step_tokens": 17, "micro_batches": 2},
    "micro-batches, exact": {"step_tokens": 1000, "micro_batches": 2},
}


# ---- all-to-all: every path has the same bits -------------------------------------------------------


def check_same_bits(pool, *arguments, **options) -> None:
    arguments = (*arguments, list(STEPS.values()))
    for rank, outputs in enumerate(pool.run(call, cases.run_variants, arguments, options)):
        for name, out in zip(STEPS, outputs, strict=True):
            assert torch.equal(out, outputs[0]), f"rank {rank}: {name}"


def call(function, arguments, options):
    return function(*arguments, **options)


@pytest.mark.parametrize("kind", ["plain", "biases", "weighs input"])
def test_all_to_all_paths_have_the_same_bits(ranks, kind):
    check_same_bits(ranks(4), FOUR, UNEVEN, transport="all_to_all", kind=kind)


@pytest.mark.parametrize("wire", ["bf16", "fp8", "nvfp4"])
def test_same_bits_with_a_wire_format(ranks, wire):
    check_same_bits(ranks(4), FOUR, UNEVEN, transport="all_to_all", wire=wire)


def test_same_bits_of_odd_steps(ranks):
    pool, how = ranks(4), {"transport": "all_to_all"}
    check_same_bits(pool, FOUR, (0,), **how)
    check_same_bits(pool, FOUR, (0, 0, 1, 0), **how)
    check_same_bits(pool, FOUR, (7, 7, 0, 7), only=6, **how)
    check_same_bits(pool, FOUR, UNEVEN, per_token=1, **how)
    check_same_bits(pool, FOUR, UNEVEN, count=4, per_token=4, **how)
    check_same_bits(pool, FOUR, UNEVEN, placement=REPLICAS, **how)
    check_same_bits(pool, FOUR, UNEVEN, dtype=torch.bfloat16, **how)
    check_same_bits(pool, (2, 2, 2), UNEVEN, **how)


def make_meta_axis(ranks: int) -> Axis:
    """An axis whose collectives allocate and send nothing, for tensors on the meta device."""
    with Mesh() as mesh:
        return dataclasses.replace(mesh.expert, ranks=tuple(range(ranks)), nodes=(0,) * ranks)


def run_on_meta(dispatcher: AllToAllDispatcher) -> torch.Size:
    """A step without values: everything that reads one on the host raises."""
    x = torch.empty(6, 32, device="meta")
    slots, weights = torch.empty(6, 3, dtype=torch.long, device="meta"), x.new_empty(6, 3)
    with torch.no_grad():
        pending = dispatcher.start_dispatch(x, slots, 8, weights)
        dispatched = dispatcher.finish_dispatch(pending)
        return dispatcher.combine(torch.empty_like(dispatched.x_SD), dispatched).shape


def test_a_padded_step_reads_nothing_on_the_host():
    dispatcher = AllToAllDispatcher(make_meta_axis(4))
    dispatcher.set_step_tokens(9)
    assert run_on_meta(dispatcher) == (6, 32)


def test_each_half_of_a_step_is_padded_by_itself():
    """And not to the size of the whole step. Four ranks send 600 tokens in two padded halves."""
    dispatcher = AllToAllDispatcher(make_meta_axis(4))
    experts = make_experts("plain", 8, 3, torch.float32).to("meta")
    parallel = ExpertParallel(experts, dispatcher, contiguous_placement(1, 8, 4))
    parallel.micro_batches = 2
    x = torch.empty(597, HIDDEN, device="meta")
    routes = Routes(x.new_empty(597, 3), torch.empty(597, 3, dtype=torch.long, device="meta"))
    dispatcher.set_step_tokens(600)
    assert not dispatcher.is_padded
    with torch.no_grad():
        halves = parallel.start_dispatch(x, routes)
    assert [half.counts for half in halves] == [((300,) * 4, (300,) * 4)] * 2
    assert [half.x_TD.shape[0] for half in halves] == [299, 298]
    assert dispatcher.step_tokens == 600


def test_an_exact_step_reads_the_counts_only(monkeypatch):
    """All other values are on the meta device; the all-gather gives counts of the host."""
    dispatcher = AllToAllDispatcher(make_meta_axis(4))
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        run_on_meta(dispatcher)
    gathered = []

    def gather_counts(own: torch.Tensor, axis: Axis, label: str) -> torch.Tensor:
        gathered.append(own)
        rows, pairs, most = [2, 1, 3, 0], [3, 1, 4, 0], [2, 1, 2, 0]
        return torch.tensor([[*rows, *pairs, *most, 0]]).expand(4, -1).clone()

    monkeypatch.setattr(all_to_all, "all_gather", gather_counts)
    assert run_on_meta(dispatcher) == (6, 32)
    assert len(gathered) == 1, "one host sync a layer"


def test_a_step_is_padded_up_to_a_limit():
    dispatcher = AllToAllDispatcher(make_meta_axis(4))
    assert not dispatcher.is_padded
    for tokens, is_padded in ((0, True), (512, True), (513, False)):
        dispatcher.set_step_tokens(tokens)
        assert dispatcher.is_padded == is_padded
    dispatcher.capacity = 40  # more rows than that could be received: they are counted first
    dispatcher.set_step_tokens(11)
    assert not dispatcher.is_padded


@pytest.mark.parametrize("tokens", [5, 64])
def test_fp8_weights_and_wire(ranks, tokens):
    """CPUs multiply dense rows: they are dequantized once."""
    for error, stayed in ranks(2).run(cases.compare_fp8, TWO, "all_to_all", tokens):
        assert error < 1e-5 and not stayed


# ---- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_tokens", [None, 5])
def test_invalid_expert_raises_on_every_rank(ranks, step_tokens):
    for text, after in ranks(4).run(cases.find_error, FOUR, "all_to_all", None, 99, step_tokens):
        assert text.startswith("ArgumentError: rank 1 of the expert axis sent 1 tokens"), text
        assert after < 1e-6


def test_exceeded_capacity_raises_on_every_rank(ranks):
    """Rank 2 has the experts of all 20 tokens, and room for 4 x 4."""
    for text, after in ranks(4).run(cases.find_error, FOUR, "all_to_all", 4, None, 5):
        assert text.startswith("CapacityError: rank 2 of the expert axis would receive 20 rows")
        assert after < 1e-6
    for text, _ in ranks(4).run(cases.find_error, FOUR, "all_to_all", 5, None, 5):
        assert text == ""


def test_more_tokens_than_ranks_agreed_on():
    dispatcher = AllToAllDispatcher(make_meta_axis(4))
    dispatcher.set_step_tokens(5)
    with pytest.raises(ArgumentError, match="6 tokens in a step for which all ranks agreed on"):
        run_on_meta(dispatcher)


# ---- the choice of a transport ---------------------------------------------------------------------


def test_cpus_use_all_to_all():
    choice = choose_transport(ExpertOptions(), make_meta_axis(4), CPU)
    assert choice.name == "all_to_all" and "CPU" in choice.reason


def test_impossible_transport_says_why():
    with pytest.raises(ArgumentError, match="TRITON_INTERPRET=1|need Triton"):
        choose_transport(ExpertOptions("symmetric"), make_meta_axis(4), CPU)


@pytest.mark.parametrize(
    "options", [{"transport": "pigeon"}, {"wire": "int3"}, {"micro_batches": 3}, {"capacity": 0}]
)
def test_unknown_options_raise(options):
    name = next(iter(options))
    with pytest.raises(ArgumentError, match=f"{name}="):
        ExpertOptions(**options)


def test_wire_auto_is_the_dtype_of_the_model():
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "f32")):
        config = ExpertOptions().dispatch_config(64, 2, dtype, 8, 4)
        assert (config.dispatch_format, config.combine_format) == (name, name)
    config = ExpertOptions(wire="fp8").dispatch_config(256, 2, torch.bfloat16, 8, 4)
    assert (config.dispatch_format, config.combine_format) == ("fp8", "bf16")


def test_only_symmetric_memory_holds_buffers():
    config = DispatchConfig(10, 2, 64, 4, "f32", "f32")
    held = {name: dispatch_buffer_bytes(name, config, 3) for name in TRANSPORTS}
    assert held == {"symmetric": config.num_bytes(3), "hierarchical": 0, "all_to_all": 0}
    smaller = DispatchConfig(10, 2, 64, 4, "f32", "f32", capacity=4)
    assert dispatch_buffer_bytes("symmetric", smaller, 3) < held["symmetric"]


# ---- the engine ------------------------------------------------------------------------------------


def check(pool, path: Path, shape, dispatcher: str = "AllToAllDispatcher", **options) -> None:
    found = pool.run(cases.generate, path, shape, prompts(), greedy(), options)
    assert found[0][0] == alone(path, greedy())
    for _, name, _ in found:
        assert name == dispatcher


@pytest.mark.parametrize(
    "options",
    [
        {"transport": "all_to_all", "wire": "f32"},
        {"micro_batches": 2, "expert_capacity": 24},
    ],
    ids=str,
)
def test_engine_options_give_the_same_tokens(ranks, folder, options):
    check(ranks(2), folder("qwen3_moe"), TWO, **options)


def generate_rounded(path: Path, wire: str, monkeypatch) -> engine_cases.Tokens:
    """One rank whose experts get inputs that are rounded as the wire format rounds them."""
    forward = Experts.forward

    def forward_rounded(self, x_TD, routes, norm=None, residual_TD=None):
        assert norm is None and residual_TD is None
        return forward(self, round_trip(wire, x_TD), routes)

    llm = LLM(path, **engine_cases.PLAIN)
    llm.engine.runner.no_capture_reason = "native calls are not the ones that round"
    with monkeypatch.context() as patch:
        patch.setattr(Experts, "forward", forward_rounded)
        return [one.token_ids for one in llm.generate(prompts(), greedy())]


@pytest.mark.parametrize("wire", ["bf16", "fp8", "nvfp4"])
def test_wires_give_the_tokens_of_rounded_inputs(ranks, folder, wire, monkeypatch):
    path, options = folder("qwen3_moe"), {"wire": wire}
    found = ranks(2).run(cases.generate, path, TWO, prompts(), greedy(), options)
    assert found[0][0] == generate_rounded(path, wire, monkeypatch)


def test_an_option_that_can_not_work_raises_on_every_rank(ranks, folder):
    for text in ranks(2).run(cases.error_of, folder("qwen3_moe"), TWO, {"transport": "symmetric"}):
        assert "transport='symmetric' can't be used" in text and "all_to_all" in text


@pytest.mark.slow  # eight processes on two cores
def test_eight_ranks(ranks, folder):
    check(ranks(8), folder("qwen3_moe"), (8, 1, 8), expert_capacity=24)
    check(ranks(8), folder("deepseek_v3"), (4, 2, 8), micro_batches=2)


def test_load_is_recorded_and_a_placement_gives_the_same_tokens(ranks, folder, tmp_path):
    """The file counts every routed token of all ranks, and a placement with replicas is made of it."""
    path, file = folder("qwen3_moe"), tmp_path / "load.json"
    check(ranks(2), path, TWO, record_load=str(file))
    load_LE = read_expert_load(file)
    config = LLM(path, **engine_cases.PLAIN).model.config
    lengths = [len(prompt) for prompt in prompts()]
    tokens = sum(lengths) + sum(one.max_tokens - 1 for one in greedy())
    assert load_LE.shape[1] == config.moe.num_experts
    assert load_LE.sum(1).tolist() == [tokens * config.moe.top_k] * load_LE.shape[0]

    assert read_model_name(file) == path.name
    placement = rebalance_experts(load_LE, 2, slots=config.moe.num_experts + 2)
    save_placement(dataclasses.replace(placement, model="other"), tmp_path / "other.json")
    with pytest.raises(
        ArgumentError, match=f"other.json is of other, and the model is {path.name}"
    ):
        LLM(path, data=2, expert=2, placement=str(tmp_path / "other.json"), **engine_cases.PLAIN)

    save_placement(placement, tmp_path / "placement.json")
    assert placement.slots_LS.shape[1] == config.moe.num_experts + 2
    check(ranks(2), path, TWO, placement=str(tmp_path / "placement.json"))
    check(ranks(4), path, TWO, placement=str(tmp_path / "placement.json"), pipeline=2)


def test_one_rank_records_the_same_load(folder, tmp_path):
    path = folder("qwen3_moe")
    with LLM(path, **engine_cases.PLAIN, record_load=tmp_path / "load.csv") as llm:
        replies = [one.token_ids for one in llm.generate(prompts(), greedy())]
    assert replies == alone(path, greedy())
    tokens = sum(map(len, prompts())) + sum(one.max_tokens - 1 for one in greedy())
    assert read_expert_load(tmp_path / "load.csv").sum(1).unique().tolist() == [
        tokens * llm.model.config.moe.top_k
    ]


@pytest.mark.parametrize(
    ("name", "axes", "graphs"),
    [
        ("qwen3_moe", {"data": 2, "expert": 2}, False),
        ("qwen3_moe", {"data": 1, "tensor": 2}, False),
        ("qwen3_moe", {"data": 1, "context_parallel": 2}, False),
        ("qwen3_moe", {"data": 1, "context_parallel": 2}, True),
        ("qwen3_moe", {"data": 1, "tensor": 2, "expert": 2}, True),
        ("deepseek_v3", {"data": 1, "pipeline": 2}, False),  # its first layer is dense
        ("qwen3_moe", {"data": 1, "pipeline": 2, "context_parallel": 2}, True),
    ],
    ids=str,
)
def test_load_is_that_of_one_rank_whenever_it_is_saved(ranks, folder, tmp_path, name, axes, graphs):
    """Every token counts once, on whatever ranks it was, and padding of captured steps never does.
    Stages run several micro-batches a step."""
    file, path = tmp_path / "load.npy", folder(name)
    with LLM(path, record_load=file, **engine_cases.PLAIN) as llm:
        llm.generate(prompts(), greedy())
    alone = read_expert_load(file)
    assert alone.sum() > 0
    arguments = path, axes, prompts(), greedy(), file, graphs
    num_ranks = math.prod(size for name, size in axes.items() if name != "expert")
    once, twice = ranks(num_ranks).run(cases.save_load_twice, *arguments)[0]
    assert once == alone.tolist() and twice == (2 * alone).tolist()
    assert read_expert_load(file).tolist() == twice  # `close` saves it again
    assert [one.name for one in tmp_path.iterdir()] == ["load.npy"]


def test_load_is_saved_after_an_interval(folder, tmp_path):
    file, options = tmp_path / "load.json", engine_cases.PLAIN
    with LLM(folder("qwen3_moe"), record_load=file, record_load_interval=1e-6, **options) as llm:
        llm.generate(prompts(), greedy())
        assert int(read_expert_load(file).sum()) == int(llm.load_file.counter.load_LE.sum()) > 0
    with LLM(folder("qwen3_moe"), record_load=file, record_load_interval=1e6, **options) as llm:
        file.unlink()
        llm.generate(prompts(), greedy())
        assert not file.exists()
    with pytest.raises(ArgumentError, match="record_load_interval=0.0 with"):
        LLM(folder("qwen3_moe"), record_load=file, record_load_interval=0.0, **options)
    with pytest.raises(ArgumentError, match="record_load=None"):
        LLM(folder("qwen3_moe"), record_load_interval=5.0, **options)
    with (
        LLM(folder("qwen3_moe"), **options) as llm,
        pytest.raises(ArgumentError, match="not recorded"),
    ):
        llm.save_load()


def test_load_that_can_not_be_saved_ends_no_request(folder, tmp_path, caplog):
    """A full disk, or a folder that is gone: requests go on, and `close` says what is wrong."""
    place, path = tmp_path / "place", folder("qwen3_moe")
    place.mkdir()
    options = {**engine_cases.PLAIN, "record_load_interval": 1e-6}
    llm = LLM(path, record_load=place / "load.json", **options)
    place.rmdir()
    with caplog.at_level("WARNING", logger="fulgurite"):
        found = [one.token_ids for one in llm.generate(prompts(), greedy())]
    assert found == alone(path, greedy())
    assert "the expert load was not saved" in caplog.text
    with pytest.raises(ArgumentError, match="can't be saved"):
        llm.close()


def test_options_that_need_experts_on_ranks(folder, tmp_path):
    with pytest.raises(ArgumentError, match="expert=1"):
        LLM(folder("qwen3_moe"), wire="fp8")
    with pytest.raises(ArgumentError, match="dense"):
        LLM(folder("llama"), record_load=tmp_path / "load.json")
    with pytest.raises(ArgumentError, match=r"\.json"):
        LLM(folder("qwen3_moe"), record_load=tmp_path / "load.txt")
